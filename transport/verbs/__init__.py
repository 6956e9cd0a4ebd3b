"""The ``verbs`` device: InfiniBand and RoCE. A WRITE is a work request that the adapter carries out by itself."""
