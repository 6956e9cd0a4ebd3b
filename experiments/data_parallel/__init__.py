"""Data-parallel training over a process group: what a step costs, and what hides it."""
