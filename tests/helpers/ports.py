"""Ports that nobody else is given meanwhile."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def server_below_the_ephemeral_ports() -> socket.socket:
    """A server at a port of 127.0.0.1 that the system gives to no connection: free again once it is closed."""
    while True:
        with suppress(OSError):
            return socket.create_server(("127.0.0.1", random.SystemRandom().randrange(15_000, 30_000)))


def free_port() -> int:
    with server_below_the_ephemeral_ports() as server:
        return server.getsockname()[1]
