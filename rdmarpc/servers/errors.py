"""An error of a server on its way to its workers."""

from __future__ import annotations

import pickle
import traceback
from typing import NamedTuple

from ..message import permits
from ..transport import RdmaError, for_others


class WorkerError(NamedTuple):
    """Plain data. ``text``: the worker's name, the error's message, and the traceback there."""

    name: str
    """Of its type."""
    text: str
    copies: tuple[bytes, ...]
    """Pickles of an exception, or of what makes one (type, arguments, attributes): the first that can be read here is raised.
    Types that other processes cannot find are replaced by the first one above that they can."""

    @staticmethod
    def of(error: BaseException, worker: str) -> WorkerError:
        """``worker``: whose it is."""
        error = for_others(error, worker)
        message = error.message if isinstance(error, RdmaError) else str(error)
        trace = "".join(traceback.format_exception(error))
        text = f"on worker {worker!r}: {message}\n\nTraceback on {worker!r}:\n{trace}"
        kind = next(kind for kind in type(error).__mro__ if _dumped(kind))
        copies: list[bytes] = []
        if isinstance(error, RdmaError):
            copies = [_dumped((kind, (text,), {"peer": error.peer, "status": error.status}))]
        elif isinstance(error, Exception):
            attributes = {name: value for name, value in error.__dict__.items() if _dumped(value)}
            made = [(kind, error.args, attributes), (kind, (message,), {})]
            copies = [_dumped(error) if _same(error) else b"", *map(_dumped, made)]
        return WorkerError(type(error).__name__, text, tuple(filter(None, copies)))

    def raised(self, worker: str) -> Exception:
        """The exception again, as in one process, caused by a ``RuntimeError`` with the worker's name and the traceback there.
        ``RdmaError`` have both in their text, and one stands for what cannot be made again here."""
        for blob in self.copies:
            try:
                found = permits.loads(blob)
                if isinstance(found, tuple):
                    kind, args, given = found
                    if issubclass(kind, RdmaError):
                        return kind(*args, **given)
                    if not issubclass(kind, Exception):
                        continue
                    # Without its constructor, which takes other arguments than an exception keeps.
                    found = kind.__new__(kind, *args)
                    found.args = args
                    found.__dict__.update(given)
                if isinstance(found, Exception):
                    found.__cause__ = RuntimeError(self.text)
                    return found
            except Exception:
                continue
        return RdmaError(f"{self.name} {self.text}", peer=worker)


def _same(error: Exception) -> bool:
    """Whether its pickle gives an equal exception."""
    try:
        again = pickle.loads(pickle.dumps(error))
        return type(again) is type(error) and str(again) == str(error) and again.__dict__.keys() == error.__dict__.keys()
    except Exception:
        return False


def _dumped(value: object) -> bytes:
    """Its pickle, if that can be read; else empty."""
    try:
        blob = pickle.dumps(value)
        pickle.loads(blob)
    except Exception:
        return b""
    return blob
