"""Tensors over accelerator memory that is lent: when the last tensor over it dies, a callback runs.

For host memory, a weak reference to a memoryview does this (``slot``). Torch has no such thing for an accelerator's memory. But
a tensor that is made by DLPack (dlpack.h of dmlc/dlpack, version 0) carries a function that is called at the end of its
storage, by any thread, including those of the autograd engine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p

import torch

_CUDA, _EXTENSION = 2, 12
"""Of ``DLDeviceType``: CUDA, and what came to torch from outside."""
_UINT8 = (1, 8, 1)


class _Device(ctypes.Structure):
    _fields_ = (("type", c_int32), ("index", c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device", _Device),
        ("dimensions", c_int32),
        ("type", _Type),
        ("shape", POINTER(c_int64)),
        ("strides", c_void_p),
        ("offset", c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", c_void_p), ("deleter", _Deleter))


_lent: dict[int, tuple[object, Callable[[], None]]] = {}
"""By address of the description: what has to live as long as the storage, and who hears of its end."""


def _died(managed: int, lent: dict[int, tuple[object, Callable[[], None]]] = _lent) -> None:
    found = lent.pop(managed, None)
    if found is not None:
        found[1]()


_deleter = _Deleter(_died)
# Storages may outlive this module, at the end of the interpreter.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_deleter))
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (c_void_p, c_char_p, c_void_p)


def lend(
    memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], died: Callable[[], None]
) -> torch.Tensor:
    """A tensor over a storage of its own on ``memory`` (uint8, contiguous, on an accelerator), which lives as long as that
    storage. ``died`` is called once, after its end, by any thread; it must not raise. Some 10 us."""
    device = memory.device
    count = (c_int64 * 1)(memory.numel())
    place = _Device(_CUDA if device.type == "cuda" else _EXTENSION, device.index)
    managed = _Managed(_Tensor(memory.data_ptr(), place, 1, _Type(*_UINT8), count, None, 0), None, _deleter)
    address = ctypes.addressof(managed)
    _lent[address] = ((managed, count, memory), died)
    try:
        flat = torch.utils.dlpack.from_dlpack(_capsule(address, b"dltensor", None))
    except BaseException:
        _lent.pop(address, None)
        raise
    # ``set_``, not ``view``: an operation may write into this tensor in place, which autograd refuses for some views.
    return torch.empty(0, dtype=dtype, device=device).set_(flat.untyped_storage(), 0, tuple(shape), tuple(strides))
