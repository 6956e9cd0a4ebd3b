"""The pieces of a stream: what one end writes into the slots of the other, and what it finds in its own.

The words of a call and of its lanes, and the invariants, are those of ``kernels``.

The sum of a tensor over all ranks goes in one pass (``sum_step``): every rank adds up one part of it, and sends that to the
others.

The tensor is cut into a part for each rank, and each part into ``CALL_CHUNKS`` chunks. Between each two ranks goes one stream:
chunks to be added (*A*), and sums (*B*), in an order that both know: a sum comes half as many chunks behind as a stream has
slots. So a chunk is added while it is in a cache, no rank waits for another between the two halves, and no slot is needed
besides those of the stream.

1. The sum of chunk *i* is made when chunk *i* of every rank is at the head of its stream.
2. A sum is sent when it is made. It replaces what its receiver has sent before: the sum is made of it.
3. No deadlock: of all pieces that are not taken, that with the smallest place in its stream can always be sent, and taken: a
   chunk waits for nothing but room, a sum for chunks that come before it in the streams."""

from __future__ import annotations

from ..words.atomics import FOLD_BYTES, fetch_add, fold, load_acquire, memcpy, store_release
from ..words.atomics import call as call_c
from ..words.compiled import compiled_callback
from ..words.kernels import WR_BELLS, WR_RECORD, copy_past_caches, enter, move
from ..words.signals import signal
from ..words.symbols import i64, inline
from . import layout as w


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


@inline
def add_up(call: int, result: int, nbytes: int) -> int:
    """Add up the sources in the table of a call."""
    table, count = load_acquire(call + 8 * w.CALL_TABLE), load_acquire(call + 8 * w.CALL_LANES) + 1
    store_release(table, result)
    return call_c(load_acquire(call + 8 * w.CALL_FOLDER), load_acquire(call + 8 * w.CALL_FOLD), table, nbytes, count)


@inline
def write(call: int, lane: int, source: int, nbytes: int) -> int:
    """Write a piece into the next slot of a lane, which is free: 1; -1: the lane is closed."""
    block, sent = load_acquire(lane + 8 * w.LANE_NOTIFY), load_acquire(lane + 8 * w.LANE_SENT)
    inflight = enter(block)
    if inflight == 0:
        return -1
    stride = w.HEADER + load_acquire(call + 8 * w.CALL_PIECE)
    slot = load_acquire(lane + 8 * w.LANE_OUT) + (sent % load_acquire(lane + 8 * w.LANE_OUT_DEPTH)) * stride
    store_release(slot + 8 * w.HEAD_SEQUENCE, load_acquire(call + 8 * w.CALL_SEQUENCE))
    store_release(slot + 8 * w.HEAD_CODE, load_acquire(call + 8 * w.CALL_CODE))
    store_release(slot + 8 * w.HEAD_BYTES, load_acquire(lane + 8 * w.LANE_FROM_BYTES))
    store_release(slot + 8 * w.HEAD_COUNT, load_acquire(call + 8 * w.CALL_COUNT))
    store_release(slot + 8 * w.HEAD_PIECE, nbytes)
    move(slot + w.HEADER, source, nbytes, lane + 8 * w.LANE_ADVICE)
    signal(load_acquire(block + 8 * WR_RECORD), load_acquire(block + 8 * WR_BELLS))
    fetch_add(inflight, -1)
    store_release(lane + 8 * w.LANE_SENT, sent + 1)
    store_release(lane + 8 * w.LANE_PUSHED, load_acquire(lane + 8 * w.LANE_PUSHED) + 1)
    return 1


@inline
def room(lane: int) -> int:
    """1 if a lane has a piece that is still to be written, and a slot for it, else 0."""
    if load_acquire(lane + 8 * w.LANE_PUSHED) >= load_acquire(lane + 8 * w.LANE_PUSH):
        return 0
    under_way = load_acquire(lane + 8 * w.LANE_SENT) - load_acquire(load_acquire(lane + 8 * w.LANE_CREDITED))
    return 1 if under_way < load_acquire(lane + 8 * w.LANE_OUT_DEPTH) else 0


