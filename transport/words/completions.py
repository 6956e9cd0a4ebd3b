"""Posting to queue pairs and polling a completion queue, without the GIL and without a Python object.

Everything is laid out beforehand in blocks of int64 words. A *port* block belongs to a device (one completion queue, one shared
receive queue); a *lane* block to a channel (one queue pair); a *chain* block to a prepared transfer (work requests linked in
memory, only the last one signalled). ``libibverbs``' own inline functions are calls through the context's table of operations;
so are ours.

A waiting thread polls the queue itself, in the loop in which it looks at its record (``kernels.wait_count``, ``wait_any``). So
no thread is woken for a completion that a spinning waiter takes. Only when a waiter is about to sleep does it *arm* the queue:
the next completion then wakes the device's thread, which polls in its place.

Invariants:

1. One thread polls at a time (``PORT_LOCK``), so notifications of one peer are counted in the order they came, and a completed
   send before those after it.
2. Data before count: the completion of a WRITE_WITH_IMM is seen after its data is in memory (InfiniBand specification, 9.7.7);
   the count is a ``fetch_add`` after that look, the receiver reads it with acquire.
3. No lost wake-up: a waiter counts itself in its record's ``sleepers``, then in ``PORT_SLEEPERS``; arms; polls *holding the
   lock* (what came before the arming raises no event); looks at its record; sleeps. What comes after the arming raises an
   event; the device's thread disarms, polls, and arms again for as long as anybody sleeps.
4. The send queue never overflows: a chain is posted under ``LANE_LOCK`` only if ``posted + its requests - reached`` is at most
   the queue's depth. ``wr_id`` of the signalled request is ``posted`` after it, so ``reached`` is a plain store.
5. Nothing is posted on a lane whose ``LANE_CLOSED`` is set under ``LANE_LOCK``; a chain of 0 requests was revoked.
6. The receive queue is refilled by the polling thread, a chain at a time; the completion queue holds all receives and all sends
   that can be under way, so it cannot overflow either.
"""

from __future__ import annotations

from . import layout as at
from .atomics import call, compare_exchange, fence, fetch_add, futex_wake, load_acquire, now, pause, sched_yield, store_release
from .compiled import compiled
from .signals import ENDED, signal
from .symbols import CFunction, Operation, i32, i64

_poll_fds = CFunction("poll", i32(i64, i64, i32))
_eventfd_write = CFunction("eventfd_write", i32(i32, i64))

# A port (words): the queues, what is posted to receive, where completions go, the thread that sleeps on the channel.
PORT_LOCK, PORT_ARMED, PORT_SLEEPERS, PORT_CQ, PORT_POLL_CQ, PORT_REQ_NOTIFY, PORT_SRQ, PORT_POST_RECV = range(8)
PORT_RECV_CHAIN, PORT_RECV_COUNT, PORT_RECV_USED, PORT_WC, PORT_TABLE, PORT_TABLE_MASK, PORT_BELLS, PORT_FAILED = range(8, 16)
PORT_GET_EVENT, PORT_ACK_EVENTS, PORT_CHANNEL, PORT_STOP, PORT_SCRATCH, PORT_SCRATCH_2, PORT_FDS, PORT_WAKE = range(16, 24)
PORT_WORDS = 32
WC_BATCH = 16

# A lane (words). COMPLETED and its sleepers are a notification record, for those who wait; REACHED is the same count, but
# stays as it is when the lane ends.
LANE_COMPLETED, LANE_SLEEPERS, LANE_LOCK, LANE_POSTED, LANE_DEPTH, LANE_CLOSED, LANE_QP, LANE_POST_SEND = range(8)
LANE_RECORDS, LANE_POSTS, LANE_BYTES, LANE_STATUS, LANE_VENDOR, LANE_BAD_WR, LANE_SEEN, LANE_REACHED = range(8, 16)
LANE_WORDS = 16

# A chain (words).
CHAIN_FIRST, CHAIN_LAST, CHAIN_COUNT, CHAIN_BYTES = range(4)
CHAIN_WORDS = 4

CLOSED, FULL, REVOKED, REFUSED = -1, -2, -3, -4
OPEN, SHUT = 0, 1
"""``LANE_CLOSED``: posts are taken; never again."""
u32 = Operation("u32", "address")
"""The 32-bit word at this address."""
be32 = Operation("be32", "address")
"""The 32-bit word in network order at this address."""
set_u32 = Operation("set_u32", "address, value")
"""Set the 32-bit word at this address."""


