"""What a step of a wrapped model does at its caller, in Python instructions by part.

Times of single parts mean nothing on a busy machine, and little on an idle one: each is some microseconds. The number of
instructions that Python executes is the same in every run, but for looks of a poller. An instruction takes some 20 ns on a
core of 3 GHz; what torch and the kernels do behind one is not in the count.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

PARTS = {
    "guards, arguments, plan": (
        *("graph/guards/", "rdmarpc/wrapped/", "rdmarpc/fetched/", "parts/seeds", "trace/watch", "trace/values"),
    ),
    "optimizer": ("wrapped/optimizer", "torch/optim/"),
    "zeroing": ("parts/parameter", "parts/remote_", "caller/zeroing", "Optimizer.zero_grad"),
    "autograd functions": ("caller/stage", "torch/autograd/", "torch/_functorch/"),
    "schedule": ("caller/caller", "caller/exchange", "caller/ledger", "caller/control"),
    "posts": ("outlets/outlet", "transport/shm/", "transport/tcp/", "transport/verbs/", "transport/region", "wire/layout"),
    "waits and credits": ("edges/station", "outlets/ports", "transport/notify", "wire/tail"),
    "landing": ("edges/slot", "wire/header"),
    "segments here": ("plan/program", "torch/nn/"),
}
"""By what stands in the path of a function's file, before its name; the longest that fits decides."""
REST = "the rest"


def count(step: Callable[[], object], steps: int) -> tuple[dict[str, float], Counter[str]]:
    """Instructions of a step, by part, the mean of so many; and all of them by function."""
    found: Counter[CodeType] = Counter()

    def entered(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return executed

    def executed(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            found[frame.f_code] += 1
        return executed

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        for _ in range(steps):
            step()
    finally:
        sys.settrace(before)
    parts: dict[str, float] = dict.fromkeys([*PARTS, REST], 0.0)
    functions: Counter[str] = Counter()
    for code, times in found.items():
        name = f"{code.co_filename}:{getattr(code, 'co_qualname', code.co_name)}"  # Python 3.10 has the last name only
        parts[part_of(name)] += times / steps
        functions[name] += times
    return parts, functions


def part_of(name: str) -> str:
    """The part of a function, by its file and name."""
    fits = [(len(text), part) for part, texts in PARTS.items() for text in texts if text in name]
    return max(fits)[1] if fits else REST
