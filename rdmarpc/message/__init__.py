"""The content of a message: pickled objects, and beside the pickle the tensors with the way that each takes."""
