"""The forward of a model as a graph of operations on tensors without data."""
