"""The hot loops: copy, post, signal, wait. Compiled with ``nogil`` and cached on disk.

Words (full table: docs/protocols.md). A *notification record* is 16 bytes in memory the receiver owns:

    +0  count      written by the sender (fetch_add 1 after the data), read by the receiver
    +8  sleepers   low 32 bits: receivers asleep on ``count``; high 32 bits: bell number, 0 = none

A *bell* is one cache line the receiver owns: ``+0 rings`` (futex), ``+8 sleepers``. A record with a bell wakes whoever
sleeps on the bell, so one thread can wait for many records.

Invariants (C11 order):
1. data before count: the copy is sequenced before ``fetch_add(count)`` (seq_cst, hence release); the receiver reads
   ``count`` with acquire before it touches the data.
2. no lost wake-up: the sender does ``fetch_add(count)``; load ``sleepers``. The receiver does ``fetch_add(sleepers, 1)``; load
   ``count``; futex wait. One of the two must see the other.
3. no copy after abort: the sender does ``fetch_add(inflight, 1)``; load ``closed`` (the receiver's word) and ``over``
   (the sender's own, behind its statistics); copy; ``fetch_add(inflight, -1)``. An abort stores either; fence; waits for
   ``inflight`` == 0.

Large copies adapt too (``move``): writing to memory that a far core has in its cache can be ten times slower than a warm
memcpy, because every line's ownership has to come over first; stores that go past the caches do not wait for that, but are
slower where the cores share a cache. So a copy that turned out slow makes the next ones on that channel go past the caches, and
what is larger than any cache always does: it need not be read before it is written.

Waits spin (first with pause, then giving the core away between looks, so that two workers on one core progress), then sleep
in the kernel; they return to Python at least every ``slice_ns`` so that signals are handled. How long they spin adapts: a
wait that had to sleep but ended within ``SPIN_MAX_NS`` sets the budget to that, because waking a sleeping core takes about
0.1 ms, which a training step pays at every crossing; a longer wait sets it back to ``SPIN_MIN_NS``, so an idle worker sleeps.
A core that was given away and did not come back within ``_CROWDED_NS`` is wanted by others: then the spinning ends at once.
"""

from __future__ import annotations

import numpy as np

from .atomics import (
    STREAM_ALIGN,
    STREAM_BYTES,
    compare_exchange,
    fence,
    fetch_add,
    futex_wait,
    futex_wake,
    load_acquire,
    memcpy,
    now,
    pause,
    sched_yield,
    store_release,
    stream,
)
from .compiled import compiled
from .completions import asleep, awake, poll
from .signals import signal
from .symbols import i64, inline

SPIN_MIN_NS, SPIN_MAX_NS = 50_000, 5_000_000
_CROWDED_NS = 50_000
SLICE_NS = 100_000_000
_PAUSES = 64  # looks with pause before the core is given away between looks: about 3 us

_budget = np.full(1, SPIN_MIN_NS, np.int64)
SPIN = _budget.ctypes.data
"""Address of this process's spin budget (ns). A hint: threads may overwrite each other's."""

MOVE_MIN = 64 << 10  # bytes from which on a copy is judged
_PAST = 32 << 20  # bytes of one post from which on no cache keeps what it writes for the reader
_SLOW_BYTES_PER_US = 6000  # a plain copy below this rate (6 GB/s) is one of contended memory, or of memory never touched
_STREAMED = 64  # copies past the caches after two slow ones in a row, before a plain one is tried again

OK, TIMEOUT, CLOSED, CHANGED = 0, -1, -2, -3

# Layout of a work request block (int64 each), see ``post``.
WR_COUNT, WR_RECORD, WR_BELLS, WR_CLOSED, WR_INFLIGHT, WR_STATS, WR_BYTES, WR_HEAD = 0, 1, 2, 3, 4, 5, 6, 7
STATS_WORDS, STATS_OVER = 4, 3
"""``WR_STATS`` is the address of: posts, bytes, the advice of ``move``, and 1 when the sender may copy no more (``over``)."""


@compiled(i64(i64, i64, i64))
def copy(dst: int, src: int, nbytes: int) -> int:
    """One memcpy on the calling thread."""
    memcpy(dst, src, nbytes)
    return 0


@compiled(i64(i64))
def load(address: int) -> int:
    return load_acquire(address)


@compiled(i64(i64, i64))
def store(address: int, value: int) -> int:
    store_release(address, value)
    fence()
    return 0


@compiled(i64(i64, i64))
def add(address: int, value: int) -> int:
    return fetch_add(address, value)


@compiled(i64(i64, i64, i64))
def swap_if(address: int, expected: int, desired: int) -> int:
    return compare_exchange(address, expected, desired)


@compiled(i64(i64))
def progress(port: int) -> int:
    """Poll a port (0: there is none). Call it before looking at a record without a wait."""
    return poll(port) if port != 0 else 0


