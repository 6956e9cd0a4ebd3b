"""The polling role of one process: one thread at a time reads the rings, and a pool runs what was read. Knows no frame."""
