"""An error of a server on its way to its workers."""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NamedTuple

from ..message import permits
from ..transport import RdmaError, for_others


class WorkerError(NamedTuple):
    """Plain data."""

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
    def of(error: BaseException, worker: str) -> WorkerError:
        """``worker``: whose it is."""
        error = for_others(error, worker)
        name = type(error).__name__
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, RdmaError):
            return WorkerError(name, error.message, trace, error.peer, error.status, _kind(error))
        if not isinstance(error, Exception):
            return WorkerError(name, str(error), trace)
        return WorkerError(name, str(error), trace, kind=_kind(error), whole=_whole(error))

    def raised(self, worker: str) -> Exception:
        """The exception again, as in one process, caused by a ``RuntimeError`` with the worker's name and the traceback there.
        ``RdmaError`` have both in their text, and one stands for what cannot be made again here."""
        text = f"on worker {worker!r}: {self.message}\n\nTraceback on {worker!r}:\n{self.trace}"
        for blob in filter(None, (self.whole, self.kind)):
            try:
                found = permits.loads(blob)
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