@compiled(i64(i64))
def wake(word: int) -> int:
    """Wake all threads that sleep on this word."""
    return futex_wake(word)


@compiled(i64(i64, i64, i64))
def copy_past_caches(dst: int, src: int, nbytes: int) -> int:
    """As ``copy``, with stores that do not bring the destination into this core's cache."""
    head = min(nbytes, -dst & (STREAM_ALIGN - 1))
    memcpy(dst, src, head)
    at = head
    while nbytes - at >= STREAM_BYTES:
        stream(dst + at, src + at)
        at += STREAM_BYTES
    fence()
    memcpy(dst + at, src + at, nbytes - at)
    return 0


@compiled(i64(i64, i64, i64, i64))
def move(dst: int, src: int, nbytes: int, state: int) -> int:
    """Copy as the channel's recent copies advise. ``state`` (private): how many more go past the caches; -1 after one slow
    plain copy. A hint only: threads may overwrite each other's."""
    if nbytes < MOVE_MIN:
        memcpy(dst, src, nbytes)
        return 0
    if nbytes >= _PAST:
        copy_past_caches(dst, src, nbytes)
        return 0
    left = load_acquire(state)
    if left > 0:
        copy_past_caches(dst, src, nbytes)
        store_release(state, left - 1)
        return 0
    start = now()
    memcpy(dst, src, nbytes)
    slow = (now() - start) * _SLOW_BYTES_PER_US > nbytes * 1000
    store_release(state, (_STREAMED if left < 0 else -1) if slow else 0)
    return 0


@compiled(i64(i64))
def enter(block: int) -> int:
    """Begin a copy (invariant 3). Returns the address of ``inflight``, which counts the copy now, or 0 if no copy may start.
    The caller adds -1 there when it has written."""
    inflight, over = load_acquire(block + 8 * WR_INFLIGHT), load_acquire(block + 8 * WR_STATS) + 8 * STATS_OVER
    if load_acquire(over) != 0:
        return 0
    fetch_add(inflight, 1)
    if load_acquire(over) != 0 or load_acquire(load_acquire(block + 8 * WR_CLOSED)) != 0:
        fetch_add(inflight, -1)
        return 0
    return inflight


@compiled(i64(i64, i64, i64, i64))
def _leave(block: int, inflight: int, stats: int, nbytes: int) -> int:
    """The copies are made: announce them, and count."""
    record = load_acquire(block + 8 * WR_RECORD)
    if record != 0:
        signal(record, load_acquire(block + 8 * WR_BELLS))
    fetch_add(inflight, -1)
    fetch_add(stats, 1)
    fetch_add(stats + 8, nbytes)
    return OK


@compiled(i64(i64))
def post(block: int) -> int:
    """Run a prepared list of copies, then its notification. ``block`` is laid out as ``WR_*``; after the head come
    (destination, source, bytes) per copy. ``OK`` or ``CLOSED``."""
    inflight = enter(block)
    if inflight == 0:
        return CLOSED
    stats = load_acquire(block + 8 * WR_STATS)
    at = block + 8 * WR_HEAD
    past = load_acquire(block + 8 * WR_BYTES) >= _PAST
    for _ in range(load_acquire(block)):
        dst, src, nbytes = load_acquire(at), load_acquire(at + 8), load_acquire(at + 16)
        if past and nbytes >= STREAM_BYTES:
            copy_past_caches(dst, src, nbytes)
        else:
            move(dst, src, nbytes, stats + 16)
        at += 24
    return _leave(block, inflight, stats, load_acquire(block + 8 * WR_BYTES))


@compiled(i64(i64, i64, i64, i64))
def put(block: int, dst: int, src: int, nbytes: int) -> int:
    """As ``post``, for one copy whose place is given now. The block is only read: threads may share it."""
    inflight = enter(block)
    if inflight == 0:
        return CLOSED
    stats = load_acquire(block + 8 * WR_STATS)
    move(dst, src, nbytes, stats + 16)
    return _leave(block, inflight, stats, nbytes)


@inline
def _rest(looks: int, start: int, spin_ns: int) -> int:
    """Between two looks of a waiter that began to give its core away at ``start``: 0 once it has to sleep."""
    if looks < _PAUSES:
        pause()
        return 1
    at = now()
    if at - start >= spin_ns:
        return 0
    sched_yield()
    return 1 if now() - at <= _CROWDED_NS else 0


