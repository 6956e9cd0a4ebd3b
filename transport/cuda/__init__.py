"""The ``cuda`` device: the ``shm`` device, extended by GPU memory. GPUs copy on side streams, so no thread waits for a copy."""
