"""Every order in which a few threads can do what the polling role asks of them (``interleavings``): each message is read once,
and no thread sleeps while there is one that nobody reads. The threads do what ``Pool`` and ``Progress`` do around the steps."""

from __future__ import annotations

import pytest
from interleavings import LONG, Explorer, Violation, Words, no_fence

from rdmarpc.links.polling.steps import (
    HOLDING,
    RUNNING,
    WAITER,
    event,
    follow,
    leave_to_watchdog,
    let_go,
    linger,
    show,
    stand_by,
    take,
    watch,
)
from rdmarpc.transport.words.atomics import compare_exchange, fetch_add, futex_wait, load_acquire
from rdmarpc.transport.words.kernels import CHANGED, store, untake, wait_any
from rdmarpc.transport.words.signals import signal


class Role:
    """The words of a role, of one row, and what the threads of a case have in common."""

    def __init__(self, messages):
        self.words = words = Words()
        self.bells = words.shared(*[0] * 10)
        self.bell = self.bells + 64
        words.values[self.bell + 8] = 1  # the free token counts as a sleeper
        words.mark_own(*range(self.bells, self.bell, 8))
        self.token, self.jobs, self.events = words.shared(0), words.shared(0), words.shared(0)
        self.followers, self.got = words.shared(0), words.shared(0)
        self.record = words.shared(0, 1 << 32)
        self.table = words.shared(0, 0, self.record, 0) + 16
        words.mark_own(self.table - 16)
        words.kinds[self.table] = "constant"
        self.budget = words.own(0)
        self.messages = messages

    def sender(self):
        record, bells, messages = self.record, self.bells, self.messages

        def run():
            for _ in range(messages):
                signal(record, bells)

        return run

    def interrupted(self, number):
        """A waiter in which another thread has raised an exception as its wait was over: it gives back what it took."""
        token, bell, table, budget, got = self.token, self.bell, self.table, self.budget, self.got
        followers, events, messages, mine = self.followers, self.events, self.messages, 8 * number + WAITER

        def run():
            if take(token, mine, bell) == 1:
                if load_acquire(got) < messages:
                    wait_any(table, 1, bell, token, mine, budget, LONG, 0)
                untake(table, token, mine)
                let_go(token, mine, bell, table, 1)
                if load_acquire(followers) > 0:
                    event(events)

        return run

    def over(self):
        """What ``Pool.stop`` does, so that threads that stand by end."""
        jobs, bell, events = self.jobs, self.bell, self.events

        def run():
            event(jobs)
            event(bell)
            event(events)

        return run

    def pool_thread(self, number):
        token, bell, table, jobs, got, budget = self.token, self.bell, self.table, self.jobs, self.got, self.budget
        followers, events, messages, over, mine = self.followers, self.events, self.messages, self.over(), 8 * number

        def poll():
            while load_acquire(got) < messages:
                found = wait_any(table, 1, bell, token, mine, budget, LONG, 0)
                if found == CHANGED:
                    break
                if found >= 0:
                    fetch_add(got, found & 0xFFFFFFFF)
                    if load_acquire(followers) > 0:
                        event(events)
                    store(token, mine)
            if load_acquire(token) == mine:
                let_go(token, mine, bell, table, 1)

        def run():
            while load_acquire(got) < messages:
                seen = load_acquire(jobs)
                if take(token, mine, bell) == 1:
                    poll()
                else:
                    stand_by(token, bell, jobs, seen, LONG)
            over()

        return run

    def waiter(self, number):
        """A call's own thread, which waits until all messages have been read, by itself or others."""
        token, bell, table, got, budget, events = self.token, self.bell, self.table, self.got, self.budget, self.events
        followers, enough, over, mine = self.followers, self.messages, self.over(), 8 * number + WAITER

        def drive():
            while load_acquire(got) < enough:
                found = wait_any(table, 1, bell, token, mine, budget, LONG, 0)
                if found == CHANGED:
                    return mine
                if found >= 0:
                    fetch_add(got, found & 0xFFFFFFFF)
                    if load_acquire(got) >= enough:
                        return mine + HOLDING
                    store(token, mine)
            return mine

        def run():
            while load_acquire(got) < enough:
                if take(token, mine, bell) == 1:
                    held = drive()
                    let_go(token, held, bell, table, 1)
                    if load_acquire(followers) > 0:
                        event(events)
                else:
                    seen = load_acquire(events)
                    fetch_add(followers, 1)
                    if load_acquire(got) < enough:
                        follow(token, events, seen, -1, LONG)
                    fetch_add(followers, -1)
            over()

        return run


