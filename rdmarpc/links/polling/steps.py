"""The words of the polling role (``progress``), and the compiled steps by which it changes hands.

The *token* is one word: 0 when nobody polls, else ``8 * thread + state``:

    0 POLLING   a pool thread looks or sleeps          a waiter may take the role away
    1 HOLDING   it took something and reads it         nobody may
    2 RUNNING   it runs a user function, or lingers    anybody who needs progress may
    4 POLLING   a waiter looks or sleeps               nobody may
    5 HOLDING   a waiter took something and reads it   nobody may

Invariant: the poller's bell counts one sleeper on behalf of the free token exactly while the token is 0. So a message that
arrives when nobody polls rings the bell, and wakes a thread that stands by; one that arrives while somebody polls costs the
sender no system call. ``let_go`` looks at the records after it counted, so nothing is lost in between (invariant 2 of
``transport.words.kernels``).

The words, each in a cache line of its own. Their order is that of ``transport.words.atomics``:

    token    Owner: the thread that it names. It changes hands by ``compare_exchange`` alone; the owner may store plainly
             (release) while no other thread may take it. A taker's exchange acquires what the owner did before it let go.
    jobs     Counts announcements. Raised after the job is queued; a thread that sleeps on it read it before it looked at the
             queue.
    events   The same for waiters: raised after what they wait for is done.
    runs     Raised by a thread that starts a function or lingers. Only the watchdog reads it.
    backlog  Owner: the watchdog, which clears it. Set by a thread that leaves jobs to another one that is at work.
    asleep   Owner: the watchdog, which sets it, fences, and then loads ``runs`` and ``backlog``. A thread that changed one of
             these loads ``asleep`` afterwards, behind the ``fetch_add``, or a ``fence`` after the store: so one of the two sees
             the other. Either clears it.
    bell     The poller's bell. ``sleepers`` is raised after the token was freed; then all records are looked at. A sender
             counts its record, then loads ``sleepers``.
"""

from __future__ import annotations

import numpy as np

from ...transport import (
    Poller,
    compare_exchange,
    compiled,
    fence,
    fetch_add,
    futex_wait,
    futex_wake,
    futex_wake_one,
    i64,
    kernels,
    load_acquire,
    now,
    pause,
    sched_yield,
    store_release,
)

POLLING, HOLDING, RUNNING, WAITER = 0, 1, 2, 4
_LINE = 64  # bytes of a cache line


