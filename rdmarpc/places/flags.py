"""Flags of torch that change what operators compute: the caller's hold at workers, too. They are told when they change."""

from __future__ import annotations

from typing import Any

import torch

from .autocast import inside
from .plain import decode

_deterministic, _warns = torch._C._get_deterministic_algorithms, torch._C._get_deterministic_algorithms_warn_only
_mkldnn, _threads, _dtype = torch._C._get_mkldnn_enabled, torch.get_num_threads, torch.get_default_dtype
_precision, _set_precision = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
_OLD_NAMES = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}
_OPERATIONS = ("matmul", "conv", "rnn")
_GPU = {
    f"_get_{name}": f"_set_{name}"
    for name in (
        "cudnn_enabled",
        "cudnn_benchmark",
        "cudnn_deterministic",
        "cublas_allow_fp16_accumulation",
        "cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allow_bf16_reduced_precision_reduction",
        "sdp_priority_order",
    )
} | {f"_get_{name}_sdp_enabled": f"_set_sdp_use_{name}" for name in ("flash", "mem_efficient", "cudnn", "math")}
"""Functions of torch that get a flag for GPUs, and that set it."""
_TINY, _ONE = 5e-324, 1.0


def flags() -> tuple[Any, ...]:
    """Flags of torch, and of this thread, that change what operators compute on a CPU."""
    tiny = _TINY * _ONE == 0.0
    precisions = _precision("mkldnn", "matmul"), _precision("mkldnn", "conv"), _precision("mkldnn", "rnn")
    return (_deterministic(), _warns(), _mkldnn(), *precisions, _threads(), tiny, inside.dtype, _dtype())


def flags_of_gpus() -> tuple[Any, ...]:
    """Those before which kernels of GPUs ask for others, too. This process need not have one."""
    found = [getattr(torch._C, getter)() for getter in _GPU]
    precisions = [_precision("cuda", operation) for operation in _OPERATIONS]
    return (*[tuple(each) if isinstance(each, list) else each for each in found], *precisions, *flags())


def set_flags(told: tuple[Any, ...], device: str) -> None:
    """Set them, in the thread that runs operations, whose device is of this type."""
    *gpu, deterministic, warns, mkldnn, matmul, conv, rnn, threads, flushes, autocast, dtype = told
    torch.set_autocast_enabled(device, autocast is not None)
    if autocast is not None:
        torch.set_autocast_dtype(device, decode(autocast))
    torch._C._set_deterministic_algorithms(deterministic, warn_only=warns)
    torch._C._set_mkldnn_enabled(mkldnn)
    torch.set_float32_matmul_precision(_OLD_NAMES[matmul])  # sets what the older functions tell a worker's own programs, too
    _set_precision("mkldnn", "conv", conv)
    _set_precision("mkldnn", "rnn", rnn)
    for setter, value in zip(_GPU.values(), gpu):
        several = isinstance(value, tuple) and not setter.endswith("order")
        getattr(torch._C, setter)(*(value if several else (value,)))
    for operation, value in zip(_OPERATIONS, gpu[len(_GPU) :]):
        _set_precision("cuda", operation, value)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(flushes)
    torch.set_default_dtype(decode(dtype))
