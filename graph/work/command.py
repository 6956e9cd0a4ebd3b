"""Commands: what the caller tells a worker besides tensors, by one-sided writes into a ring of slots at that worker.

Every worker gets every command of its model, numbered from 1, and applies them in that order. Everything that is written
to any worker carries the number of commands that come before it, so nothing overtakes a command by another way.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ...transport import RdmaError, for_others

NOTHING, ZERO, STEP, DISCARD = range(4)
KEEP, TO_NONE, TO_ZERO = range(3)
"""Per parameter of a ZERO command: leave its gradient, set it to ``None``, fill it with zeros."""


class Command(NamedTuple):
    """``argument``: the optimizer (STEP) or the forward (DISCARD). ``payload``: one byte a parameter (ZERO; none: ``None``
    for all that are trainable), or the numbers of the optimizer's groups as float64 (STEP; none: as they are there)."""

    kind: int
    argument: int = 0
    payload: bytes = b""

    def padded(self, nbytes: int) -> torch.Tensor:
        """The payload as it is written: a length word (int64), then the bytes."""
        room = torch.zeros(nbytes, dtype=torch.uint8)
        array = room.numpy()
        array[:8].view(np.int64)[0] = len(self.payload)
        array[8 : 8 + len(self.payload)] = np.frombuffer(self.payload, np.uint8)
        return room


def unpadded(payload: np.ndarray) -> bytes:
    """The inverse of ``Command.padded``."""
    length = int(payload[:8].view(np.int64)[0])
    if not 0 <= length <= len(payload) - 8:
        raise RdmaError(f"a command says it has {length} bytes, its slot has {len(payload) - 8}")
    return payload[8 : 8 + length].tobytes()


loads: Callable[[bytes], Any] = pickle.loads
"""How what a worker reports is read: whoever restricts what peers may name replaces it."""


class WorkerError(NamedTuple):
    """An exception on its way to the caller."""

    kind: type[BaseException] | None
    message: str
    trace: str
    peer: str = ""
    """Of an ``RdmaError``, and ``status``: who was lost, perhaps another one than the worker that says so."""
    status: str = ""

    @staticmethod
    def of(error: BaseException, worker: str, task: str = "") -> WorkerError:
        """``worker``: whose it is; ``task``: in what it was raised."""
        error = for_others(error, worker)
        trace = "".join(traceback.format_exception(error)) + (f"in the {task}\n" if task else "")
        if isinstance(error, RdmaError):
            return WorkerError(type(error), error.message, trace, error.peer, error.status)
        return WorkerError(type(error), str(error), trace)

    def dump(self, limit: int) -> bytes:
        """Pickled, cut to at most ``limit`` bytes."""
        room = limit - 1024
        trace = self.trace if len(self.trace) < room // 4 else "...\n" + self.trace[-room // 4 :]
        short = self._replace(message=self.message[: room // 4], trace=trace)
        for candidate in (short, short._replace(kind=None)):
            try:
                blob = pickle.dumps(tuple(candidate))
                pickle.loads(blob)
            except Exception:
                continue
            if len(blob) <= limit:
                return blob
        return pickle.dumps((None, "an error that could not be sent", ""))

    @staticmethod
    def load(blob: bytes) -> WorkerError:
        return WorkerError(*loads(blob))

    def raised(self, worker: str) -> Exception:
        """The same type of exception again, naming the worker, with the remote traceback in its text."""
        text = f"on worker {worker!r}: {self.message}\n\nTraceback on {worker!r}:\n{self.trace}"
        kind: Any = self.kind
        if kind is not None and issubclass(kind, Exception):
            try:
                error = kind(text, peer=self.peer, status=self.status) if issubclass(kind, RdmaError) else kind(text)
                if worker in str(error):
                    return error
            except Exception:
                pass
        return RdmaError(text if kind is None else f"{kind.__name__} {text}", peer=worker)
