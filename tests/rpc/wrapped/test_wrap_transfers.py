"""What ``transfers`` says against what really arrives in a step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from test_wrap import drive
from torch import nn

from rdmarpc import wrap


class Probe(nn.Module):
    """A part that keeps what came in, and the gradient of what it gave, as buffers: the caller can ask for them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("came", torch.zeros(0), persistent=True)
        self.register_buffer("back", torch.zeros(0), persistent=True)

    def forward(self, *given):
        out = self.inner(*given)
        if type(out) is torch.Tensor:
            self.came = _facts(given)
            if out.requires_grad:
                out.register_hook(self._came_back)
        return out

    def _came_back(self, grad: torch.Tensor) -> None:
        self.back = _facts([grad])

    def _load_from_state_dict(self, *args: Any) -> None:
        raise AssertionError("probes are read only")


DTYPES = ["torch.float32", "torch.float64", "torch.int64", "torch.bool"]


def _facts(tensors: Any) -> torch.Tensor:
    """Of each: which dtype, bytes, then rank and sizes."""
    rows = [[DTYPES.index(str(t.dtype)), t.nbytes, t.dim(), *t.shape, *[0] * (4 - t.dim())] for t in tensors]
    return torch.tensor(rows, dtype=torch.int64)


def _read(facts: torch.Tensor) -> list[tuple[Any, ...]]:
    return [(DTYPES[row[0]].removeprefix("torch."), row[1], tuple(row[3 : 3 + row[2]])) for row in facts.tolist()]


class Gate(nn.Module):
    def forward(self, x, mask, scale):
        return torch.where(mask, x * scale, 0.0).double()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Probe(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)))
        self.left = Probe(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))
        self.right = Probe(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)))
        self.gate = Probe(Gate())

    def forward(self, x, scale):
        y = self.stem(x)
        right = self.right(y)
        return self.gate(self.left(y), right > 0, scale).sum(1) + y.mean() + right.sum(1)


PLACES = {"stem": "worker1", "left": "worker2", "right": "worker1", "gate": "worker2"}


def sizes() -> None:
    torch.manual_seed(1)
    net = Net()
    model, twin = wrap(copy.deepcopy(net), PLACES), net
    assert model.transfers() == []
    x, scale = torch.randn(3, 1, 8, 8), torch.tensor(2, dtype=torch.int64)
    out, expected = model(x, scale), twin(x, scale)
    assert torch.equal(out, expected)
    out.sum().backward()
    state = model.state_dict()
    [found] = model.transfers()
    assert found.crossings[0].allocator == "input x"
    arrived = {
        (c.target, c.name, c.kind): (c.dtype, c.nbytes, c.shape)
        for c in found.crossings
        if c.first is not None and not c.trigger
    }
    came = {name: _read(state[f"{name}.came"]) for name in PLACES}
    back = {name: _read(state[f"{name}.back"]) for name in PLACES}
    assert came["stem"] == [arrived["worker1", "input x", "activation"]]
    assert came["left"] == [arrived["worker2", "stem", "activation"]]
    assert came["gate"][1:] == [arrived["worker2", name, "activation"] for name in ("gt()", "input scale")]
    assert back["stem"] == [arrived["worker1", "stem", "gradient"]]
    assert (*back["gate"][0][:2], back["gate"][0][2]) == ("float64", 3 * 5 * 8, (3, 5))
    last = found.crossings[[c.target for c in found.crossings].index("worker0")]
    assert (last.dtype, last.nbytes, last.shape) == (str(out.dtype).removeprefix("torch."), out.nbytes, tuple(out.shape))
    parameters = {
        worker: sum(p.nbytes for name, part in net.named_children() if PLACES[name] == worker for p in part.parameters())
        for worker in ("worker1", "worker2")
    }
    assert {w.name: w.parameter_bytes for w in found.workers if w.parameter_bytes} == parameters
    assert model.placement_table() == found.table()
    # Another plan, in evaluation: no gradients come back.
    model.eval().requires_grad_(False)
    with torch.no_grad():
        model(x[:2], scale)
    _, second = model.transfers()
    assert {h.kind for h in second.histogram()} == {"activation"}
    assert model.placement_table() == f"{found.table()}\n\n{second.table()}"
    model.close()


def test_sizes_are_those_of_real_tensors():
    drive(sizes, 3)
