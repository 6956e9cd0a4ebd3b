"""What a forward and the parts of a model hold in Python: where it lies, what it is, and whether it has changed."""