class Words:
    """The addresses of one role's words. Owns their memory, but for the poller's."""

    def __init__(self, poller: Poller) -> None:
        self._memory = np.zeros(7 * _LINE // 8, np.int64)
        base = -(-self._memory.ctypes.data // _LINE) * _LINE
        self.token, self.jobs, self.events, self.runs, self.asleep, self.backlog = (base + _LINE * at for at in range(6))
        self.bell, self.table, self.port = poller.bell_address, poller.address, poller.port
        kernels.add(self.bell + 8, 1)  # the free token counts as a sleeper


@compiled(i64(i64))
def event(word: int) -> int:
    """Something has happened that threads wait for which sleep on this word: wake all of them."""
    fetch_add(word, 1)
    futex_wake(word)
    return 0


@compiled(i64(i64))
def rouse(asleep: int) -> int:
    """Wake the watchdog if it sleeps."""
    if load_acquire(asleep) == 1:
        store_release(asleep, 0)
        futex_wake(asleep)
    return 1


@compiled(i64(i64, i64, i64))
def take(token: int, mine: int, bell: int) -> int:
    """Try to become the poller (``mine``: the token's new value). 1 if it worked."""
    held = load_acquire(token)
    if held == 0:
        if compare_exchange(token, 0, mine) == 0:
            return 0
        fetch_add(bell + 8, -1)
        return 1
    state = held & 7
    if (mine & WAITER) != 0 and (state == POLLING or state == RUNNING):
        return compare_exchange(token, held, mine)
    return 0


@compiled(i64(i64, i64, i64, i64, i64))
def let_go(token: int, mine: int, bell: int, table: int, rows: int) -> int:
    """Free the token if it still is ``mine``: 1 if it was."""
    if compare_exchange(token, mine, 0) == 0:
        return 0
    fetch_add(bell + 8, 1)
    for row in range(rows):
        at = table + 16 * row
        if load_acquire(load_acquire(at)) > load_acquire(at + 8):
            event(bell)
            break
    return 1


@compiled(i64(i64, i64, i64, i64, i64))
def stand_by(token: int, bell: int, jobs: int, seen: int, limit_ns: int) -> int:
    """Sleep until the token is free or the word ``jobs`` differs from ``seen``, or ``limit_ns`` have passed. For one thread:
    every message that finds the token free wakes all threads that stand by. The other threads wait in ``spare``."""
    start = now()
    while load_acquire(token) != 0 and load_acquire(jobs) == seen:
        rings = load_acquire(bell)
        if load_acquire(token) == 0 or load_acquire(jobs) != seen:
            break  # the caller tries to ``take`` the token next, and looks at the records then
        left = limit_ns - (now() - start)
        if left <= 0:
            break
        futex_wait(bell, rings, left)
    return 0


@compiled(i64(i64, i64, i64))
def spare(jobs: int, seen: int, limit_ns: int) -> int:
    """Sleep until the word ``jobs`` differs from ``seen`` (one is woken for each ``call_one``), or ``limit_ns`` have passed."""
    if load_acquire(jobs) == seen:
        futex_wait(jobs, seen, limit_ns)
    return 0


@compiled(i64(i64, i64))
def call_out(jobs: int, bell: int) -> int:
    """Announce a job to all threads that stand by."""
    event(jobs)
    return event(bell)


@compiled(i64(i64, i64))
def call_one(jobs: int, bell: int) -> int:
    """As ``call_out``, but wake one thread. Only the poller may call it: only threads that stand by sleep on the bell then."""
    fetch_add(jobs, 1)
    if futex_wake_one(jobs) == 0:
        fetch_add(bell, 1)
        futex_wake_one(bell)
    return 0


@compiled(i64(i64, i64))
def leave_to_watchdog(backlog: int, asleep: int) -> int:
    """Jobs wait for a thread that is at work: have the watchdog call another if that one takes none within a tick."""
    store_release(backlog, 1)
    fence()
    return rouse(asleep)


@compiled(i64(i64, i64, i64, i64, i64))
def follow(token: int, events: int, seen: int, spin_ns: int, limit_ns: int) -> int:
    """Wait until the polling role can be taken by a waiter, or ``events`` differs from ``seen``."""
    start = now()
    while True:
        if load_acquire(events) != seen:
            return 1
        held = load_acquire(token)
        state = held & 7
        if held == 0 or state == POLLING or state == RUNNING:
            return 1
        if now() - start > spin_ns:
            futex_wait(events, seen, limit_ns)
            return 0
        pause()
        sched_yield()


@compiled(i64(i64, i64, i64, i64, i64, i64, i64))
def watch(token: int, runs: int, asleep: int, backlog: int, bell: int, tick_ns: int, idle_ticks: int) -> int:
    """The watchdog: take the role from a pool thread whose user function has run for more than a tick, and see to it that
    jobs left to a busy thread (``backlog``) do not wait for longer than that.

    A tick begins at ``tick_ns`` after every intervention and grows to four times that while none is needed; to sixteen times
    while it takes much longer than asked for: then many share this core, a thread that made no progress had no turn, and the
    ticks themselves would cost the others theirs.

    Sleeps while no thread runs a function: ``asleep`` is 1 then, and a thread that starts a run wakes it. Returns 1 after it
    freed a token, 2 when jobs wait, 0 every second or so.
    """
    quiet = 0
    tick = tick_ns
    last = load_acquire(runs)
    start = now()
    before = start
    while before - start < 1_000_000_000:
        if quiet >= idle_ticks:
            store_release(asleep, 1)
            fence()
            if load_acquire(runs) == last and load_acquire(backlog) == 0:
                futex_wait(asleep, 1, 1_000_000_000)
            store_release(asleep, 0)
            if load_acquire(runs) == last and load_acquire(backlog) == 0:
                return 0
            quiet = 0
            before = now()
        # A wait on a word nobody changes: a sleep that needs no further symbol.
        futex_wait(asleep, 0, tick)
        after = now()
        current = load_acquire(runs)
        tick = min(2 * tick, (16 if after - before > 2 * tick else 4) * tick_ns)
        before = after
        held = load_acquire(token)
        if (held & 7) == RUNNING and current == last and compare_exchange(token, held, 0) == 1:
            fetch_add(bell + 8, 1)
            event(bell)
            return 1
        if current == last and load_acquire(backlog) != 0:
            store_release(backlog, 0)
            return 2
        quiet = quiet + 1 if current == last else 0
        last = current
    return 0


@compiled(i64(i64, i64))
def show(runs: int, asleep: int) -> int:
    """Let the watchdog see that the holder of the role is at work; wake it if it sleeps."""
    fetch_add(runs, 1)
    return rouse(asleep)


@compiled(i64(i64, i64, i64, i64, i64))
def start_run(token: int, mine: int, running: int, runs: int, asleep: int) -> int:
    """HOLDING -> RUNNING. Wakes the watchdog if it sleeps. 0 if the role was lost."""
    if compare_exchange(token, mine, running) == 0:
        return 0
    return show(runs, asleep)


@compiled(i64(i64, i64, i64, i64, i64))
def linger(token: int, running: int, bell: int, runs: int, asleep: int) -> int:
    """Take the role in state RUNNING unless somebody is busy with it. 1 if we have it."""
    held = load_acquire(token)
    if held != running:
        if held == 0:
            if compare_exchange(token, 0, running) == 0:
                return 0
            fetch_add(bell + 8, -1)
        elif (held & 7) == POLLING:
            if compare_exchange(token, held, running) == 0:
                return 0
        else:
            return 0
    return show(runs, asleep)
