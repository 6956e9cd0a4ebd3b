"""Seeing a run: counters, timelines, what a worker is doing."""
