"""The four programs over rdmarpc."""
