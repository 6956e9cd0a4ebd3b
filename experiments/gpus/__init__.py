"""GPU memory between processes of one host (``cuda``)."""
