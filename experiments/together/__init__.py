"""Collectives of torch.distributed beside gloo's: what is called, how it is timed, and the tables."""
