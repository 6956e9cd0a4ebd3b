"""The four programs over torch RPC."""
