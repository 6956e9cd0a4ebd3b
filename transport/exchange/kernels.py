"""The compiled loops of an exchange: all streams of one call at once, without the GIL.

A *lane* is the connection to one peer, with a stream each way. What it needs is a row of words (``LANE_*``). A stream carries
*pieces*: a header of ``HEADER`` bytes and at most ``piece`` bytes of a message. The receiver owns the slots of a stream, as
many as ``depth``; piece ``n`` goes to slot ``n % depth``. Two notification records count: ``arrived`` at the receiver,
``credited`` at the sender (pieces that were taken out of their slots).

``docs/protocols.md``, 14, has the words.

1. data before count: the sender writes slot and header, then ``signal`` adds to ``arrived`` (release); the receiver reads
   ``arrived`` (acquire) before the slot.
2. no overwriting: the receiver reads the slot, then ``signal`` adds to ``credited``; the sender reads ``credited`` (acquire)
   and writes piece ``n`` only if ``n - credited < depth``.
3. no copy after abort: a piece, and a credit, is written between ``enter`` and -1 on ``inflight`` (``words/kernels``, 3).
4. no lost wake-up: the records ring the bell that their receiver sleeps on (``words/signals``). The receiver adds itself to the
   bell's sleepers, then looks at all records again, then sleeps.

Sums are made piece by piece when a piece of every peer has arrived: in the order of the ranks, so they have the same bits
everywhere and always. The call can be entered again after any return: what was done stands in the words.
"""

from __future__ import annotations

from ..words.atomics import (
    FOLD_BYTES,
    FUTEX_WAIT,
    fence,
    fetch_add,
    fold,
    futex,
    load_acquire,
    memcpy,
    now,
    pause,
    sched_yield,
    store_release,
)
from ..words.compiled import compiled
from ..words.completions import asleep, awake, poll
from ..words.kernels import SPIN_MAX_NS, SPIN_MIN_NS, WR_BELLS, WR_RECORD, enter
from ..words.signals import signal
from ..words.symbols import i64, inline

OK, TIMEOUT, CHANGED, MISMATCH, CLOSED = 0, -1, -2, -3, -4
"""What ``exchange`` returns; for the last two ``CALL_LANE`` says which lane."""

HEADER = 64
"""Bytes in front of a piece: four words, see ``HEAD_*``."""
HEAD_SEQUENCE, HEAD_CODE, HEAD_BYTES, HEAD_COUNT = 0, 1, 2, 3

# The words of a call, int64 each; the rows of its lanes follow.
CALL_LANES, CALL_PIECE, CALL_DEPTH, CALL_BELL, CALL_BUDGET = 0, 1, 2, 3, 4
CALL_SEQUENCE, CALL_CODE, CALL_COUNT = 5, 6, 7
CALL_FOLD, CALL_OWN, CALL_RESULT, CALL_RANK, CALL_BYTES, CALL_FOLDED, CALL_SOURCES, CALL_SCRATCH, CALL_WHOLE = (
    8,
    9,
    10,
    11,
    12,
    13,
    14,
    15,
    16,
)
CALL_LANE, CALL_KICK, CALL_SEEN = 17, 18, 19
CALL_WORDS = 24

LANE_NOTIFY, LANE_CREDIT, LANE_OUT, LANE_IN, LANE_ARRIVED, LANE_CREDITED, LANE_SENT, LANE_TAKEN = 0, 1, 2, 3, 4, 5, 6, 7
LANE_FROM, LANE_FROM_BYTES, LANE_PUSHED, LANE_PUSH = 8, 9, 10, 11
LANE_TO, LANE_TO_BYTES, LANE_PULLED, LANE_PULL, LANE_RANK = 12, 13, 14, 15, 16
LANE_WORDS = 20

_PAUSES = 64
_CROWDED_NS = 50_000


