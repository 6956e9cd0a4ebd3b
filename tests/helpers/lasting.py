"""Processes that a fixture of wider scope than a test keeps; the check that nothing is left behind leaves them out."""

lasting: set[int] = set()
