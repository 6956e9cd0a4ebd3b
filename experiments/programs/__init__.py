"""The same four programs over gRPC, torch RPC and rdmarpc, as short as each of them allows; and what counts their lines."""
