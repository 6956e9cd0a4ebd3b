"""The ``verbs`` device: InfiniBand and RoCE. A WRITE is a work request that the adapter carries out without the peer's
processor."""
