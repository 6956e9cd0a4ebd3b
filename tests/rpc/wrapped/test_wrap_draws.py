"""Random numbers of a forward come from the generator of the process that called ``wrap``, in the order of one process; those
of parts at other workers are named and counted."""

from __future__ import annotations

import copy
import itertools
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_wrap import both, drive
from torch import nn

from rdmarpc import NotSupported, wrap

SIZE = 20
WORKERS = ("worker0", "worker1", "worker2")


def noise(kind: str, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """One way to draw."""
    if kind == "randn_like":
        return x + 0.1 * torch.randn_like(x)
    if kind == "rand of a size":
        return x * torch.rand(x.shape[0], 1)
    if kind == "dropout":
        return F.dropout(x, 0.3, True)
    if kind == "in place":
        return x + torch.empty_like(x).normal_()
    if kind == "bernoulli":
        return x * torch.bernoulli(torch.sigmoid(x)).detach()
    if kind == "gumbel":
        return F.gumbel_softmax(x, tau=0.5)
    if kind == "normal":
        return x + torch.normal(torch.tanh(x).detach(), 0.2)
    if kind == "distribution":
        return torch.distributions.Normal(x, 1.0, validate_args=False).rsample()
    if kind == "multinomial":
        return x.gather(1, torch.multinomial(torch.softmax(x, 1), 3)).sum(1, keepdim=True) + x
    if kind == "of a weight":
        return F.linear(x, layer.weight + 0.1 * torch.randn_like(layer.weight))
    if kind == "attention":
        one = x.view(1, 1, -1, SIZE)
        return F.scaled_dot_product_attention(one, one, one, dropout_p=0.2).view(-1, SIZE)
    return F.rrelu(x, training=True)


KINDS = ("randn_like", "rand of a size", "dropout", "in place", "bernoulli", "gumbel", "normal", "distribution", "multinomial")
KINDS = (*KINDS, "of a weight", "attention", "rrelu")


class Noisy(nn.Module):
    """Parts, and what is drawn between them: of the last value, or of an earlier one."""

    def __init__(self, draw: random.Random, kinds: list[str]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.drop = nn.Dropout(0.2)
        self.steps = [(draw.randrange(4) if at else 0, kind, draw.random() < 0.4) for at, kind in enumerate(kinds)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = first = x * 1.0
        for part, kind, early in self.steps:
            total = self.drop(total) if part == 3 else torch.tanh(self.parts[part](total))
            total = total + noise(kind, first, self.parts[0]) if early else noise(kind, total, self.parts[0])
        return total


def trial(seed: int, kinds: list[str]) -> list[str]:
    """What is not as in one process."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net = Noisy(draw, kinds)
    twin = copy.deepcopy(net)
    model = wrap(net, {f"parts.{at}": draw.choice(WORKERS) for at in range(3)}, timeout=20.0)
    wrong = []
    for number in range(4):
        torch.manual_seed(100 + number)
        x = torch.randn(6, SIZE)
        state = torch.get_rng_state()
        drawn = []
        for one in (model, twin):
            torch.set_rng_state(state)
            if number < 2:
                result = one(x)
                result.pow(2).mean().backward()
            elif one is model:
                result = one.forward_backward(lambda out: out.pow(2).mean(), x, chunks=3)
            else:
                losses = []
                for piece in x.chunk(3):
                    losses.append(one(piece).pow(2).mean() * (2 / 6))
                    losses[-1].backward()
                result = losses[0] + losses[1] + losses[2]
            drawn.append((result.detach(), torch.get_rng_state()))
        if not all(map(torch.equal, *drawn)):
            wrong.append(f"forward {number}")
    for (name, mine), other in zip(model.named_parameters(), twin.parameters()):
        if (other.grad is None) != (mine.grad is None) or (other.grad is not None and not torch.equal(mine.grad, other.grad)):
            wrong.append(name)
    if model.counters()["draws_elsewhere"]:
        wrong.append("elsewhere")
    captured = model.captured.splitlines()[0]
    model.close()
    return [*wrong, captured] if wrong else []


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Dropout(0.5)), nn.Linear(SIZE, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(F.dropout(self.one(x), 0.5, self.training))


def elsewhere() -> None:
    """Parts that draw at another worker are named once; not in evaluation, where they do not."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("rdmarpc").addHandler(handler)
    for capture in ("auto", "eager"):
        model, _ = both(Dropping, {"one": "worker1"}, capture=capture)
        model.eval()
        model(torch.randn(2, SIZE))
        assert model.counters()["draws_elsewhere"] == 0 and not said
        model.train()
        for size in (2, 3):
            model(torch.randn(size, SIZE)).sum().backward()
        assert model.counters()["draws_elsewhere"] == 1
        assert [text.split(":")[0] for text in said] == ["one"]
        said.clear()
        model.close()
    logging.getLogger("rdmarpc").removeHandler(handler)


def switched() -> None:
    """A chance that becomes one, or stays none, after the capture; and a draw that no capture saw, which nobody asks for."""
    for before, now in ((0.0, 0.5), (1.0, 0.5), (0.0, 1.0), (0.3, 0.0)):
        model, twin = both(Dropping, {"one": "worker1"})
        results = []
        for network in (model, twin):
            network.one[1].p = before
            network.eval()(torch.randn(2, SIZE, generator=torch.Generator().manual_seed(1)))
            network.two.train(), network.one.train()
            network.one[1].p = now
            results.append(network(torch.randn(2, SIZE, generator=torch.Generator().manual_seed(1))).detach())
        assert model.counters()["draws_elsewhere"] == (now == 0.5), (before, now)
        assert now == 0.5 or torch.equal(*results), (before, now)
        model.close()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("rdmarpc").addHandler(handler)
    model, _ = both(lambda: Chances("torch", True), {"part": "worker1"})
    for _ in range(6):
        model(torch.ones(3, SIZE)).sum().backward()
    model.state_dict()  # whatever looks at what has come
    assert [text.split(":")[0] for text in said] == ["part"]
    logging.getLogger("rdmarpc").removeHandler(handler)
    model.close()


class Chance(nn.Module):
    """What it draws depends on values, so that only a run on real tensors shows it. ``late``: from its third call on."""

    def __init__(self, kind: str, late: bool) -> None:
        super().__init__()
        self.line, self.kind, self.late, self.calls = nn.Linear(SIZE, SIZE), kind, late, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.line(x)
        if x.sum() > 1e9 or (self.late and self.calls < 3):
            return x
        if self.kind == "torch":
            return F.dropout(x, 0.5)
        return x * (random.random() if self.kind == "python" else np.random.rand())


class Chances(nn.Module):
    def __init__(self, kind: str, late: bool) -> None:
        super().__init__()
        self.part, self.head = Chance(kind, late), nn.Linear(SIZE, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(x))


def probed() -> None:
    """Draws of parts that nobody can trace are counted, whenever they come; from Python's generators they are made here, or
    refused."""
    for kind, late in itertools.product(("torch", "python", "numpy"), (False, True)):
        model, twin = both(lambda: Chances(kind, late), {"part": "worker1"})  # noqa: B023
        drawn = []
        for network in (twin, model):
            random.seed(3), np.random.seed(3)
            try:
                drawn.append([network(torch.ones(3, SIZE)).detach() for _ in range(4)])
            except NotSupported as error:
                assert late and "of which every worker has its own" in str(error)
        assert model.counters()["draws_elsewhere"] == (kind == "torch")
        assert len(drawn) == (2 if kind == "torch" or not late else 1)
        assert kind == "torch" or late or all(map(torch.equal, *drawn))
        model.close()


class Beginning(nn.Module):
    """Draws at once, or from a time on that the program sets: around a part, and, ``branched``, in another order than that in
    which its inputs are there."""

    def __init__(self, kind: str, branched: bool) -> None:
        super().__init__()
        self.part, self.head, self.branched = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 4), branched
        self.one, self.two = (nn.Dropout(0.0) if kind == "dropout" else Beginner() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.branched:
            return self.head(self.one(self.part(x)) + self.two(x))
        return self.head(self.two(self.part(self.one(x))))

    def begin(self) -> None:
        for module in (self.one, self.two):
            if isinstance(module, Beginner):
                module.on = True
            else:
                module.p = 0.4


class Beginner(nn.Module):
    on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x) if self.on else x


def steps_of(network: Any, micro: int, numbers: range) -> list[torch.Tensor]:
    """Losses, and where the generator stands."""
    found = []
    for number in numbers:
        torch.manual_seed(number)
        x = torch.randn(6, SIZE)
        if micro == 1 or not hasattr(network, "forward_backward"):
            losses = [network(piece.clone()).pow(2).mean() * (len(piece) / 6) for piece in x.chunk(micro)]
            for loss in losses:
                loss.backward()
            found.append(torch.stack(losses).sum().detach())
        else:
            found.append(network.forward_backward(lambda out: out.pow(2).mean(), x, chunks=micro))
        found.append(torch.get_rng_state())
    return found


def late() -> None:
    """Modules here that begin to draw after the capture: in the order of one process, or refused once."""
    for kind, branched, micro in itertools.product(("dropout", "flag"), (False, True), (1, 3)):
        model, twin = both(lambda: Beginning(kind, branched), {"part": "worker1"})  # noqa: B023
        for network in (model, twin):
            steps_of(network, micro, range(2))
            network.begin()
        if kind == "flag" and (branched or micro > 1):
            with pytest.raises(NotSupported, match="did not when the forward was captured"):
                steps_of(model, micro, range(2, 3))
        assert all(map(torch.equal, steps_of(model, micro, range(3, 6)), steps_of(twin, micro, range(3, 6))))
        model.close()


def losses() -> None:
    """A loss that draws between micro-batches that draw as well."""
    model, _ = both(lambda: Noisy(random.Random(1), ["dropout"]), {"parts.1": "worker1"})
    draws: Any = lambda out: (out * torch.rand_like(out)).mean()  # noqa: E731
    model.forward_backward(draws, torch.randn(6, SIZE), chunks=1)
    if model.placement_table() and not model.counters()["draws_elsewhere"]:
        with pytest.raises(NotSupported, match="loss_fn draws random numbers"):
            model.forward_backward(draws, torch.randn(6, SIZE), chunks=3)
    model.close()


def everything() -> None:
    elsewhere()
    switched()
    probed()
    late()
    losses()
    draw = random.Random(5)
    trials = [list(KINDS[at : at + 2]) for at in range(0, len(KINDS), 2)] + [draw.choices(KINDS, k=3) for _ in range(2)]
    wrong = {(seed, *kinds): found for seed, kinds in enumerate(trials) if (found := trial(seed, kinds))}
    assert not wrong, "\n".join(f"{trial}: {found}" for trial, found in wrong.items())


def test_draws_are_those_of_one_process():
    drive(everything, 3, timeout=250.0)
