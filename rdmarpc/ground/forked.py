"""A process that forks. The child has none of the parent's threads, and whatever it did with the parent's rings, sockets and
store it would do to the parent: in the child all of it is out of reach, and says so. It may ``init_rpc`` for itself.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable

import torch.distributed as dist

TEXT = (
    "RPC was initialized in the process that this one is a fork of: a fork cannot use it. "
    "Call rdmarpc.init_rpc here (under another name and rank), or make calls in the parent."
)

_stores: weakref.WeakSet[dist.Store] = weakref.WeakSet()


def share(store: dist.Store) -> None:
    """Keep this store for ever in children that are forked while it exists. Its destructor would wait there for threads that do
    not exist, or abort, and speak to the server through the parent's connection."""
    _stores.add(store)


def in_child(job: Callable[[], None]) -> None:
    """Have ``job`` run in every forked child. It must take no lock: another thread may have held it."""
    os.register_at_fork(after_in_child=job)


def _never_destroy() -> None:
    for store in list(_stores):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))


in_child(_never_destroy)
