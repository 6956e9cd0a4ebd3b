"""The ``cuda`` device: ``shm``, with copies of GPU memory on side streams."""
