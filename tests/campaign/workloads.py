"""What workers do all the time: calls in every form, each result compared with what this process computes itself.

A *step* is called again and again by several threads of every worker. ``training`` and ``raw`` have the other workloads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rdmarpc as rpc

from .diary import Diary, Wrong, same
from .trial import Trial


@dataclass
class Scene:
    """Where a worker is: its trial, its rank, its diary. ``folder``: of the trial. ``options``: of ``init_rpc``.
    ``before``: descriptors and memory before it had any of ours."""

    trial: Trial
    rank: int
    diary: Diary
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)

    @property
    def going(self) -> bool:
        return not self.diary.board.stopping

    def alive(self) -> list[int]:
        """Whom this worker has not heard to be lost, itself included."""
        return [rank for rank in range(self.trial.size) if rank not in self.diary.lost]


def name_of(rank: int) -> str:
    return f"worker{rank}"


# -- functions that run at others


class Planned(Exception):
    """What a function raises on purpose."""


def make(seed: int, count: int) -> torch.Tensor:
    return torch.randint(-1000, 1000, (count,), generator=torch.Generator().manual_seed(seed)).float()


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2 + 1


def add(left: Any, right: Any) -> Any:
    return left + right


def fail(text: str) -> None:
    raise Planned(text)


def leave_by_exit() -> None:
    raise SystemExit(7)


def by_way_of(ranks: list[int], value: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(name_of(ranks[0]), by_way_of, (ranks[1:], value + 1)) if ranks else value


@rpc.functions.async_execution
def later(rank: int, value: torch.Tensor) -> Any:
    return rpc.rpc_async(name_of(rank), double, (value,)).then(lambda future: future.value() * 2)


def total(reference: Any) -> float:
    return float(reference.to_here().sum())


class Keeper:
    def __init__(self, seed: int, count: int) -> None:
        self.value = make(seed, count)

    def get(self) -> torch.Tensor:
        return self.value

    def plus(self, amount: int) -> torch.Tensor:
        return self.value + amount


# -- steps


def calls(scene: Scene, chance: random.Random) -> None:
    diary, mine = scene.diary, scene.rank
    to = chance.choice(scene.alive())
    kind = chance.randrange(6)
    if kind <= 1:
        with diary.doing("call", mine, to):
            number = chance.randrange(10**6)
            same(rpc.rpc_sync(name_of(to), add, (number,), {"right": 1}), number + 1, "add")
    elif kind == 2:
        with diary.doing("tensor", mine, to):
            value = make(chance.randrange(10**6), chance.choice((1, 100, 5000, 20_000, 100_000)))
            same(rpc.rpc_sync(name_of(to), double, (value,)), double(value), "double")
    elif kind == 3:
        path = [chance.choice(scene.alive()) for _ in range(2)]
        with diary.doing("nested", mine, to, *path):
            value = make(chance.randrange(10**6), 2000)
            same(rpc.rpc_sync(name_of(to), by_way_of, (path, value)), value + 2, "by way of others")
    elif kind == 4:
        with diary.doing("raises", mine, to):
            text = f"on purpose {chance.randrange(10**6)}"
            _raises(to, fail, (text,), Planned, text)
        with diary.doing("exits", mine, to):
            _raises(to, leave_by_exit, (), RuntimeError, "SystemExit")
    else:
        third = chance.choice(scene.alive())
        with diary.doing("nested", mine, to, third):
            value = make(chance.randrange(10**6), 500)
            same(rpc.rpc_sync(name_of(to), later, (third, value)), double(value) * 2, "later")
    time.sleep(chance.uniform(0, 0.004))


def _raises(to: int, function: Callable[..., None], args: tuple[Any, ...], kind: type[Exception], text: str) -> None:
    try:
        rpc.rpc_sync(name_of(to), function, args)
    except rpc.RdmaError:  # some are RuntimeErrors
        raise
    except kind as error:
        if text not in str(error):
            raise Wrong(f"the error of another function: {error}") from None
        return
    raise Wrong("no error came")


def flood(scene: Scene, chance: random.Random) -> None:
    """Many calls in flight, of 30 kB (in the frame), or large ones (beside it), in both directions."""
    diary, to = scene.diary, chance.choice(scene.alive())
    large = chance.randrange(4) == 0
    count, size = (4, 1 << 20) if large else (60, 7500)
    seeds = [chance.randrange(10**6) for _ in range(count)]
    with diary.doing("large" if large else "flood", scene.rank, to):
        if chance.randrange(2):
            futures = [rpc.rpc_async(name_of(to), make, (seed, size)) for seed in seeds]
            expected = [make(seed, size) for seed in seeds]
        else:
            values = [make(seed, size) for seed in seeds]
            futures = [rpc.rpc_async(name_of(to), double, (value,)) for value in values]
            expected = [double(value) for value in values]
        for future, value in zip(futures, expected):
            same(future.wait(), value, "one of many")
    time.sleep(chance.uniform(0, 0.02))


def references(scene: Scene, chance: random.Random) -> None:
    diary, mine = scene.diary, scene.rank
    owner, user = chance.choice(scene.alive()), chance.choice(scene.alive())
    seed, count = chance.randrange(10**6), chance.choice((1, 50, 20_000))
    expected = make(seed, count)
    if chance.randrange(2):
        with diary.doing("reference", mine, owner):
            keeper = rpc.remote(name_of(owner), Keeper, (seed, count))
            same(keeper.rpc_sync().plus(3), expected + 3, "a method of the value")
            same(keeper.rpc_async().get().wait(), expected, "a method of the value")
            del keeper
    with diary.doing("fork", mine, owner, user):
        reference = rpc.remote(name_of(owner), make, (seed, count))
        same(rpc.rpc_sync(name_of(user), total, (reference,)), float(expected.sum()), "the sum of a fork")
        same(reference.to_here(), expected, "to_here")
        del reference
    time.sleep(chance.uniform(0, 0.01))


def _layer(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def autograd(scene: Scene, chance: random.Random) -> None:
    """Two layers at two workers, and the gradients of their weights and of the input."""
    path = [chance.choice(scene.alive()) for _ in range(2)]
    generator = torch.Generator().manual_seed(chance.randrange(10**6))
    x, *weights = (torch.randn(8, 8, generator=generator, requires_grad=True) for _ in range(3))
    with scene.diary.doing("backward", scene.rank, *path):
        with rpc.autograd.context() as context:
            value = x
            for rank, weight in zip(path, weights):
                value = rpc.rpc_sync(name_of(rank), _layer, (weight, value))
            rpc.autograd.backward(context, [value.sum()])
            found = rpc.autograd.get_gradients(context)
        value = x
        for weight in weights:
            value = _layer(weight, value)
        expected = torch.autograd.grad(value.sum(), [x, *weights])
        for leaf, gradient in zip((x, *weights), expected):
            same(found[leaf], gradient, "a gradient")
    time.sleep(chance.uniform(0, 0.01))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(20, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.relu(self.first(x)))))


STEPS: dict[str, Callable[[Scene, random.Random], None]] = {
    "calls": calls,
    "flood": flood,
    "references": references,
    "autograd": autograd,
}
