"""Parameter servers and the trainers that use them."""
