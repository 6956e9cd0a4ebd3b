"""How notifications lie in shared memory: a record for each number of a channel, and the bells that wake the waiters; and the
last step of every sender's and every receiver's kernel: to count one, and to wake. ``kernels`` has the words and their
invariants."""

from __future__ import annotations

from .atomics import fetch_add, futex_wake, load_acquire
from .compiled import compiled
from .symbols import i64

MAX_NOTIFY = 1 << 16
"""A notification is a number below this."""
RECORD_BYTES = 16
BELLS = 64
"""The number of bells of a process. Number 0 is no bell: its cache line holds the heartbeat."""
BELL_BYTES = 64
ENDED = 1 << 62 | 1 << 31
"""A count beyond all others: set, or added, at the end of what is counted, so that every wait returns. A futex compares the low
half: were that the same as before, a thread that has just looked would sleep."""


@compiled(i64(i64))
def ring_bell(bell: int) -> int:
    """Wake all threads that sleep on this bell. Makes no system call if none does. The caller has changed what they look at, by
    a ``fetch_add`` at the last."""
    if load_acquire(bell + 8) > 0:
        fetch_add(bell, 1)
        futex_wake(bell)
    return 0


@compiled(i64(i64, i64))
def signal(record: int, bells: int) -> int:
    """Count one notification and wake the threads that sleep for it."""
    fetch_add(record, 1)
    word = load_acquire(record + 8)
    bell = word >> 32
    if bell > 0:
        ring_bell(bells + bell * 64)
    elif word > 0:
        futex_wake(record)
    return 0
