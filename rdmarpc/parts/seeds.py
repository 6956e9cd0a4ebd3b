"""``torch.manual_seed`` of a caller reaches the owners of its models, so that a run that was seeded repeats.

Every owner's generator starts with the caller's seed, as in a job whose processes all call ``torch.manual_seed``. So what only
one worker draws is what one process draws; workers that draw numbers side by side begin with the same ones. A seed that
is set at an owner holds until the caller sets another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..calls.agent import Agent

_told: weakref.WeakKeyDictionary[Agent, dict[str, Any]] = weakref.WeakKeyDictionary()
"""The seeding that each worker knows, by the worker that has told it."""


def seeding() -> tuple[Any, ...]:
    """An object that is another one after every ``torch.manual_seed``, also with the same seed.

    Torch keeps the latest seed for accelerators that it has not initialised yet, and of CUDA and XPU no process uses both. The
    generator alone does not tell: the same seed and as many draws give the same state again."""
    return tuple(getattr(getattr(m, "_lazy_seed_tracker", None), "manual_seed_all_cb", None) for m in (torch.cuda, torch.xpu))


class Seeds:
    """Of one model: ``tell(workers, seed)`` seeds the generators of these workers."""

    def __init__(self, agent: Agent, workers: Iterable[str], tell: Callable[[list[str], int], None]) -> None:
        self._known = _told.setdefault(agent, {})
        self._workers, self._tell = list(workers), tell

    def push(self) -> None:
        """Before a step: tell those who have not heard of the present seed."""
        now = seeding()
        late = [worker for worker in self._workers if not _same(self._known.get(worker), now)]
        if late:
            self._tell(late, torch.initial_seed())
            self._known.update(dict.fromkeys(late, now))


def _same(known: tuple[Any, ...] | None, now: tuple[Any, ...]) -> bool:
    if known is None:
        return not any(now)  # nobody has set a seed
    return all(one is other for one, other in zip(known, now))