def all_are_read(role):
    def check(word, results):
        assert word(role.got) == role.messages == word(role.record)
        assert word(role.token) == 0
        assert word(role.bell + 8) == 1, "the free token counts as one sleeper"

    return check


def explored(messages, *others, **constants):
    """A sender, and threads that read. (Of two messages there are some 300,000 states: that took a minute, and held.)"""
    role = Role(messages)
    threads = {"sender": role.sender(), **{f"{of} {number}": getattr(role, of)(number) for number, of in enumerate(others, 1)}}
    return Explorer(role.words, threads, **constants).run(all_are_read(role))


@pytest.mark.parametrize("others", [("pool_thread", "pool_thread"), ("pool_thread", "waiter"), ("waiter", "waiter")])
def test_every_message_is_read_whoever_has_the_role(others):
    assert explored(1, *others) > 10_000


def forgotten(token, mine, bell, table, rows):
    """``let_go`` without its look at the records."""
    return compare_exchange(token, mine, 0)


def test_a_role_that_is_freed_unseen_is_found():
    with pytest.raises(Violation):
        explored(1, "waiter", "waiter", let_go=forgotten)


@pytest.mark.parametrize("other", ["pool_thread", "waiter"])
def test_what_an_interrupted_waiter_took_is_read_by_another(other):
    assert explored(1, "interrupted", other) > 1_000


def kept(table, word, expected):
    """``untake`` that gives nothing back."""
    return 0


def test_what_is_kept_by_an_interrupted_waiter_is_found():
    with pytest.raises(Violation):
        explored(1, "interrupted", "waiter", untake=kept)


def watched(**constants):
    """A watchdog, and a thread that starts a function, or leaves jobs to a busy thread."""
    words = Words()
    token, runs, asleep, backlog, bell = (words.shared(*values) for values in ((0,), (0,), (0,), (0,), (0, 1)))
    words.kinds[token] = "constant"

    def watchdog():
        called = 0
        while load_acquire(runs) == 0 or called == 0:
            if watch(token, runs, asleep, backlog, bell, 1, 1) == 2:
                called = 1

    def thread():
        show(runs, asleep)
        leave_to_watchdog(backlog, asleep)

    return Explorer(words, {"watchdog": watchdog, "thread": thread}, **constants)


def test_the_watchdog_hears_of_a_function_and_of_jobs():
    watched().run()


def beside_a_watchdog(role, busy, runs, asleep, woken):
    """A thread that is ``busy`` with the role, another one of the pool, and the watchdog, until the message has been read."""
    token, bell, got, read, backlog = role.token, role.bell, role.got, role.pool_thread(2), role.words.shared(0)

    def other():
        read()
        event(woken)
        leave_to_watchdog(backlog, asleep)

    def watchdog():
        while load_acquire(got) < 1:
            watch(token, runs, asleep, backlog, bell, 1, 1)

    return Explorer(role.words, {"busy": busy, "other": other, "watchdog": watchdog}).run(all_are_read(role))


def test_a_message_is_read_while_a_thread_lingers_and_stays_away():
    role = Role(1)
    token, bell, record, bells = role.token, role.bell, role.record, role.bells
    runs, asleep, woken = (role.words.shared(0) for _ in range(3))

    def away():
        linger(token, 8 + RUNNING, bell, runs, asleep)
        signal(record, bells)

    beside_a_watchdog(role, away, runs, asleep, woken)


def test_without_a_fence_that_is_found():
    with pytest.raises(Violation, match="none goes on: watchdog"):
        watched(fence=no_fence).run()


def test_the_watchdog_takes_the_role_from_a_function_that_blocks():
    """A thread of the pool runs a function that waits for what a message brings which nobody has read."""
    role, running = Role(1), 8 + RUNNING
    token, bell, table = role.token, role.bell, role.table
    runs, asleep, woken = (role.words.shared(0) for _ in range(3))
    role.words.values |= {token: running, bell + 8: 0, role.record: 1}

    def function():
        show(runs, asleep)
        while load_acquire(woken) == 0:
            futex_wait(woken, 0, LONG)
        if compare_exchange(token, running, 8 + HOLDING) == 1:
            store(token, 8)
            let_go(token, 8, bell, table, 1)

    beside_a_watchdog(role, function, runs, asleep, woken)
