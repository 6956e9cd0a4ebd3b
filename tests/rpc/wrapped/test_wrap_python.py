"""What parts at other workers give, draw and read in Python, beside one process: the same bits, or refused by name."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from random import randrange
from typing import Any

import numpy as np
import torch
from test_wrap import batches, both, drive
from torch import nn

import rdmarpc as rpc

GAIN = 2.0


@dataclass
class Scaled:
    x: torch.Tensor
    by: Any


class Part(nn.Module):
    """Gives what ``of(its output, how often it was called)`` says."""

    def __init__(self, of: Callable[[torch.Tensor, int], Any]) -> None:
        super().__init__()
        self.line, self.of, self.calls = nn.Linear(10, 10), of, 0

    def forward(self, x):
        self.calls += 1
        return self.of(self.line(x), self.calls)


class Net(nn.Module):
    def __init__(self, of: Callable[[torch.Tensor, int], Any], use: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__()
        self.stem, self.part, self.head, self.use = nn.Linear(10, 10), Part(of), nn.Linear(10, 4), use

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.head(self.use(x, self.part(x)))


def number(x, calls):
    return 1.0 / calls


def late(x, calls):
    return calls > 2


def word(x, calls):
    return "relu" if calls > 2 else "tanh"


def measured(x, calls):
    return float(x.sum().item())


def linear(x, calls):
    return 2 * x


def pair(x, calls):
    return x, calls


def scaled(x, calls):
    return Scaled(x, [float(calls)])


def by_random(x, calls):
    return x if random.random() < 0.5 else 2 * x


def by_randrange(x, calls):
    return x if randrange(10) < 5 else 2 * x


def by_numpy(x, calls):
    return x * np.random.rand()


def by_chance(x, calls):
    return x * random.random() if torch.rand([]) < 0.5 else x


def by_setting(x, calls):
    return x * GAIN


def by_absent(x, calls):
    return torch.classes.absent.Thing(x) if calls < 0 else x


def times(x, given):
    return x * given


def chosen(x, given):
    return 2 * x if given else x


def applied(x, given):
    return getattr(torch, given)(x)


def second(x, given):
    return given[0] * given[1]


def only_second(x, given):
    return x * given[1]


def inside(x, given):
    return given.x * given.by[0]


def itself(x, given):
    return given


def drawn(x, given):
    return given * randrange(3)


def may_draw(x, given):
    return given * randrange(3) if GAIN < 0 else given


EQUAL, REFUSED = "equal", "refused"
CASES: list[tuple[Any, Any, str, str]] = [
    (number, times, EQUAL, EQUAL),
    (late, chosen, EQUAL, EQUAL),
    (word, applied, EQUAL, EQUAL),
    (measured, times, EQUAL, EQUAL),
    (pair, second, REFUSED, EQUAL),
    (pair, only_second, REFUSED, EQUAL),
    (scaled, inside, REFUSED, EQUAL),
    (by_random, itself, EQUAL, EQUAL),
    (by_numpy, itself, EQUAL, EQUAL),
    (by_randrange, itself, EQUAL, EQUAL),
    (linear, drawn, EQUAL, EQUAL),
    (linear, may_draw, EQUAL, EQUAL),
    (by_chance, itself, EQUAL, EQUAL),
    (by_absent, itself, EQUAL, EQUAL),
]
"""What the part gives, what the forward does with it; what comes of that by ``capture="auto"``, and eagerly."""


def outcome(of: Any, use: Any, capture: str) -> str:
    model, twin = both(lambda: Net(of, use), {"part": "worker1"}, capture=capture)
    optimizers = [torch.optim.SGD(network.parameters(), 0.1) for network in (model, twin)]
    try:
        for step, (x, y) in enumerate(batches(4, 6, 10)):
            losses = []
            for network, optimizer in zip((model, twin), optimizers):
                random.seed(step), np.random.seed(step), torch.manual_seed(step)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(network(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            if not torch.equal(*losses):
                return f"step {step}: {losses} by {model.captured}"
        return EQUAL
    except rpc.NotSupported as error:
        return REFUSED if "part" in str(error) else str(error)
    finally:
        model.close()


def settings() -> None:
    """A global that a part reads elsewhere changes here: the part runs here."""
    global GAIN
    x = batches(1, 6, 10)[0][0]
    for capture in ("auto", "eager"):
        model, twin = both(lambda: Net(by_setting, itself), {"part": "worker1"}, capture=capture)
        assert torch.equal(model(x), twin(x))
        GAIN = 3.0
        assert torch.equal(model(x), twin(x))
        assert model.captured.startswith("eager")
        GAIN = 2.0
        assert torch.equal(model(x), twin(x))
        model.close()


def named_only() -> None:
    """A forward may have the name of a method of Python's generator, if it does not draw."""
    model, twin = both(lambda: Net(linear, may_draw), {"part": "worker1"})
    for x, _ in batches(3, 6, 10):
        assert torch.equal(model(x), twin(x))
    assert not model.captured.startswith("eager"), model.captured
    model.close()


def everything() -> dict[str, str]:
    warnings.simplefilter("ignore")
    settings()
    named_only()
    found = {}
    for of, use, *wanted in CASES:
        for capture, expected in zip(("auto", "eager"), wanted):
            if (came := outcome(of, use, capture)) != expected:
                found[f"{of.__name__}, {use.__name__}, {capture}"] = came
    return found


def test_what_parts_do_in_python() -> None:
    assert not drive(everything)


class Irreps(tuple):
    """Its length is something else than how many items it has, as that of e3nn."""

    def __len__(self):
        raise NotImplementedError


class Once(list):
    """A loop over it changes it."""

    def __iter__(self):
        self.clear()
        return super().__iter__()

    def __reduce__(self):
        return Once, ([self[at] for at in range(len(self))],)


class Lazy(dict):
    """Makes its values when it is asked for them."""

    def values(self):
        raise RuntimeError("asked for values")

    def __iter__(self):
        raise RuntimeError("asked for keys")


class Own(nn.Module):
    """Reads containers of classes that have methods of their own for what a list or dict does."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(10, 10)
        self.irreps, self.once, self.lazy = Irreps((2.0, [3.0])), Once([1.0, 2.0]), Lazy(a=2.0, b=[0.5])

    def forward(self, x):
        first, second = tuple.__getitem__(self.irreps, 0), tuple.__getitem__(self.irreps, 1)
        return self.line(x) * first * second[0] * self.once[1] * self.lazy["a"] * self.lazy["b"][0]


class Owns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.part, self.head = Own(), Own(), nn.Linear(10, 4)

    def forward(self, x):
        return self.head(self.part(self.stem(x)))


def own_containers() -> dict[str, str]:
    """What came of three steps, between which the containers change, where that was not equal to one process."""
    warnings.simplefilter("ignore")
    found = {}
    for capture in ("auto", "eager", "here"):
        for at in ("", "stem", "part"):
            model, twin = both(Owns, {"part": "worker1"}, capture=capture)
            for step, (x, _) in enumerate(batches(3, 6, 10)):
                for network in (model, twin) if at else ():
                    part = network.get_submodule(at)
                    if step == 1:
                        tuple.__getitem__(part.irreps, 1)[0] = 5.0
                        part.once[1] = 7.0
                        part.lazy["a"] = 0.25
                if not torch.equal(model(x), twin(x)):
                    found[f"{capture}, {at}, step {step}"] = model.captured
            model.close()
    return found


def test_containers_with_methods_of_their_own() -> None:
    assert not drive(own_containers)
