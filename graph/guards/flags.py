"""Flags of torch that choose how operations compute. Every process has its own, and a graph has none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from ...transport import NotSupported

_SMALLEST = 5e-324
"""Nothing where numbers below the normal ones are flushed: torch has a setter for that, and no getter."""

_native: Any = torch._C
_HINT = "use it inside of a part"


def _deterministic() -> tuple[bool, bool]:
    return _native._get_deterministic_algorithms(), _native._get_deterministic_algorithms_warn_only()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _flushes() -> bool:
    return _SMALLEST * 1.0 == 0.0


def _precision(backend: str, operation: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    read: Callable[[], str] = partial(_native._get_fp32_precision_getter, backend, operation)

    def precision() -> str:
        found: str = read()
        return "ieee" if found == "none" else found  # what nobody has chosen

    return precision, partial(_native._set_fp32_precision_setter, backend, operation)


NATIVE = {
    "backends.mkldnn.enabled": ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
    "backends.mkldnn.deterministic": ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    "sdp_kernel (flash)": ("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
    "sdp_kernel (memory-efficient)": ("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
    "sdp_kernel (math)": ("_get_math_sdp_enabled", "_set_sdp_use_math"),
    "sdp_kernel (order)": ("_get_sdp_priority_order", "_set_sdp_priority_order"),
    "backends.cudnn.enabled": ("_get_cudnn_enabled", "_set_cudnn_enabled"),
    "backends.cudnn.deterministic": ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
    "sdp_kernel (cuDNN)": ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
}
"""Functions of ``torch._C``, which has no public names for all of them. A version without one has no such flag to look at."""
PRECISIONS = ("_get_fp32_precision_getter", "_set_fp32_precision_setter")
_WITH_CUDA = bool(torch.version.cuda or torch.version.hip)

_FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "flush_denormal": (_flushes, torch.set_flush_denormal),
    "use_deterministic_algorithms": (_deterministic, _set_deterministic),
    **{
        name: (getattr(_native, get), getattr(_native, put))
        for name, (get, put) in NATIVE.items()
        if hasattr(_native, get) and hasattr(_native, put) and (_WITH_CUDA or "cudnn" not in get)
    },
    **{
        f"backends.{backend}.{name}.fp32_precision": _precision(backend, name)
        for backend in ("mkldnn", "cuda")
        for name in ("conv", "matmul", "rnn")
        if all(hasattr(_native, each) for each in PRECISIONS) and (_WITH_CUDA or backend == "mkldnn")
    },
}
"""How each is read and set."""

_READERS = {name: get for name, (get, _) in _FLAGS.items()}


def flags() -> dict[str, Any]:
    """What they are now, by name."""
    return {name: get() for name, get in _READERS.items()}


def other_flag(here: dict[str, Any], there: dict[str, Any]) -> str:
    """The first that both have and that is not the same; empty if there is none."""
    return next((name for name, value in here.items() if name in there and there[name] != value), "")


def flags_apart(others: Iterable[dict[str, Any]]) -> str:
    """How these of workers are not what they are here now; empty if they are."""
    here = flags()
    for there in others:
        if there != here and (name := other_flag(here, there)):
            return f"torch's {name} is {here[name]} here and was {there[name]} at a worker: set it everywhere before wrap()"
    return ""


class SetsFlag(NotSupported):
    """A forward sets a flag around its operations: no graph has that."""


_began: ContextVar[dict[str, Any] | None] = ContextVar("flags as the trace began", default=None)


@contextlib.contextmanager
def steady_flags(wanted: dict[str, Any] | None = None) -> Iterator[None]:
    """Around a trace, or around a forward within one that has to run under the flags ``wanted``: what it changes is put back.
    Raises ``SetsFlag`` if it leaves one changed."""
    found = flags()
    began = found if wanted is None else wanted
    _set(began)
    token = _began.set(began)
    try:
        yield
        check_flags()
    finally:
        _began.reset(token)
        _set(found)


def _set(values: dict[str, Any]) -> None:
    for name, value in flags().items():
        if value != values[name]:
            _FLAGS[name][1](values[name])


def check_flags() -> None:
    """Within a trace: raise ``SetsFlag`` if the forward has changed one, which its graph would not."""
    began = _began.get()
    if began is None:
        return
    now = flags()
    if name := other_flag(now, began):
        raise SetsFlag(f"the forward sets torch's {name} to {now[name]}, which does not reach other workers", hint=_HINT)
