"""Parameter servers and the workers that train with them (``serve``), and the owners' part of the distributed optimizer."""
