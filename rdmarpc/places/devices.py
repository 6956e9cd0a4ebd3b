"""Places as devices of torch: ``rdmarpc.device("worker1")`` is a ``torch.device`` that tensors can be moved to and made on.

The device is one of torch's backend for others (PrivateUse1), under the name ``remote``. It is only an entrance: what comes in
is a ``RemoteTensor``, whose own device is "cpu", because PyTorch's kernels, autograd's engine and autocast choose by it.
"""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import backend_registration

from ..calls import agent as _agent
from ..transport import NotSupported
from .names import DEVICE, named, place_named
from .operators import aten, operator
from .tensor import at_place, make_empty, run_here

_lock = threading.Lock()
_MADE_HERE = (
    "arange", "range", "linspace", "logspace", "eye", "randperm", "tril_indices", "triu_indices", "bartlett_window",
    "blackman_window", "hamming_window", "hann_window", "kaiser_window", "fft_fftfreq", "fft_rfftfreq",
)  # fmt: skip
"""Factories that resize an empty tensor, or write into its memory."""


_MODULE = SimpleNamespace(
    is_initialized=lambda: True,
    is_available=lambda: False,
    device_count=lambda: 0,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
)
"""``torch.remote``. Not available, so that nothing takes it for this process's accelerator."""


def device(worker: Any, where: str | torch.device = "cpu") -> torch.device:
    """A device of a worker (name, rank or ``WorkerInfo``), for ``.to`` and ``device=``. ``where``: the device there."""
    name = _agent.current().resolve(worker).name
    with _lock:
        _enter()
    return named(name, str(torch.device(where)))


@functools.cache
def _enter() -> torch.library.Library:
    """Have torch know the device, as long as the library lives."""
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise NotSupported(f"torch has room for one device of others, and {taken!r} is it", hint="wrap() needs none")
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, _MODULE)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_to_copy", _to_copy, "PrivateUse1")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    for name in _MADE_HERE:
        for overload in getattr(aten, name).overloads():
            factory = getattr(getattr(aten, name), overload)
            kinds = {argument.name: str(argument.type) for argument in factory._schema.arguments}
            if "device" in kinds and "Tensor" not in kinds.values():
                library.impl(factory.name(), functools.partial(_brought, factory), "PrivateUse1")
    # ``torch.load(map_location=...)`` reads storages, which are here.
    torch.serialization.register_package(
        19, lambda storage: None, lambda storage, location: storage if location.startswith(DEVICE) else None
    )
    return library


def _to_copy(tensor: torch.Tensor, *, device: Any = None, dtype: Any = None, memory_format: Any = None, **rest: Any) -> Any:
    place = place_named(device)
    # A copy also where the device is this process: autograd makes what this returns the output of a node.
    if place is None or (dtype is not None and dtype is not tensor.dtype) or memory_format not in (None, torch.preserve_format):
        tensor = run_here(operator(aten._to_copy.default), (tensor,), {"dtype": dtype, "memory_format": memory_format})
    return at_place(tensor, place)


def _empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **rest: Any) -> Any:
    like = torch.empty(size, dtype=dtype, memory_format=memory_format, device="meta")
    return _empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **rest: Any) -> Any:
    return make_empty(place_named(device), size, stride, dtype or torch.get_default_dtype())


def _brought(factory: Any, *args: Any, device: Any = None, pin_memory: Any = None, **rest: Any) -> Any:
    return at_place(run_here(operator(factory), args, rest), place_named(device))
