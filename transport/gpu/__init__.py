"""The CUDA driver and GPU memory, whichever device carries the bytes."""
