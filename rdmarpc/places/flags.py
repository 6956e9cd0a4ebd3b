"""Flags of torch that change what operators compute: the caller's hold at workers, too. They are told when they change; what a
few operators alone ask for, with those.

Autocast converts operands before an operator comes to ``__torch_dispatch__``, which sees it switched off then. A kernel that
itself calls operators has these converted, too: whoever runs it has to know of it (``inside``).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from .ring import decode

_deterministic, _warns = torch._C._get_deterministic_algorithms, torch._C._get_deterministic_algorithms_warn_only
_mkldnn, _threads, _dtype = torch._C._get_mkldnn_enabled, torch.get_num_threads, torch.get_default_dtype
_precision, _set_precision = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
_OLD_NAMES = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}
_GPU = (
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cublas_allow_fp16_accumulation"),
    *("cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction"),
)
_ATTENTION = ("flash", "mem_efficient", "cudnn", "math")
_GETTERS = [getattr(torch._C, f"_get_{name}") for name in (*_GPU, *(f"{each}_sdp_enabled" for each in _ATTENTION))]
_SETTERS = [getattr(torch._C, f"_set_{name}") for name in (*_GPU, *(f"sdp_use_{each}" for each in _ATTENTION))]
_order, _set_order = torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order
_defaulting = threading.Lock()
_TINY, _ONE = 5e-324, 1.0


def flags() -> tuple[Any, ...]:
    """Flags of torch, and of this thread, that change what operators compute on a CPU."""
    tiny = _TINY * _ONE == 0.0
    return (_deterministic(), _warns(), _mkldnn(), _precision("mkldnn", "matmul"), _threads(), tiny, inside.dtype, _dtype())


def flags_of_gpus() -> tuple[Any, ...]:
    """Those before which kernels of GPUs ask for others, too. This process need not have one."""
    precisions = _precision("cuda", "matmul"), _precision("cuda", "conv"), _precision("cuda", "rnn")
    return (*[getter() for getter in _GETTERS], tuple(_order()), *precisions, *flags())


def set_flags(told: tuple[Any, ...], device: str) -> torch.dtype:
    """Set them, in the thread that runs operations, whose device is of this type; but the default dtype is returned."""
    *gpu, deterministic, warns, mkldnn, matmul, threads, flushes, autocast, dtype = told
    torch.set_autocast_enabled(device, autocast is not None)
    if autocast is not None:
        torch.set_autocast_dtype(device, decode(autocast))
    torch._C._set_deterministic_algorithms(deterministic, warn_only=warns)
    torch._C._set_mkldnn_enabled(mkldnn)
    torch.set_float32_matmul_precision(_OLD_NAMES[matmul])  # sets what the older functions tell a worker's own programs, too
    if gpu:
        *values, order, matmul, conv, rnn = gpu
        for setter, value in zip(_SETTERS, values):
            setter(*value) if isinstance(value, tuple) else setter(value)
        _set_order(list(order))
        for operation, value in (("matmul", matmul), ("conv", conv), ("rnn", rnn)):
            _set_precision("cuda", operation, value)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(flushes)
    return decode(dtype)


def at_default(func: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """The operator, under this default dtype: itself if the programs of this process, for which it holds too, have the same."""
    with _defaulting:
        if _dtype() is dtype:
            return func

    def run(*args: Any, **kwargs: Any) -> Any:
        with _defaulting, contextlib.ExitStack() as after:
            after.callback(torch.set_default_dtype, _dtype())
            torch.set_default_dtype(dtype)
            return func(*args, **kwargs)

    return run


def precisions() -> tuple[str, str]:
    """Of convolutions and recurrent layers on a CPU."""
    return _precision("mkldnn", "conv"), _precision("mkldnn", "rnn")


def at_precisions(func: Callable[..., Any], told: tuple[str, str]) -> Callable[..., Any]:
    """The operator, under these."""

    def run(*args: Any, **kwargs: Any) -> Any:
        _set_precision("mkldnn", "conv", told[0])
        _set_precision("mkldnn", "rnn", told[1])
        return func(*args, **kwargs)

    return run


# -- autocast inside of kernels

_CALLING = (
    "_cdist_forward",
    "_euclidean_dist",
    "_foreach_mm",
    "_sparse_addmm",
    "_transformer_encoder_layer_fwd",
    "_trilinear",
    "linalg_pinv.atol_rtol_tensor",
    "mv",
)
"""Operators whose kernels call others that autocast changes."""


class _Inside(threading.local):
    dtype: torch.dtype | None = None


inside = _Inside()
"""``dtype``: what autocast converts to within the kernel that this thread runs or posts."""
_library = torch.library.Library("aten", "IMPL")


def run_plain(func: Any, args: Any, kwargs: Any, dtype: torch.dtype | None) -> Any:
    """Call an operator on plain tensors below ``__torch_dispatch__``, with autocast to ``dtype`` within its kernel."""
    with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype, cache_enabled=False):
        return func(*args, **kwargs)


_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)


def _kernel(op: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    before, inside.dtype = inside.dtype, torch.get_autocast_dtype("cpu")
    try:
        return op.redispatch(keys & _BELOW, *args, **kwargs)
    finally:
        inside.dtype = before


for _name in _CALLING:
    _packet, _, _overload = _name.partition(".")
    if hasattr(torch.ops.aten, _packet):  # not every torch has all
        _op = getattr(getattr(torch.ops.aten, _packet), _overload or "default")
        _library.impl(_name, functools.partial(_kernel, _op), "AutocastCPU", with_keyset=True)
