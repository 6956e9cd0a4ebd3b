"""Every order in which an adapter, its device's thread and a waiter can go on around a completion queue (``interleavings``): no
completion is left while a thread sleeps for it (``words/completions``, 3). The adapter raises an event for what comes after the
queue was armed, and for nothing that came before: the least that InfiniBand promises."""

from __future__ import annotations

import pytest
from interleavings import LONG, Explorer, Violation, Words, no_fence

from rdmarpc.transport.words import completions as of
from rdmarpc.transport.words import layout
from rdmarpc.transport.words.atomics import compare_exchange, fetch_add, futex_wait, futex_wake, load_acquire, store_release
from rdmarpc.transport.words.completions import end_lane, serve
from rdmarpc.transport.words.kernels import OK, wait_count

POLL, NOTIFY, GET_EVENT, ACKNOWLEDGE = range(1, 5)
READABLE = 1 << 48


def completed(opcode, **constants):
    """A completion of one WRITE, of the peer's (it notifies) or of this process's own."""
    words = Words()
    data, record, budget, taken = words.shared(0), words.shared(0, 0), words.own(0), words.own(0)
    arrived, read, armed, events, stop = (words.shared(0) for _ in range(5))
    lane, table, fds = words.constant(*[record] * of.LANE_WORDS), words.constant(0, 0), words.own(0, 0, 0)
    completion = words.constant(*[1] * (layout.WC_BYTES // 8))
    words.mark_own(lane + 8 * of.LANE_SEEN, lane + 8 * of.LANE_REACHED)
    words.values |= {table: 1, table + 8: lane}
    if opcode != layout.WC_RECV:
        record = lane + 8 * of.LANE_COMPLETED
        words.values |= {record: 0, record + 8: 0}
        words.kinds |= {record: "shared", record + 8: "shared"}
    port = words.shared(*[0] * of.PORT_WORDS)
    given = {
        "CQ": 1, "POLL_CQ": POLL, "REQ_NOTIFY": NOTIFY, "GET_EVENT": GET_EVENT, "ACK_EVENTS": ACKNOWLEDGE, "RECV_COUNT": 1000,
        "TABLE": table, "FDS": fds, "BELLS": 0, "TABLE_MASK": 0, "WC": completion, "CHANNEL": 0,
    }  # fmt: skip
    for name, value in given.items():
        address = port + 8 * getattr(of, f"PORT_{name}")
        words.values[address], words.kinds[address] = value, "constant"
    words.mark_own(*[port + 8 * each for each in (of.PORT_RECV_USED, of.PORT_FAILED, of.PORT_SCRATCH, of.PORT_SCRATCH_2)])

    def call(function, a, b, c, d):
        result = 0
        if function == POLL:
            until, begin = load_acquire(arrived), load_acquire(read)
            store_release(read, until)
            result = until - begin
        elif function == NOTIFY:
            compare_exchange(armed, 0, 1)
        elif function == GET_EVENT:
            result = 1
            if load_acquire(events) > load_acquire(taken):
                fetch_add(taken, 1)
                result = 0
        return result

    def poll_fds(fds, count, limit):
        while load_acquire(events) == load_acquire(taken) and load_acquire(stop) == 0:
            futex_wait(events, load_acquire(taken), LONG)
        store_release(fds, READABLE if load_acquire(events) > load_acquire(taken) else 0)
        store_release(fds + 8, READABLE if load_acquire(stop) != 0 else 0)
        return 1

    def u32(address):
        return {layout.WC_QP_NUM: 1, layout.WC_STATUS: layout.WC_SUCCESS, layout.WC_OPCODE: opcode}[address - completion]

    def be32(address):
        return 0

    def adapter():
        store_release(data, 1)
        fetch_add(arrived, 1)
        if compare_exchange(armed, 1, 0) == 1:
            fetch_add(events, 1)
            futex_wake(events)

    def device():
        serve(port, LONG)

    def waiter():
        while wait_count(record, 1, budget, LONG, port) != OK:
            pass
        assert load_acquire(data) == 1, "the data is not here"
        store_release(stop, 1)
        fetch_add(events, 1)
        futex_wake(events)

    own = {"call": call, "_poll_fds": poll_fds, "u32": u32, "be32": be32, **constants}
    return Explorer(words, {"adapter": adapter, "device": device, "waiter": waiter}, **own)


@pytest.mark.parametrize("opcode", [layout.WC_RECV, 0])
def test_no_completion_is_left_while_a_thread_sleeps_for_it(opcode):
    completed(opcode).run()


def ended(**constants):
    """A lane ends while a thread waits for what it has posted."""
    words = Words()
    lane, budget = words.shared(*[0] * of.LANE_WORDS), words.own(0)
    record = lane + 8 * of.LANE_COMPLETED

    def end():
        end_lane(lane)

    def waiter():
        while wait_count(record, 1, budget, LONG, 0) != OK:
            pass

    return Explorer(words, {"end": end, "waiter": waiter}, **constants)


def test_no_thread_sleeps_on_a_lane_that_has_ended():
    ended().run()


def test_without_a_fence_that_is_found():
    with pytest.raises(Violation, match="none goes on: waiter"):
        ended(fence=no_fence).run()


def unarmed(port):
    return 0


def test_without_arming_that_is_found():
    with pytest.raises(Violation, match=r"none goes on: device .*, waiter"):
        completed(layout.WC_RECV, _arm=unarmed).run()
