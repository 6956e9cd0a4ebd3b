"""The ``tcp`` device: the same contract over sockets, between any hosts."""