@compiled(i64(i64, i64, i64, i64, i64, i64))
def fold_all(code: int, dst: int, sources: int, count: int, nbytes: int, scratch: int) -> int:
    """``dst = s0 OP s1 OP ...``, from left to right, over ``count`` >= 2 addresses in the table ``sources``. ``dst`` may be
    one of them. ``scratch``: two times ``FOLD_BYTES``."""
    at = 0
    while nbytes - at >= FOLD_BYTES:
        left = load_acquire(sources) + at
        for number in range(1, count - 1):
            fold(code, scratch, left, load_acquire(sources + 8 * number) + at)
            left = scratch
        fold(code, dst + at, left, load_acquire(sources + 8 * (count - 1)) + at)
        at += FOLD_BYTES
    if nbytes > at:
        memcpy(scratch, load_acquire(sources) + at, nbytes - at)
        for number in range(1, count):
            memcpy(scratch + FOLD_BYTES, load_acquire(sources + 8 * number) + at, nbytes - at)
            fold(code, scratch, scratch, scratch + FOLD_BYTES)
        memcpy(dst + at, scratch, nbytes - at)
    return 0


@inline
def _push(call: int, lane: int) -> int:
    """Write the next piece of a lane, if there is one and room for it: 1 if it was written, else 0; -1: the lane is closed."""
    done, sent = load_acquire(lane + 8 * LANE_PUSHED), load_acquire(lane + 8 * LANE_SENT)
    if done >= load_acquire(lane + 8 * LANE_PUSH):
        return 0
    depth, piece = load_acquire(call + 8 * CALL_DEPTH), load_acquire(call + 8 * CALL_PIECE)
    if sent - load_acquire(load_acquire(lane + 8 * LANE_CREDITED)) >= depth:
        return 0
    block = load_acquire(lane + 8 * LANE_NOTIFY)
    inflight = enter(block)
    if inflight == 0:
        return -1
    slot = load_acquire(lane + 8 * LANE_OUT) + (sent % depth) * (HEADER + piece)
    total = load_acquire(lane + 8 * LANE_FROM_BYTES)
    store_release(slot + 8 * HEAD_SEQUENCE, load_acquire(call + 8 * CALL_SEQUENCE))
    store_release(slot + 8 * HEAD_CODE, load_acquire(call + 8 * CALL_CODE))
    store_release(slot + 8 * HEAD_BYTES, total)
    store_release(slot + 8 * HEAD_COUNT, load_acquire(call + 8 * CALL_COUNT))
    memcpy(slot + HEADER, load_acquire(lane + 8 * LANE_FROM) + done * piece, min(piece, total - done * piece))
    signal(load_acquire(block + 8 * WR_RECORD), load_acquire(block + 8 * WR_BELLS))
    fetch_add(inflight, -1)
    store_release(lane + 8 * LANE_SENT, sent + 1)
    store_release(lane + 8 * LANE_PUSHED, done + 1)
    return 1


@inline
def _arrived(call: int, lane: int) -> int:
    """The address of the next piece of a lane, 0 if it has not come; -1 if it is not of this call."""
    taken = load_acquire(lane + 8 * LANE_TAKEN)
    if load_acquire(load_acquire(lane + 8 * LANE_ARRIVED)) <= taken:
        return 0
    slot = load_acquire(lane + 8 * LANE_IN) + (taken % load_acquire(call + 8 * CALL_DEPTH)) * (
        HEADER + load_acquire(call + 8 * CALL_PIECE)
    )
    if (
        load_acquire(slot + 8 * HEAD_SEQUENCE) != load_acquire(call + 8 * CALL_SEQUENCE)
        or load_acquire(slot + 8 * HEAD_CODE) != load_acquire(call + 8 * CALL_CODE)
        or load_acquire(slot + 8 * HEAD_BYTES) != load_acquire(lane + 8 * LANE_TO_BYTES)
        or load_acquire(slot + 8 * HEAD_COUNT) != load_acquire(call + 8 * CALL_COUNT)
    ):
        return -1
    return slot


@inline
def _take(lane: int) -> int:
    """The next piece of a lane has been read: give the slot back."""
    store_release(lane + 8 * LANE_TAKEN, load_acquire(lane + 8 * LANE_TAKEN) + 1)
    store_release(lane + 8 * LANE_PULLED, load_acquire(lane + 8 * LANE_PULLED) + 1)
    block = load_acquire(lane + 8 * LANE_CREDIT)
    inflight = enter(block)
    if inflight != 0:  # else the peer has left: it needs no credit
        signal(load_acquire(block + 8 * WR_RECORD), load_acquire(block + 8 * WR_BELLS))
        fetch_add(inflight, -1)
    return 0


