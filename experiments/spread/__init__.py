"""Models that are spread over workers and servers in other ways than by layers: experts, and the features of a graph."""
