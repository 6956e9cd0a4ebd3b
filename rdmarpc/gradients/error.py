"""The error of a backward pass, as the worker that began it gets it: a ``BackwardError`` that is of the original type too.

Its text begins as in ``torch.distributed.autograd``: one ``Error on Node <worker id>: `` for each worker that it passed, then
the original text; what follows is the traceback of the worker where it happened.
"""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress
from typing import Any

from ..message import permits


class BackwardError(RuntimeError):
    """A backward pass failed: a node, a hook, or a worker that was lost. Also an instance of the original exception's type
    where the two can be one."""

    def __str__(self) -> str:
        return str(self.args[0])


_kinds: dict[type, Any] = {}


def _kind(original: type) -> Any:
    if issubclass(original, BackwardError):
        return original
    found = _kinds.get(original)
    if found is None:
        try:
            found = type(
                original.__name__, (BackwardError, original), {"__module__": original.__module__, "_original": original}
            )
        except Exception:  # the two are laid out differently, or the original wants no heirs
            found = BackwardError
        _kinds[original] = found
    return found


def _new(kind: Any, original: type, text: str) -> Any:
    """An error that no constructor has seen. Types that are laid out otherwise than ``RuntimeError`` (``OSError``) can be made
    by a ``__new__`` of their own only."""
    for base in (kind, *original.__mro__):
        with suppress(Exception):
            return base.__new__(kind, text)
    return BackwardError.__new__(BackwardError, text)


def made(original: type, text: str, state: dict[str, Any]) -> Exception:
    """The error to raise."""
    kind = _kind(original)
    error = _new(kind, original, text)
    error.args = (text,)
    error.__dict__.update(state)
    return error


def located(error: BaseException, worker_id: int, name: str) -> Exception:
    """The ``BackwardError`` for an error that was raised at a worker, or came to it from another. It holds no frames."""
    prefix = f"Error on Node {worker_id}: "
    if isinstance(error, BackwardError):
        return made(_original(error), prefix + str(error), error.__dict__)
    try:
        text = str(error)
    except BaseException as reason:
        text = f"{type(error).__name__} (its text cannot be made: {type(reason).__name__})"
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    kind = type(error) if isinstance(error, Exception) else RuntimeError
    return made(kind, f"{prefix}{text}\n\nOn worker {name}:\n{trace}", error.__dict__)


def _original(error: Exception) -> type:
    return getattr(error, "_original", RuntimeError)


def dump(error: Exception) -> bytes:
    """Pickle an error made by ``located``. Its attributes, and then its type, are left out if they cannot be pickled."""
    kind, state = _original(error), error.__dict__
    for attempt in ((kind, state), (kind, {})):
        try:
            packed = pickle.dumps(attempt, 5)
            pickle.loads(packed)
            return pickle.dumps((str(error), packed), 5)
        except Exception:
            continue
    return pickle.dumps((str(error), pickle.dumps((RuntimeError, {}), 5)), 5)


def load(packed: bytes) -> Exception:
    text, inner = permits.loads(packed)
    try:
        kind, state = permits.loads(inner)
    except Exception:  # a type that is not known, or not allowed, here
        return BackwardError(text)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return BackwardError(text)
    return made(kind, text, state)
