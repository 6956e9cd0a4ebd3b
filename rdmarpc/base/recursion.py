"""Python's recursion limit, near which a call could end in the midst of something.

``isinstance(None, ROOM)`` takes as much of it as to handle a message does, and some 0.1 us. So a thread that has less left
gets its ``RecursionError`` before it begins, and loses no message of others. (From Python 3.12 on C code has a limit of its
own, and this finds nothing.)
"""

from __future__ import annotations

from typing import Any

ROOM: Any = int
for _ in range(40):
    ROOM = (ROOM,)
