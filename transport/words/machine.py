"""Machine code of kernels, brought to life: LLVM's linker puts it into memory, and Python calls it as a builtin function.

The object file of a kernel has a function of CPython's calling convention (``METH_FASTCALL | METH_KEYWORDS``), which takes
integers, lets the GIL go, and calls the kernel (``compiler``). So a call costs what a builtin's costs, and no compiler has to
be imported. Until there is code, the builtin calls a function of Python instead, which brings it about.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm

TYPE_ERROR = "rdmarpc.TypeError"
"""The name under which code finds that class. (``PyExc_TypeError`` means something else once numba is imported.)"""
_METH_FASTCALL, _METH_KEYWORDS = 0x0080, 0x0002
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_new_builtin = ctypes.pythonapi.PyCFunction_NewEx
_new_builtin.restype = ctypes.py_object
_new_builtin.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]


class Definition(ctypes.Structure):
    """``PyMethodDef``. ``function``: the address of what the builtin calls; it may be set while others call it."""

    _fields_ = (("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


_addresses: dict[str, int] = {}


def processor() -> tuple[str, str]:
    """The processor that code is made for, and its features. ``RDMARPC_CPU_NAME`` and ``RDMARPC_CPU_FEATURES`` may
    name others."""
    name, features = os.environ.get("RDMARPC_CPU_NAME"), os.environ.get("RDMARPC_CPU_FEATURES")
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    return name or llvm.get_host_cpu_name(), features


@cache
def target() -> llvm.TargetMachine:
    """The machine that code is made for, and loaded on."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    name, features = processor()
    found = llvm.Target.from_triple(llvm.get_process_triple())
    return found.create_target_machine(cpu=name, features=features, opt=3, reloc="default", codemodel="jitdefault", jit=True)


@cache
def _engine() -> llvm.ExecutionEngine:
    llvm.add_symbol(TYPE_ERROR, id(TypeError))
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target())


@cache
def why_not() -> str:
    """Why the system does not let this process make machine code, which LLVM would find out by a SIGSEGV; empty if it does."""
    page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if not _libc.mprotect(start, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        return ""
    return f"this system does not let a process make memory executable (mprotect): {os.strerror(ctypes.get_errno())}"


def has_symbol(name: str) -> bool:
    """Whether code may call a function of this name."""
    engine = _engine()  # from then on LLVM looks into this process
    return bool(llvm.address_of_symbol(name) or engine.get_function_address(name))


def address_of(code: bytes, symbol: str) -> int:
    """Load an object file, and give the address of one of its functions. It stays in memory. A module that is imported under
    two names brings the same kernels twice: they are loaded once."""
    if symbol in _addresses:
        return _addresses[symbol]
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    found: int = engine.get_function_address(symbol)
    if not found:
        raise RuntimeError(f"the object file has no {symbol}")
    _addresses[symbol] = found
    return found


def builtin(name: str, doc: str | None, stand_in: Callable[..., Any]) -> tuple[Callable[..., Any], Definition]:
    """A builtin, and its definition, which has to live as long; ``stand_in`` is called until its ``function`` is set."""
    # In C the same arguments: what is called or self, an array, its length, names.
    address = ctypes.cast(ctypes.pythonapi.PyObject_Vectorcall, ctypes.c_void_p).value
    definition = Definition(name.encode(), address, _METH_FASTCALL | _METH_KEYWORDS, (doc or "").encode())
    return _new_builtin(ctypes.addressof(definition), stand_in, None), definition
