"""The process that called ``wrap``: the plans of its model, its part of every step, and the micro-batches under way."""
