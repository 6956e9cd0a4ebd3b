"""Automatic placement: even, contiguous, and such that ``wrap`` takes it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rdmarpc import auto_placement
from rdmarpc.places.balance import _Run, partition
from rdmarpc.places.placement import home, resolve


@given(st.lists(st.integers(0, 9), max_size=7), st.integers(1, 4))
def test_the_largest_run_is_as_small_as_can_be(weights, count):
    runs = partition(weights, count)
    assert [at for run in runs for at in range(run.start, run.stop)] == list(range(len(weights)))
    assert len(runs) <= count
    cuts = itertools.combinations_with_replacement(range(len(weights) + 1), count - 1)
    possible = [max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cut, len(weights)))) for cut in cuts]
    assert max(sum(weights[run]) for run in runs) == min(possible)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.full((8,), 0.5))
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x):
        self.count.add_(1)
        return x + torch.tanh(self.two(torch.relu(self.one(x)))) * self.gain + self.shift[:8]


class Nested(nn.Module):
    """A list of blocks in a forward, one of them twice, and a norm between."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.start = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Residual() for _ in range(depth))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.blocks[0](x)))


class Gpt(nn.Module):
    """Tied weights, positions, a causal mask."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 16), nn.Parameter(torch.randn(6, 16) / 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places[: tokens.size(1)]
        mask = torch.triu(torch.full((tokens.size(1), tokens.size(1)), float("-inf")), diagonal=1)
        return self.head(self.norm(self.body(x, mask=mask, is_causal=True)))


def weights_of(net: nn.Module, placement: dict[str, str], workers: list[str]) -> list[int]:
    places = resolve(net, placement, workers)
    sizes = dict.fromkeys([*workers, "me"], 0)
    for name, parameter in net.named_parameters():
        where = home(places, name.rpartition(".")[0])
        sizes["me" if where is None else where[0]] += parameter.numel()
    return [*sizes.values()]


def encoder(layers: int = 12) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


@pytest.mark.parametrize("inputs", [None, (torch.randn(2, 3, 16),)])
def test_layers_of_a_transformer_are_split_evenly(inputs):
    net = encoder()
    assert auto_placement(net, ["w0", "w1"], inputs=inputs) == {"layers.0-5": "w0", "layers.6-11": "w1"}
    assert auto_placement(net, ["w0", "w1", "w2"], inputs=inputs) == {
        "layers.0-3": "w0",
        "layers.4-7": "w1",
        "layers.8-11": "w2",
    }
    net = nn.Sequential(nn.Linear(16, 16), encoder(4), nn.Linear(16, 2))
    placement = auto_placement(net, ["w0", "w1"], inputs=inputs)
    assert placement == {"0": "w0", "1.layers.0-1": "w0", "1.layers.2-3": "w1", "2": "w1"}
    assert auto_placement(net, ["w0"]) == {"0-2": "w0"}


class Backwards(nn.Module):
    """Registered in another order than it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.b, self.a = nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)

    def forward(self, x):
        return self.c(self.b(torch.relu(self.a(x))))


def test_runs_follow_the_execution():
    # What weighs nothing stays with what comes before it.
    assert auto_placement(Backwards(), ["w0", "w1"], inputs=(torch.randn(2, 8),)) == {"a": "w0", "b": "w0", "c": "w1"}
    assert auto_placement(Backwards(), ["w0", "w1"]) == {"c": "w0", "b": "w0", "a": "w1"}
    net = Nested(6)
    placement = auto_placement(net, ["w0", "w1", "w2"], inputs=(torch.randn(4, 8),))
    sizes = weights_of(net, placement, ["w0", "w1", "w2"])
    assert max(sizes) <= sum(sizes) / 3 * 1.25
    assert sizes[-1] == 0


def test_tied_parameters_stay_together():
    net = Gpt(6)
    placement = auto_placement(net, ["w0", "w1"], inputs=(torch.zeros(2, 6, dtype=torch.long),))
    places = resolve(net, placement, ["w0", "w1"])
    assert home(places, "tokens") == home(places, "head") == ("w0", "cpu")
    sizes = weights_of(net, placement, ["w0", "w1"])
    assert abs(sizes[0] - sizes[1]) < sum(sizes) / 6
    shared = nn.Linear(8, 8)
    net = nn.Sequential(shared, nn.Linear(8, 8), shared)
    assert auto_placement(net, ["w0", "w1"]) == {"0": "w0", "1": "w1"}
    net = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([shared, nn.Linear(8, 8), shared]))
    assert resolve(net, auto_placement(net, ["w0", "w1", "w2"]), ["w0", "w1", "w2"])


class Busy(nn.Module):
    """Costs time, and no parameters: its forward and backward move the clock of the test."""

    clock = 0.0

    def forward(self, x):
        Busy.clock += 1.0
        return Tick.apply(x)


class Tick(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Busy.clock += 2.0
        return grad


def test_by_time(monkeypatch):
    # By bytes the linear layers are the weight; by time the busy ones.
    monkeypatch.setattr("rdmarpc.places.balance.perf_counter", lambda: Busy.clock)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Busy(), nn.BatchNorm1d(64), Busy())
    x = torch.randn(64, 64)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    assert auto_placement(net, ["w0", "w1"]) == {"0": "w0", "1-4": "w1"}
    assert auto_placement(net, ["w0", "w1"], by="time", inputs=(x,)) == {"0-3": "w0", "4": "w1"}
    assert _Run(net, (x,), {}).seconds(["2", "3"]) == 3.0
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_what_cannot_be_asked():
    with pytest.raises(ValueError, match="at least one worker"):
        auto_placement(Backwards(), [])
    with pytest.raises(ValueError, match="'mood'"):
        auto_placement(Backwards(), ["w0"], by="mood")
    with pytest.raises(ValueError, match="inputs="):
        auto_placement(Backwards(), ["w0"], by="time")
    with pytest.raises(ValueError, match="a list of at least one worker, got 'w0'"):
        auto_placement(Backwards(), "w0")
    with pytest.raises(ValueError, match=r"in a tuple: \(x,\), not x"):
        auto_placement(Backwards(), ["w0"], inputs=torch.zeros(2, 8))
