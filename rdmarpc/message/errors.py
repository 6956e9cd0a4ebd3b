"""How an exception crosses: with its type, its text and the remote traceback.

Of a function (``dump``, ``rebuild``) a text goes out (the callee logs the error too: ``tell``) and, each pickled by itself so
that one that cannot be read back spoils nothing else, the type, the exception, its arguments and its attributes. The caller
rebuilds, in this order:

1. an exception of one text (most are): the type with the remote text, which contains the original one;
2. any other: the exception itself, as it is pickled, caused by a ``RuntimeError`` with the remote text;
3. where its class does not let it be read back: the type with what could be read of arguments and attributes, so caused;
4. where even that fails: ``RuntimeError`` with name and text. So arrive types that ``allow`` does not have: none is looked for.

In 1 and 3 the constructor of the class is not called: it may take the text for something else. One that could not be called
with a text leads to 4, as in torch.

Of a backward pass (``located``, ``dump_located``, ``load_located``) the worker that began it gets a ``BackwardError`` that is
of the original type too. Its text begins as in ``torch.distributed.autograd``: one ``Error on Node <worker id>: `` for each
worker that it passed, then the original text; what follows is the traceback of the worker where it happened.
"""

from __future__ import annotations

import copyreg
import inspect
import os
import pickle
import sys
import traceback
from contextlib import suppress
from functools import cache
from types import TracebackType
from typing import Any

import torch

from ..base.here import WorkerInfo
from ..transport import Guard, assign, for_others, remade
from . import permits

_PICKLER_HINT = (
    "Default RPC pickler does not serialize function code. Ensure that UDFs are defined on both caller and callee modules."
)
BY_VALUE = "defined on the spot, or in another __main__, travel with RpcBackendOptions(pickler='cloudpickle')"
_OURS = os.path.join(os.path.dirname(sys.modules[__name__.partition(".")[0]].__file__ or ""), "")


class ScriptError(torch.jit.Error, RuntimeError):
    """What a TorchScript function raised at the callee. Programs written for torch's RPC catch ``RuntimeError``."""


def dump(error: BaseException, me: WorkerInfo) -> bytes:
    """The payload of an ``ERROR``. Raises nothing, whatever the exception's own methods do. ``SystemExit`` and
    ``KeyboardInterrupt`` of a function become ``RuntimeError`` for the caller, which they must not end."""
    error = for_others(error, me.name)
    name = type(error).__name__
    try:
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException as reason:
        summary, trace = _unreadable(error, "text cannot be made", reason), ""
    text, kind = f"On {me}:\n{summary}\n{trace}", type(error) if isinstance(error, Exception) else RuntimeError
    whole, args, state = b"", b"", {}
    if isinstance(error, Exception) and not _is_text(error):
        whole, args, state = _dump(error), _dump(error.args), _dump_state(error)
    return pickle.dumps((name, text, _dump(kind), whole, args, state), 5)


def readable(error: BaseException) -> BaseException:
    """The error; in place of one whose own attributes raise when they are read, a ``RuntimeError`` that says so."""
    try:
        error.args, error.__dict__, error.__traceback__, error.__cause__, error.__context__  # noqa: B018
        return error
    except BaseException as reason:
        return RuntimeError(_unreadable(error, "attributes cannot be read", reason))


def _unreadable(error: BaseException, what: str, reason: BaseException) -> str:
    return f"{type(error).__name__} (its {what}: {type(reason).__name__})"


def rebuild(payload: bytes) -> Exception:
    """The exception to raise at the caller."""
    name, text, packed_kind, whole, args, state = permits.loads(payload)
    error = _load(whole)
    kind = _load_kind(packed_kind)
    if not isinstance(error, Exception) and kind is not None and _takes_a_text(kind):
        with suppress(BaseException):
            error = remade(ScriptError if kind is torch.jit.Error else kind, _load(args, (text,)), _load_state(state))
    if isinstance(error, Exception):
        if whole or args:  # else the text is in it
            assign(error, "__cause__", RuntimeError(text))
        return error
    return RuntimeError(f"An exception of type {name} could not be rebuilt here. Original exception on remote side was {text}")


def _takes_a_text(kind: type[Exception]) -> bool:
    """Whether torch, which makes an error by its class and one text, would make one of this class."""
    try:
        inspect.signature(kind).bind("")
    except TypeError:
        return False
    except Exception:  # of C code, or of a class that is no ordinary one
        pass
    return True


