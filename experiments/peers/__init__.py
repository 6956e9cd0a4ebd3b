"""Clients and servers over rdmarpc, torch RPC or gRPC, each as it is fastest; the same lines drive all three."""
