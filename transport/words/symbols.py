"""Kernels, and what their source refers to besides integers: scalar types, C functions, operations of the machine.

These are names only. The compiler knows what they stand for (``compiler``), so a process whose kernels are all on disk
imports none of it.

An address is an int64. Words are 64-bit, 8-byte aligned, little-endian (a futex is the low half of one). Order is the C11 one:
``load_acquire`` pairs with ``store_release``; ``fetch_add`` and ``compare_exchange`` are sequentially consistent; ``fence``
orders an earlier store before a later load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Scalar:
    """A type. ``i64(i64, i32)`` is the signature of a function; in a kernel ``i32(x)`` converts."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any) -> Any:
        return Signature(self.name, tuple(argument.name for argument in arguments))


@dataclass(frozen=True)
class Signature:
    """The names of the types of the result, and of the arguments."""

    result: str
    arguments: tuple[str, ...]


i64, i32, void = Scalar("int64"), Scalar("int32"), Scalar("void")


@dataclass(frozen=True)
class CFunction:
    """A function of the C library, for kernels."""

    name: str
    signature: Signature

    def __call__(self, *arguments: int) -> Any:
        raise TypeError("only kernels can call this")


@dataclass(frozen=True)
class Operation:
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


memcpy = CFunction("memcpy", i64(i64, i64, i64))
sched_yield = CFunction("sched_yield", i32())

STREAM_BYTES, STREAM_ALIGN = 256, 32
FOLD_BYTES = 256
FOLD_TYPES = ("float32", "float64", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "int64")
FOLD_FLOATS = ("float32", "float64", "bfloat16", "float16")
FOLD_OPERATIONS = ("sum", "product", "min", "max", "band", "bor", "bxor")
FOLDS = 8
# Not FUTEX_PRIVATE: the words lie in memory that two processes map.
FUTEX_WAIT, FUTEX_WAKE = 0, 1
WAKE_ALL = 0x7FFFFFFF
load_acquire = Operation("load_acquire", "address")
"""The word at this address."""
store_release = Operation("store_release", "address, value")
"""Set the word at this address."""
fetch_add = Operation("fetch_add", "address, value")
"""Add to the word at this address; what it was before."""
compare_exchange = Operation("compare_exchange", "address, expected, desired")
"""Set the word to ``desired`` if it holds ``expected``: 1 if it did, else 0."""
fence = Operation("fence", "")
"""Full fence: stores before it are visible before loads after it."""
errno = Operation("errno", "")
"""The error of this thread's last C function that failed."""
call = Operation("call", "function, a, b, c, d")
"""Call the C function at an address, which returns an ``int`` and has at most four arguments, integers or pointers. Those
that it has not are ignored: all travel in whole registers on the ABIs that we run on (x86-64, aarch64 Linux)."""
pause = Operation("pause", "")
"""Tell the core that this is a spin loop."""
now = Operation("now", "")
"""CLOCK_MONOTONIC in nanoseconds (no system call: vDSO)."""
futex = Operation("futex", "address, operation, value, timeout_ns")
"""The system call ``futex`` on the low half of a word, with a relative timeout."""
stream = Operation("stream", "dst, src")
"""Copy ``STREAM_BYTES`` bytes with stores that go past the caches. ``dst`` is aligned to ``STREAM_ALIGN``. A ``fence``
has to come before anything that announces the data."""
fold = Operation("fold", "code, dst, left, right")
"""``dst = left OP right`` over ``FOLD_BYTES`` bytes; ``dst`` may be one of them. ``code``: see
``fold_code``; nothing happens for one that there is not."""


def fold_code(kind: str, operation: str) -> int:
    """The number of an operation on a type (torch's name, without ``torch.``); -1 where there is none. Operations on bits are
    for integers alone."""
    if kind not in FOLD_TYPES or operation not in FOLD_OPERATIONS or (kind in FOLD_FLOATS and operation.startswith("b")):
        return -1
    return FOLDS * FOLD_TYPES.index(kind) + FOLD_OPERATIONS.index(operation)
