"""Many calls under way at once: the grid of the PyTorch RPC paper."""
