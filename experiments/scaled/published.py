"""What the paper's models are, and how long one mini-batch of theirs was computed on the paper's GPUs."""

COMPUTE_MS = {"AlexNet": 4.61, "InceptionV3": 68.32, "VGG16": 30.92, "LSTM": 33.33, "GRU": 30.44, "FCN5": 4.88}
"""Milliseconds, as remembered of the paper's table 2; not verified. ``exchange.models`` has the models' sizes, which are."""
