"""What parts at other workers do to the globals of their process, and draw from its generators: as in one process, or refused
and counted."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import guard_settings as settings
import pytest
import torch
import torch.nn.functional as F
from test_wrap import batches, both, drive
from torch import nn
from twins import train_both, verdict

import rdmarpc as rpc
from rdmarpc import wrap

MANY = bool(os.environ.get("GLOBALS"))
TOTAL = 0.0
NOTED: list[float] = []
TABLE: dict[str, Any] = {"factor": 1.0, "deep": [1.0]}
HOLDER = types.SimpleNamespace(gain=1.0)
KEPT = torch.zeros(8)
FREE: Any = None


class Counter:
    count = 0


def rebinds(calls: int, x: torch.Tensor) -> None:
    global TOTAL
    TOTAL += 0.5


def appends(calls: int, x: torch.Tensor) -> None:
    NOTED.append(float(calls))


def sets_item(calls: int, x: torch.Tensor) -> None:
    TABLE["factor"] = 1.0 + calls


def sets_deep(calls: int, x: torch.Tensor) -> None:
    TABLE["deep"][0] += calls


def sets_field(calls: int, x: torch.Tensor) -> None:
    HOLDER.gain = 1.0 + calls


def sets_class(calls: int, x: torch.Tensor) -> None:
    Counter.count += 1


def sets_module(calls: int, x: torch.Tensor) -> None:
    settings.OFFSET = 0.1 * calls


def sets_tensor(calls: int, x: torch.Tensor) -> None:
    global FREE
    FREE = x.detach().mean(0)


def writes_tensor(calls: int, x: torch.Tensor) -> None:
    KEPT.add_(x.detach().mean(0))


CHANGES = [rebinds, appends, sets_item, sets_deep, sets_field, sets_class, sets_module, sets_tensor, writes_tensor]


def seen() -> Any:
    """All of it, as a forward reads it."""
    known = TOTAL + len(NOTED) + TABLE["factor"] + TABLE["deep"][0] + HOLDER.gain + Counter.count + settings.OFFSET
    return known + KEPT + (0 if FREE is None else FREE)


def reset() -> None:
    global TOTAL, FREE
    TOTAL, FREE, Counter.count, settings.OFFSET, HOLDER.gain = 0.0, None, 0, 1.0, 1.0
    NOTED.clear()
    TABLE.update(factor=1.0, deep=[1.0])
    KEPT.zero_()


class Part(nn.Module):
    """``late``: it changes something only from its third call on; ``looks``: it decides by values."""

    def __init__(self, change: Callable[[int, torch.Tensor], None], late: bool, looks: bool) -> None:
        super().__init__()
        self.line, self.change, self.late, self.looks, self.calls = nn.Linear(8, 8), change, late, looks, 0

    def forward(self, x):
        self.calls += 1
        if self.looks and x.sum() > 1e9:
            return x
        if not self.late or self.calls > 2:
            self.change(self.calls, x)
        return torch.tanh(self.line(x))


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x):
        return self.line(x) * 0.1 * seen()


class Net(nn.Module):
    """``reader``: ``forward`` (here), ``part`` (at a third worker) or ``loop``."""

    def __init__(self, change: Callable[[int, torch.Tensor], None], late: bool, looks: bool, reader: str) -> None:
        super().__init__()
        self.part, self.reads, self.head, self.reader = Part(change, late, looks), Reads(), nn.Linear(8, 4), reader

    def forward(self, x):
        x = self.part(x)
        if self.reader == "forward":
            x = x * 0.1 * seen()
        return self.head(self.reads(x) if self.reader == "part" else x)


def trained(model: nn.Module, reader: str) -> list[torch.Tensor]:
    reset()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for x, y in batches(5, 6, 8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if reader == "loop":
            loss = loss * seen().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *model.state_dict().values()]


def trial(change: Any, late: bool, looks: bool, reader: str, capture: str) -> str:
    torch.manual_seed(1)
    net = Net(change, late, looks, reader)
    twin = copy.deepcopy(net)
    expected = trained(twin, reader)
    reset()
    wrapped = functools.partial(wrap, net, {"part": "worker1", "reads": "worker2"}, capture=capture)
    try:
        return verdict(wrapped, lambda model: trained(model, reader), expected, 5)
    finally:
        reset()


def globals_changed() -> dict[str, str]:
    warnings.simplefilter("ignore")
    wrong = {}
    trials = [*itertools.product(CHANGES, (False, True), (False, True), ("forward", "part", "loop"), ("eager", "auto"))]
    for change, late, looks, reader, capture in random.Random(1).sample(trials, len(trials) if MANY else 14):
        came = trial(change, late, looks, reader, capture)
        what = f"{change.__name__} {'late' if late else ''} {'looks' if looks else ''} {reader} {capture}"
        print(what, came[:150], flush=True)
        if came.startswith("wrong"):
            wrong[what] = came
    return wrong


def test_globals_that_parts_change() -> None:
    assert not drive(globals_changed, 3, timeout=300)


LEVEL = 1.0
DEEP: dict[str, list[torch.Tensor]] = {"totals": [torch.zeros(8)]}
with torch.inference_mode():
    SHIFT = torch.full((8,), 0.5)


def writes_deep_tensor(calls: int, x: torch.Tensor) -> None:
    DEEP["totals"][0].add_(1)


class WritesDeep(Part):
    """From its third call on it writes into a tensor that a container holds."""

    def __init__(self) -> None:
        super().__init__(writes_deep_tensor, True, False)


class Level(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x):
        return (self.line(x) + SHIFT) * LEVEL


class Inside(nn.Module):
    """The forward calls a module inside of the part, which names a global."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(Level(), nn.Linear(8, 8))

    def forward(self, x):
        return self.part[0](x)


