"""How bytes move: devices, regions, channels, transfers. Imports nothing else of this project."""

from __future__ import annotations

from . import cuda_driver, kernels
from .auth import check_secret
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
from .kinds import kinds, open_device
from .notify import Expectation, Poller
from .records import MAX_NOTIFY
from .region import Region, RemoteRegion
from .shm import ShmDevice
from .tcp import TcpDevice
from .tls_options import TlsOptions
from .tls_options import check as check_tls
from .user_secret import read_private, user_secret

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
