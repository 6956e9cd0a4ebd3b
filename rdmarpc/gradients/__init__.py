"""Distributed autograd: what calls know of gradients, and the backward pass over workers."""
