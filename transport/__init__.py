"""How bytes move: devices, regions, channels, transfers. Imports nothing else of this project."""

from __future__ import annotations

from typing import Any

from . import cuda_driver, kernels
from .auth import check_secret
from .auto import AutoDevice
from .channel import DONE, Channel, Mapped, Transfer, Window, Work
from .device import Device, host_id
from .errors import (
    GIVEN_UP,
    GONE,
    ArenaFull,
    AuthenticationError,
    NotSupported,
    PeerLost,
    RdmaError,
    RegistrationError,
    RemoteAccessError,
    TransferTimeout,
    bare,
    for_others,
    fresh,
    kept,
)
from .notify import Expectation, Poller
from .records import MAX_NOTIFY
from .region import Region, RemoteRegion
from .shm import ShmDevice
from .tcp import TcpDevice
from .tls_options import TlsOptions
from .tls_options import check as check_tls
from .user_secret import read_private, user_secret


def open_device(name: str = "shm", *, require: str = "", tls: bool | TlsOptions = False, **options: Any) -> Device:
    """Open ``"shm"`` (this host), ``"cuda"`` (as ``shm``, and the memory of GPUs besides), ``"tcp"`` / ``"tcp://ADDRESS"`` (any
    host; listens on that local address), or ``"auto"`` / ``"auto://ADDRESS"``: all of them on one arena, each peer by the
    fastest that reaches it (``auto``; there ``tcp`` listens on ``ADDRESS``).

    ``ADDRESS`` may be an interface name and may end in ``:PORT``; without one ``tcp`` listens on the address of the default
    route, or without a secret on loopback. ``require="rdma"``: to reach a peer over ``tcp`` is ``NotSupported``; the text says
    what would have to be put right. ``"verbs://mlx5_0,mlx5_1"``: several RDMA ports, large copies parted over them
    (``stripes``).

    ``tls``: ``True`` or ``TlsOptions``: what goes over ``tcp`` is encrypted, and so is the control stream of ``verbs``; what
    RDMA carries is not, so ``verbs`` is refused unless ``TlsOptions.rdma_in_clear``. Nothing of ``shm`` and ``cuda`` is sent.

    Options: ``secret`` (at least 16 random bytes that both ends must share; without it only processes of this user on this host
    are let in, see ``user_secret``), ``arena_limit`` (bytes), ``on_connect`` (called with every channel a
    peer opens, before the peer can use it; returns the hello to answer with; without it use ``accept``), ``peer_timeout``
    (seconds, 10; 0: none): a peer that shows no sign of running, or that the network cut off, is lost after that time;
    ``memory`` (``memory.Memory``): what the device stands on, to share it with other devices (then without ``arena_limit``).
    """
    check_require(require)
    check_tls(tls)
    kind, _, place = name.partition("://")
    if kind == "shm" and not place:
        return ShmDevice(**options)
    if kind == "cuda" and not place:
        from .cuda import CudaDevice  # compiles more kernels

        return CudaDevice(**options)
    if kind == "tcp" and require:
        raise NotSupported("require='rdma', and tcp is none", device="tcp", hint="open auto, verbs or shm")
    if kind == "tcp":
        return TcpDevice(place, tls=tls, **options)
    if kind == "verbs":
        # These need libibverbs.
        if "," in place:
            from .stripes import StripedDevice

            return StripedDevice(place.split(","), tls=tls, **options)
        from .verbs import VerbsDevice

        return VerbsDevice(place, tls=tls, **options)
    if kind == "auto":
        return AutoDevice(place, require=require, tls=tls, **options)
    hint = "one of auto, shm, cuda, verbs, tcp, verbs://NIC:PORT, auto://ADDRESS[:PORT], tcp://ADDRESS[:PORT]"
    raise NotSupported(f"no device {name!r}", hint=hint)


def check_require(require: str) -> None:
    """``ValueError`` for what cannot be required."""
    if require not in ("", "rdma"):
        raise ValueError(f"require is 'rdma' or empty, got {require!r}")


__all__ = [
    "DONE",
    "GIVEN_UP",
    "GONE",
    "MAX_NOTIFY",
    "ArenaFull",
    "AuthenticationError",
    "AutoDevice",
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
    "TlsOptions",
    "Transfer",
    "TransferTimeout",
    "Window",
    "Work",
    "bare",
    "check_require",
    "check_secret",
    "check_tls",
    "cuda_driver",
    "for_others",
    "fresh",
    "host_id",
    "kept",
    "kernels",
    "open_device",
    "read_private",
    "user_secret",
]
