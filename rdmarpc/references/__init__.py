"""Values that stay at their owner, and the handles to them that travel."""
