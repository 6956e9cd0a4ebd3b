"""What every experiment needs: processes, floors, measurements, pictures; clients and servers over rdmarpc, torch RPC or gRPC,
each as it is fastest, which the same lines drive."""
