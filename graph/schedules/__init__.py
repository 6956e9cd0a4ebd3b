"""In which order workers take the micro-batches of a batch."""
