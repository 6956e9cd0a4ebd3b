"""One tensor a step from a producer to a light consumer, in five ways."""
