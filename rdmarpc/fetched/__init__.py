"""The forward of a wrapped model here, over values that are fetched: for what reaches no other worker."""