@inline
def push(call: int, lane: int) -> int:
    """Write the next piece of a lane, if there is one and room for it: 1 if it was written, else 0; -1: the lane is closed."""
    if room(lane) == 0:
        return 0
    done = load_acquire(lane + 8 * w.LANE_PUSHED)
    piece, total = load_acquire(call + 8 * w.CALL_PIECE), load_acquire(lane + 8 * w.LANE_FROM_BYTES)
    return write(call, lane, load_acquire(lane + 8 * w.LANE_FROM) + done * piece, min(piece, total - done * piece))


@inline
def arrived(call: int, lane: int) -> int:
    """The address of the next piece of a lane, 0 if it has not come; -1 if it is not of this call."""
    taken = load_acquire(lane + 8 * w.LANE_TAKEN)
    if load_acquire(load_acquire(lane + 8 * w.LANE_ARRIVED)) <= taken:
        return 0
    stride = w.HEADER + load_acquire(call + 8 * w.CALL_PIECE)
    slot = load_acquire(lane + 8 * w.LANE_IN) + (taken % load_acquire(lane + 8 * w.LANE_IN_DEPTH)) * stride
    if (
        load_acquire(slot + 8 * w.HEAD_SEQUENCE) != load_acquire(call + 8 * w.CALL_SEQUENCE)
        or load_acquire(slot + 8 * w.HEAD_CODE) != load_acquire(call + 8 * w.CALL_CODE)
        or load_acquire(slot + 8 * w.HEAD_BYTES) != load_acquire(lane + 8 * w.LANE_TO_BYTES)
        or load_acquire(slot + 8 * w.HEAD_COUNT) != load_acquire(call + 8 * w.CALL_COUNT)
    ):
        return -1
    return slot


@inline
def awaited(call: int, lane: int) -> int:
    """``arrived``, but 0 where all pieces of this call have been taken."""
    if load_acquire(lane + 8 * w.LANE_PULLED) >= load_acquire(lane + 8 * w.LANE_PULL):
        return 0
    return arrived(call, lane)


@inline
def left(lane: int) -> int:
    """How many pieces of this call are still to be written, and to be taken."""
    unwritten = load_acquire(lane + 8 * w.LANE_PUSH) - load_acquire(lane + 8 * w.LANE_PUSHED)
    return unwritten + load_acquire(lane + 8 * w.LANE_PULL) - load_acquire(lane + 8 * w.LANE_PULLED)


@inline
def lay(call: int, lane: int, target: int, slot: int, nbytes: int) -> int:
    """Copy the payload of the next piece of a lane to its place, and ``take`` it."""
    if load_acquire(call + 8 * w.CALL_PAST) != 0:
        copy_past_caches(target, slot + w.HEADER, nbytes)
    else:
        memcpy(target, slot + w.HEADER, nbytes)
    return take(lane)


@inline
def take(lane: int) -> int:
    """The next piece of a lane has been read: give the slot back."""
    store_release(lane + 8 * w.LANE_TAKEN, load_acquire(lane + 8 * w.LANE_TAKEN) + 1)
    store_release(lane + 8 * w.LANE_PULLED, load_acquire(lane + 8 * w.LANE_PULLED) + 1)
    block = load_acquire(lane + 8 * w.LANE_CREDIT)
    inflight = enter(block)
    if inflight != 0:  # else the peer has left: it needs no credit
        signal(load_acquire(block + 8 * WR_RECORD), load_acquire(block + 8 * WR_BELLS))
        fetch_add(inflight, -1)
    return 0


@inline
def _item(call: int, place: int) -> int:
    """What stands at this place of a stream: two times its chunk, and one more for a sum."""
    chunks = load_acquire(call + 8 * w.CALL_CHUNKS)
    ahead = min(load_acquire(call + 8 * w.CALL_DEPTH) >> 1, chunks)
    if place < ahead:
        return 2 * place
    if place >= 2 * chunks - ahead:
        return 2 * (place - chunks) + 1
    pair = place - ahead
    return 2 * (ahead + (pair >> 1)) if pair & 1 == 0 else 2 * (pair >> 1) + 1


