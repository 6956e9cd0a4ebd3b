"""Kernels, and what their source refers to besides integers: scalar types, C functions, operations of the machine.

These are names only. The compiler knows what they stand for (``compiler``), so a process whose kernels are all on disk
imports none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Scalar:
    """A type. ``i64(i64, i32)`` is the signature of a function; in a kernel ``i32(x)`` converts."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Any:
        return Signature(self.name, tuple(argument.name for argument in arguments))


class Signature(NamedTuple):
    """The names of the types of the result, and of the arguments."""

    result: str
    arguments: tuple[str, ...]


i64, i32, void = Scalar("int64"), Scalar("int32"), Scalar("void")


class CFunction(NamedTuple):
    """A function of the C library, for kernels."""

    name: str
    signature: Signature

    def __call__(self, *arguments: int) -> Any:
        raise TypeError("only kernels can call this")


class Operation(NamedTuple):
    """An operation of the machine, for kernels: ``instructions`` has under its name how it is emitted. All operands, and the
    result, are ``int64``."""

    name: str
    operands: str
    """Their names."""

    def __call__(self, *operands: int) -> int:
        raise TypeError("only kernels can call this")


class Kernel:
    """A function that is compiled. ``callback``: C code calls it, not Python."""

    def __init__(self, function: FunctionType, signature: Signature, callback: bool) -> None:
        self.function, self.signature, self.callback = function, signature, callback

    @property
    def name(self) -> str:
        return self.function.__qualname__


inlined: set[Callable[..., Any]] = set()
"""The functions that become a part of the kernels that call them."""


def inline(function: F) -> F:
    """A decorator: kernels may call this function, whose source becomes a part of theirs."""
    inlined.add(function)
    return function
