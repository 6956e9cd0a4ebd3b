"""Capture: the forward of a model as a graph of operations, traced on fake tensors (shapes without data)."""
