"""The two halves of an edge (a tensor that crosses from one worker to another): outlets write, slots receive, credits return a
slot to its sender. One poller at each worker serves the edges of a model."""
