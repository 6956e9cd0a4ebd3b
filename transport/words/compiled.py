"""``compiled``: a function of integers as machine code, which runs without the GIL.

The code is made when the function is first called (``compiler``: numba, some 50 ms a kernel) and kept on disk (``cache``) under
a digest of all that it is made from: the function, the functions and constants that it uses, how all is compiled, the versions
of numba and LLVM, and the processor. A process that finds it there imports no compiler.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from functools import cache as once
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from . import cache, machine
from .symbols import CFunction, Kernel, Operation, Scalar, Signature, inlined

_lock = threading.RLock()
"""Held while a kernel is loaded or compiled. A signal handler, or a finalizer, may come to another one in the midst of that."""
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class Compiled(Kernel):
    """A kernel, and its code, which is loaded when it is first needed."""

    def __init__(self, function: FunctionType, signature: Signature, callback: bool) -> None:
        super().__init__(function, signature, callback)
        self._address = 0
        self.builtin, self._definition = machine.builtin(function.__name__, function.__doc__, self)
        kernels.append(self)

    def __call__(self, *arguments: Any) -> Any:
        """What ``builtin`` does until there is code."""
        if self.callback:
            raise TypeError(f"{self.name} is for C code to call")
        self._definition.function = self.address
        return self.builtin(*arguments)

    @cached_property
    def digest(self) -> bytes:
        """Of all that the code is made from."""
        return _digest(self.function, f"{self.signature} {self.callback}")

    @property
    def address(self) -> int:
        """Where the code lies, for as long as the process lives. ``SyntaxError``: there can be none."""
        return self._address or self.load()

    def load(self) -> int:
        """Load the code, or make it: its address."""
        with _lock:
            symbol = f"rdmarpc.{self.name}.{self.digest.hex()[:16]}"
            where = self.function.__module__, self.function.__code__.co_filename, _environment()
            code = cache.find(*where, self.name, self.digest)
            if code is None:
                code = _made(self, symbol)
                cache.keep(*where, self.name, cache.Entry(self.digest, code))
            self._address = machine.address_of(code, symbol)
            return self._address


def _made(kernel: Kernel, symbol: str) -> bytes:
    from .compiler import object_code

    enabled = gc.isenabled()
    gc.disable()  # a collection walks all objects that torch has made, and compiling has many begin: a fifth of the time
    try:
        return object_code(kernel, symbol)
    finally:
        if enabled:
            gc.enable()


kernels: list[Compiled] = []
"""Those of all modules that were imported."""


def compiled(signature: Any) -> Callable[[Any], Any]:
    """A decorator: the function as a builtin that takes and gives integers (``signature``: of ``i64``) and lets the GIL go."""
    return lambda function: Compiled(function, signature, False).builtin


def compiled_callback(signature: Any) -> Callable[[Any], Compiled]:
    """A decorator: the function as one that C code may call at an address."""
    return lambda function: Compiled(function, signature, True)


# -- what the code is made from


@once
def _environment() -> str:
    """What all code depends on, in short: the processor, and all that compiles."""
    parts = (machine.processor(), sys.implementation.cache_tag, sys.flags.optimize, version("numba"), version("llvmlite"))
    found = hashlib.sha256(repr(parts).encode())
    for name in ("compiler.py", "instructions.py", "machine.py"):
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
    if isinstance(value, (int, CFunction, Operation)):
        return repr(value)
    if isinstance(value, Scalar):
        return value.name
    if isinstance(value, ModuleType):
        return repr(sorted((name, number) for name, number in vars(value).items() if isinstance(number, int)))
    if isinstance(kernel := getattr(value, "__self__", None), Compiled):
        return kernel.digest.hex()
    if value in inlined:
        return _digest(value, "inline").hex()
    return repr(value)
