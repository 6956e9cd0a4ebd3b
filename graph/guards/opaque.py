"""Calls that a trace cannot look into: TorchScript, control flow of torch's own, functions with a backward of their own.

What a TorchScript function computes depends on how often it has run in the process: the first run is profiled, later ones have
gradients by formulas of their own, whose last bits differ. The operations of one run, written down, would compute neither. So
a forward that calls one is not traced. A part that stays one operation may call any; its runs without data are not counted.

``torch.cond``, ``while_loop`` and the like compile what they call. Their first use within a dispatch mode, as in a trace, makes
every later one in the process fail. So they are refused before that.

What a forward prints, logs, writes to a file or sends, a trace does once and a graph never. It is refused before it is done.
"""

from __future__ import annotations

import _io
import _queue
import _socket
import builtins
import contextlib
import csv
import functools
import io
import logging
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops import utils as operators
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from ...transport import NotSupported
from .content import foreign, package_of

_KINDS: Any = torch._C.ScriptFunction, torch._C.ScriptMethod
_COMPILE = "setup_compilation_env"
"""What ``torch.cond`` and its like look up when they compile; not in every version of torch."""


@contextlib.contextmanager
def no_opaque_calls(allowed: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """While this lasts, a TorchScript function or method that this thread calls raises ``NotSupported``, unless
    ``allowed()``; so does an operator like ``torch.cond``."""
    thread = threading.get_ident()

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(script: Any, /, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and not allowed():
                raise NotSupported(f"the forward calls {script.name!r}, a function of TorchScript, whose gradients are its own")
            return original(script, *args, **kwargs)

        return call

    compiles = getattr(operators, _COMPILE, None)

    def controlled() -> Any:
        if compiles is None or threading.get_ident() == thread:
            raise NotSupported("the forward calls torch.cond, or another operator that compiles what it is given")
        return compiles()

    originals = [(kind, kind.__call__) for kind in _KINDS]
    for kind, original in originals:
        kind.__call__ = refusing(original)
    if compiles is not None:
        setattr(operators, _COMPILE, controlled)
    try:
        yield
    finally:
        for kind, original in originals:
            kind.__call__ = original
        if compiles is not None:
            setattr(operators, _COMPILE, compiles)


@contextlib.contextmanager
def custom_functions(handle: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """While this lasts, ``SomeFunction.apply(...)`` in this thread goes to ``handle(apply, args, kwargs)``: a trace must see
    the function, not the operations of its forward. A program may have looked ``apply`` up before (``f =
    SomeFunction.apply``), so it is what that calls which is exchanged: before torch 2.14 the ``apply`` of a base class, since
    then, where it is in C, ``forward`` (``_looked_up_before``)."""
    thread, function = threading.get_ident(), torch.autograd.Function
    original, beneath = function.__dict__["apply"], torch._C._FunctionBase.__dict__["apply"]
    in_python = isinstance(original, classmethod)
    exchanged: Any = torch.autograd.function._SingleLevelFunction if in_python else function
    handled = False

    def left_alone(cls: Any) -> bool:
        # In older versions all others of torch.utils.checkpoint had one that keeps their inputs.
        own = cls.__module__ == "torch.utils.checkpoint" and cls is not CheckpointFunction
        return threading.get_ident() != thread or handled or own

    def give(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal handled
        if cls is CheckpointFunction:
            raise NotSupported(
                "checkpoint(..., use_reentrant=True) calls a function once more in the backward, a trace does not"
            )
        handled = True
        try:
            return handle(original.__get__(None, cls), args, kwargs)
        finally:
            handled = False

    @classmethod  # type: ignore[misc]
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return beneath.__get__(None, cls)(*args, **kwargs) if left_alone(cls) else give(cls, args, kwargs)

    exchanged.apply = apply
    try:
        with contextlib.nullcontext() if in_python else _looked_up_before(left_alone, give):
            yield
    finally:
        if in_python:
            del exchanged.apply
        else:
            exchanged.apply = original


@contextlib.contextmanager
def _looked_up_before(left_alone: Callable[[Any], bool], give: Callable[..., Any]) -> Iterator[None]:
    """An ``apply`` in C that was looked up before asks its class for ``_backward_cls``, which nobody else does, and then for
    ``forward``. While this lasts, that calls ``give``, and C makes one more node of autograd around what comes of it. Refused
    is what C would change by that: results that are not objects of their own, or that have no gradient."""
    kind: Any = type(torch.autograd.Function)
    unset = torch.autograd.function._SingleLevelFunction.setup_context
    entered: tuple[Any, bool] | None = None  # the class, and whether gradients were on

    def find(cls: Any, name: str) -> Any:
        nonlocal entered
        found = type.__getattribute__(cls, name)
        if name not in ("_backward_cls", "forward") or left_alone(cls):
            return found
        if name == "_backward_cls":
            entered = cls, torch.is_grad_enabled()
            return found
        known, entered = entered, None
        return functools.partial(forward, *known) if known is not None and known[0] is cls else found

    def forward(cls: Any, grad: bool, *args: Any, **kwargs: Any) -> Any:
        apart = cls.setup_context is not unset
        given = args if apart else args[1:]  # the first one is the context
        with torch.set_grad_enabled(grad):
            result = give(cls, given, kwargs)
        before, after = pytree.tree_leaves((given, kwargs)), pytree.tree_leaves(result)
        proxies = any(isinstance(leaf, fx.Proxy) for leaf in after)
        if (apart and proxies) or (not proxies and _changed_by_c(before, after, grad)):
            raise NotSupported(
                f"the forward calls an apply of {cls.__name__} that was looked up before the trace",
                hint=f"call {cls.__name__}.apply(...) in the forward",
            )
        return result

    kind.__getattribute__ = find
    try:
        yield
    finally:
        del kind.__getattribute__


def _changed_by_c(given: list[Any], made: list[Any], grad: bool) -> bool:
    """Whether an ``apply`` around one changes its results: C makes views of what was ``given``, and gives gradients to all."""
    tensors = [leaf for leaf in made if isinstance(leaf, torch.Tensor)]
    without = any(leaf.is_floating_point() or leaf.is_complex() for leaf in tensors if not leaf.requires_grad)
    needs = grad and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in given)
    return (needs and without) or any(leaf is other for leaf in tensors for other in given)


_WRITERS = (_io._IOBase, _socket.socket, _queue.SimpleQueue, type(csv.writer(io.StringIO())))
_WRITES = frozenset(["write", "writelines", "writerow", "writerows", "send", "sendall", "sendto", "put"])
_ACTS = frozenset(
    [os.write, os.kill, os.system, os.remove, os.rename, os.replace, os.mkdir, os.rmdir, signal.raise_signal, time.sleep]
)
ACT_NAMES = _WRITES | {function.__name__ for function in _ACTS}
"""The names of functions that may be such as ``acts`` tells of."""
_ONCE = frozenset(f"{level}_once" for level in ("debug", "info", "log", "warn", "warning", "error"))
"""What libraries call functions that log a text once in a process."""
_PACKAGES = {
    "queue": "put get put_nowait get_nowait",
    "multiprocessing": "send recv send_bytes recv_bytes put get put_nowait get_nowait start set clear acquire release wait",
    "threading": "start set clear acquire release wait notify notify_all",
    "concurrent": "submit map result",
    "asyncio": "run run_until_complete",
    "subprocess": "run call check_call check_output __init__",
    "pathlib": "open write_text write_bytes touch mkdir unlink rename replace rmdir",
    "shutil": "copy copy2 copyfile copytree move rmtree",
    "urllib": "urlopen urlretrieve",
    "torch": "save",
}
_ACTING = {package: frozenset(names.split()) for package, names in _PACKAGES.items()}


def called_to_act(frame: types.FrameType) -> types.FrameType | None:
    """Who has just called a function of Python's library or of torch that does what ``acts`` tells of, if it is neither."""
    caller = frame.f_back
    if frame.f_code.co_name not in _ACTING.get(package_of(frame), ()) or caller is None:
        return None
    return None if foreign(caller.f_globals.get("__name__")) else caller


def acts(function: Any) -> bool:
    """Whether a call of this function of C is seen outside of the process: it writes, sends, sleeps or signals."""
    writes = getattr(function, "__name__", "") in _WRITES and isinstance(getattr(function, "__self__", None), _WRITERS)
    return writes or function in _ACTS


def done_once(what: str, frame: types.FrameType) -> str:
    """Why a forward whose frame this is cannot be captured."""
    return f"{what} at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}, which a trace would do once"


@contextlib.contextmanager
def no_output(here: Callable[[], bool], refuse: Callable[[str], NotSupported]) -> Iterator[None]:
    """While this lasts, ``refuse`` is told what this thread prints, logs or opens where ``here()``, and it is not done. What
    torch and Python print or log is, and so is what a library logs once in a process (``warning_once``). ``vars()`` of a
    tensor is told, too."""
    thread = threading.get_ident()
    say, begin, variables, handle = builtins.print, builtins.open, builtins.vars, logging.Logger.handle

    def own(frame: Any) -> bool:
        return threading.get_ident() == thread and here() and not foreign(frame.f_globals.get("__name__"))

    def printed(*args: Any, **kwargs: Any) -> None:
        if not own(sys._getframe(1)):
            say(*args, **kwargs)
        else:
            refuse(done_once("prints", sys._getframe(1)))

    def opened(*args: Any, **kwargs: Any) -> Any:
        if own(sys._getframe(1)):
            raise refuse(done_once("opens a file", sys._getframe(1)))
        return begin(*args, **kwargs)

    def listed(*given: Any) -> Any:
        if given and isinstance(given[0], torch.Tensor) and own(sys._getframe(1)):
            refuse("asks for vars() of a tensor, which has others in a trace")
        return variables(*given) if given else sys._getframe(1).f_locals

    def handled(logger: logging.Logger, record: logging.LogRecord) -> None:
        frame: Any = sys._getframe(1)
        while frame.f_globals.get("__name__") == "logging":
            frame = frame.f_back
        if frame.f_code.co_name in _ONCE or not own(frame):
            handle(logger, record)
        else:
            refuse(done_once("logs", frame))

    builtins.print, builtins.open, builtins.vars = printed, opened, listed
    logging.Logger.handle = handled  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        builtins.print, builtins.open, builtins.vars = say, begin, variables
        logging.Logger.handle = handle  # type: ignore[method-assign]


def uncounted() -> contextlib.AbstractContextManager[Any]:
    """While this lasts, what TorchScript runs in this thread leaves its later runs as they are."""
    return torch.jit.optimized_execution(False)


def runs_again() -> bool:
    """Whether ``torch.utils.checkpoint`` runs what is called now once more in the backward."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


class ActsAgain(NotSupported):
    """What ``torch.utils.checkpoint`` runs twice changes something each time: no graph has that."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} changes what it keeps, and torch.utils.checkpoint runs it twice, which a trace does not",
            hint="use checkpoint inside of a part that lies at one worker",
        )
