"""The two halves of an edge between workers, its credits, and the one poller of a worker."""
