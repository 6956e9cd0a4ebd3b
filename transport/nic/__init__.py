"""RDMA adapters: which port to use, and the native objects of libibverbs behind it."""
