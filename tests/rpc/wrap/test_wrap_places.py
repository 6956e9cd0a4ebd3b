"""Automatic placement: even, contiguous, in the order of the execution, and such that ``wrap`` takes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from beside import assert_same, both, sgd, step
from nets import NETS, Language, data
from torch import nn

from rdmarpc import auto_placement

TWO = ["worker1", "worker2"]


class Backwards(nn.Module):
    """Registered in another order than it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.a = nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)

    def forward(self, x):
        return self.c(self.b(torch.relu(self.a(x))))


def test_runs_follow_the_execution():
    placement = auto_placement(Backwards(), ["w0", "w1"], inputs=(torch.randn(2, 8),))
    assert (placement["a"], placement["c"]) == ("w0", "w1")


class Busy(nn.Module):
    """Takes time, and has no parameters."""

    def forward(self, x):
        for _ in range(200):
            x = torch.tanh(x @ torch.eye(64))
        return x


def test_by_time():
    """By bytes the linear layers are the weight; by time the busy ones. The model is left as it is."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Busy(), nn.BatchNorm1d(64), Busy())
    before = {key: value.clone() for key, value in net.state_dict().items()}
    assert auto_placement(net, ["w0", "w1"]) == {"0": "w0", "1-4": "w1"}
    found = auto_placement(net, ["w0", "w1"], by="time", inputs=(torch.randn(64, 64),))
    assert set(found.values()) == {"w0", "w1"} and found != {"0": "w0", "1-4": "w1"}
    assert_same(net.state_dict(), before)
    assert all(parameter.grad is None for parameter in net.parameters())


def trained(name: str) -> None:
    make, [(x, y), *_] = NETS[name].make, data(name, (6, 6))
    placement = auto_placement(make(), TWO, inputs=(x,))
    model, twin = both(make, placement)
    optimizers = [sgd(each) for each in (model, twin)]
    for _ in range(3):
        assert_same(*(step(each, o, x, y) for each, o in zip((model, twin), optimizers)))
    assert_same(model.state_dict(), twin.state_dict())
    sizes = {worker: sum(p.numel() for n, p in twin.named_parameters() if _home(placement, n) == worker) for worker in TWO}
    assert all(size > 0 for size in sizes.values()), sizes
    assert F.cross_entropy(model(x), y).item() == F.cross_entropy(twin(x), y).item()


def _home(placement: dict[str, str], name: str) -> str:
    """Of a parameter, by the longest entry; a range stands for its ends and what is between."""
    found = ("", "")
    for path, worker in placement.items():
        *before, last = path.split(".")
        first, _, end = last.partition("-")
        lasts = [str(at) for at in range(int(first), int(end) + 1)] if end else [last]
        for each in (".".join([*before, one]) for one in lasts):
            if name.startswith(f"{each}.") and len(each) > len(found[0]):
                found = each, worker
    return found[1]


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "language", "vit"])
def test_wrap_takes_what_it_gives(drive, name):
    drive(trained, name)


def test_tied_parameters_stay_together():
    placement = auto_placement(Language(), ["w0", "w1"], inputs=(torch.zeros(2, 6, dtype=torch.long),))
    assert _home(placement, "tokens.weight") == _home(placement, "head.weight")


@pytest.mark.parametrize(
    "workers, options, text",
    [
        ([], {}, "at least one worker"),
        ("w0", {}, "a list of at least one worker, got 'w0'"),
        (["w0"], {"by": "mood"}, "'mood'"),
        (["w0"], {"by": "time"}, "inputs="),
        (["w0"], {"inputs": torch.zeros(2, 8)}, r"in a tuple: \(x,\), not x"),
    ],
)
def test_what_cannot_be_asked(workers, options, text):
    with pytest.raises(ValueError, match=text):
        auto_placement(Backwards(), workers, **options)
