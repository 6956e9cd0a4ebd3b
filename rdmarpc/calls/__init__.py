"""The agent of a worker, and both sides of a call: requests and answers, futures, timeouts, memory for messages, graceful
shutdown."""
