"""Results keep their type, and arguments of any class reach a part or are refused by name."""

from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from test_wrap import assert_same_state, batches, both, drive
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

import rdmarpc as rpc
from rdmarpc.graph.trace.values import flatten, key


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Output:
    loss: Any
    more: Any = None
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    inner: Output
    scale: float = 2.0


@dataclass(frozen=True, slots=True)
class Slotted:
    value: Any


class Plain:
    """Nothing that pytree knows."""

    def __init__(self, value: Any) -> None:
        self.value, self.calls = value, 0


class Mine:
    """Registered by its user."""

    def __init__(self, a: Any, b: Any, name: str) -> None:
        self.a, self.b, self.name = a, b, name


pytree.register_pytree_node(Mine, lambda m: ([m.a, m.b], m.name), lambda items, name: Mine(*items, name))


class Batch(UserDict):
    """As transformers' BatchEncoding."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getstate__(self) -> Any:
        return {"data": self.data}

    def __setstate__(self, state: Any) -> None:
        self.data = state["data"]


KINDS = {
    "ordered": lambda y, z: OrderedDict([("z", z), ("y", y)]),
    "default": lambda y, z: defaultdict(list, y=[y], z=[z, None]),
    "named": lambda y, z: Point(y, (z, 3)),
    "dataclass": lambda y, z: Output(y, {"z": z}, ["a", "b"]),
    "frozen": lambda y, z: Frozen(Output(y, [z, None, 1.5])),
    "slotted": lambda y, z: Slotted([y, z]),
    "plain": lambda y, z: Plain([y, z]),
    "mine": lambda y, z: Mine(y, z, "n"),
    "batch": lambda y, z: Batch({"y": y, "z": z}),
    "values": lambda y, z: [torch.max(y, 1), z, True, -0.0, "s", torch.float64, slice(0, 2), y.shape],
}


class Make(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(20, 8), kind

    def forward(self, x):
        y = self.layer(x)
        return KINDS[self.kind](y, torch.tanh(y))


class Take(nn.Module):
    """Uses all tensors of what it is given, and says so in the same class."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.out, self.kind = nn.Linear(8, 4), kind

    def forward(self, made, *, scale: Any = None):
        tensors = [leaf for leaf in flatten(made)[0] if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        y = self.out(sum(t if t.dim() == 2 else t[:, None] for t in tensors))
        return KINDS[self.kind](y, y * 2)


class Chain(nn.Module):
    """Objects cross from part to part, and are the result."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.make, self.take = Make(kind), Take(kind)

    def forward(self, x):
        return self.take(self.make(x))


def same(ours: Any, theirs: Any) -> None:
    (mine, tree), (expected, other) = flatten(ours), flatten(theirs)
    assert type(ours) is type(theirs)
    assert tree == other, (tree, other)
    for a, b in zip(mine, expected):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else key(a) == key(b), (a, b)


def loss_of(result: Any) -> torch.Tensor:
    return sum(t.square().mean() for t in flatten(result)[0] if isinstance(t, torch.Tensor) and t.is_floating_point())


def trained(model: Any, twin: nn.Module, calls: list[tuple[tuple[Any, ...], dict[str, Any]]], how: str | None = "fx") -> None:
    """Several steps: results, gradients of the inputs and the state are equal."""
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin))
    for args, kwargs in calls:
        ours, expected = model(*args, **kwargs), twin(*args, **kwargs)
        same(ours, expected)
        for result, optimizer in ((ours, mine), (expected, theirs)):
            loss_of(result).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, twin)
    with torch.no_grad():
        same(model(*calls[0][0], **calls[0][1]), twin(*calls[0][0], **calls[0][1]))
    if how is not None:
        assert model.captured.startswith(how), model.captured


def results() -> None:
    for kind in KINDS:
        for capture in ("fx", "eager"):
            model, twin = both(lambda kind=kind: Chain(kind), {"make": "worker1", "take": "worker2"}, capture=capture)
            trained(model, twin, [((x,), {}) for x, _ in batches(3, 6, 20)], capture)
            model.close()


class Given(nn.Module):
    """Hands its input to a part as it is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.take, self.last = Take(kind), nn.Tanh()

    def forward(self, made, scale=None):
        return self.take(made, scale=scale)


def arguments() -> None:
    for kind, make in KINDS.items():
        for capture in ("fx", "eager"):
            model, twin = both(lambda kind=kind: Given(kind), {"take": "worker1"}, capture=capture)
            xs = [x for x, _ in batches(3, 6, 8)]
            calls = [((make(x, x + 1),), {"scale": scale}) for x, scale in zip(xs, (None, {1, 2}, slice(0, 3)))]
            trained(model, twin, calls, capture)
            model.close()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 4)

    def forward(self, x, by):
        return self.layer(x) * (1.0 if by is True else -1.0 if str(by) == "-0.0" else 2.0 if type(by) is float else 3.0)


