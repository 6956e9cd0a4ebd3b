"""Why something cannot be pickled: where it is, and what would help. Runs only after pickling has failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

_LIMIT_S = 0.25
_DEPTH = 30
_SYMBOLIC = "torch.fx.proxy"


def explain(error: Exception, value: Any, names: tuple[str, ...], fails: Callable[[Any], bool]) -> None:
    """Add to the error's text which part of ``value`` it is about, as a path. ``names``: of the members of ``value``,
    the tuple that makes up a call; none for a result. ``fails``: whether pickling some part fails; without effect otherwise.
    Takes a quarter of a second and the pickling of one part at most; a path that is not complete then ends early."""
    deadline = time.monotonic() + _LIMIT_S
    path, culprit = "" if names else "result", value
    for _ in range(_DEPTH):
        if type(culprit).__module__ == _SYMBOLIC:  # any attribute of it is another one
            _append(error, "; values of a symbolic trace have no data: put the call into a function that torch.fx.wrap names")
            break
        # An object that holds itself leads nowhere new: the depth is limited.
        found = next((part for part in _parts(culprit) if time.monotonic() < deadline and fails(part[1])), None)
        if found is None or time.monotonic() >= deadline:
            break
        step, culprit = found
        path = path + step if path else names[int(step[1:-1])]
    if culprit is not value:
        _append(error, f" (in {path}, a {type(culprit).__name__})")
    hint(error)


def hint(error: Exception) -> None:
    """Add what helps with functions that have no name another process could find."""
    text = str(error)
    if "<lambda>" in text or "<locals>" in text or "local object" in text:
        _append(error, "; functions and classes defined on the spot travel with RpcBackendOptions(pickler='cloudpickle')")


def _append(error: Exception, text: str) -> None:
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (error.args[0] + text,)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that an object holds, each with the Python expression that leads to it."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from ((f".{name}", part) for name, part in vars(value).items())
    elif hasattr(value, "__self__"):
        yield ".__self__", value.__self__
