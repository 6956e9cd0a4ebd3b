"""How the error of a backward pass comes back to whoever began it: a ``BackwardError`` that is of the original type too.

Its text begins as in ``torch.distributed.autograd``: one ``Error on Node <worker id>: `` for each worker that it passed, then
the original text; what follows is the traceback of the worker where it happened.
"""

from __future__ import annotations

import pickle
import traceback
from typing import Any


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
        except TypeError:  # the two are laid out differently
            found = BackwardError
        _kinds[original] = found
    return found


def made(original: type, text: str, state: dict[str, Any]) -> Exception:
    """The error to raise."""
    kind = _kind(original)
    try:
        error = kind.__new__(kind, text)
    except Exception:
        error = BackwardError.__new__(BackwardError, text)
    error.args = (text,)
    error.__dict__.update(state)
    return error


def located(error: BaseException, worker_id: int, name: str) -> tuple[type, str, dict[str, Any]]:
    """What ``made`` makes an error of that passed a worker."""
    prefix = f"Error on Node {worker_id}: "
    if isinstance(error, BackwardError):
        return getattr(error, "_original", RuntimeError), prefix + str(error), error.__dict__
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    kind = type(error) if isinstance(error, Exception) else RuntimeError
    return kind, f"{prefix}{error}\n\nOn worker {name}:\n{trace}", dict(error.__dict__)


def dump(error: BaseException, worker_id: int, name: str) -> bytes:
    kind, text, state = located(error, worker_id, name)
    for attempt in ((kind, text, state), (kind, text, {}), (RuntimeError, text, {})):
        try:
            packed = pickle.dumps(attempt, 5)
            pickle.loads(packed)
            return packed
        except Exception:
            continue
    raise AssertionError("a text can be pickled")


def load(packed: bytes) -> Exception:
    try:
        return made(*pickle.loads(packed))
    except Exception as reason:  # a type that is not known here
        return BackwardError(f"Error on another node, of a type that is not known here ({reason})")
