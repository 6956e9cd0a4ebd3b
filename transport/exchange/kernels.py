"""The compiled loops of an exchange: all streams of one call at once, without the GIL.

A *lane* is the connection to one peer, with a stream each way. What it needs is a row of words (``layout``). A stream carries
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
"""

from __future__ import annotations

from ..words.atomics import FUTEX_WAIT, fence, fetch_add, futex, load_acquire, memcpy, now, pause, sched_yield, store_release
from ..words.compiled import compiled
from ..words.completions import asleep, awake, poll
from ..words.kernels import SPIN_MAX_NS, SPIN_MIN_NS
from ..words.symbols import i64, inline
from . import layout as w
from .pieces import add_up, arrived, awaited, lay, left, push, sum_step, take

_PAUSES = 64
_CROWDED_NS = 50_000
_PATIENT_NS = 100_000
"""How long a thread spins whose caller computes meanwhile."""


@compiled(i64(i64, i64, i64, i64, i64, i64))
def begin(call: int, plan: int, sequence: int, source: int, target: int, patient: int) -> int:
    """Set the words of a call as its plan has them. What is sent lies at ``source``, what comes goes to ``target``."""
    memcpy(call + 8 * w.CALL_CODE, plan, 8 * w.PLAN_WORDS)
    store_release(call + 8 * w.CALL_SEQUENCE, sequence)
    store_release(call + 8 * w.CALL_OWN, source + load_acquire(call + 8 * w.CALL_OWN))
    store_release(call + 8 * w.CALL_RESULT, target + load_acquire(call + 8 * w.CALL_RESULT))
    store_release(call + 8 * w.CALL_FOLDED, 0)
    store_release(call + 8 * w.CALL_PATIENT, patient)
    for number in range(load_acquire(call + 8 * w.CALL_LANES)):
        lane = call + 8 * (w.CALL_WORDS + w.LANE_WORDS * number)
        memcpy(lane + 8 * w.LANE_FROM, plan + 8 * (w.PLAN_WORDS + w.PLAN_LANE_WORDS * number), 8 * w.PLAN_LANE_WORDS)
        store_release(lane + 8 * w.LANE_FROM, source + load_acquire(lane + 8 * w.LANE_FROM))
        store_release(lane + 8 * w.LANE_TO, target + load_acquire(lane + 8 * w.LANE_TO))
        store_release(lane + 8 * w.LANE_PUSHED, 0)
        store_release(lane + 8 * w.LANE_PULLED, 0)
    return 0


@inline
def _pull(call: int, lane: int) -> int:
    """Copy the next piece of a lane to its place, if it has come: 1 if so, else 0; -1: it is not of this call."""
    slot = awaited(call, lane)
    if slot <= 0:
        return slot
    at = load_acquire(lane + 8 * w.LANE_PULLED) * load_acquire(call + 8 * w.CALL_PIECE)
    nbytes = min(load_acquire(call + 8 * w.CALL_PIECE), load_acquire(lane + 8 * w.LANE_TO_BYTES) - at)
    lay(call, lane, load_acquire(lane + 8 * w.LANE_TO) + at, slot, nbytes)
    return 1


@inline
def _add_up(call: int) -> int:
    """Make the sum of the next piece, if that of every peer has come: 1 if so, else 0; -1: one is not of this call."""
    count, lanes = load_acquire(call + 8 * w.CALL_LANES), call + 8 * w.CALL_WORDS
    done, sources = load_acquire(call + 8 * w.CALL_FOLDED), load_acquire(call + 8 * w.CALL_TABLE) + 16
    if done >= load_acquire(lanes + 8 * w.LANE_PULL):
        return 0
    here = 1
    for number in range(count):
        lane = lanes + 8 * w.LANE_WORDS * number
        slot = arrived(call, lane)
        if slot < 0:
            store_release(call + 8 * w.CALL_LANE, number)
            return -1
        # What is summed in place must have been sent to everybody before.
        if slot == 0 or (load_acquire(call + 8 * w.CALL_WHOLE) != 0 and load_acquire(lane + 8 * w.LANE_PUSHED) <= done):
            here = 0
        store_release(sources + 8 * load_acquire(lane + 8 * w.LANE_RANK), slot + w.HEADER)
    if here == 0:
        return 0
    at = done * load_acquire(call + 8 * w.CALL_PIECE)
    nbytes = min(load_acquire(call + 8 * w.CALL_PIECE), load_acquire(call + 8 * w.CALL_BYTES) - at)
    store_release(sources + 8 * load_acquire(call + 8 * w.CALL_RANK), load_acquire(call + 8 * w.CALL_OWN) + at)
    add_up(call, load_acquire(call + 8 * w.CALL_RESULT) + at, nbytes)
    for number in range(count):
        take(lanes + 8 * w.LANE_WORDS * number)
    store_release(call + 8 * w.CALL_FOLDED, done + 1)
    return 1