@inline
def _pull(call: int, lane: int) -> int:
    """Copy the next piece of a lane to its place, if it has come: 1 if so, else 0; -1: it is not of this call."""
    done = load_acquire(lane + 8 * LANE_PULLED)
    if done >= load_acquire(lane + 8 * LANE_PULL):
        return 0
    slot = _arrived(call, lane)
    if slot <= 0:
        return slot
    at = done * load_acquire(call + 8 * CALL_PIECE)
    nbytes = min(load_acquire(call + 8 * CALL_PIECE), load_acquire(lane + 8 * LANE_TO_BYTES) - at)
    memcpy(load_acquire(lane + 8 * LANE_TO) + at, slot + HEADER, nbytes)
    _take(lane)
    return 1


@inline
def _add_up(call: int) -> int:
    """Make the sum of the next piece, if that of every peer has come: 1 if so, else 0; -1: one is not of this call."""
    count, lanes = load_acquire(call + 8 * CALL_LANES), call + 8 * CALL_WORDS
    done, sources = load_acquire(call + 8 * CALL_FOLDED), load_acquire(call + 8 * CALL_SOURCES)
    if done >= load_acquire(lanes + 8 * LANE_PULL):
        return 0
    here = 1
    for number in range(count):
        lane = lanes + 8 * LANE_WORDS * number
        slot = _arrived(call, lane)
        if slot < 0:
            store_release(call + 8 * CALL_LANE, number)
            return -1
        # What is summed in place must have been sent to everybody before.
        if slot == 0 or (load_acquire(call + 8 * CALL_WHOLE) != 0 and load_acquire(lane + 8 * LANE_PUSHED) <= done):
            here = 0
        store_release(sources + 8 * load_acquire(lane + 8 * LANE_RANK), slot + HEADER)
    if here == 0:
        return 0
    at = done * load_acquire(call + 8 * CALL_PIECE)
    nbytes = min(load_acquire(call + 8 * CALL_PIECE), load_acquire(call + 8 * CALL_BYTES) - at)
    store_release(sources + 8 * load_acquire(call + 8 * CALL_RANK), load_acquire(call + 8 * CALL_OWN) + at)
    fold_all(
        load_acquire(call + 8 * CALL_FOLD),
        load_acquire(call + 8 * CALL_RESULT) + at,
        sources,
        count + 1,
        nbytes,
        load_acquire(call + 8 * CALL_SCRATCH),
    )
    for number in range(count):
        _take(lanes + 8 * LANE_WORDS * number)
    store_release(call + 8 * CALL_FOLDED, done + 1)
    return 1


@inline
def _step(call: int, port: int) -> int:
    """Do what can be done: the number of pieces, or 0; ``OK - 1`` and less: ``MISMATCH``, ``CLOSED``. ``1 << 40``: all is
    done."""
    if port != 0:
        poll(port)
    count, moved, left = load_acquire(call + 8 * CALL_LANES), 0, 0
    folds = load_acquire(call + 8 * CALL_FOLD) >= 0
    for number in range(count):
        lane = call + 8 * (CALL_WORDS + LANE_WORDS * number)
        pushed = _push(call, lane)
        pulled = 0 if folds else _pull(call, lane)
        if pushed < 0 or pulled < 0:
            store_release(call + 8 * CALL_LANE, number)
            return MISMATCH if pulled < 0 else CLOSED
        moved += pushed + pulled
        left += load_acquire(lane + 8 * LANE_PUSH) - load_acquire(lane + 8 * LANE_PUSHED)
        left += load_acquire(lane + 8 * LANE_PULL) - load_acquire(lane + 8 * LANE_PULLED)
    if folds and left > 0:
        added = _add_up(call)
        if added < 0:
            return MISMATCH
        moved += added
        left -= added * count
    return 1 << 40 if left == 0 else moved


