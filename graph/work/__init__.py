"""A worker that owns parts of a model: it runs a segment when the inputs have landed, and applies commands of the caller."""
