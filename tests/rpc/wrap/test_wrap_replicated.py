"""Parts with replicas: each computes a shard of the batch. Training has the bits of one process that runs one shard after
another."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside import assert_same, sgd, step, wrap
from torch import nn

import rdmarpc as rpc

TWO = {"features": ["worker1", "worker2"], "classifier": ["worker2", "worker1"]}


class Net(nn.Module):
    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features, self.classifier = features, classifier

    def forward(self, x):
        return self.classifier(self.features(x))


class Last(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0][:, -1]


class Block(nn.Module):
    """Reads its weight twice, and its norm at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm, self.twice = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return self.norm(self.twice(self.twice(self.layer(self.norm(x))))).mean(1)


def convolutions() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten())
    return Net(features.to(memory_format=torch.channels_last), nn.Linear(32, 4))


MODELS = {
    "dense": (lambda: Net(nn.Sequential(nn.Linear(12, 16), nn.ReLU(True), nn.Linear(16, 16)), nn.Linear(16, 4)), (12,)),
    "convolutions": (convolutions, (3, 8, 8)),
    "recurrent": (lambda: Net(Last(6, 8, 2, batch_first=True), nn.Linear(8, 4)), (5, 6)),
    "transformer": (lambda: Net(Block(), nn.Linear(8, 4)), (5, 8)),
}


def in_one_process(net: nn.Module, parts: Sequence[str], count: int) -> nn.Module:
    """What replicas are documented to compute, one shard after another."""
    for part in parts:
        module = net.get_submodule(part)
        forward = module.forward
        module.forward = lambda x, forward=forward: torch.cat([forward(shard) for shard in x.chunk(count)])
    return net


def pair(model: str, placement: dict[str, Any]) -> tuple[Any, nn.Module]:
    nets = []
    for _ in range(2):
        torch.manual_seed(1)
        nets.append(MODELS[model][0]())
    replicated = {path: workers for path, workers in placement.items() if not isinstance(workers, str)}
    return wrap(nets[0], placement), in_one_process(nets[1], list(replicated), len(next(iter(replicated.values()))))


def trained(model: str, placement: dict[str, Any], training: bool) -> None:
    nets = pair(model, placement)
    optimizers = [sgd(each.train(training)) for each in nets]
    for number, size in enumerate((8, 8, 5, 8, 7)):
        x, y = torch.randn(size, *MODELS[model][1]), torch.randint(0, 4, (size,))
        assert_same(*(step(each, o, x, y) for each, o in zip(nets, optimizers)), f"step {number}")
    assert_same(*(each.state_dict() for each in nets))
    with torch.no_grad():
        assert_same(*(each.eval()(x) for each in nets))


@pytest.mark.parametrize("model", MODELS)
def test_bits_are_those_of_one_process(drive, model):
    drive(trained, model, TWO, True)


@pytest.mark.parametrize("training", [True, False])
def test_a_replica_at_the_caller_beside_other_parts(drive, training):
    drive(trained, "convolutions", {"features": ["worker0", "worker1"], "classifier": ["worker2", "worker0"]}, training)
    drive(trained, "transformer", {"features": ["worker1", "worker2"], "classifier": "worker1"}, training)


def micro_batches() -> None:
    net, twin = pair("transformer", TWO)
    for _ in range(3):
        x, y = torch.randn(12, 5, 8), torch.randint(0, 4, (12,))
        ours = net.forward_backward(F.cross_entropy, x, target=y, chunks=3)
        theirs = []
        for one, other in zip(x.chunk(3), y.chunk(3)):
            theirs.append(F.cross_entropy(twin(one), other) * (4 / 12))
            theirs[-1].backward()
        assert_same(ours, (theirs[0] + theirs[1] + theirs[2]).detach())
    assert_same(*([p.grad for p in each.parameters()] for each in (net, twin)))


def test_micro_batches_are_split_over_replicas(drive):
    drive(micro_batches)


def one_copy() -> None:
    """There is one state, whatever the number of replicas; freezing and hooks hold for all."""
    net, twin = pair("dense", TWO)
    assert list(net.state_dict()) == list(twin.state_dict())
    seen: list[Any] = []
    for each in (net, twin):
        torch.manual_seed(2)
        each.load_state_dict(MODELS["dense"][0]().state_dict())
        each.features[0].weight.requires_grad_(False)
        each.features[2].register_forward_hook(lambda module, args, out: seen.append(len(out)))
    x = torch.randn(6, 12)
    net(x).sum().backward()
    twin(x).sum().backward()
    assert seen == [3, 3, 3, 3]
    assert_same([p.grad for p in net.parameters()], [p.grad for p in twin.parameters()])
    for part, text in ((nn.Linear(4, 4), "no batch"), (nn.Flatten(0), "no batch")):
        other = wrap(Net(nn.Sequential(part, Total()), nn.Identity()), {"features": ["worker1", "worker2"]})
        with pytest.raises(rpc.NotSupported, match=text):
            other(torch.randn(4, 4))


class Total(nn.Module):
    def forward(self, x):
        return x.sum()


def test_there_is_one_logical_copy(drive):
    drive(one_copy)


def placed_anew() -> None:
    """A model, or a copy of one, that is wrapped again lies where the last call says, with so many replicas."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x, alone = torch.randn(8, 4), copy.deepcopy(net)
    model = rpc.wrap(net, {"0": ["worker1", "worker2"], "2": "worker1"})
    for again in (copy.deepcopy(model), model):
        again = rpc.wrap(again, {"0": ["worker2", "worker1"], "2": "worker2"})
        assert again[0].weight.place == again[2].weight.place == "worker2"
        shards = torch.cat([alone[0](shard) for shard in x.chunk(2)])
        assert torch.equal(again(x).cpu(), alone[2](alone[1](shards)))
        again = rpc.wrap(again, {"2": "worker1"})
        assert torch.equal(again(x).cpu(), alone(x)) and again[2].weight.place == "worker1"
    model.close()
    norm = nn.BatchNorm1d(4)
    expected = torch.cat([copy.deepcopy(norm)(shard) for shard in x.chunk(2)])
    model = rpc.wrap(nn.Sequential(norm), {"0": ["worker1", "worker2"]})
    rpc.wrap(nn.Sequential(norm, nn.Linear(4, 2)), {"1": "worker2"})  # of another model, which places another part
    assert torch.equal(model(x).cpu(), expected)
    model.close()


def test_placed_anew(drive):
    drive(placed_anew)
