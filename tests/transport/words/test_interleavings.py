"""Every order in which a few threads can do what kernels do (``interleavings``): the invariants of ``words/kernels``."""

from __future__ import annotations

import pytest
from interleavings import LONG, Explorer, Violation, Words, no_fence

from rdmarpc.transport.words.atomics import fence, fetch_add, load_acquire, memcpy, store_release, stream
from rdmarpc.transport.words.kernels import OK, copy_past_caches, post, quiesce, store, wait_any, wait_count
from rdmarpc.transport.words.signals import signal


def outcomes(one, other, words):
    """What two threads can see together."""
    found = set()
    Explorer(words, {"one": one, "other": other}).run(lambda word, results: found.add(tuple(results)))
    return found


def test_the_order_is_that_of_the_litmus_tests():
    words = Words()
    x, y, copy = words.shared(0), words.shared(0), words.constant(1)

    def store_then_load():
        store_release(x, 1)
        return load_acquire(y)

    def fenced():
        store_release(y, 1)
        fence()
        return load_acquire(x)

    def unfenced():
        store_release(y, 1)
        return load_acquire(x)

    def added():
        fetch_add(x, 1)
        return load_acquire(y)

    def message():
        memcpy(x, copy, 8)
        store_release(y, 1)
        return 0

    def two_copies():
        memcpy(x, copy, 8)
        memcpy(y, copy, 8)
        return 0

    def streamed():
        stream(x, copy)
        store_release(y, 1)
        return 0

    def reader():
        second = load_acquire(y)
        return 2 * second + load_acquire(x)

    def load_then_store():
        seen = load_acquire(x)
        store_release(y, 1)
        return seen

    def other_way():
        seen = load_acquire(y)
        store_release(x, 1)
        return seen

    every = {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert outcomes(store_then_load, unfenced, words) == every  # store buffering
    assert outcomes(store_then_load, fenced, words) == every  # both need it
    assert outcomes(added, fenced, words) == every - {(0, 0)}
    assert outcomes(load_then_store, other_way, words) == every - {(1, 1)}  # load buffering
    assert {seen for _, seen in outcomes(message, reader, words)} == {0, 1, 3}  # message passing
    assert {seen for _, seen in outcomes(two_copies, reader, words)} == {0, 1, 2, 3}
    assert {seen for _, seen in outcomes(streamed, reader, words)} == {0, 1, 2, 3}


def notified(senders, times, **constants):
    """Senders that write and count, a receiver that sleeps until all has come."""
    words, total = Words(), senders * times
    record, budget, values = words.shared(0, 0), words.own(0), words.constant(*range(1, times + 1))
    data = [words.shared(0) for _ in range(senders)]
    first, last = data[0], data[-1]

    def receiver():
        while wait_count(record, total, budget, LONG, 0) != OK:
            pass
        assert load_acquire(first) == times, "the data is not here"
        assert load_acquire(last) == times, "the data is not here"

    def sender_to(target):
        def sender():
            for number in range(times):
                memcpy(target, values + 8 * number, 8)
                signal(record, 0)

        return sender

    threads = {f"sender {number}": sender_to(target) for number, target in enumerate(data)}
    return Explorer(words, {"receiver": receiver, **threads}, **constants)


@pytest.mark.parametrize(("senders", "times"), [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_data_is_seen_before_its_count_and_no_wakeup_is_lost(senders, times):
    assert notified(senders, times).run() > 20


def belled(times, **constants):
    """A sender to each of two records with one bell; a receiver that takes from both."""
    words = Words()
    bells = words.shared(*[0] * 10)
    bell = bells + 64
    one, other = words.shared(0, 1 << 32), words.shared(0, 1 << 32)
    table = words.own(0, 0, one, 0, other, 0) + 16
    budget = words.own(0)

    def receiver():
        left = 2 * times
        while left > 0:
            found = wait_any(table, 2, bell, 0, 0, budget, LONG, 0)
            if found >= 0:
                left -= found & 0xFFFFFFFF
        assert left == 0, "one was taken twice"

    def sender_to(record):
        def sender():
            for _ in range(times):
                signal(record, bells)

        return sender

    return Explorer(words, {"receiver": receiver, "one": sender_to(one), "other": sender_to(other)}, **constants)


@pytest.mark.parametrize("times", [1, 2])
def test_one_bell_for_two_records(times):
    assert belled(times).run() > 20


def aborted(posts, by, **constants):
    """Posts that an end overtakes: the receiver's (``closed``), or the sender's own (``over``)."""
    words = Words()
    target, inflight, record, closed = words.shared(0), words.shared(0), words.shared(0, 0), words.shared(0)
    source, stats = words.constant(5), words.shared(0, 0, 0, 0)
    words.mark_own(stats, stats + 8, stats + 16)
    block = words.constant(1, record, 0, closed, inflight, stats, 8, target, source, 8)
    mark = closed if by == "the receiver" else stats + 24

    def sender():
        made = 0
        for _ in range(posts):
            if post(block) == OK:
                made += 1
        return made

    def end():
        store(mark, 1)
        while quiesce(inflight, LONG) != OK:
            pass
        counted = load_acquire(record)
        store_release(target, 7)
        return counted

    def check(word, results):
        made, counted = results
        assert word(target) == 7, "a copy came after the end"
        assert made == counted == word(record)

    return Explorer(words, {"sender": sender, "end": end}, **constants), check


@pytest.mark.parametrize("by", ["the receiver", "the sender"])
def test_nothing_is_copied_after_an_abort(by):
    explorer, check = aborted(2, by)
    assert explorer.run(check) > 20


def streamed(**constants):
    words = Words()
    record, budget, source, target = words.shared(0, 0), words.own(0), words.constant(1, 2), words.shared(0, 0)

    def sender():
        copy_past_caches(target, source, 16)
        signal(record, 0)

    def receiver():
        while wait_count(record, 1, budget, LONG, 0) != OK:
            pass
        assert load_acquire(target) == 1, "the data is not here"
        assert load_acquire(target + 8) == 2, "the data is not here"

    return Explorer(words, {"sender": sender, "receiver": receiver}, **constants)


def test_copies_past_the_caches_are_seen_before_their_count():
    assert streamed().run() > 20


def test_without_a_fence_that_is_found():
    explorer, check = aborted(1, "the receiver", fence=no_fence)
    with pytest.raises(Violation, match="a copy came after the end"):
        explorer.run(check)
    with pytest.raises(Violation, match="the data is not here"):
        streamed(fence=no_fence).run()