@inline
def _step(call: int, port: int) -> int:
    """Do what can be done: the number of pieces, or 0; negative: ``MISMATCH``, ``CLOSED``. ``1 << 40``: all is
    done."""
    if port != 0:
        poll(port)
    if load_acquire(call + 8 * w.CALL_CHUNKS) > 0:
        return sum_step(call)
    count, moved, rest = load_acquire(call + 8 * w.CALL_LANES), 0, 0
    folds = load_acquire(call + 8 * w.CALL_FOLD) >= 0
    for number in range(count):
        lane = call + 8 * (w.CALL_WORDS + w.LANE_WORDS * number)
        pushed = push(call, lane)
        pulled = 0 if folds else _pull(call, lane)
        if pushed < 0 or pulled < 0:
            store_release(call + 8 * w.CALL_LANE, number)
            return w.MISMATCH if pulled < 0 else w.CLOSED
        moved += pushed + pulled
        rest += left(lane)
    if folds and rest > 0:
        added = _add_up(call)
        if added < 0:
            return w.MISMATCH
        moved += added
        rest -= added * count
    return 1 << 40 if rest == 0 else moved


@compiled(i64(i64))
def counted(call: int) -> int:
    """The sum of all records of a call: it changes with every arrival and every credit."""
    total = 0
    for number in range(load_acquire(call + 8 * w.CALL_LANES)):
        lane = call + 8 * (w.CALL_WORDS + w.LANE_WORDS * number)
        total += load_acquire(load_acquire(lane + 8 * w.LANE_ARRIVED)) + load_acquire(load_acquire(lane + 8 * w.LANE_CREDITED))
    return total


@compiled(i64(i64, i64, i64, i64))
def sleep(call: int, seen: int, slice_ns: int, port: int) -> int:
    """Sleep until a record has changed since ``counted`` gave ``seen``, at most ``slice_ns``."""
    bell = load_acquire(call + 8 * w.CALL_BELL)
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


@inline
def _idle(call: int, seen: int, at: int, quiet_ns: int, left_ns: int, port: int) -> int:
    """Nothing has changed for ``quiet_ns``, at the time ``at``: yield while the budget for spinning lasts, and others let us go
    on at once, else sleep. Whether it slept; the budget follows from how long that was."""
    budget = load_acquire(load_acquire(call + 8 * w.CALL_BUDGET))
    if load_acquire(call + 8 * w.CALL_PATIENT) != 0:
        budget = min(budget, _PATIENT_NS)
    if quiet_ns < budget:
        sched_yield()
        if now() - at < _CROWDED_NS:
            return 0
    sleep(call, seen, left_ns, port)
    store_release(load_acquire(call + 8 * w.CALL_BUDGET), SPIN_MAX_NS if now() - at < SPIN_MAX_NS else SPIN_MIN_NS)
    return 1


@compiled(i64(i64, i64, i64))
def rest(call: int, slice_ns: int, port: int) -> int:
    """Wait until a piece that was not taken is here, on any lane, or a record has changed: spin, then sleep."""
    seen, start, quiet = counted(call), now(), 0
    while True:
        if port != 0:
            poll(port)
        for number in range(load_acquire(call + 8 * w.CALL_LANES)):
            lane = call + 8 * (w.CALL_WORDS + w.LANE_WORDS * number)
            if load_acquire(load_acquire(lane + 8 * w.LANE_ARRIVED)) > load_acquire(lane + 8 * w.LANE_TAKEN):
                return w.OK
        if counted(call) != seen:
            return w.OK
        at = now()
        if at - start >= slice_ns:
            return w.TIMEOUT
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
            return w.OK
        if moved > 0:
            quiet = 0
            if slice_ns > 0 and now() - start > slice_ns:
                return w.TIMEOUT
            continue
        quiet += 1
        if quiet < _PAUSES:
            pause()
            continue
        at = now()
        if quiet == _PAUSES:
            before = at
        if at - start >= slice_ns:
            return w.TIMEOUT
        if _idle(call, seen, at, at - before, slice_ns - (at - start), port) != 0:
            quiet = _PAUSES - 1
