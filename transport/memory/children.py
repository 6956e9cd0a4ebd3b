"""What forked children see in memory that peers may touch: what it held when they were forked, as in any other memory.

A mapping that is shared stays shared over a fork: the child would see what the parent writes there later, also when it uses the
memory for other tensors, and the parent would see what the child writes. So the pages of live tensors are copied before a fork,
and the child moves the copies to where they belong. The parent lets go of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

LIMIT = 1 << 30
"""The bytes that are copied at most; beyond that all of it stays shared, with a warning."""
_MOST_RANGES = 1 << 13  # the system gives a process some 65,000 mappings, and each range takes up to two
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAYMOVE_FIXED = 3


class Shown(NamedTuple):
    """A live tensor that code of the user may see. Whoever has this keeps it alive."""

    address: int
    nbytes: int
    view: memoryview


class _Copy(NamedTuple):
    start: int
    nbytes: int
    ranges: list[tuple[int, int]]
    """Where its parts belong: address and bytes."""


_taken = threading.local()
"""``copy``: that for the child that this thread forks, or ``None``."""
_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_left: dict[int, tuple[int, int, weakref.ref[memoryview]]] = {}
"""The tensors that outlived their owners, by address, which is theirs for as long as they live."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


def watch(owner: Any) -> None:
    """Copy what ``owner.shown()`` gives (``Shown``; it takes no lock) before every fork, while ``owner`` exists."""
    _owners.add(owner)


def leave(tensors: Iterable[Shown]) -> None:
    """Copy these before every fork, for as long as they live: their owner ends."""
    for address, nbytes, view in tensors:
        _left[address] = (address, nbytes, weakref.ref(view, partial(_forget, address)))


def _forget(address: int, _: object) -> None:
    _left.pop(address, None)


def _pages(tensors: Iterable[Shown]) -> list[tuple[int, int]]:
    """The ranges of whole pages in which these lie: start and end, in order, none touching the next one."""
    found: list[tuple[int, int]] = []
    for start, nbytes in sorted([(address, nbytes) for address, nbytes, _ in tensors]):
        first, end = start // mmap.PAGESIZE * mmap.PAGESIZE, -(-(start + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and first <= found[-1][1]:
            first, end = found[-1][0], max(end, found.pop()[1])
        found.append((first, end))
    return found


def _before() -> None:
    _taken.copy = None
    tensors = [each for owner in list(_owners) for each in owner.shown()]
    for address, nbytes, left in list(_left.values()):
        if (view := left()) is not None:
            tensors.append(Shown(address, nbytes, view))
    pages = _pages(tensors)
    if not pages:
        return
    total = sum(end - start for start, end in pages)
    copy = _MAP_FAILED
    if total <= LIMIT and len(pages) <= _MOST_RANGES:
        copy = _libc.mmap(None, total, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if copy == _MAP_FAILED or copy is None:
        warnings.warn(
            f"{total:,} bytes of tensors that came from other workers are too much to copy for a forked child: it shares them "
            "with this process, so each sees what the other writes there, also when the memory is used for something else. "
            "Fork before, use spawn, or clone() what the child uses and let the rest go",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    at = copy
    for start, end in pages:
        ctypes.memmove(at, start, end - start)
        at += end - start
    _taken.copy = _Copy(copy, total, [(start, end - start) for start, end in pages])


def _in_parent() -> None:
    copy, _taken.copy = _taken.copy, None
    if copy is not None:
        _libc.munmap(copy.start, copy.nbytes)


def _in_child() -> None:
    copy, _taken.copy = _taken.copy, None
    if copy is None:
        return
    at = copy.start
    for start, nbytes in copy.ranges:
        if _libc.mremap(at, nbytes, nbytes, _MAYMOVE_FIXED, start) == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "tensors that came from other workers stay shared with the parent")
        at += nbytes


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
