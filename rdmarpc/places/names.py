"""The names of places: ``torch.device("remote", n)`` is the n-th device of a worker that this process has named."""

from __future__ import annotations

import threading

import torch

from ..transport import NotSupported
from .stream import Stream, stream_to

DEVICE = "remote"
_MOST = 128
_places: list[tuple[str, str]] = []
_lock = threading.Lock()


def named(worker: str, where: str) -> torch.device:
    """The device of a worker's device. ``NotSupported`` beyond 128 of them."""
    key = worker, where
    with _lock:
        if key not in _places:
            if len(_places) == _MOST:
                raise NotSupported(f"torch tells at most {_MOST} devices of one kind apart")
            _places.append(key)
        return torch.device(DEVICE, _places.index(key))


def place_named(found: torch.device) -> Stream | None:
    """The place of a device; ``None``: here."""
    if found.type == "cpu":
        return None
    if found.type != DEVICE or (found.index or 0) >= len(_places):
        raise NotSupported(f"there is no place {found} for a tensor that lies at a worker", hint='rdmarpc.device("worker1")')
    return stream_to(*_places[found.index or 0])