@compiled(i64(i64))
def lock(word: int) -> int:
    while compare_exchange(word, 0, 1) == 0:
        for _ in range(64):
            if load_acquire(word) == 0:
                break
            pause()
        else:
            sched_yield()
    return 0


@compiled(i64(i64))
def unlock(word: int) -> int:
    store_release(word, 0)
    return 0


@compiled(i64(i64, i64))
def _find_slot(port: int, qp_num: int) -> int:
    """The address of a queue pair's entry in the table, or of the entry where it may be put. The table has entries (number,
    lane) with open addressing: number 0 is an entry that was never used, lane 0 one that is free again."""
    table, mask = load_acquire(port + 8 * PORT_TABLE), load_acquire(port + 8 * PORT_TABLE_MASK)
    slot, free = qp_num & mask, 0
    while True:
        entry = table + 16 * slot
        number = load_acquire(entry)
        if number == qp_num:
            return entry
        if free == 0 and load_acquire(entry + 8) == 0:
            free = entry
        if number == 0:
            return free
        slot = (slot + 1) & mask


@compiled(i64(i64, i64, i64))
def enter_lane(port: int, qp_num: int, lane: int) -> int:
    """Have completions of a queue pair go to this lane."""
    lock(port + 8 * PORT_LOCK)
    entry = _find_slot(port, qp_num)
    store_release(entry, qp_num)
    store_release(entry + 8, lane)
    unlock(port + 8 * PORT_LOCK)
    return 0


@compiled(i64(i64, i64))
def drop_lane(port: int, qp_num: int) -> int:
    """Completions of this queue pair concern nobody from now on."""
    lock(port + 8 * PORT_LOCK)
    table, mask = load_acquire(port + 8 * PORT_TABLE), load_acquire(port + 8 * PORT_TABLE_MASK)
    entry = _find_slot(port, qp_num)
    store_release(entry + 8, 0)
    # At the end of a run of entries those that are gone need not be walked over any more.
    slot = (entry - table) // 16
    if load_acquire(table + 16 * ((slot + 1) & mask)) == 0:
        while load_acquire(table + 16 * slot) != 0 and load_acquire(table + 16 * slot + 8) == 0:
            store_release(table + 16 * slot, 0)
            slot = (slot - 1) & mask
    unlock(port + 8 * PORT_LOCK)
    return 0


@compiled(i64(i64, i64))
def _find_lane(port: int, qp_num: int) -> int:
    entry = _find_slot(port, qp_num)
    return load_acquire(entry + 8) if load_acquire(entry) == qp_num else 0


@compiled(i64(i64, i64))
def _complete(lane: int, count: int) -> int:
    """Enter progress of a lane (invariant 4), and wake its waiters, as ``signal`` does for a notification."""
    if count < ENDED:
        store_release(lane + 8 * LANE_REACHED, count)
    if load_acquire(lane + 8 * LANE_COMPLETED) < count:
        store_release(lane + 8 * LANE_COMPLETED, count)
    fence()
    if load_acquire(lane + 8 * LANE_SLEEPERS) > 0:
        futex_wake(lane + 8 * LANE_COMPLETED)
    return 0


@compiled(i64(i64))
def end_lane(lane: int) -> int:
    """End a lane: later posts are refused, and every wait for a post returns (``LANE_COMPLETED`` is ``ENDED`` then)."""
    lock(lane + 8 * LANE_LOCK)
    store_release(lane + 8 * LANE_CLOSED, SHUT)
    unlock(lane + 8 * LANE_LOCK)
    return _complete(lane, ENDED)


