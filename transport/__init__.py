"""How bytes move between processes: devices, regions, channels and transfers.

A ``Device`` is one way to reach the memory of other processes (``open_device``). A ``Channel`` connects it to one peer. A
``RemoteRegion`` names memory of the peer, and ``Channel.memcpy`` or a prepared ``Transfer`` copies to or from that memory by
one-sided WRITEs and READs. The contract that all devices keep is the docstring of ``channel``. This package imports nothing
else of rdmarpc. The room ``exchange`` has streams among several processes; who needs it imports it.

Code above imports what this file names, and nothing past it. Users find ``__all__`` in docs/api.md; the rest is for the storeys
above.
"""

# ruff: noqa: F401

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .channel import DONE, Channel, Mapped, Transfer, Window, Work
from .device import Device, DeviceOptions, check_require, host_id
from .errors import (
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
from .kinds import AutoDevice, kinds, open_device
from .notify import Expectation, Poller
from .peers.auth import check_secret, read_private, user_secret
from .region import Region, RemoteRegion
from .shm.device import ShmDevice
from .tcp.device import TcpDevice
from .tls.options import TlsOptions
from .tls.options import check as check_tls
from .words import kernels
from .words.signals import MAX_NOTIFY

# isort: split
# For the storeys above.
from . import timeouts
from .errors import assign, remade
from .interrupts import interruptible
from .memory import sole
from .memory.arena import PINNED_SEGMENT_BYTES, RINGS, SEGMENT_BYTES, SLOTS, Arena, Block, Pool, default_limit, size_class
from .nic import sysfs
from .peers.address import where_to_listen
from .peers.guard import Guard, broken_by, have_standard_streams, hint_for, need_descriptors, nobody, processors
from .region import as_tensor
from .shm.channel import runs as process_runs

# isort: split
# What kernels are written with, above, too.
from .words.atomics import (
    compare_exchange,
    fence,
    fetch_add,
    futex_wait,
    futex_wake,
    futex_wake_one,
    load_acquire,
    memcpy,
    now,
    pause,
    sched_yield,
    store_release,
)
from .words.compiled import compiled
from .words.compiled import kernels as known_kernels
from .words.symbols import CFunction, i32, i64

if TYPE_CHECKING:
    from .gpu.events import Event, StreamPool
    from .gpu.ipc import Exports, Imports, imports_of
    from .gpu.pins import Pins
    from .gpu.slots import Borrowed, Lent
    from .nic import packages, ports
    from .tls import openssl
    from .verbs import gpudirect

_HOMES = {
    "gpu.events": "Event StreamPool",
    "gpu.ipc": "Exports Imports imports_of",
    "gpu.pins": "Pins",
    "gpu.slots": "Borrowed Lent",
}
"""Modules that are imported when they are first asked for, and the names that are theirs."""
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
_MODULES = ("nic.packages", "nic.ports", "tls.openssl", "verbs.gpudirect")
"""Those that are names themselves."""
_HOME |= {home.rpartition(".")[2]: home for home in _MODULES}

__all__ = [
    "DONE",
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


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{home}", __name__)
    found = globals()[name] = module if home.endswith(f".{name}") else getattr(module, name)
    return found
