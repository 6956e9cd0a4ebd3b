"""Frames to one peer, and the rule that whoever waits, polls."""