@compiled(i64(i64))
def _poll_held(port: int) -> int:
    """Take what the completion queue has, with ``PORT_LOCK`` held. Returns how many completions."""
    if load_acquire(port + 8 * PORT_CQ) == 0:
        return 0
    wc, bells = load_acquire(port + 8 * PORT_WC), load_acquire(port + 8 * PORT_BELLS)
    total = 0
    while True:
        got = call(load_acquire(port + 8 * PORT_POLL_CQ), load_acquire(port + 8 * PORT_CQ), WC_BATCH, wc, 0)
        for index in range(got):
            entry = wc + index * at.WC_BYTES
            lane = _find_lane(port, u32(entry + at.WC_QP_NUM))
            status = u32(entry + at.WC_STATUS)
            if status != at.WC_SUCCESS:
                if lane != 0:
                    if load_acquire(lane + 8 * LANE_STATUS) == 0:
                        store_release(lane + 8 * LANE_VENDOR, u32(entry + at.WC_VENDOR_ERR))
                        store_release(lane + 8 * LANE_STATUS, status)
                    fetch_add(port + 8 * PORT_FAILED, 1)
                    _eventfd_write(i32(load_acquire(port + 8 * PORT_WAKE)), 1)
            elif u32(entry + at.WC_OPCODE) & at.WC_RECV:
                fetch_add(port + 8 * PORT_RECV_USED, 1)
                if lane != 0:
                    store_release(lane + 8 * LANE_SEEN, 1)
                    signal(load_acquire(lane + 8 * LANE_RECORDS) + 16 * (be32(entry + at.WC_IMM_DATA) & 0xFFFF), bells)
            elif lane != 0:
                store_release(lane + 8 * LANE_SEEN, 1)
                _complete(lane, load_acquire(entry + at.WC_WR_ID))
        if got > 0:
            total += got
        chain = load_acquire(port + 8 * PORT_RECV_COUNT)
        while load_acquire(port + 8 * PORT_RECV_USED) >= chain:
            fetch_add(port + 8 * PORT_RECV_USED, -chain)
            requests, post_recv = load_acquire(port + 8 * PORT_RECV_CHAIN), load_acquire(port + 8 * PORT_POST_RECV)
            call(post_recv, load_acquire(port + 8 * PORT_SRQ), requests, port + 8 * PORT_SCRATCH, 0)
        if got < WC_BATCH:
            return total


@compiled(i64(i64))
def poll(port: int) -> int:
    """Take what the completion queue has, unless another thread is at it."""
    if compare_exchange(port + 8 * PORT_LOCK, 0, 1) == 0:
        return 0
    found = _poll_held(port)
    unlock(port + 8 * PORT_LOCK)
    return found


@compiled(i64(i64))
def _arm(port: int) -> int:
    """Invariant 3: have the next completion raise an event, and take what came before."""
    lock(port + 8 * PORT_LOCK)
    cq = load_acquire(port + 8 * PORT_CQ)
    if cq != 0 and load_acquire(port + 8 * PORT_ARMED) == 0:
        store_release(port + 8 * PORT_ARMED, 1)
        call(load_acquire(port + 8 * PORT_REQ_NOTIFY), cq, 0, 0, 0)
    found = _poll_held(port)
    unlock(port + 8 * PORT_LOCK)
    return found


@compiled(i64(i64))
def asleep(port: int) -> int:
    """The caller, counted in its record, is about to look at it for the last time and sleep. ``port``: or 0."""
    if port == 0:
        return 0
    fetch_add(port + 8 * PORT_SLEEPERS, 1)
    _arm(port)
    return 0


@compiled(i64(i64))
def awake(port: int) -> int:
    if port != 0:
        fetch_add(port + 8 * PORT_SLEEPERS, -1)
    return 0


@compiled(i64(i64))
def shut(port: int) -> int:
    """The completion queue is about to be destroyed: nobody polls it any more after the return."""
    lock(port + 8 * PORT_LOCK)
    store_release(port + 8 * PORT_CQ, 0)
    unlock(port + 8 * PORT_LOCK)
    return 0