def unknown_name(error: Exception) -> RuntimeError:
    """The error for a function, or a class, that unpickling did not find in this process."""
    more = f" Those {BY_VALUE}." if "__main__" in str(error) else ""
    return RuntimeError(f"{type(error).__name__}: {error}. {_PICKLER_HINT}{more}")


def ordinary(error: BaseException) -> Exception:
    """The exception to send, or to keep, for an error. Those that would end an interpreter become ``RuntimeError``."""
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


def unsendable(error: BaseException) -> BaseException:
    """The error for a result that cannot be pickled. It is always a ``RuntimeError``, as the function itself has not failed."""
    if isinstance(error, RuntimeError):
        return error
    made = RuntimeError(f"the result of the function cannot be sent: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def _is_text(error: BaseException) -> bool:
    """Whether an exception is nothing but its type and one text, and shows that text as it is."""
    args, kind = error.args, type(error)
    more = error.__dict__ or copyreg._slotnames(kind)  # type: ignore[attr-defined]
    return len(args) == 1 and type(args[0]) is str and not more and kind.__str__ is BaseException.__str__


def _dump(value: object) -> bytes:
    with suppress(BaseException):
        return pickle.dumps(value, 5)
    return b""


def _load(packed: bytes, default: Any = None) -> Any:
    """What ``_dump`` made; ``default`` where it does not let itself be read back."""
    with suppress(BaseException):
        return permits.loads(packed)
    return default


def _load_kind(packed: bytes) -> type[Exception] | None:
    """The class of an error; ``None`` for what is not known, or not allowed, here, and for what is none."""
    kind = _load(packed)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None


def _dump_state(error: BaseException) -> dict[str, bytes]:
    """The attributes of an error, each by itself."""
    return {key: _dump(each) for key, each in error.__dict__.items()}


def _load_state(state: dict[str, bytes]) -> dict[str, Any]:
    """Those that can be read back."""
    found = {}
    for key, packed in state.items():
        with suppress(BaseException):
            found[key] = permits.loads(packed)
    return found


def tell(guard: Guard, error: BaseException, function: Any) -> None:
    """Log a function that failed, at the worker that ran it: a kind of failure is a type of exception and the function that was
    called, the outermost frame that is not ours."""
    guard.note(error, f"a function that another worker called, {_where(error.__traceback__, function)},", ours=False)


def _where(trace: TracebackType | None, function: Any) -> str:
    """The function that a request called, as far as it is written in Python: name and file. Else its name (``torch.add``), or
    where no function could be read, what read it."""
    name = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        name = f"{code.co_name} ({os.path.basename(code.co_filename)})"
        if not code.co_filename.startswith(_OURS):
            return name
        trace = trace.tb_next
    return getattr(function, "__name__", name)


class BackwardError(RuntimeError):
    """A backward pass failed: a node, a hook, or a worker that was lost. Also an instance of the original exception's type
    where the two can be one."""

    _original: type = RuntimeError

    def __str__(self) -> str:
        return str(self.args[0])


@cache
def _kind(original: type) -> Any:
    if issubclass(original, BackwardError):
        return original
    named = {"__module__": original.__module__, "_original": original}
    try:
        return type(original.__name__, (BackwardError, original), named)
    except Exception:  # the two are laid out differently, or the original wants no heirs
        return BackwardError


def _new(kind: Any, original: type, text: str) -> Any:
    """An error that no constructor has seen. Types that are laid out otherwise than ``RuntimeError`` (``OSError``) can be made
    by a ``__new__`` of their own only."""
    for base in (kind, *original.__mro__):
        with suppress(Exception):
            return base.__new__(kind, text)
    return BackwardError.__new__(BackwardError, text)


def _made(original: type, text: str, state: dict[str, Any]) -> Exception:
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
        return _made(error._original, prefix + str(error), error.__dict__)
    try:
        text = str(error)
    except BaseException as reason:
        text = _unreadable(error, "text cannot be made", reason)
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    kind = type(error) if isinstance(error, Exception) else RuntimeError
    return _made(kind, f"{prefix}{text}\n\nOn worker {name}:\n{trace}", error.__dict__)


def dump_located(error: Exception) -> bytes:
    """Pickle an error made by ``located``."""
    return pickle.dumps((str(error), _dump(getattr(error, "_original", RuntimeError)), _dump_state(error)), 5)


def load_located(packed: bytes) -> Exception:
    """The error again: without attributes that cannot travel, and without a type that is not known, or not allowed, here."""
    text, packed_kind, state = permits.loads(packed)
    kind = _load_kind(packed_kind)
    return BackwardError(text) if kind is None else _made(kind, text, _load_state(state))