def others_that_change() -> None:
    global LEVEL
    warnings.simplefilter("ignore")
    for capture in ("auto", "eager"):
        LEVEL = 2.0  # since the workers have started
        model, twin = both(lambda: nn.Sequential(Level(), nn.Linear(8, 4)), {"0": "worker1"}, capture=capture)
        train_both(model, twin, batches(2, 6, 8))
        assert "global 'LEVEL'" in model.captured and "another one" in model.captured
        LEVEL = 1.0
        model.close()
        torch.manual_seed(1)
        model = wrap(nn.Sequential(WritesDeep()), {"0": "worker1"}, capture=capture)
        x = torch.randn(4, 8)
        model(x), model(x)
        with pytest.raises(rpc.NotSupported, match=r"'DEEP'.*and did not when it was captured"):
            model(x), model(x)
        model.close()
        net = Inside()
        twin = copy.deepcopy(net)
        model = wrap(net, {"part": "worker1"}, capture=capture)
        assert torch.equal(model(x), twin(x))
        LEVEL = 3.0
        assert torch.equal(model(x), twin(x))
        LEVEL = 1.0
        model.close()


def test_tensors_in_containers_modules_inside_of_parts_and_globals_of_before_wrap() -> None:
    drive(others_that_change)


class Backend:
    """What a module of a library finds once for each class of tensors."""

    gain, calls = 0.5, 0

    def __init__(self) -> None:
        self.name, self.functions = "torch", F


class Counting(Backend):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0


_FOUND: dict[type, Backend] = {}
_BY_NAME: dict[str, Backend] = {}


def backend_of(x: torch.Tensor, kind: type[Backend]) -> Backend:
    if type(x) not in _FOUND:
        _FOUND[type(x)] = _BY_NAME.setdefault("torch", kind())
    return _FOUND[type(x)]


class Dispatches(nn.Module):
    """``counts``: what it finds does not stay as it was found; ``looks``: it decides by values."""

    def __init__(self, counts: bool, looks: bool) -> None:
        super().__init__()
        self.line, self.kind, self.looks = nn.Linear(8, 8), Counting if counts else Backend, looks

    def forward(self, x):
        if self.looks and x.sum() > 1e9:
            return x
        found = backend_of(x, self.kind)
        if self.kind is Counting:
            found.calls += 1
        return torch.tanh(self.line(x)) * (found.gain + found.calls)


class Dispatching(nn.Module):
    def __init__(self, counts: bool, looks: bool) -> None:
        super().__init__()
        self.one, self.two, self.head = Dispatches(counts, looks), Dispatches(counts, looks), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.two(self.one(x) * backend_of(x, self.one.kind).gain))


def private_tables() -> None:
    """Every process fills its own, and the parts stay where they are; unless what is in it changes later."""
    warnings.simplefilter("ignore")
    for counts, looks in itertools.product((False, True), (False, True)):
        results = []
        for remote in (False, True):
            _FOUND.clear()
            _BY_NAME.clear()
            torch.manual_seed(1)
            model: Any = Dispatching(counts, looks)
            if remote:
                model = wrap(model, {"one": "worker1", "two": "worker2"})
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for number, (x, y) in enumerate(batches(5, 6, 8)):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                results.append(loss.item())
                if number == 2:
                    backend_of(x, Counting if counts else Backend)  # here, from now on, if not before
        assert results[:5] == results[5:], (counts, looks)
        counters = model.counters()
        assert bool(counters["calls_here"]) == counts, (counts, looks, model.captured)
        model.close()


def test_private_tables_that_every_process_fills() -> None:
    drive(private_tables, 3)