@compiled(i64(i64, i64, i64, i64, i64))
def wait_count(record: int, target: int, budget: int, slice_ns: int, port: int) -> int:
    """Wait until ``count`` of this record has reached ``target``: ``OK``, or ``TIMEOUT`` after ``slice_ns`` (or earlier, on
    a signal). One waiter a record at a time may be relied on to see every change. ``port``: what the waiter polls meanwhile
    (``words/completions``), or 0."""
    looks, start, spin_ns = 0, 0, 0
    while True:
        progress(port)
        if load_acquire(record) >= target:
            return OK
        looks += 1
        if looks == _PAUSES:
            start, spin_ns = now(), min(load_acquire(budget), slice_ns)
        if _rest(looks, start, spin_ns) == 0:
            break
    if slice_ns <= 0:
        return TIMEOUT
    fetch_add(record + 8, 1)
    asleep(port)
    seen = load_acquire(record)
    if seen < target:
        futex_wait(record, seen, slice_ns)
    fetch_add(record + 8, -1)
    awake(port)
    store_release(budget, SPIN_MAX_NS if now() - start < SPIN_MAX_NS else SPIN_MIN_NS)
    return OK if load_acquire(record) >= target else TIMEOUT


@compiled(i64(i64, i64))
def _scan(table: int, rows: int) -> int:
    """The next row with news, in a circle from behind the one that was taken last: ``row << 32 | number of new notifications``,
    or -1. So taking what has come for all of n rows is one look at each, not n / 2 looks for each of them."""
    row = load_acquire(table - 8)
    for _ in range(rows):
        if row >= rows:
            row = 0
        at = table + 16 * row
        count = load_acquire(load_acquire(at))
        fresh = count - load_acquire(at + 8)
        if fresh > 0:
            return row << 32 | fresh
        row += 1
    return -1


@compiled(i64(i64, i64, i64, i64))
def _claim(table: int, found: int, word: int, expected: int) -> int:
    # The word says whether the caller may still take something; +1 marks that it did.
    if word != 0 and compare_exchange(word, expected, expected + 1) == 0:
        return CHANGED
    at = table + 16 * (found >> 32) + 8
    store_release(at, load_acquire(at) + (found & 0xFFFFFFFF))
    store_release(table - 8, (found >> 32) + 1)
    store_release(table - 16, found & 0xFFFFFFFF)
    return found


@compiled(i64(i64, i64, i64))
def untake(table: int, word: int, expected: int) -> int:
    """Undo what the last ``wait_any`` with this ``word`` took, if it took something: ``word`` is ``expected`` again."""
    if load_acquire(word) == expected + 1:
        at = table + 16 * (load_acquire(table - 8) - 1) + 8
        store_release(at, load_acquire(at) - load_acquire(table - 16))
        store_release(word, expected)
    return 0


@compiled(i64(i64, i64, i64))
def take_any(table: int, rows: int, port: int) -> int:
    """As ``wait_any`` for news that are here already: ``row << 32 | fresh``, taken, or -1."""
    progress(port)
    found = _scan(table, rows)
    return found if found < 0 else _claim(table, found, 0, 0)


@compiled(i64(i64, i64, i64, i64, i64, i64, i64, i64))
def wait_any(table: int, rows: int, bell: int, word: int, expected: int, budget: int, slice_ns: int, port: int) -> int:
    """Wait until any record of a table has news. ``table`` holds rows (record address, notifications seen), and before them
    how many were taken last and the row at which a look begins; ``port`` as for ``wait_count``.

    Returns ``row << 32 | fresh``, ``TIMEOUT`` after ``slice_ns``, or ``CHANGED`` as soon as ``word`` (an address, or 0)
    no longer holds ``expected``. What is returned is taken: ``seen`` is advanced, and ``word`` becomes ``expected + 1``.
    """
    looks, start, spin_ns = 0, 0, 0
    while True:
        progress(port)
        found = _scan(table, rows)
        if found >= 0:
            return _claim(table, found, word, expected)
        if word != 0 and load_acquire(word) != expected:
            return CHANGED
        looks += 1
        if looks == _PAUSES:
            start, spin_ns = now(), min(load_acquire(budget), slice_ns)
        if _rest(looks, start, spin_ns) == 0:
            break
    if slice_ns <= 0:
        return TIMEOUT
    rings = load_acquire(bell)
    fetch_add(bell + 8, 1)
    asleep(port)
    found = _scan(table, rows)
    if found < 0 and (word == 0 or load_acquire(word) == expected):
        futex_wait(bell, rings, slice_ns)
        found = _scan(table, rows)
    fetch_add(bell + 8, -1)
    awake(port)
    store_release(budget, SPIN_MAX_NS if now() - start < SPIN_MAX_NS else SPIN_MIN_NS)
    if found >= 0:
        return _claim(table, found, word, expected)
    return TIMEOUT if word == 0 or load_acquire(word) == expected else CHANGED


@compiled(i64(i64, i64))
def quiesce(inflight: int, timeout_ns: int) -> int:
    """Wait until a peer that has been told to stop (``closed``) has no copy under way: ``OK`` or ``TIMEOUT``."""
    start = now()
    while load_acquire(inflight) > 0:
        if now() - start > timeout_ns:
            return TIMEOUT
        sched_yield()
    return OK
