"""The plan of a wrapped model: segments, edges and slots. Plain data, made before the first step."""
