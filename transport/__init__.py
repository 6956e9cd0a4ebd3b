"""How bytes move: devices, regions, channels, transfers. Imports nothing else of this project."""

from __future__ import annotations

from typing import Any

from . import kernels
from .channel import DONE, Channel, Mapped, Transfer, Window, Work
from .device import Device, host_id
from .errors import (
    GONE,
    ArenaFull,
    AuthenticationError,
    NotSupported,
    PeerLost,
    RdmaError,
    RegistrationError,
    RemoteAccessError,
    TransferTimeout,
)
from .notify import MAX_NOTIFY, Expectation, Poller
from .region import Region, RemoteRegion
from .shm import ShmDevice
from .tcp import TcpDevice


def open_device(name: str = "shm", **options: Any) -> Device:
    """Open ``"shm"`` (this host) or ``"tcp"`` / ``"tcp://ADDRESS"`` (any host; listens on that local address).

    ``ADDRESS`` may be an interface name and may end in ``:PORT``; without one ``tcp`` listens on loopback, or with a secret on
    the address of the default route.

    Options: ``secret`` (bytes both ends must share), ``arena_limit`` (bytes), ``on_connect`` (called with every channel a
    peer opens, before the peer can use it; returns the hello to answer with; without it use ``accept``), ``peer_timeout``
    (seconds, 10; 0: none): a peer that shows no sign of running, or that the network cut off, is lost after that time.
    """
    kind, _, place = name.partition("://")
    if kind == "shm" and not place:
        return ShmDevice(**options)
    if kind == "tcp":
        return TcpDevice(place, **options)
    if kind == "verbs":
        from .verbs import VerbsDevice  # needs libibverbs

        return VerbsDevice(place, **options)
    raise NotSupported(f"no device {name!r}", hint="one of shm, tcp, tcp://ADDRESS[:PORT]")


__all__ = [
    "DONE",
    "GONE",
    "MAX_NOTIFY",
    "ArenaFull",
    "AuthenticationError",
    "Channel",
    "Device",
    "Expectation",
    "Mapped",
    "NotSupported",
    "PeerLost",
    "Poller",
    "RdmaError",
    "Region",
    "RegistrationError",
    "RemoteAccessError",
    "RemoteRegion",
    "ShmDevice",
    "TcpDevice",
    "Transfer",
    "TransferTimeout",
    "Window",
    "Work",
    "host_id",
    "kernels",
    "open_device",
]
