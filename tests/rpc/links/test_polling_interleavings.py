"""Every order in which a few threads can do what the polling role asks of them (``interleavings``): each message is read once,
and no thread sleeps while there is one that nobody reads. The threads do what ``Pool`` and ``Progress`` do around the steps."""

from __future__ import annotations

import pytest
from interleavings import Explorer, Violation, Words

from rdmarpc.links.polling.steps import (
    HOLDING,
    RUNNING,
    WAITER,
    event,
    follow,
    leave_to_watchdog,
    let_go,
    show,
    stand_by,
    start_run,
    take,
    watch,
)
from rdmarpc.transport.words.atomics import compare_exchange, fetch_add, futex_wait, load_acquire, store_release
from rdmarpc.transport.words.kernels import CHANGED, store, wait_any
from rdmarpc.transport.words.signals import signal

LONG = 1 << 60


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
        words.kinds[self.table] = words.kinds[self.table - 8] = "constant"
        words.kinds[self.table - 8] = "shared"
        self.budget = words.own(0)
        self.messages = messages

    def sender(self):
        record, bells, messages = self.record, self.bells, self.messages

        def run():
            for _ in range(messages):
                signal(record, bells)

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
                    return 0
                if found >= 0:
                    fetch_add(got, found & 0xFFFFFFFF)
                    if load_acquire(followers) > 0:
                        event(events)
                    store(token, mine)
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

    def waiter(self, number, enough):
        """A call's own thread, which waits until ``enough`` messages have been read, by itself or others."""
        token, bell, table, got, budget, events = self.token, self.bell, self.table, self.got, self.budget, self.events
        followers, messages, over, mine = self.followers, self.messages, self.over(), 8 * number + WAITER

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
            if load_acquire(got) >= messages:
                over()

        return run


def all_are_read(role):
    def check(word, results):
        assert word(role.got) == role.messages == word(role.record)
        assert word(role.token) == 0
        assert word(role.bell + 8) == 1, "the free token counts as one sleeper"

    return check


@pytest.mark.parametrize("messages", [1, 2])
def test_threads_of_the_pool_read_every_message(messages):
    role = Role(messages)
    threads = {"sender": role.sender(), "first": role.pool_thread(1), "second": role.pool_thread(2)}
    print(Explorer(role.words, threads, _PAUSES=1).run(all_are_read(role)))


@pytest.mark.parametrize("messages", [1, 2])
def test_a_waiter_takes_the_role_away_and_gives_it_back(messages):
    role = Role(messages)
    threads = {"sender": role.sender(), "pool": role.pool_thread(1), "waiter": role.waiter(2, 1)}
    print(Explorer(role.words, threads, _PAUSES=1).run(all_are_read(role)))


def test_two_waiters():
    role = Role(1)
    threads = {"sender": role.sender(), "one": role.waiter(1, 1), "other": role.waiter(2, 1)}
    print(Explorer(role.words, threads, _PAUSES=1).run(all_are_read(role)))
