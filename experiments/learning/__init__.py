"""Models that learn to a target through parameter servers (``convergence``)."""
