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
everywhere and always. The call can be entered again after any return: what was done stands in the words. Those of a call, of a
plan and of a table of sources are private to the thread that moves the streams.

The sum of a tensor over all ranks goes in one pass (``sum_step``): every rank adds up one part of it, and sends that to the
others.

The tensor is cut into a part for each rank, and each part into ``CALL_CHUNKS`` chunks. Between each two ranks goes one stream:
chunks to be added (*A*), and sums (*B*), in an order that both know: a sum comes half as many chunks behind as a stream has
slots. So a chunk is added while it is in a cache, no rank waits for another between the two halves, and no slot is needed
besides those of the stream.

1. The sum of chunk *i* is made when chunk *i* of every rank is at the head of its stream.
2. A sum is sent when it is made. It replaces what its receiver has sent before: the sum is made of it.
3. No deadlock: of all pieces that are not taken, that with the smallest place in its stream can always be sent, and taken: a
   chunk waits for nothing but room, a sum for chunks that come before it in the streams.
"""

from __future__ import annotations

from ..words.atomics import (
    FOLD_BYTES,
    fetch_add,
    fold,
    futex_wait,
    load_acquire,
    memcpy,
    now,
    pause,
    sched_yield,
    store_release,
)
from ..words.atomics import call as call_c
from ..words.compiled import compiled, compiled_callback
from ..words.completions import asleep, awake
from ..words.kernels import SPIN_MAX_NS, SPIN_MIN_NS, WR_BELLS, WR_RECORD, copy_past_caches, enter, move, progress
from ..words.signals import signal
from ..words.symbols import i64, inline

OK, TIMEOUT, MISMATCH, CLOSED = 0, -1, -2, -3
"""What ``exchange`` returns; for the last two ``CALL_LANE`` says which lane."""

HEADER = 64
"""Bytes in front of a piece: five words, see ``HEAD_*``. The last has the bytes of this piece, the third of its message."""
HEAD_SEQUENCE, HEAD_CODE, HEAD_BYTES, HEAD_COUNT, HEAD_PIECE = 0, 1, 2, 3, 4

# The words of a call, int64 each; the rows of its lanes follow.
CALL_LANES, CALL_PIECE, CALL_DEPTH, CALL_BELL, CALL_BUDGET = 0, 1, 2, 3, 4
CALL_SEQUENCE, CALL_CODE, CALL_COUNT = 5, 6, 7
CALL_FOLD, CALL_OWN, CALL_RESULT, CALL_BYTES, CALL_WHOLE = 8, 9, 10, 11, 12
CALL_PART, CALL_CHUNK, CALL_CHUNKS, CALL_PAST = 13, 14, 15, 16
CALL_RANK, CALL_FOLDED, CALL_TABLE, CALL_FOLDER = 17, 18, 19, 20
CALL_LANE, CALL_PATIENT = 21, 22
CALL_WORDS = 24

LANE_NOTIFY, LANE_CREDIT, LANE_OUT, LANE_IN, LANE_ARRIVED, LANE_CREDITED, LANE_SENT, LANE_TAKEN = 0, 1, 2, 3, 4, 5, 6, 7
LANE_FROM, LANE_FROM_BYTES, LANE_PUSH, LANE_TO, LANE_TO_BYTES, LANE_PULL = 8, 9, 10, 11, 12, 13
LANE_PUSHED, LANE_PULLED, LANE_RANK, LANE_ADVICE = 14, 15, 16, 17
LANE_OUT_DEPTH, LANE_IN_DEPTH = 18, 19
"""The slots at the peer, and here: a direction of a lane has few until it has carried a large message."""
LANE_WORDS = 20

PLAN_WORDS, PLAN_LANE_WORDS = CALL_PAST - CALL_CODE + 1, LANE_PULL - LANE_FROM + 1
"""A plan has what every call of one signature has in common: the words from ``CALL_CODE`` to ``CALL_PAST``, then, for each
lane, those from ``LANE_FROM`` to ``LANE_PULL``. Addresses are offsets."""


@compiled_callback(i64(i64, i64, i64, i64))
def folder(code: int, table: int, nbytes: int, count: int) -> int:
    """``dst = s0 OP s1 OP ...``, from left to right, over ``count`` >= 2 sources. ``table``: addresses of ``dst``, which may be
    a source, of scratch (two times ``FOLD_BYTES``), and of the sources. Called by its address, so that the code, with a case
    for each type and operation, is compiled once, not into every kernel that adds up."""
    dst, scratch, sources = load_acquire(table), load_acquire(table + 8), table + 16
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


# -- the pieces of a lane


@inline
def write(call: int, lane: int, source: int, nbytes: int) -> int:
    """Write a piece into the next slot of a lane, which is free: 1; -1: the lane is closed."""
    block, sent = load_acquire(lane + 8 * LANE_NOTIFY), load_acquire(lane + 8 * LANE_SENT)
    inflight = enter(block)
    if inflight == 0:
        return -1
    stride = HEADER + load_acquire(call + 8 * CALL_PIECE)
    slot = load_acquire(lane + 8 * LANE_OUT) + (sent % load_acquire(lane + 8 * LANE_OUT_DEPTH)) * stride
    store_release(slot + 8 * HEAD_SEQUENCE, load_acquire(call + 8 * CALL_SEQUENCE))
    store_release(slot + 8 * HEAD_CODE, load_acquire(call + 8 * CALL_CODE))
    store_release(slot + 8 * HEAD_BYTES, load_acquire(lane + 8 * LANE_FROM_BYTES))
    store_release(slot + 8 * HEAD_COUNT, load_acquire(call + 8 * CALL_COUNT))
    store_release(slot + 8 * HEAD_PIECE, nbytes)
    move(slot + HEADER, source, nbytes, lane + 8 * LANE_ADVICE)
    signal(load_acquire(block + 8 * WR_RECORD), load_acquire(block + 8 * WR_BELLS))
    fetch_add(inflight, -1)
    store_release(lane + 8 * LANE_SENT, sent + 1)
    store_release(lane + 8 * LANE_PUSHED, load_acquire(lane + 8 * LANE_PUSHED) + 1)
    return 1


@inline
def room(lane: int) -> int:
    """1 if a lane has a piece that is still to be written, and a slot for it, else 0."""
    if load_acquire(lane + 8 * LANE_PUSHED) >= load_acquire(lane + 8 * LANE_PUSH):
        return 0
    under_way = load_acquire(lane + 8 * LANE_SENT) - load_acquire(load_acquire(lane + 8 * LANE_CREDITED))
    return 1 if under_way < load_acquire(lane + 8 * LANE_OUT_DEPTH) else 0


@inline
def push(call: int, lane: int) -> int:
    """Write the next piece of a lane, if there is one and room for it: 1 if it was written, else 0; -1: the lane is closed."""
    if room(lane) == 0:
        return 0
    done = load_acquire(lane + 8 * LANE_PUSHED)
    piece, total = load_acquire(call + 8 * CALL_PIECE), load_acquire(lane + 8 * LANE_FROM_BYTES)
    return write(call, lane, load_acquire(lane + 8 * LANE_FROM) + done * piece, min(piece, total - done * piece))


@inline
def arrived(call: int, lane: int) -> int:
    """The address of the next piece of a lane, 0 if it has not come; -1 if it is not of this call."""
    taken = load_acquire(lane + 8 * LANE_TAKEN)
    if load_acquire(load_acquire(lane + 8 * LANE_ARRIVED)) <= taken:
        return 0
    stride = HEADER + load_acquire(call + 8 * CALL_PIECE)
    slot = load_acquire(lane + 8 * LANE_IN) + (taken % load_acquire(lane + 8 * LANE_IN_DEPTH)) * stride
    if (
        load_acquire(slot + 8 * HEAD_SEQUENCE) != load_acquire(call + 8 * CALL_SEQUENCE)
        or load_acquire(slot + 8 * HEAD_CODE) != load_acquire(call + 8 * CALL_CODE)
        or load_acquire(slot + 8 * HEAD_BYTES) != load_acquire(lane + 8 * LANE_TO_BYTES)
        or load_acquire(slot + 8 * HEAD_COUNT) != load_acquire(call + 8 * CALL_COUNT)
    ):
        return -1
    return slot


@inline
def awaited(call: int, lane: int) -> int:
    """``arrived``, but 0 where all pieces of this call have been taken."""
    if load_acquire(lane + 8 * LANE_PULLED) >= load_acquire(lane + 8 * LANE_PULL):
        return 0
    return arrived(call, lane)


@inline
def left(lane: int) -> int:
    """How many pieces of this call are still to be written, and to be taken."""
    unwritten = load_acquire(lane + 8 * LANE_PUSH) - load_acquire(lane + 8 * LANE_PUSHED)
    return unwritten + load_acquire(lane + 8 * LANE_PULL) - load_acquire(lane + 8 * LANE_PULLED)


@inline
def lay(call: int, lane: int, target: int, slot: int, nbytes: int) -> int:
    """Copy the payload of the next piece of a lane to its place, and ``take`` it."""
    if load_acquire(call + 8 * CALL_PAST) != 0:
        copy_past_caches(target, slot + HEADER, nbytes)
    else:
        memcpy(target, slot + HEADER, nbytes)
    return take(lane)


@inline
def take(lane: int) -> int:
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
def add_up(call: int, own: int, result: int, nbytes: int) -> int:
    """Add up the sources in the table of a call, with what lies at ``own``, and give the slots of the others back: 1."""
    table, count = load_acquire(call + 8 * CALL_TABLE), load_acquire(call + 8 * CALL_LANES) + 1
    store_release(table, result)
    store_release(table + 16 + 8 * load_acquire(call + 8 * CALL_RANK), own)
    call_c(load_acquire(call + 8 * CALL_FOLDER), load_acquire(call + 8 * CALL_FOLD), table, nbytes, count)
    for number in range(count - 1):
        take(call + 8 * (CALL_WORDS + LANE_WORDS * number))
    store_release(call + 8 * CALL_FOLDED, load_acquire(call + 8 * CALL_FOLDED) + 1)
    return 1


# -- the sum of a tensor over all ranks, in one pass


@inline
def _item(call: int, place: int) -> int:
    """What stands at this place of a stream: two times its chunk, and one more for a sum."""
    chunks = load_acquire(call + 8 * CALL_CHUNKS)
    ahead = min(load_acquire(call + 8 * CALL_DEPTH) >> 1, chunks)
    if place < ahead:
        return 2 * place
    if place >= 2 * chunks - ahead:
        return 2 * (place - chunks) + 1
    pair = place - ahead
    return 2 * (ahead + (pair >> 1)) if pair & 1 == 0 else 2 * (pair >> 1) + 1


@inline
def _start(call: int, rank: int, chunk: int) -> int:
    """Where a chunk of the part of a rank begins in the tensor."""
    at = rank * load_acquire(call + 8 * CALL_PART) + chunk * load_acquire(call + 8 * CALL_CHUNK)
    return min(load_acquire(call + 8 * CALL_BYTES), at)


@inline
def _nbytes(call: int, rank: int, chunk: int) -> int:
    part, total = load_acquire(call + 8 * CALL_PART), load_acquire(call + 8 * CALL_BYTES)
    end = min(total, (rank + 1) * part)
    return max(0, min(load_acquire(call + 8 * CALL_CHUNK), end - _start(call, rank, chunk)))


@inline
def _push_next(call: int, lane: int) -> int:
    """Write the next piece of a lane, if there is room for it, and it is made: 1 if so, else 0; -1: the lane is closed."""
    if room(lane) == 0:
        return 0
    item = _item(call, load_acquire(lane + 8 * LANE_PUSHED))
    chunk, rank = item >> 1, load_acquire(lane + 8 * LANE_RANK)
    if item & 1 == 1:
        if load_acquire(call + 8 * CALL_FOLDED) <= chunk:
            return 0
        rank = load_acquire(call + 8 * CALL_RANK)
    return write(call, lane, load_acquire(call + 8 * CALL_OWN) + _start(call, rank, chunk), _nbytes(call, rank, chunk))


@inline
def _pull_sum(call: int, lane: int) -> int:
    """Put the next piece of a lane into the tensor, if it is here and a sum: 1 if so, else 0; -1: it is not of this call."""
    slot = awaited(call, lane)
    if slot <= 0:
        return slot
    item = _item(call, load_acquire(lane + 8 * LANE_PULLED))
    if item & 1 == 0:
        return 0
    rank, chunk = load_acquire(lane + 8 * LANE_RANK), item >> 1
    target = load_acquire(call + 8 * CALL_OWN) + _start(call, rank, chunk)
    lay(call, lane, target, slot, _nbytes(call, rank, chunk))
    return 1


@inline
def _sum_next(call: int) -> int:
    """Make the next sum, if its chunk of every rank is here: 1 if so, else 0."""
    count, lanes = load_acquire(call + 8 * CALL_LANES), call + 8 * CALL_WORDS
    chunk, sources = load_acquire(call + 8 * CALL_FOLDED), load_acquire(call + 8 * CALL_TABLE) + 16
    if chunk >= load_acquire(call + 8 * CALL_CHUNKS):
        return 0
    for number in range(count):
        lane = lanes + 8 * LANE_WORDS * number
        if _item(call, load_acquire(lane + 8 * LANE_PULLED)) != 2 * chunk:
            return 0
        slot = arrived(call, lane)
        if slot <= 0:  # one that is not of this call is found by ``_pull_sum``
            return 0
        store_release(sources + 8 * load_acquire(lane + 8 * LANE_RANK), slot + HEADER)
    rank = load_acquire(call + 8 * CALL_RANK)
    own = load_acquire(call + 8 * CALL_OWN) + _start(call, rank, chunk)
    return add_up(call, own, own, _nbytes(call, rank, chunk))


@inline
def sum_step(call: int) -> int:
    """Do what can be done: the number of pieces, or 0; ``CLOSED``: ``CALL_LANE`` is; ``MISMATCH``: what came there is not of
    this call. ``1 << 40``: all is done."""
    moved, rest = _sum_next(call), 0
    for number in range(load_acquire(call + 8 * CALL_LANES)):
        lane = call + 8 * (CALL_WORDS + LANE_WORDS * number)
        pulled, pushed = _pull_sum(call, lane), _push_next(call, lane)
        if pulled < 0 or pushed < 0:
            store_release(call + 8 * CALL_LANE, number)
            return MISMATCH if pulled < 0 else CLOSED
        moved += pulled + pushed
        rest += left(lane)
    return 1 << 40 if rest == 0 else moved


# -- a call: its streams moved, and sleep

_PAUSES = 64
_CROWDED_NS = 50_000
_PATIENT_NS = 100_000
"""How long a thread spins whose caller computes meanwhile."""


@compiled(i64(i64, i64, i64, i64, i64, i64))
def begin(call: int, plan: int, sequence: int, source: int, target: int, patient: int) -> int:
    """Set the words of a call as its plan has them. What is sent lies at ``source``, what comes goes to ``target``."""
    memcpy(call + 8 * CALL_CODE, plan, 8 * PLAN_WORDS)
    store_release(call + 8 * CALL_SEQUENCE, sequence)
    store_release(call + 8 * CALL_OWN, source + load_acquire(call + 8 * CALL_OWN))
    store_release(call + 8 * CALL_RESULT, target + load_acquire(call + 8 * CALL_RESULT))
    store_release(call + 8 * CALL_FOLDED, 0)
    store_release(call + 8 * CALL_PATIENT, patient)
    for number in range(load_acquire(call + 8 * CALL_LANES)):
        lane = call + 8 * (CALL_WORDS + LANE_WORDS * number)
        memcpy(lane + 8 * LANE_FROM, plan + 8 * (PLAN_WORDS + PLAN_LANE_WORDS * number), 8 * PLAN_LANE_WORDS)
        store_release(lane + 8 * LANE_FROM, source + load_acquire(lane + 8 * LANE_FROM))
        store_release(lane + 8 * LANE_TO, target + load_acquire(lane + 8 * LANE_TO))
        store_release(lane + 8 * LANE_PUSHED, 0)
        store_release(lane + 8 * LANE_PULLED, 0)
    return 0


@inline
def _pull(call: int, lane: int) -> int:
    """Copy the next piece of a lane to its place, if it has come: 1 if so, else 0; -1: it is not of this call."""
    slot = awaited(call, lane)
    if slot <= 0:
        return slot
    at = load_acquire(lane + 8 * LANE_PULLED) * load_acquire(call + 8 * CALL_PIECE)
    nbytes = min(load_acquire(call + 8 * CALL_PIECE), load_acquire(lane + 8 * LANE_TO_BYTES) - at)
    lay(call, lane, load_acquire(lane + 8 * LANE_TO) + at, slot, nbytes)
    return 1


@inline
def _add_up(call: int) -> int:
    """Make the sum of the next piece, if that of every peer has come: 1 if so, else 0; -1: one is not of this call."""
    count, lanes = load_acquire(call + 8 * CALL_LANES), call + 8 * CALL_WORDS
    done, sources = load_acquire(call + 8 * CALL_FOLDED), load_acquire(call + 8 * CALL_TABLE) + 16
    if done >= load_acquire(lanes + 8 * LANE_PULL):
        return 0
    here = 1
    for number in range(count):
        lane = lanes + 8 * LANE_WORDS * number
        slot = arrived(call, lane)
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
    return add_up(call, load_acquire(call + 8 * CALL_OWN) + at, load_acquire(call + 8 * CALL_RESULT) + at, nbytes)


@inline
def _step(call: int, port: int) -> int:
    """Do what can be done: the number of pieces, or 0; negative: ``MISMATCH``, ``CLOSED``. ``1 << 40``: all is
    done."""
    progress(port)
    if load_acquire(call + 8 * CALL_CHUNKS) > 0:
        return sum_step(call)
    count, moved, rest = load_acquire(call + 8 * CALL_LANES), 0, 0
    folds = load_acquire(call + 8 * CALL_FOLD) >= 0
    for number in range(count):
        lane = call + 8 * (CALL_WORDS + LANE_WORDS * number)
        pushed = push(call, lane)
        pulled = 0 if folds else _pull(call, lane)
        if pushed < 0 or pulled < 0:
            store_release(call + 8 * CALL_LANE, number)
            return MISMATCH if pulled < 0 else CLOSED
        moved += pushed + pulled
        rest += left(lane)
    if folds and rest > 0:
        added = _add_up(call)
        if added < 0:
            return MISMATCH
        moved += added
        rest -= added * count
    return 1 << 40 if rest == 0 else moved


@compiled(i64(i64))
def counted(call: int) -> int:
    """The sum of all records of a call: it changes with every arrival and every credit."""
    total = 0
    for number in range(load_acquire(call + 8 * CALL_LANES)):
        lane = call + 8 * (CALL_WORDS + LANE_WORDS * number)
        total += load_acquire(load_acquire(lane + 8 * LANE_ARRIVED)) + load_acquire(load_acquire(lane + 8 * LANE_CREDITED))
    return total


@compiled(i64(i64, i64, i64, i64))
def sleep(call: int, seen: int, slice_ns: int, port: int) -> int:
    """Sleep until a record has changed since ``counted`` gave ``seen``, at most ``slice_ns``."""
    bell = load_acquire(call + 8 * CALL_BELL)
    rings = load_acquire(bell)
    fetch_add(bell + 8, 1)
    asleep(port)
    if counted(call) == seen:
        futex_wait(bell, rings, slice_ns)
    fetch_add(bell + 8, -1)
    awake(port)
    return 0


@inline
def _idle(call: int, seen: int, at: int, quiet_ns: int, left_ns: int, port: int) -> int:
    """Nothing has changed for ``quiet_ns``, at the time ``at``: yield while the budget for spinning lasts, and others let us go
    on at once, else sleep. Whether it slept; the budget follows from how long that was."""
    budget = load_acquire(load_acquire(call + 8 * CALL_BUDGET))
    if load_acquire(call + 8 * CALL_PATIENT) != 0:
        budget = min(budget, _PATIENT_NS)
    if quiet_ns < budget:
        sched_yield()
        if now() - at < _CROWDED_NS:
            return 0
    sleep(call, seen, left_ns, port)
    store_release(load_acquire(call + 8 * CALL_BUDGET), SPIN_MAX_NS if now() - at < SPIN_MAX_NS else SPIN_MIN_NS)
    return 1


@compiled(i64(i64, i64, i64))
def rest(call: int, slice_ns: int, port: int) -> int:
    """Wait until a piece that was not taken is here, on any lane, or a record has changed: spin, then sleep."""
    seen, start, quiet = counted(call), now(), 0
    while True:
        progress(port)
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
        else:
            _idle(call, seen, at, at - start, slice_ns - (at - start), port)


@compiled(i64(i64, i64, i64))
def exchange(call: int, slice_ns: int, port: int) -> int:
    """Move the streams of a call on until all is done: ``OK``; ``MISMATCH`` or ``CLOSED`` (``CALL_LANE``); ``TIMEOUT`` after
    ``slice_ns``, and it may be called again."""
    start, quiet, before = now(), 0, 0
    while True:
        seen = counted(call)
        moved = _step(call, port)
        if moved < 0:
            return moved
        if moved == 1 << 40:
            return OK
        if moved > 0:
            quiet = 0
            if slice_ns > 0 and now() - start > slice_ns:
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
        if _idle(call, seen, at, at - before, slice_ns - (at - start), port) != 0:
            quiet = _PAUSES - 1
