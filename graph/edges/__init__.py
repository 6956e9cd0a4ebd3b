"""The consumer's half of an edge: slots receive, and credits return a slot to its sender (``outlets``). Dynamic edges are here
with both halves. One poller at each worker serves the edges of a model."""
