"""Places as devices of torch: ``rdmarpc.device("worker1")`` is a ``torch.device`` that tensors can be moved to and made on.

The device is one of torch's backend for others (PrivateUse1), under the name ``remote``. It is only an entrance: what comes in
is a ``RemoteTensor``, whose own device is "cpu", because PyTorch's kernels, autograd's engine and autocast choose by it.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch.utils import backend_registration

from ..calls import agent as _agent
from ..transport import NotSupported
from .names import DEVICE, named, place_named
from .operators import aten, operator
from .tensor import at_place, make_empty, run_here

_lock = threading.Lock()
_library: torch.library.Library | None = None
_RESIZING = (
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.range.default, aten.range.step, aten.linspace.default,
    aten.logspace.default, aten.eye.default, aten.eye.m, aten.randperm.default, aten.tril_indices.default,
    aten.triu_indices.default,
)  # fmt: skip
"""Factories that make an empty tensor and then resize it."""


class _Module:
    """``torch.remote``. Not available, so that nothing takes it for this process's accelerator."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass


def device(worker: Any, where: str | torch.device = "cpu") -> torch.device:
    """A device of a worker (name, rank or ``WorkerInfo``), for ``.to`` and ``device=``. ``where``: the device there."""
    name = _agent.current().resolve(worker).name
    with _lock:
        _enter()
    return named(name, str(torch.device(where)))


def _enter() -> None:
    """Have torch know the device."""
    global _library
    if _library is not None:
        return
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise NotSupported(f"torch has room for one device of others, and {taken!r} is it", hint="wrap() needs none")
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, _Module())
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("_to_copy", _to_copy, "PrivateUse1")
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    for factory in _RESIZING:
        _library.impl(factory.name(), functools.partial(_brought, factory), "PrivateUse1")


def _to_copy(tensor: torch.Tensor, *, device: Any = None, dtype: Any = None, memory_format: Any = None, **rest: Any) -> Any:
    if (dtype is not None and dtype is not tensor.dtype) or memory_format not in (None, torch.preserve_format):
        tensor = run_here(operator(aten._to_copy.default), (tensor,), {"dtype": dtype, "memory_format": memory_format})
    return at_place(tensor, place_named(device))


def _empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **rest: Any) -> Any:
    shape = torch.empty(size, dtype=dtype, memory_format=memory_format, device="meta")
    return _made(shape.shape, shape.stride(), shape.dtype, device)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
    return _made(size, stride, dtype or torch.get_default_dtype(), device)


def _brought(factory: Any, *args: Any, device: Any = None, pin_memory: Any = None, **rest: Any) -> Any:
    return at_place(run_here(operator(factory), args, rest), place_named(device))


def _made(size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    place = place_named(device)
    if place is None:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
    return make_empty(place, tuple(size), tuple(stride), dtype)
