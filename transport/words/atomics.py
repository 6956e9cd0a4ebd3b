"""Atomic memory operations and system calls for kernels.

An address is an int64. Words are 64-bit, 8-byte aligned, little-endian (a futex is the low half of one).
Order is the C11 one: ``load_acquire`` pairs with ``store_release``. It, ``fetch_add`` and ``compare_exchange`` are sequentially
consistent: a load behind a ``fetch_add`` stays behind it. ``fence`` orders an earlier store before a later load.
"""

from __future__ import annotations

from .symbols import CFunction, Operation, i32, i64, inline

memcpy = CFunction("memcpy", i64(i64, i64, i64))
sched_yield = CFunction("sched_yield", i32())

STREAM_BYTES, STREAM_ALIGN = 256, 32
FOLD_BYTES = 256
FOLD_TYPES = ("float32", "float64", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "int64")
FOLD_FLOATS = ("float32", "float64", "bfloat16", "float16")
FOLD_OPERATIONS = ("sum", "product", "min", "max", "band", "bor", "bxor")
FOLDS = 8
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # not FUTEX_PRIVATE: the words lie in memory that two processes map
_ALL = 0x7FFFFFFF
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
_futex = Operation("futex", "address, operation, value, timeout_ns")
"""The system call ``futex`` on the low half of a word, with a relative timeout."""
stream = Operation("stream", "dst, src")
"""Copy ``STREAM_BYTES`` bytes with stores that go past the caches. ``dst`` is aligned to ``STREAM_ALIGN``. A ``fence``
has to come before anything that announces the data."""
fold = Operation("fold", "code, dst, left, right")
"""``dst = left OP right`` over ``FOLD_BYTES`` bytes; ``dst`` may be one of them. ``code``: see
``fold_code``; nothing happens for one that there is not."""


@inline
def word_of(block: int, number: int) -> int:
    """The word of that number in a block of words."""
    return load_acquire(block + 8 * number)


@inline
def futex_wait(word: int, seen: int, timeout_ns: int) -> int:
    """Sleep until this word is woken, at most ``timeout_ns``; not at all if its low half is not that of ``seen`` any more."""
    return _futex(word, _FUTEX_WAIT, seen & 0xFFFFFFFF, timeout_ns)


@inline
def futex_wake(word: int) -> int:
    """Wake all threads that sleep on this word; how many."""
    return _futex(word, _FUTEX_WAKE, _ALL, 0)


@inline
def futex_wake_one(word: int) -> int:
    """Wake one of them; how many."""
    return _futex(word, _FUTEX_WAKE, 1, 0)


def fold_code(kind: str, operation: str) -> int:
    """The number of an operation on a type (torch's name, without ``torch.``); -1 where there is none. Operations on bits are
    for integers alone."""
    if kind not in FOLD_TYPES or operation not in FOLD_OPERATIONS or (kind in FOLD_FLOATS and operation.startswith("b")):
        return -1
    return FOLDS * FOLD_TYPES.index(kind) + FOLD_OPERATIONS.index(operation)