def constants() -> None:
    """1, True and 1.0 are equal, and are not the same."""
    model, twin = both(Scaled, {"layer": "worker1"})
    x = torch.ones(2, 20)
    for by in (1, True, 1.0, 0.0, -0.0, 1):
        assert torch.equal(model(x, by), twin(x, by)), by
    model.close()


class Cell(nn.Module):
    """Puts what it made into an object that it is passed, as attention does into a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 20)

    def forward(self, x, memory):
        y = torch.tanh(self.layer(x))
        memory.calls += 1
        memory.value.append(y)
        return y + memory.value[0].detach() / memory.calls


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.ModuleList(Cell() for _ in range(4)), nn.Linear(20, 4)

    def forward(self, x, memory=None):
        memory = Plain([]) if memory is None else memory
        for cell in self.cells:
            x = cell(x, memory)
        assert memory.calls == len(memory.value)
        return Output(self.head(x + memory.value[1].detach() * memory.calls), Plain([v.detach() for v in memory.value]))


def caches() -> None:
    placement = {"cells.0-1": "worker1", "cells.3": "worker1"}
    for capture in ("auto", "eager"):
        model, twin = both(Remembering, placement, capture=capture)
        trained(model, twin, [((x,), {}) for x, _ in batches(3, 6, 20)], "fx" if capture == "auto" else "eager")
        # Its own caller's object is changed: no trace does that.
        for x, _ in batches(2, 6, 20):
            ours, theirs = Plain([]), Plain([])
            inner = ours.value
            same(model(x, ours), twin(x, theirs))
            same(ours, theirs)
            assert ours.value is inner
            assert ours.calls == 4
        assert model.captured.startswith("eager")
        model.close()


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Inner()

    def forward(self, x, thing):
        return self.layer(x, thing)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.count = nn.Linear(20, 4), 0

    def forward(self, x, thing):
        return self.out(x)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.count = nn.Linear(20, 4), 0

    def forward(self, x):
        self.count += 1
        return self.out(x), self.count


def refusals() -> None:
    x = torch.ones(2, 20)
    for thing, text in ((threading.Lock(), "lock"), (nn.Linear(1, 1), "Linear"), (torch.Generator(), "Generator")):
        model, _ = both(Locked, {"layer": "worker1"})
        with pytest.raises(rpc.NotSupported, match=rf"(?s)'layer' is given 'thing'.*{text}"):
            model(x, thing)
        model.close()
    # A number that a part counts cannot be a constant of the plan.
    model, _ = both(lambda: nn.Sequential(Counted()), {"0": "worker1"})
    with pytest.raises(rpc.NotSupported, match="gave"):
        for _ in range(3):
            model(x)
    model.close()


class Once(nn.Module):
    """Sets something in the steps ``when`` (by its own count, which it keeps in every step if ``counts``), as configurations
    are completed by a first forward."""

    def __init__(self, when: tuple[int, ...], counts: bool) -> None:
        super().__init__()
        self.config: dict[str, Any] = {"kind": None, "gain": 1.0}
        self.when, self.counts, self.step = when, counts, 0
        self.body, self.head = nn.Linear(20, 20), nn.Linear(20, 4)

    def forward(self, x):
        if self.config["kind"] is None:
            self.config["kind"] = "first"
            x = x * 2
        if self.step in self.when:
            self.config["gain"] *= 1.5
        if self.counts:
            self.step += 1
        return self.head(torch.tanh(self.body(x))) * self.config["gain"]


def once() -> None:
    for when, counts, how in (((), False, "fx"), ((2, 4), False, "fx"), ((2,), True, "eager")):
        model, twin = both(lambda when=when, counts=counts: Once(when, counts), {"head": "worker1"})
        optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin)]
        for step, (x, _) in enumerate(batches(6, 6, 20)):
            results = []
            for net, optimizer in zip((model, twin), optimizers):
                if not counts:
                    net.step = step
                results.append(net(x))
                loss_of(results[-1]).backward()
                optimizer.step()
                optimizer.zero_grad()
            same(*results)
            if counts or not step or step in when:
                assert model.captured.startswith("eager"), model.captured
                assert "config" in model.captured or "step" in model.captured
            else:
                assert model.captured.startswith("fx"), model.captured
        assert model.config == twin.config
        assert_same_state(model, twin)
        assert model.captured.startswith(how)
        model.close()


class Refers(nn.Module):
    """A layer, or its hook, has a reference to another layer that is not in it."""

    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Sequential(nn.Linear(20, 20), nn.Tanh()), nn.Linear(20, 20)
        refers = Refers.Hook(self)
        if hooked:
            self.one[0].register_forward_hook(refers)
        else:
            self.one[0].other = refers

    class Hook:
        def __init__(self, net: nn.Module) -> None:
            self.net = net

        def __call__(self, module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
            return result + self.net.two(args[0])

    def forward(self, x):
        return self.one(x) + self.two(x)


class Lends(nn.Module):
    """Calls a layer with a weight that it computes, of the input or not."""

    def __init__(self, of_input: bool) -> None:
        super().__init__()
        self.of_input, self.one, self.two = of_input, nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x):
        weight = self.one.weight * x.mean() if self.of_input else torch.eye(20)
        return self.one(x) + torch.func.functional_call(self.two, {"weight": weight}, (x,))


class Picks(nn.Module):
    """Decides by values how many rows its layer gives."""

    class Layer(nn.Linear):
        def forward(self, x):
            x = x[x.sum(1) > 0] if x.sum() > 0 else x[x.sum(1) < 0]
            return super().forward(x), int(x.sum() > 0)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = self.Layer(20, 20), nn.Linear(20, 4)

    def forward(self, x):
        x, sign = self.layer(x)
        return self.head(x) * (1 + sign)


def references() -> None:
    for hooked, place, text in (
        (True, "one", "refers to 'the model'"),
        (True, "two", "calls 'two', which is not in that part"),
    ):
        with pytest.raises(rpc.NotSupported, match=text):
            model, _ = both(lambda hooked=hooked: Refers(hooked), {place: "worker1"})
            model(torch.ones(2, 20))
    for make, place, capture in (
        (lambda: Lends(True), "two", "auto"),
        (lambda: Lends(False), "two", "auto"),
        (Picks, "layer", "eager"),
    ):
        model, twin = both(make, {place: "worker1"}, capture=capture)
        for x, _ in batches(3, 6, 20):
            results = [net(x) for net in (model, twin)]
            same(*results)
            for result in results:
                loss_of(result).backward()
        for mine, other in zip(model.parameters(), twin.parameters()):
            assert (mine.grad is None) == (other.grad is None)
            assert other.grad is None or torch.equal(mine.grad, other.grad)
        model.close()


class Rows(nn.Module):
    """A remote LSTM over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(10, 12, batch_first=True), nn.Linear(12, 4)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, (h, c) = self.lstm(packed)
        y, _ = pad_packed_sequence(out, batch_first=True)
        return self.head(y).sum(1), h, c


def packed() -> None:
    model, twin = both(Rows, {"lstm": "worker1"})
    calls = [((torch.randn(3, 5, 10), torch.tensor(n)), {}) for n in ([5, 2, 3], [1, 5, 2], [5, 2, 3])]
    trained(model, twin, calls, None)
    model.close()


def everything() -> None:
    for body in (results, arguments, constants, caches, once, references, packed, refusals):
        body()


def test_values_keep_their_type():
    drive(everything, 3, timeout=250.0)


def test_numbers_are_told_apart():
    assert len({key(x) for x in (1, True, 1.0, 0.0, -0.0)}) == 5
