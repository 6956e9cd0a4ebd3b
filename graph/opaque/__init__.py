"""Calls that a trace cannot look into, or that a graph would not repeat."""
