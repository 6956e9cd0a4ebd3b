"""Gradients are summed in the order of one process: models drawn at random, whose tensors and parameters are read in many
places, give the bits that they give alone."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import torch
import torch.nn.functional as F
from test_wrap import drive
from torch import nn

from rdmarpc import wrap

SIZE = 6
WORKERS = ("worker0", "worker1", "worker2")


class Often(nn.Module):
    """A part that reads its input, and its parameters, several times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.linear, self.gain = times, nn.Linear(SIZE, SIZE), nn.Parameter(torch.randn(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for at in range(1, self.times):
            y = y * (at + 0.3) + x * self.gain
        return torch.tanh(y)


OWN = ["weight", "bias", "nearest", "detached"]
"""Steps that read parameters of a part without calling it."""


class Drawn(nn.Module):
    """A forward that is a list of steps: each makes one more value of those before."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            draw.choice([nn.Linear(SIZE, SIZE), Often(1), Often(2), Often(3)]) for _ in range(draw.randint(2, 5))
        )
        self.scale = nn.Parameter(torch.randn(SIZE))
        linears = [part for part in self.parts if isinstance(part, nn.Linear)]
        self.tied = len(linears) > 1 and draw.random() < 0.5
        if self.tied:
            linears[1].weight = linears[0].weight
        self.steps: list[tuple[Any, ...]] = []
        for number in range(1, draw.randint(4, 14)):
            some = lambda number=number: draw.randrange(max(0, number - 6), number)  # noqa: E731
            kind = draw.choice(["part", "part", "part", "add", "mul", "twice", "scale", "where", *OWN])
            self.steps.append((kind, draw.randrange(len(self.parts)), some(), some()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x * 1.0]
        for kind, part, one, other in self.steps:
            a, b = values[one], values[other]
            if kind == "part":
                values.append(self.parts[part](a))
            elif kind == "add":
                values.append(a * 0.7 + b)
            elif kind == "mul":
                values.append(torch.tanh(a * b))
            elif kind == "twice":
                values.append(torch.sin(a) + torch.cos(a) * b)
            elif kind == "scale":
                values.append(torch.sigmoid(a * self.scale) + a)
            elif kind in OWN:
                values.append(self.own(kind, self.parts[part], a, b))
            else:
                values.append(torch.where(b > 0, a, b))
        total = values[-1]
        for value in values[:-1]:
            total = total * 0.9 + value
        return total

    @staticmethod
    def own(kind: str, part: nn.Module, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        linear = part.linear if isinstance(part, Often) else part
        if kind == "weight":
            return a + F.linear(b, linear.weight)
        if kind == "bias":
            return torch.sigmoid(a + linear.bias)
        if kind == "nearest":
            return a * (torch.cdist(b, linear.weight).argmin(1)[:, None] * 0.1 + 1)
        return a + linear.weight.detach().mean(0)


def placed(draw: random.Random, model: Drawn) -> dict[str, str]:
    placement = {f"0.parts.{at}": draw.choice(WORKERS) for at in range(len(model.parts))}
    if model.tied:
        one, other = [at for at, part in enumerate(model.parts) if isinstance(part, nn.Linear)][:2]
        placement[f"0.parts.{other}"] = placement[f"0.parts.{one}"]
    if draw.random() < 0.3:
        placement["0"] = draw.choice(WORKERS[1:])
    return placement


def fetched(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def check(model: nn.Module, twin: nn.Module, what: str) -> list[str]:
    ours, theirs = fetched(model), fetched(twin)
    wrong = []
    for name, grad in theirs.items():
        mine = ours[name]
        if (grad is None) != (mine is None) or (grad is not None and not torch.equal(mine, grad)):
            wrong.append(f"{what}: {name}")
    return wrong


def far(model: nn.Module, twin: nn.Module) -> list[str]:
    """What differs by more than rounding."""
    ours, found = fetched(model), []
    for name, theirs in fetched(twin).items():
        mine = ours[name]
        if mine is None or theirs is None:
            found += [name] if mine is not theirs else []
        elif not torch.allclose(mine, theirs, rtol=1e-3, atol=1e-4):
            found.append(name)
    return found


def trial(seed: int) -> list[str]:
    """What is not equal in the model that this seed draws."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net = nn.Sequential(Drawn(draw), nn.Linear(SIZE, SIZE))
    twin = copy.deepcopy(net)
    model = wrap(net, placed(draw, net[0]), timeout=20.0)
    wrong: list[str] = []
    asks = draw.random() < 0.5
    for number in range(3):
        x = torch.randn(4, SIZE)
        mine, theirs = x.clone().requires_grad_(asks), x.clone().requires_grad_(asks)
        model(mine).pow(2).sum().backward()
        twin(theirs).pow(2).sum().backward()
        wrong += check(model, twin, f"forward {number}")
        if asks and not torch.equal(mine.grad, theirs.grad):
            wrong.append(f"forward {number}: input")
    for number in range(2):
        x, y = torch.randn(12, SIZE), torch.randn(12, SIZE)
        model.forward_backward(lambda out, y: (out - y).pow(2).mean(), x, target=y, chunks=3)
        for piece, goal in zip(x.chunk(3), y.chunk(3)):
            ((twin(piece) - goal).pow(2).mean() * (4 / 12)).backward()
        wrong += check(model, twin, f"micro-batches {number}")
    if model.counters()["sums_reordered"]:
        own = any(step[0] in OWN for step in net[0].steps)
        wrong = far(model, twin) if own else [*wrong, "reordered"]
    model.close()
    return wrong


def trials(seeds: range) -> None:
    wrong = {seed: found for seed in seeds if (found := trial(seed))}
    assert not wrong, wrong


class Mixed(nn.Module):
    """A part reads its weight as its own, and the forward reads it by its name, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = F.linear(self.b(self.a(x)), self.a.weight)
        return x


def named() -> None:
    """What cannot be summed in the order of one process is named, once, and equal up to rounding."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("rdmarpc").addHandler(handler)
    torch.manual_seed(1)
    net = Mixed()
    twin = copy.deepcopy(net)
    model = wrap(net, {"a": "worker1", "b": "worker2"}, timeout=20.0)
    for size in (4, 4, 5, 5):
        x = torch.randn(size, SIZE)
        model(x).pow(2).sum().backward()
        twin(x).pow(2).sum().backward()
    for name, grad in fetched(twin).items():
        torch.testing.assert_close(fetched(model)[name], grad)
    assert model.counters()["sums_reordered"] == 1
    assert model.placement_table().count("gradients not summed in the order of one process: a.weight") >= 1
    assert len([text for text in said if "gradients of a.weight are not summed in the order of one process" in text]) == 1
    logging.getLogger("rdmarpc").removeHandler(handler)
    model.close()


class Codebook(nn.Module):
    """Reads the weights of a part where no gradient comes back, before, between and after the calls of that part."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.encode, self.codes, self.decode = nn.Linear(SIZE, SIZE), nn.Embedding(5, SIZE), nn.Linear(SIZE, SIZE)

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x, self.codes.weight).argmin(1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.encode(x)
        which = self.nearest(z) if "before" in self.at else z.argmax(1) % 5
        found = self.codes(which)
        if "between" in self.at:
            found = found + self.codes(self.nearest(found))
        if "after" in self.at:
            found = found * (self.nearest(found)[:, None] + 1)
        if "gradient" in self.at:
            found = found + self.codes.weight.mean(0)
        return self.decode(z + (found - z).detach()), F.mse_loss(found, z.detach()) + F.mse_loss(z, found.detach())


def codebooks() -> None:
    for at in ("before", "between", "after", "before, after", "before, between, after", "before, gradient"):
        for others in ({}, {"encode": "worker2"}, {"decode": "worker1"}):
            place = {"codes": "worker1", **others}
            torch.manual_seed(3)
            net = Codebook(at)
            twin = copy.deepcopy(net)
            model = wrap(net, place, timeout=20.0)
            for _ in range(2):
                x = torch.randn(4, SIZE)
                for each in (model, twin):
                    result, loss = each(x)
                    (result.pow(2).sum() + loss).backward()
            for name, grad in fetched(twin).items():
                assert torch.equal(fetched(model)[name], grad), (at, place, name)
            model.close()


def test_weights_that_are_read_where_no_gradient_comes_back():
    drive(codebooks, 3)


class Aside(nn.Module):
    """Returns what is computed before something that nothing uses but the running means of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head, self.aside = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.norm = nn.BatchNorm1d(SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.one(x)
        two = self.two(one)
        result = self.head(two)
        self.norm(self.aside(torch.cat([one, two * 2, two * 3])))
        return result


def asides() -> None:
    for place in ({"two": "worker1"}, {"two": "worker1", "aside": "worker2"}, {"head": "worker1", "norm": "worker2"}):
        torch.manual_seed(4)
        net = Aside()
        twin = copy.deepcopy(net)
        model = wrap(net, place, timeout=20.0)
        for _ in range(2):
            x = torch.randn(4, SIZE)
            for each in (model, twin):
                each(x).pow(2).sum().backward()
            assert not check(model, twin, str(place))
        assert torch.equal(model.state_dict()["norm.running_mean"], twin.norm.running_mean)
        model.close()


def test_a_result_that_is_made_before_what_nothing_uses():
    drive(asides, 3)


def many() -> None:
    named()
    trials(range(24))


def test_drawn_models_have_the_bits_of_one_process():
    drive(many, 3)


class Readers(nn.Module):
    """A forward that runs in Python, and whose parts read one tensor, each as many times as ``times`` says."""

    def __init__(self, times: tuple[int, ...], kind: str) -> None:
        super().__init__()
        self.kind, self.enter = kind, nn.Linear(SIZE, SIZE)
        self.parts = nn.ModuleList(map(Often, times))

    def forward(self, x: torch.Tensor) -> Any:
        shared = torch.tanh(self.enter(x))
        if shared.sum() > 1e9:
            shared = shared * 2
        total = torch.cos(shared) if self.kind == "before" else torch.zeros(())
        for part in self.parts:
            total = total + part(shared)
        if self.kind == "after":
            total = total + torch.cos(shared)
        return (total, shared) if self.kind == "returned" else total


def calls() -> None:
    """Named where it differs, and only there."""
    for times in ((1, 1), (1, 2), (2, 1), (2, 2), (3,)):
        for kind in ("alone", "before", "after", "returned"):
            torch.manual_seed(3)
            net = Readers(times, kind)
            twin = copy.deepcopy(net)
            model = wrap(net, {f"parts.{at}": WORKERS[at + 1] for at in range(len(times))}, timeout=20.0)
            differs = False
            for _ in range(3):
                x = torch.randn(4, SIZE)
                for each in (model, twin):
                    given = each(x)
                    sum(part.pow(2).sum() for part in (given if isinstance(given, tuple) else (given,))).backward()
                differs |= bool(check(model, twin, ""))
            assert model.captured.startswith("eager") and not far(model, twin)
            wanted = sum(n > 1 for n in (times if kind in ("after", "returned") else times[:-1]))
            assert model.counters()["sums_reordered"] == wanted, (times, kind)
            assert differs == bool(wanted), (times, kind)
            model.close()


def outside() -> None:
    """The program reads the model's input, too, before and after the model does; and asks for its gradient alone."""
    for times, where in ((3, "after"), (3, "before"), (1, "after")):
        for alone in (False, True):
            torch.manual_seed(4)
            net, enter = nn.Sequential(Often(times), nn.Linear(SIZE, SIZE)), nn.Linear(SIZE, SIZE)
            twin = copy.deepcopy(net)
            model = wrap(net, {"0": "worker1"}, timeout=20.0)
            differs = False
            for _ in range(3):
                x, found = torch.randn(4, SIZE), []
                for each in (model, twin):
                    shared = torch.tanh(enter(x))
                    early = shared.sin().sum() if where == "before" else 0.0
                    loss = each(shared).pow(2).sum() + early
                    loss = loss + (shared.sin().sum() if where == "after" else 0.0)
                    found += torch.autograd.grad(loss, [shared if alone else enter.weight])
                differs |= not torch.equal(*found)
                torch.testing.assert_close(*found)
            reordered = times > 1 and where == "after"
            assert model.counters()["sums_reordered"] == int(reordered) and differs == reordered, (times, where, alone)
            assert not shared._backward_hooks
            model.close()


def test_sums_of_tensors_that_others_read_too_are_named():
    drive(calls, 3)
    drive(outside, 3)


class Names(nn.Module):
    """Reads a tensor, and what an operation gives that leaves it as it is."""

    def __init__(self, how: str, early: bool) -> None:
        super().__init__()
        self.how, self.early = how, early
        self.enter, self.part, self.leaves = nn.Linear(SIZE, SIZE), Often(2), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = torch.tanh(self.enter(x))
        before = torch.cos(one) if self.early else self.part(one)
        other = self.leaves(one) if self.how == "module" else one.to(torch.float32)
        return before + (self.part(other) if self.early else torch.sin(other) * other.cos())


def names() -> None:
    for how in ("conversion", "module"):
        for early in (False, True):
            torch.manual_seed(3)
            net = Names(how, early)
            twin = copy.deepcopy(net)
            model = wrap(net, {"part": "worker1"}, timeout=20.0)
            differs = False
            for _ in range(3):
                x = torch.randn(4, SIZE)
                for each in (model, twin):
                    each(x).pow(2).sum().backward()
                differs |= bool(check(model, twin, ""))
            assert model.captured.startswith("fx") and not far(model, twin)
            assert differs == bool(model.counters()["sums_reordered"]) == (how == "module" and not early), (how, early)
            model.close()


def test_a_tensor_that_has_two_names():
    drive(names, 2)
