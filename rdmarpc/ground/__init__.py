"""This process's worker, and values in the order of streams. What every other room may use."""