@inline
def _start(call: int, rank: int, chunk: int) -> int:
    """Where a chunk of the part of a rank begins in the tensor."""
    at = rank * load_acquire(call + 8 * w.CALL_PART) + chunk * load_acquire(call + 8 * w.CALL_CHUNK)
    return min(load_acquire(call + 8 * w.CALL_BYTES), at)


@inline
def _nbytes(call: int, rank: int, chunk: int) -> int:
    part, total = load_acquire(call + 8 * w.CALL_PART), load_acquire(call + 8 * w.CALL_BYTES)
    end = min(total, (rank + 1) * part)
    return max(0, min(load_acquire(call + 8 * w.CALL_CHUNK), end - _start(call, rank, chunk)))


@inline
def _push_next(call: int, lane: int) -> int:
    """Write the next piece of a lane, if there is room for it, and it is made: 1 if so, else 0; -1: the lane is closed."""
    if room(lane) == 0:
        return 0
    item = _item(call, load_acquire(lane + 8 * w.LANE_PUSHED))
    chunk, rank = item >> 1, load_acquire(lane + 8 * w.LANE_RANK)
    if item & 1 == 1:
        if load_acquire(call + 8 * w.CALL_FOLDED) <= chunk:
            return 0
        rank = load_acquire(call + 8 * w.CALL_RANK)
    return write(call, lane, load_acquire(call + 8 * w.CALL_OWN) + _start(call, rank, chunk), _nbytes(call, rank, chunk))


@inline
def _pull_sum(call: int, lane: int) -> int:
    """Put the next piece of a lane into the tensor, if it is here and a sum: 1 if so, else 0; -1: it is not of this call."""
    slot = awaited(call, lane)
    if slot <= 0:
        return slot
    item = _item(call, load_acquire(lane + 8 * w.LANE_PULLED))
    if item & 1 == 0:
        return 0
    rank, chunk = load_acquire(lane + 8 * w.LANE_RANK), item >> 1
    target = load_acquire(call + 8 * w.CALL_OWN) + _start(call, rank, chunk)
    lay(call, lane, target, slot, _nbytes(call, rank, chunk))
    return 1


@inline
def _sum_next(call: int) -> int:
    """Make the next sum, if its chunk of every rank is here: 1 if so, else 0."""
    count, lanes = load_acquire(call + 8 * w.CALL_LANES), call + 8 * w.CALL_WORDS
    chunk, sources = load_acquire(call + 8 * w.CALL_FOLDED), load_acquire(call + 8 * w.CALL_TABLE) + 16
    if chunk >= load_acquire(call + 8 * w.CALL_CHUNKS):
        return 0
    for number in range(count):
        lane = lanes + 8 * w.LANE_WORDS * number
        if _item(call, load_acquire(lane + 8 * w.LANE_PULLED)) != 2 * chunk:
            return 0
        slot = arrived(call, lane)
        if slot <= 0:  # one that is not of this call is found by ``_pull_sum``
            return 0
        store_release(sources + 8 * load_acquire(lane + 8 * w.LANE_RANK), slot + w.HEADER)
    rank = load_acquire(call + 8 * w.CALL_RANK)
    own = load_acquire(call + 8 * w.CALL_OWN) + _start(call, rank, chunk)
    store_release(sources + 8 * rank, own)
    add_up(call, own, _nbytes(call, rank, chunk))
    for number in range(count):
        take(lanes + 8 * w.LANE_WORDS * number)
    store_release(call + 8 * w.CALL_FOLDED, chunk + 1)
    return 1


@inline
def sum_step(call: int) -> int:
    """Do what can be done: the number of pieces, or 0; ``CLOSED``: ``CALL_LANE`` is; ``MISMATCH``: what came there is not of
    this call. ``1 << 40``: all is done."""
    moved, rest = _sum_next(call), 0
    for number in range(load_acquire(call + 8 * w.CALL_LANES)):
        lane = call + 8 * (w.CALL_WORDS + w.LANE_WORDS * number)
        pulled, pushed = _pull_sum(call, lane), _push_next(call, lane)
        if pulled < 0 or pushed < 0:
            store_release(call + 8 * w.CALL_LANE, number)
            return w.MISMATCH if pulled < 0 else w.CLOSED
        moved += pulled + pushed
        rest += left(lane)
    return 1 << 40 if rest == 0 else moved
