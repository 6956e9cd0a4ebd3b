"""Seeing a run: counters, the state of a worker, timelines."""
