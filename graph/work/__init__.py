"""The owner of a part: a segment runs when its inputs have landed."""
