"""The group of workers: how a worker joins, finds the others, and learns that they join and leave."""
