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
        room = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
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

    name: str
    """Of its type."""
    message: str
    trace: str
    peer: str = ""
    """Of an ``RdmaError``, and ``status``: who was lost, perhaps another one than the worker that says so."""
    status: str = ""
    kind: bytes = b""
    """A pickle of its type, or of the first type above that other processes can find."""
    whole: bytes = b""
    """A pickle of the exception, or of what ``_made`` takes."""

    @staticmethod
    def of(error: BaseException, worker: str, task: str = "") -> WorkerError:
        """``worker``: whose it is; ``task``: in what it was raised."""
        error = for_others(error, worker)
        name = type(error).__name__
        trace = "".join(traceback.format_exception(error)) + (f"in the {task}\n" if task else "")
        if isinstance(error, RdmaError):
            return WorkerError(name, error.message, trace, error.peer, error.status, _kind(error))
        if not isinstance(error, Exception):
            return WorkerError(name, str(error), trace)
        return WorkerError(name, str(error), trace, kind=_kind(error), whole=_whole(error))

    def dump(self, limit: int) -> bytes:
        """Pickled, cut to at most ``limit`` bytes."""
        room = limit - 1024
        trace = self.trace if len(self.trace) < room // 4 else "...\n" + self.trace[-room // 4 :]
        short = self._replace(message=self.message[: room // 4], trace=trace)
        for candidate in (short, short._replace(whole=b"")):
            blob = pickle.dumps(tuple(candidate))
            if len(blob) <= limit:
                return blob
        return pickle.dumps((self.name[:100], "an error that could not be sent", ""))

    @staticmethod
    def load(blob: bytes) -> WorkerError:
        return WorkerError(*loads(blob))

    def raised(self, worker: str) -> Exception:
        """The exception again, as in one process, caused by a ``RuntimeError`` with the worker's name and the traceback there.
        ``RdmaError`` have both in their text, and one stands for what cannot be made again here."""
        text = f"on worker {worker!r}: {self.message}\n\nTraceback on {worker!r}:\n{self.trace}"
        for blob in filter(None, (self.whole, self.kind)):
            try:
                found = loads(blob)
                if isinstance(found, type) and issubclass(found, RdmaError):
                    return found(text, peer=self.peer, status=self.status)
                if not isinstance(found, Exception):
                    found = _made(*found) if isinstance(found, tuple) else _made(found, (self.message,), {})
                found.__cause__ = RuntimeError(text)
                return found
            except Exception:
                continue
        return RdmaError(f"{self.name} {text}", peer=worker)


def _kind(error: Exception) -> bytes:
    return next(blob for kind in type(error).__mro__ if (blob := _dumped(kind)))


def _whole(error: Exception) -> bytes:
    """A pickle of the exception where that gives an equal one, else of what ``_made`` takes, with those attributes that can
    be pickled. Empty where its arguments cannot be."""
    try:
        blob = pickle.dumps(error)
        again = pickle.loads(blob)
        if type(again) is type(error) and str(again) == str(error) and again.__dict__.keys() == error.__dict__.keys():
            return blob
    except Exception:
        pass
    attributes = {name: value for name, value in error.__dict__.items() if _dumped(value)}
    return _dumped((pickle.loads(_kind(error)), error.args, attributes))


def _made(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    """Without its constructor, which takes other arguments than an exception keeps."""
    if not issubclass(kind, Exception):
        raise TypeError(f"{kind.__name__} is no exception")
    made = kind.__new__(kind, *args)
    made.args = args
    made.__dict__.update(attributes)
    return made


def _dumped(value: object) -> bytes:
    """Its pickle, if that can be read; else empty."""
    try:
        blob = pickle.dumps(value)
        pickle.loads(blob)
    except Exception:
        return b""
    return blob
