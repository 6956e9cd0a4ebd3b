"""Real models and real training loops, each beside the same in one process: ``python -m tests.zoo.tour`` (``make zoo``)."""
