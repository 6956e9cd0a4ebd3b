"""What was posted to command streams, as a data-flow graph: steps, fragments, who made what, how long it lives."""
