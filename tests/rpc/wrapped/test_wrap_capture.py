"""What is captured how: the forward as a graph where that is possible, else in Python with prepared calls."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import wrap_models as models
from test_capture import Nested, Shapes
from test_methods import install
from test_wrap import assert_same_state, batches, both, drive
from test_wrap_placements import train_both
from torch import nn

import rdmarpc as rpc
from rdmarpc import wrap


class Experts(nn.Module):
    """Which experts run, and on how many rows, depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(20, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(20, 4)

    def forward(self, x):
        scores = self.router(x).softmax(1)
        best = scores.argmax(1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return self.head(y)


class Loop(nn.Module):
    """A cell that is called until the values say enough; a gain that lies beside it; a tied readout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(20, 4)

    def forward(self, x):
        return self.head(self.body(x))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm = nn.GRUCell(20, 20), nn.BatchNorm1d(20)
        self.gain = nn.Parameter(torch.ones(20))
        self.register_buffer("start", torch.full((20,), 0.1))
        self.writing = False

    def forward(self, x):
        if self.writing:
            self.start.add_(1)
        h, turns = self.start.expand_as(x), int(x[0, 0].abs() * 3) % 4 + 1
        for _ in range(turns):
            h = self.norm(self.cell(x, h)) * self.gain
        return h + F.linear(x, self.cell.weight_hh[:20])


def steady(model: nn.Module, run: Any) -> None:
    """``run`` once more sends nothing but prepared writes."""
    run()
    early = model.counters()
    run()
    late = model.counters()
    for key in ("registrations", "rpc_messages", "plans"):
        assert late[key] == early[key], key


def experts() -> None:
    model, twin = both(Experts, {"router": "worker1", "experts.0-1": "worker1", "experts.2": "worker2", "head": "worker2"})
    data = batches(5, 12, 20)
    train_both(model, twin, data, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    first, *reasons = model.captured.splitlines()
    assert first == "eager"
    assert [line.split(":")[0] for line in reasons] == ["fx", "export"]
    assert "depends on data" in reasons[0]
    # Other routings are other shapes: each was new once, and is named.
    assert all("experts." in miss.what for miss in model.misses())
    assert model.misses()
    assert model.counters()["steps"] == 5

    def again() -> None:
        for x, _ in data:
            with torch.no_grad():
                assert torch.equal(model(x), twin(x))

    steady(model, again)
    # Each call is a plan, and says so like any other.
    assert len(model.transfers()) == len(model.placement_table().split("\n\n")) >= 5
    assert "experts.2" in model.placement_table()
    model.close()


class Listing(nn.Module):
    """A list of modules that are in no list of torch's, a whole list at one worker, a sequence that is taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.many = nn.Linear(20, 20), nn.ModuleList([nn.Linear(20, 20), nn.Tanh()])
        self.row, self.gains = nn.Sequential(nn.Linear(20, 4), nn.Tanh()), nn.ParameterList([torch.ones(20)])
        self.order = [self.a, {"row": self.row}]

    def forward(self, x):
        x = self.order[0](x) * self.gains[0]
        for module in self.many if x.sum() > -1e9 else []:
            x = module(x)
        assert self.a.in_features == 20
        return self.order[1]["row"][1](self.order[1]["row"][0](x))


def listing() -> None:
    placement = {"a": "worker1", "many": "worker2", "row": "worker1", "gains": "worker2"}
    model, twin = both(Listing, placement)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()]
    train_both(model, twin, batches(3, 6, 20), lambda p: torch.optim.SGD(p, 0.1))
    assert model.captured.startswith("eager")
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 20)), twin(torch.ones(2, 20)))
    model.close()


class Numpy(nn.Module):
    """Leaves torch, in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 4)

    def forward(self, x):
        return self.layer(x) * float(x.detach().numpy().max())


def numpy() -> None:
    model, twin = both(lambda: nn.Sequential(Numpy(), nn.Linear(4, 4)), {"0": "worker1"})
    with pytest.raises((RuntimeError, rpc.NotSupported), match=r"cannot be multiplied|reduction dim"):
        model(torch.zeros(2, 3))
    assert model.captured == ""
    train_both(model, twin, batches(3, 6, 20), lambda p: torch.optim.SGD(p, 0.1))
    assert model.captured.startswith("eager")
    model.close()


def captured_by_another_package() -> None:
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        sys.path.append(folder)
        model, twin = both(lambda: nn.Sequential(nn.Linear(20, 8), nn.Linear(8, 4)), {"0": "worker1"}, capture="mine")
        train_both(model, twin, batches(3, 6, 20), lambda p: torch.optim.SGD(p, 0.1))
        assert model.captured == "mine"
        train_both(model, twin, batches(2, 5, 20), lambda p: torch.optim.SGD(p, 0.1))  # the same for other sizes
        model.close()


def test_another_package_captures() -> None:
    drive(captured_by_another_package)


def loop() -> None:
    model, twin = both(Loop, {"body": "worker1", "body.norm": "worker2", "head": "worker2"}, capture="eager")
    data = batches(8, 6, 20)
    for turns, (x, _) in zip((1, 0, 2, 3, 1, 2, 0, 3), data):
        x[0, 0] = 0.4 * turns
    train_both(model, twin, data, lambda p: torch.optim.Adam(p, 1e-2))
    assert model.captured == "eager"
    assert any("body.cell, call" in miss.what for miss in model.misses())
    x, y = batches(1, 6, 20)[0]

    def step() -> None:
        for network in (model, twin):
            network.zero_grad()
            F.cross_entropy(network(x), y).backward()

    steady(model, step)
    for network in (model, twin):
        network.eval()
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))
    # A forward that fails in the middle leaves nothing behind.
    for _ in range(3):
        with pytest.raises(IndexError):
            model(torch.zeros(0, 20))
    assert torch.equal(model.head(x), twin.head(x))  # a part alone
    model.body.writing = True
    with pytest.raises(rpc.NotSupported, match=r"writes into 'body.start', which lives on worker 'worker1'"):
        model(x)
    model.body.writing = False
    loss = model.forward_backward(F.cross_entropy, x, target=y, chunks=2)  # one after another
    expected = [F.cross_entropy(twin(part), target) * (len(part) / len(x)) for part, target in zip(x.chunk(2), y.chunk(2))]
    assert torch.equal(loss, sum(expected[1:], expected[0]))
    model.zero_grad()
    with torch.autocast("cpu"), pytest.warns(UserWarning, match="autocast") as told:
        assert torch.equal(model(x), twin(x))
    assert [each.filename for each in told] == [__file__]
    assert_same_state(model, twin)
    model.close()


class Looking(nn.Module):
    """A part that looks at values itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.norm = nn.Linear(20, 20), nn.Dropout(0.5), nn.BatchNorm1d(20)

    def forward(self, x):
        y = self.norm(self.layer(x))
        return {"y": self.drop(y) if y.sum() > 0 else -y, "n": x.shape[0]}


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Looking(), nn.Linear(20, 4)

    def forward(self, x):
        made = self.part(x)
        return self.head(made["y"]) * made["n"]


