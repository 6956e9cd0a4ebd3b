"""The ``shm`` device, between processes of one host. The peer's arena is mapped into this process, so a WRITE is one memcpy."""
