"""Keeps ``torch.compile`` out of the code of the backend.

The groups of torch are C++, which it does not trace. Ours are Python: it would trace their methods, and end with an internal
error at the first attribute of a group. What it makes of a call to a group stays as it is: a graph, or a break between two."""

from __future__ import annotations

import sys
from types import ModuleType

from ..ground.imports import AfterImport

_RULES = "torch._dynamo.trace_rules"
_OURS = ("rdmarpc.collectives", "rdmarpc.ranks", "rdmarpc.transport")


def _leave_out(rules: ModuleType) -> None:
    for package in _OURS:
        rules.add(package)
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


_finder = AfterImport(_RULES, _leave_out)
_done: list[str] = []


def leave_out() -> None:
    """Once a process; a second time does nothing. Later, if torch's compiler is not imported yet."""
    if _done:
        return
    _done.append(_RULES)
    rules = sys.modules.get(_RULES)
    if rules is not None:
        _leave_out(rules)
    else:
        sys.meta_path.insert(0, _finder)