def seed() -> None:
    torch.manual_seed(9)


def looking() -> None:
    model, twin = both(Looks, {"part": "worker1", "head": "worker2"})
    x, y = batches(1, 6, 20)[0]
    # The probe of the first call neither draws nor counts.
    rpc.rpc_sync("worker1", seed)
    seed()
    for sign in (1, -1, 1):
        losses = [F.cross_entropy(network(x * sign), y) for network in (model, twin)]
        assert losses[0].item() == losses[1].item()
        for loss in losses:
            loss.backward()
    assert model.captured.startswith("eager\nfx: ")
    for optimizer in [torch.optim.SGD(network.parameters(), 0.1) for network in (model, twin)]:
        optimizer.step()
    assert_same_state(model, twin)
    model.close()


def shapes() -> None:
    model, twin = both(Shapes, {"layers.1": "worker1", "lstm": "worker2"})
    x = torch.randn(4, 8)
    for network in (model, twin):
        result = network(x, scale=2.0)
        result["z"].pow(2).sum().backward()
        network.result = result["z"]
        assert type(result) is dict
    assert model.captured == "fx"
    assert torch.equal(model.result, twin.result)
    # What knows sizes as numbers is not used for others.
    with torch.no_grad():
        for rows in (5, 6, 4, 5, 1, 6):
            x = torch.randn(rows, 8)
            assert torch.equal(model(x)["z"], twin(x)["z"])
    assert model.counters()["plans"] == 5
    model.close()


class Rectified(nn.Module):
    """The input of an in-place part is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu = nn.Linear(20, 20), nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.a(x)
        return self.relu(x) + x


def rectified() -> None:
    model = wrap(Rectified(), {"a": "worker1", "relu": "worker2"}, capture="eager")
    with pytest.raises(rpc.NotSupported, match=r"part 'relu' writes into its input"):
        model(torch.randn(2, 20))
    model.close()


def exported() -> None:
    """Through ``torch.export``: parts are cut inside, buffers and random numbers are the model's."""
    placement = {
        "start": "worker1",
        "blocks.0-1": "worker1",
        "blocks.1.two": "worker2",
        "blocks.2-3": "worker2",
        "head": "worker2",
    }
    model, twin = both(lambda: Dropped(0.3), placement, capture="export")
    rpc.rpc_sync("worker2", seed)
    seed()
    train_both(model, twin, batches(3, 6, 8), lambda p: torch.optim.Adam(p, 1e-2))
    assert model.captured == "export"
    for network in (model, twin):
        network.eval()
    with torch.no_grad():
        for rows in (6, 3, 2, 3):
            x = torch.randn(rows, 8)
            assert torch.equal(model(x), twin(x))
    assert_same_state(model, twin)
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied|export"):
        model(torch.randn(2, 9))
    model.close()


class Dropped(Nested):
    def __init__(self, chance: float) -> None:
        super().__init__()
        self.head.append(nn.Dropout(chance))


def choices() -> None:
    with pytest.raises(ValueError, match=r"'auto', 'fx'.*got 'magic'"):
        wrap(Looks(), {"part": "worker1"}, capture="magic")
    model = wrap(models.Branching(), {"a": "worker1"}, capture="fx")
    with pytest.raises(rpc.NotSupported, match=r"Branching.forward .*depends on data"):
        model(torch.zeros(2, 20))
    model.close()
    model, twin = both(models.Branching, {"a": "worker1"})
    for scale in (1.0, -1.0):
        x = torch.ones(2, 20) * scale
        assert torch.equal(model(x), twin(x))
    model.close()


def everything() -> None:
    for scenario in (choices, shapes, rectified, exported, looking, experts, listing, numpy, loop):
        torch.manual_seed(0)
        scenario()


def test_capture():
    drive(everything, 3)
