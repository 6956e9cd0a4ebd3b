"""How bytes move between processes: devices, regions, channels and transfers.

A ``Device`` is one way to reach the memory of other processes (``open_device``). A ``Channel`` connects it to one peer. A
``RemoteRegion`` names memory of the peer, and ``Channel.memcpy`` or a prepared ``Transfer`` copies to or from that memory by
one-sided WRITEs and READs. The contract that all devices keep is the docstring of ``channel``. This package imports nothing
else of rdmarpc.
"""

from __future__ import annotations

from .auto import AutoDevice
from .channel import DONE, Channel, Mapped, Transfer, Window, Work
from .device import Device, DeviceOptions, check_require, host_id
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
from .gpu import driver as cuda_driver
from .kinds import kinds, open_device
from .notify import Expectation, Poller
from .peers.auth import check_secret
from .peers.user_secret import read_private, user_secret
from .region import Region, RemoteRegion
from .shm.device import ShmDevice
from .tcp.device import TcpDevice
from .tls.options import TlsOptions
from .tls.options import check as check_tls
from .words import kernels
from .words.signals import MAX_NOTIFY

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
    "DeviceOptions",
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
    "kinds",
    "open_device",
    "read_private",
    "user_secret",
]
