"""The connection to each peer: frames in a ring in the peer's memory, landing places for tensors, and the order of requests."""
