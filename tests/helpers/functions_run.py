"""How many Python functions of this package an operation runs, on all threads of a process.

``watch()`` before ``init_rpc``: a profile hook sees only threads that start after it. Counting costs time, so it is for steps
that are repeated, not for steps that are timed.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rdmarpc as rpc

_ROOMS = tuple(f"{Path(__file__).parents[2] / room}/" for room in ("rdmarpc", "graph", "transport"))
_ours: dict[Any, str] = {}
_counts: Counter[str] = Counter()


def _seen(frame: Any, event: str, _: Any) -> None:
    if event == "call":
        code = frame.f_code
        name = _ours.get(code)
        if name is None:
            path = code.co_filename
            name = _ours[code] = (
                f"{Path(path).parent.name}/{Path(path).stem}.{code.co_qualname}" if path.startswith(_ROOMS) else ""
            )
        if name:
            _counts[name] += 1


def watch() -> None:
    """Count on this thread, and on all that start from now on."""
    threading.setprofile(_seen)
    sys.setprofile(_seen)


def counts() -> dict[str, int]:
    """What has run in this process so far."""
    return dict(_counts)


def per_step(step: Callable[[], Any], callee: str, steps: int = 50) -> tuple[dict[str, float], dict[str, float]]:
    """What a step runs here, and at the worker ``callee``: the functions' names, and how often each runs. Warmed up before."""
    for _ in range(steps):
        step()
    found = []
    for repeated in (0, steps):  # less what asking costs
        theirs, ours = rpc.rpc_sync(callee, counts), counts()
        for _ in range(repeated):
            step()
        ours_after, theirs_after = counts(), rpc.rpc_sync(callee, counts)
        found.append([Counter(after) - Counter(before) for before, after in ((ours, ours_after), (theirs, theirs_after))])
    ours, theirs = ({name: count / steps for name, count in (more - less).items()} for less, more in zip(*found))
    return ours, theirs
