"""What can be seen of a run: counters, the state of a worker, timelines."""
