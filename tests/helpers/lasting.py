"""What may be left behind: processes that a fixture of wider scope than a test keeps, and shared memory of other programs."""

import os
from pathlib import Path

lasting: set[int] = set()


def ownerless(before: set[str]) -> set[str]:
    """What is new in /dev/shm and that no process has: other programs, and tests that run beside, may have something there."""
    new = {name for name in set(os.listdir("/dev/shm")) - before if not name.startswith("sem.")}  # those are never ours
    for process in Path("/proc").glob("[0-9]*") if new else ():
        try:
            used = (process / "maps").read_text() + " ".join(str(file.readlink()) for file in (process / "fd").iterdir())
        except OSError:  # it has ended, or is not ours
            continue
        new = {name for name in new if f"/dev/shm/{name}" not in used}
    return new
