"""The content of a message: pickled objects, beside the pickle the tensors with the way that each takes, and exceptions."""
