"""Lists, dicts and objects that a remote part and the rest of the model have in common: as in one process, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_wrap import drive
from torch import nn

import rdmarpc as rpc


class Box:
    def __init__(self) -> None:
        self.last = 1.0


def made(kind: str) -> Any:
    return {"list": [1.0], "dict": {"last": 1.0}, "object": Box(), "within": ({"deep": [1.0]},)}[kind]


def last(log: Any) -> Any:
    if isinstance(log, tuple):
        return log[0]["deep"][-1]
    return log.last if isinstance(log, Box) else log["last"] if isinstance(log, dict) else log[-1]


def count(log: Any) -> None:
    if isinstance(log, Box):
        log.last += 1
    elif isinstance(log, dict):
        log["last"] += 1
    else:
        items = log[0]["deep"] if isinstance(log, tuple) else log
        items.append(items[-1] + 1)


class Part(nn.Module):
    def __init__(self, log: Any, counts: bool) -> None:
        super().__init__()
        self.line, self.log, self.counts = nn.Linear(4, 4), log, counts

    def forward(self, x):
        x = self.line(x) * last(self.log)
        if self.counts:
            count(self.log)
        return x


class Net(nn.Module):
    """``who`` changes what they have in common: the part, the forward, another part, or the loop."""

    def __init__(self, kind: str, who: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.log, self.who = made(kind), who
        self.part, self.other = Part(self.log, who == "part"), Part(self.log, who == "other")

    def forward(self, x):
        x = self.part(x)
        if self.who == "forward":
            count(self.log)
        return self.other(x) * last(self.log)


PLACES: dict[str, dict[str, Any]] = {
    "one": {"part": "worker1"},
    "two": {"part": "worker1", "other": "worker2"},
    "together": {"part": "worker1", "other": "worker1"},
}


def outcome(kind: str, who: str, places: dict[str, Any], capture: str) -> str:
    net = Net(kind, who)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    model = rpc.wrap(Net(kind, who), places, capture=capture)
    try:
        for _ in range(4):
            if who == "loop":
                count(net.log)
                count(model.log)
            if not torch.equal(model(x), net(x)):
                return "differs"
    except rpc.NotSupported as error:
        return str(error)
    finally:
        model.close()
    return "equal"


def outcomes() -> dict[tuple[str, ...], str]:
    who = ("part", "forward", "other", "loop")
    keys = [(kind, by, place, how) for kind in ("list", "object") for by in who for place in PLACES for how in ("auto", "here")]
    keys += [(kind, "part", "one", how) for kind in ("dict", "within") for how in ("auto", "eager", "here")]
    return {(kind, by, place, how): outcome(kind, by, PLACES[place], how) for kind, by, place, how in keys}


def test_what_parts_have_in_common():
    found = drive(outcomes, size=3, timeout=280, rpc_timeout=60)
    for (kind, by, place, how), outcome in found.items():
        away = (by == "part") or (by == "other" and place != "one")
        if away and how != "here":
            assert "which others in the model have, too" in outcome, (kind, by, place, how, outcome)
        else:
            assert outcome == "equal", (kind, by, place, how, outcome)


class Keeps(nn.Module):
    """What a part alone has it may change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part, self.other = Part([1.0], True), Part([1.0], False)

    def forward(self, x):
        return self.other(self.part(x))


class Tensors(nn.Module):
    """A list with tensors: the part leaves one there, which the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = [torch.zeros(1)]
        self.part = Leaves(self.heads)

    def forward(self, x):
        return self.part(x) + self.heads[0]


class Leaves(nn.Module):
    def __init__(self, heads: list[torch.Tensor]) -> None:
        super().__init__()
        self.line, self.heads = nn.Linear(4, 4), heads

    def forward(self, x):
        self.heads[0] = self.line(x) * 2
        return self.line(x)


def alone() -> None:
    x = torch.randn(3, 4)
    net, model = Keeps(), rpc.wrap(Keeps(), {"part": "worker1"}, capture="eager")
    assert all(torch.equal(model(x), net(x)) for _ in range(3))
    model.close()
    model = rpc.wrap(Tensors(), {"part": "worker1"})
    for _ in range(2):
        with pytest.raises(rpc.NotSupported, match=r"changes what is in part\.heads, which others"):
            model(x)
    model.close()


def test_what_a_part_alone_has_and_lists_of_tensors():
    drive(alone)
