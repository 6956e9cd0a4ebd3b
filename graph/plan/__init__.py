"""The plan of a wrapped model: segments (operations that one worker runs together), edges (tensors that cross) and slots (where
they land). Plain data, made before the first step."""
