"""Distributed autograd: contexts, what messages say about gradients, and the backward pass from worker to worker."""
