"""RDMA adapters (NICs): the choice of a port, and the libibverbs objects behind it (context, queue pair, memory region)."""