@compiled(i64(i64, i64))
def post(lane: int, chain: int) -> int:
    """Post a chain: what ``LANE_COMPLETED`` will reach when it is done (> 0), or ``CLOSED``, ``FULL``, ``REVOKED``,
    ``REFUSED``."""
    count = load_acquire(chain + 8 * CHAIN_COUNT)
    if count == 0:
        return REVOKED
    lock(lane + 8 * LANE_LOCK)
    posted = load_acquire(lane + 8 * LANE_POSTED) + count
    result = posted
    if load_acquire(lane + 8 * LANE_CLOSED) != OPEN:
        result = CLOSED
    elif load_acquire(chain + 8 * CHAIN_COUNT) == 0:
        result = REVOKED
    elif posted - load_acquire(lane + 8 * LANE_REACHED) > load_acquire(lane + 8 * LANE_DEPTH):
        result = FULL
    else:
        store_release(load_acquire(chain + 8 * CHAIN_LAST) + at.SEND_WR_WR_ID, posted)
        qp, first = load_acquire(lane + 8 * LANE_QP), load_acquire(chain + 8 * CHAIN_FIRST)
        if call(load_acquire(lane + 8 * LANE_POST_SEND), qp, first, lane + 8 * LANE_BAD_WR, 0) != 0:
            # Some of it may be posted, so nothing can be told of this lane any more.
            store_release(lane + 8 * LANE_CLOSED, SHUT)
            result = REFUSED
        else:
            store_release(lane + 8 * LANE_POSTED, posted)
            fetch_add(lane + 8 * LANE_POSTS, 1)
            fetch_add(lane + 8 * LANE_BYTES, load_acquire(chain + 8 * CHAIN_BYTES))
    unlock(lane + 8 * LANE_LOCK)
    return result


@compiled(i64(i64, i64, i64, i64, i64, i64))
def put(lane: int, chain: int, local: int, remote: int, nbytes: int, inline: int) -> int:
    """As ``post``, for a chain of one request whose range is given now (``nbytes`` > 0). ``inline``: up to so many bytes are
    taken along by the post itself. The caller serialises the use of the chain."""
    request = load_acquire(chain + 8 * CHAIN_FIRST)
    element = load_acquire(request + at.SEND_WR_SG_LIST)
    store_release(element + at.SGE_ADDR, local)
    set_u32(element + at.SGE_LENGTH, nbytes)
    store_release(request + at.SEND_WR_REMOTE_ADDR, remote)
    set_u32(request + at.SEND_WR_SEND_FLAGS, at.SEND_SIGNALED | (at.SEND_INLINE if nbytes <= inline else 0))
    store_release(chain + 8 * CHAIN_BYTES, nbytes)
    return post(lane, chain)


@compiled(i64(i64, i64))
def revoke(lane: int, chain: int) -> int:
    """Refuse later posts of a chain. Returns the value of ``LANE_COMPLETED`` at which its earlier posts are done."""
    lock(lane + 8 * LANE_LOCK)
    store_release(chain + 8 * CHAIN_COUNT, 0)
    posted = load_acquire(lane + 8 * LANE_POSTED)
    unlock(lane + 8 * LANE_LOCK)
    return posted


@compiled(i64(i64))
def _take_events(port: int) -> int:
    """Read and acknowledge what the completion channel (non-blocking) has to say. By libibverbs' own function: providers count
    their arming in it."""
    getting, channel = load_acquire(port + 8 * PORT_GET_EVENT), load_acquire(port + 8 * PORT_CHANNEL)
    while call(getting, channel, port + 8 * PORT_SCRATCH, port + 8 * PORT_SCRATCH_2, 0) == 0:
        call(load_acquire(port + 8 * PORT_ACK_EVENTS), load_acquire(port + 8 * PORT_SCRATCH), 1, 0, 0)
    return 0


@compiled(i64(i64, i64))
def serve(port: int, limit_ns: int) -> int:
    """The device's thread: sleep until the armed queue has news, an asynchronous event came, or it is woken, and take it.
    Returns when there is something for Python to do, or after ``limit_ns``. ``PORT_FDS``: three ``struct pollfd`` (completion
    channel, the device's asynchronous events, wake-up)."""
    fds = load_acquire(port + 8 * PORT_FDS)
    start = now()
    failed = load_acquire(port + 8 * PORT_FAILED)
    while load_acquire(port + 8 * PORT_STOP) == 0:
        left = limit_ns - (now() - start)
        if left <= 0:
            return 0
        if _poll_fds(fds, 3, left // 1_000_000 + 1) <= 0:
            continue
        if load_acquire(fds) >> 48 != 0:
            _take_events(port)
            lock(port + 8 * PORT_LOCK)
            store_release(port + 8 * PORT_ARMED, 0)
            _poll_held(port)
            unlock(port + 8 * PORT_LOCK)
            if load_acquire(port + 8 * PORT_SLEEPERS) > 0:
                _arm(port)
        if load_acquire(fds + 8) >> 48 != 0 or load_acquire(fds + 16) >> 48 != 0:
            return 1
        if load_acquire(port + 8 * PORT_FAILED) != failed:
            return 1
    return 1