@compiled(i64(i64))
def counted(call: int) -> int:
    """The sum of all records of a call: it changes with every arrival and every credit."""
    total = 0
    for number in range(load_acquire(call + 8 * CALL_LANES)):
        lane = call + 8 * (CALL_WORDS + LANE_WORDS * number)
        total += load_acquire(load_acquire(lane + 8 * LANE_ARRIVED)) + load_acquire(load_acquire(lane + 8 * LANE_CREDITED))
    kick = load_acquire(call + 8 * CALL_KICK)
    return total + (load_acquire(kick) if kick != 0 else 0)


@compiled(i64(i64, i64, i64, i64))
def sleep(call: int, seen: int, slice_ns: int, port: int) -> int:
    """Sleep until a record has changed since ``counted`` gave ``seen``, at most ``slice_ns``."""
    bell = load_acquire(call + 8 * CALL_BELL)
    rings = load_acquire(bell)
    fetch_add(bell + 8, 1)
    fence()
    if port != 0:
        asleep(port)
    if counted(call) == seen:
        futex(bell, FUTEX_WAIT, rings & 0xFFFFFFFF, slice_ns)
    fetch_add(bell + 8, -1)
    if port != 0:
        awake(port)
    return 0


@compiled(i64(i64, i64, i64))
def rest(call: int, slice_ns: int, port: int) -> int:
    """Wait until a piece that was not taken is here, on any lane, or a record has changed: spin, then sleep."""
    seen, start, quiet = counted(call), now(), 0
    while True:
        if port != 0:
            poll(port)
        for number in range(load_acquire(call + 8 * CALL_LANES)):
            lane = call + 8 * (CALL_WORDS + LANE_WORDS * number)
            if load_acquire(load_acquire(lane + 8 * LANE_ARRIVED)) > load_acquire(lane + 8 * LANE_TAKEN):
                return OK
        if counted(call) != seen:
            return OK
        at = now()
        if at - start >= slice_ns:
            return TIMEOUT
        quiet += 1
        if quiet < _PAUSES:
            pause()
            continue
        if at - start < load_acquire(load_acquire(call + 8 * CALL_BUDGET)):
            sched_yield()
            if now() - at < _CROWDED_NS:
                continue
        sleep(call, seen, slice_ns - (at - start), port)
        store_release(load_acquire(call + 8 * CALL_BUDGET), SPIN_MAX_NS if now() - at < SPIN_MAX_NS else SPIN_MIN_NS)


@compiled(i64(i64, i64, i64))
def exchange(call: int, slice_ns: int, port: int) -> int:
    """Move the streams of a call on until all is done: ``OK``; ``MISMATCH`` or ``CLOSED`` (``CALL_LANE``); ``CHANGED`` as soon
    as the word at ``CALL_KICK`` is not ``CALL_SEEN``; ``TIMEOUT`` after ``slice_ns``. May be called again after the last
    two."""
    start, quiet, before = now(), 0, 0
    while True:
        seen = counted(call)
        moved = _step(call, port)
        if moved < 0:
            return moved
        if moved == 1 << 40:
            return OK
        if load_acquire(call + 8 * CALL_KICK) != 0 and load_acquire(load_acquire(call + 8 * CALL_KICK)) != load_acquire(
            call + 8 * CALL_SEEN
        ):
            return CHANGED
        if moved > 0:
            quiet = 0
            if slice_ns <= 0:
                continue
            if now() - start > slice_ns:
                return TIMEOUT
            continue
        quiet += 1
        if quiet < _PAUSES:
            pause()
            continue
        at = now()
        if quiet == _PAUSES:
            before = at
        if at - start >= slice_ns:
            return TIMEOUT
        if at - before < load_acquire(load_acquire(call + 8 * CALL_BUDGET)):
            sched_yield()
            if now() - at < _CROWDED_NS:
                continue
        sleep(call, seen, min(slice_ns, slice_ns - (at - start)), port)
        store_release(load_acquire(call + 8 * CALL_BUDGET), SPIN_MAX_NS if now() - at < SPIN_MAX_NS else SPIN_MIN_NS)
        quiet = _PAUSES - 1
