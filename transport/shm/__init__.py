"""The ``shm`` device: processes of one host. A WRITE is one memcpy into memory of the peer that is mapped here."""
