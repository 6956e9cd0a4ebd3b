"""The four programs over gRPC."""
