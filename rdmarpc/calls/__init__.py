"""The agent of a worker, and both sides of a call: requests and answers, futures, errors, timeouts, graceful shutdown."""
