"""``served_programs`` for two trainers of one model, beside one process in which two threads with a copy each add their
gradients up. A statement is run by both at once, on batches of their own.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import judge
import served_programs
import torch
from served_nets import NETS
from served_programs import Line, Recipe, smaller
from served_statements import STATEMENTS, Statement, Trainer, one_trainer, reads_the_state
from torch import nn

import rdmarpc as rpc

TRAINERS = ["worker0", "worker1"]
SERVERS = ["worker2", "worker3"]

PATIENCE_S = 20.0

STATEMENTS_OF_TWO = [
    *(["trains"] * 6),
    "trains_twice",
    "accumulates",
    "evaluates",
    "exchanges_data_and_back",
    "clears_gradients",
    "clips_the_norm",
    "sets_a_gradient",
    "drops_a_gradient",
    "reads_gradients",
    "freezes_a_parameter",
    "trains_all_again",
    "keeps_the_state",
    "loads_the_kept_state",
    "keeps_the_optimizer",
    "loads_the_kept_optimizer",
    "reads_the_optimizer",
    "reads_the_state",
    "lowers_the_rate",
]

NETS_OF_TWO = [net for net in NETS if net not in ("Buffered", "Rare", "weight_normed")]
"""Without those that have a state of their own at each trainer, or cannot be pickled."""

__all__ = ["Pair", "recipe", "smaller", "source"]


def recipe(seed: int) -> Recipe:
    dice = random.Random(seed)
    names = dice.choices(STATEMENTS_OF_TWO, k=dice.randint(4, 14))
    lines = tuple(Line(name, dice.randrange(10**6), round(dice.random(), 3)) for name in names)
    return replace(served_programs.recipe(seed), net=dice.choice(NETS_OF_TWO), lines=lines)


def source(made: Recipe) -> str:
    """The program's text."""
    return served_programs.text(made, SERVERS, "Pair")


class Second:
    """The other trainer: what it kept goes to the first one."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net = net
        self._seen: list[tuple[str, judge.Leaves]] = []
        self._trainer = Trainer(net, optimizer, self._keep)

    def does(self, name: str, seed: int, share: float) -> list[tuple[str, judge.Leaves]]:
        self._trainer.does(STATEMENTS[name], seed + 7, share)
        seen, self._seen = self._seen, []
        return seen

    def _keep(self, name: str, value: Any) -> None:
        self._seen.append((name, list(judge.leaves(name, value))))


class Pair:
    """Both trainers. Runs at the first one."""

    def __init__(self, net: nn.Module, kind: Any, options: dict[str, Any], keep: Callable[[str, Any], None]) -> None:
        self._keep = keep
        self._threads = ThreadPoolExecutor(1)
        self._first = one_trainer(net, kind, options, keep)
        self._second = _second_there
        if not hasattr(net, "optimizer"):
            twin = copy.deepcopy(net)
            optimizer = kind(twin.parameters(), **options)
            _join([self._first.optimizer, optimizer])
            self._second = Second(twin, optimizer).does

    def does(self, statement: Statement, seed: int, share: float) -> None:
        second = self._threads.submit(self._second, statement.__name__, seed, share)
        self._first.does(statement, seed, share)
        self._keep("write of the second", second.result())

    def ends(self) -> None:
        self.does(reads_the_state, 0, 0.0)
        self._first.ends()
        self._threads.shutdown()
        if self._second is _second_there:
            rpc.rpc_sync("worker1", _close)


def _join(optimizers: list[Any]) -> None:
    """Each step takes the sum of all gradients, in the order of the trainers."""
    meeting = threading.Barrier(len(optimizers), timeout=PATIENCE_S)
    found: list[list[torch.Tensor | None]] = [[] for _ in optimizers]

    def joined(number: int, optimizer: Any, alone: Callable[[], None]) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found[number] = [parameter.grad for parameter in parameters]
        meeting.wait()
        sums = [_sum(gradients) for gradients in zip(*found)]
        meeting.wait()
        for parameter, gradient in zip(parameters, sums):
            parameter.grad = gradient
        alone()
        for parameter, gradient in zip(parameters, found[number]):
            parameter.grad = gradient

    for number, optimizer in enumerate(optimizers):
        optimizer.step = functools.partial(joined, number, optimizer, optimizer.step)


def _sum(gradients: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    total = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient.clone() if total is None else total + gradient
    return total


# At the second trainer.

_there: list[Second] = []


def placed(net: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Served for both. Runs at the first trainer."""
    late = rpc.rpc_async("worker1", _serve, (net, options))
    served = rpc.serve(net, workers=TRAINERS, timeout=PATIENCE_S, **options)
    late.wait()
    return served


def _serve(net: nn.Module, options: dict[str, Any]) -> None:
    served: Any = rpc.serve(net, workers=TRAINERS, timeout=PATIENCE_S, **options)
    _there[:] = [Second(served, served.optimizer)]


def _does(name: str, seed: int, share: float) -> Any:
    return _there[0].does(name, seed, share)


def _second_there(name: str, seed: int, share: float) -> Any:
    return rpc.rpc_sync("worker1", _does, (name, seed, share))


def _close() -> None:
    served: Any = _there.pop().net
    served.close()
