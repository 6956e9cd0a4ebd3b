"""One worker: both sides of calling."""
