"""The process that called ``wrap``: its plans, its part of every step, and its micro-batches in flight."""
