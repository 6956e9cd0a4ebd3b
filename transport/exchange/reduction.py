"""The compiled sum of a tensor over all ranks, in one pass: every rank adds up one part of it, and sends that to the others.

The tensor is cut into a part for each rank, and each part into ``CALL_CHUNKS`` chunks. Between each two ranks goes one stream:
chunks to be added (*A*), and sums (*B*), in an order that both know: a sum comes half as many chunks behind as a stream has
slots. So a chunk is added while it is in a cache, no rank waits for another between the two halves, and no slot is needed
besides those of the stream.

1. The sum of chunk *i* is made when chunk *i* of every rank is at the head of its stream.
2. A sum is sent when it is made. It replaces what its receiver has sent before: the sum is made of it.
3. No deadlock: of all pieces that are not taken, that with the smallest place in its stream can always be sent, and taken: a
   chunk waits for nothing but room, a sum for chunks that come before it in the streams."""

from __future__ import annotations

from ..words.atomics import load_acquire, memcpy, store_release
from ..words.kernels import copy_past_caches
from ..words.symbols import inline
from . import layout as w
from .pieces import add_up, arrived, awaited, left, room, take, write


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
    return min(
        load_acquire(call + 8 * w.CALL_BYTES),
        rank * load_acquire(call + 8 * w.CALL_PART) + chunk * load_acquire(call + 8 * w.CALL_CHUNK),
    )


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
    if load_acquire(call + 8 * w.CALL_PAST) != 0:
        copy_past_caches(target, slot + w.HEADER, _nbytes(call, rank, chunk))
    else:
        memcpy(target, slot + w.HEADER, _nbytes(call, rank, chunk))
    take(lane)
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
