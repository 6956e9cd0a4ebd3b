"""How notifications lie in shared memory: a record for each number of a channel, and the bells that wake the waiters.

``kernels`` has the words of a record and of a bell.
"""

from __future__ import annotations

MAX_NOTIFY = 1 << 16
"""A notification is a number below this."""
RECORD_BYTES = 16
BELLS = 64
"""The number of bells of a process. Number 0 is no bell: its cache line holds the heartbeat."""
BELL_BYTES = 64
