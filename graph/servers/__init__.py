"""Parameter servers, which sum gradients and step, and the workers that train with them."""
