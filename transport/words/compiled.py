"""``compiled``: a function of integers as machine code, which runs without the GIL.

The code is made once (``compiler``: some 20 ms a kernel) and kept on disk (``cache``) under a digest of all that it is made
from: the function, the kernels and constants that it uses, how all is translated, the version of LLVM, and the processor. A
process that finds it there imports no compiler.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import cache as once
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from . import cache, machine
from .symbols import CFunction, Kernel, Scalar, inlined, operations


class Callback:
    """A C function. ``address``: where it lies, for as long as the process lives."""

    def __init__(self, address: int) -> None:
        self.address = address


kernels: dict[Any, Kernel] = {}
"""By what stands for them in their modules."""


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: the function as a builtin that takes and gives integers (``signature``: of ``i64``) and lets the GIL go."""

    def make(function: Any) -> Any:
        kernel = Kernel(function, signature, False, _digest(function, repr(signature)))
        made = machine.builtin(function.__name__, function.__doc__, _loaded(kernel))
        kernels[made] = kernel
        return made

    return make


def compiled_callback(signature: Any) -> Callable[[Callable[..., Any]], Callback]:
    """A decorator: the function as one that C code may call at an address."""

    def make(function: Any) -> Callback:
        return Callback(_loaded(Kernel(function, signature, True, _digest(function, f"callback {signature}"))))

    return make


def _loaded(kernel: Kernel) -> int:
    function = kernel.function
    where = function.__module__, function.__code__.co_filename, _environment()
    code = cache.find(*where, kernel.name, kernel.digest)
    if code is None:
        from .compiler import object_code

        code = object_code(kernel, kernels)
        cache.keep(*where, kernel.name, cache.Entry(kernel.digest, code))
    return machine.address_of(code, kernel.symbol)


# -- what the code is made from


@once
def _environment() -> str:
    """What all code depends on, in short: the processor, and all that compiles."""
    parts = (machine.processor(), sys.implementation.cache_tag, sys.flags.optimize, version("llvmlite"))
    found = hashlib.sha256(repr(parts).encode())
    for name in ("compiler.py", "translation.py", "instructions.py", "machine.py"):
        found.update(Path(__file__).with_name(name).read_bytes())
    return found.hexdigest()[:16]


def _digest(function: FunctionType, kind: str) -> bytes:
    found = hashlib.sha256(kind.encode())
    code = function.__code__
    constants = [each for each in code.co_consts if not isinstance(each, CodeType)]
    found.update(repr((code.co_code, constants, code.co_names, code.co_varnames, code.co_argcount)).encode())
    for name in code.co_names:
        if name in function.__globals__:
            found.update(f"{name}={_meaning(function.__globals__[name])};".encode())
    return found.digest()


def _meaning(value: Any) -> str:
    """What a global name of a kernel stands for."""
    if isinstance(value, (int, CFunction)):
        return repr(value)
    if isinstance(value, Scalar):
        return value.name
    if value in operations:
        return str(value.__name__)
    if value in inlined:
        return _digest(value, "inline").hex()
    if isinstance(value, ModuleType):
        return repr(sorted((name, number) for name, number in vars(value).items() if isinstance(number, int)))
    return kernels[value].digest.hex()
