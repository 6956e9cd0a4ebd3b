"""Parts with replicas: each computes a shard of the batch. Training has the bits of one process that runs all shards."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from group import die, dismiss, may_stage, run_group
from test_wrap import DEVICES, STEADY, drive, leave_after_a_loss
from torch import nn
from twins import assert_same_state

import rdmarpc as rpc
from rdmarpc import NotSupported, wrap

TWO = {"features": ["worker1", "worker2"], "classifier": ["worker2", "worker1"]}
THREE = {"features": ["worker1", "worker2", "worker3"]}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
}


class Net(nn.Module):
    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features, self.classifier = features, classifier

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def dense() -> nn.Module:
    return Net(nn.Sequential(nn.Linear(12, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4))


def convolutions() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten())
    return Net(features.to(memory_format=torch.channels_last), nn.Linear(32, 4))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0][:, -1]


def recurrent() -> nn.Module:
    return Net(Recurrent(), nn.Linear(8, 4))


class Block(nn.Module):
    """Reads its weight twice, and its norm at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm, self.twice = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.twice(self.twice(self.layer(self.norm(x))))).mean(1)


def transformer() -> nn.Module:
    return Net(Block(), nn.Linear(8, 4))


MODELS = {
    "dense": (dense, (12,)),
    "convolutions": (convolutions, (3, 8, 8)),
    "recurrent": (recurrent, (5, 6)),
    "transformer": (transformer, (5, 8)),
}


class LoadsItself(nn.Linear):
    """What it loads besides tensors would reach one replica only."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__(4, 4)

    def get_extra_state(self) -> dict[str, float]:
        return {"gain": self.gain}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.gain = state["gain"]


def in_one_process(net: nn.Module, parts: Sequence[str], count: int, x: torch.Tensor) -> torch.Tensor:
    """What replicas are documented to compute."""
    results = []
    for at, shard in enumerate(x.chunk(count)):
        inside = lambda name: name.startswith(tuple(f"{part}." for part in parts))  # noqa: E731
        own = {name: p.view_as(p) for name, p in net.named_parameters() if inside(name)}
        own |= {name: b.clone() for name, b in net.named_buffers() if at and inside(name)}
        results.append(torch.func.functional_call(net, own, (shard.clone(),)))
    return torch.cat(results)


Run = Callable[[torch.Tensor], torch.Tensor]


def pair(make: Callable[[], nn.Module], placement: dict[str, Any], **options: Any) -> tuple[Any, nn.Module, Run]:
    torch.manual_seed(1)
    net = make()
    twin = copy.deepcopy(net)
    replicated = {path: workers for path, workers in placement.items() if not isinstance(workers, str)}
    count = len(next(iter(replicated.values())))
    return wrap(net, placement, timeout=20, **options), twin, partial(in_one_process, twin, list(replicated), count)


def train(model: str, optimizer: str, placement: dict[str, Any], training: bool, sizes: Sequence[int], **options: Any) -> None:
    make, shape = MODELS[model]
    net, twin, run = pair(make, placement, **options)
    net.train(training)
    twin.train(training)
    mine, theirs = OPTIMIZERS[optimizer](net.parameters()), OPTIMIZERS[optimizer](twin.parameters())
    early: dict[str, int] = {}
    for number, size in enumerate(sizes):
        x, y = torch.randn(size, *shape), torch.randint(0, 4, (size,))
        losses = []
        for forward, optimizer_ in ((net, mine), (run, theirs)):
            optimizer_.zero_grad()
            loss = F.cross_entropy(forward(x), y)
            loss.backward()
            optimizer_.step()
            losses.append(loss.detach())
        assert torch.equal(*losses), f"step {number}"
        if number == 2 * len({*sizes}) - 1:
            early = net.counters()
    late = net.counters()
    changed = {key: late[key] - early[key] for key in STEADY if late[key] != early[key]}
    assert not changed or (may_stage() and {*changed} == {"bytes_staged"}), (changed, net.placement_table())
    assert late["sums_reordered"] == 0
    assert_same_state(net, twin)
    with torch.no_grad():
        net.eval()
        twin.eval()
        x = torch.randn(sizes[0], *shape)
        assert torch.equal(net(x), run(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", MODELS)
def test_bits_are_those_of_one_process(model: str, device: str) -> None:
    drive(partial(train, model, "adam", TWO, True, (8,) * 6), 3, transport=device)


def test_norms_in_training_keep_the_statistics_of_the_first_shard() -> None:
    """Here ``BatchNorm`` is in training mode; in ``test_bits_are_those_of_one_process`` it is, too, and is read in the end."""
    drive(partial(train, "convolutions", "sgd", TWO, False, (8,) * 4), 3)


def test_operations_inside_of_parts() -> None:
    """An export takes parts apart: their operations run at their replica, over buffers of the first one."""
    drive(partial(train, "convolutions", "adam", TWO, False, (8, 7) * 3, capture="export"), 3)


ISSUE = {"features": ["worker0", "worker1"], "classifier": ["worker2", "worker3"]}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [True, False])
def test_a_replica_at_the_caller(training: bool, device: str) -> None:
    drive(partial(train, "convolutions", "adam", ISSUE, training, (8, 5) * 3), 4, transport=device)


def test_three_replicas_beside_parts_without() -> None:
    drive(partial(train, "transformer", "sgd", {**THREE, "classifier": "worker1"}, True, (6, 8, 3) * 3), 4)


def micro_batches() -> None:
    net, twin, run = pair(transformer, TWO)
    mine, theirs = OPTIMIZERS["adam"](net.parameters()), OPTIMIZERS["adam"](twin.parameters())
    for _ in range(4):
        x, y = torch.randn(12, 5, 8), torch.randint(0, 4, (12,))
        mine.zero_grad()
        ours = net.forward_backward(F.cross_entropy, x, target=y, chunks=3)
        mine.step()
        theirs.zero_grad()
        parts = []
        for one, other in zip(x.chunk(3), y.chunk(3)):
            parts.append(F.cross_entropy(run(one), other) * (4 / 12))
            parts[-1].backward()
        theirs.step()
        assert torch.equal(ours, (parts[0] + parts[1] + parts[2]).detach())
    assert_same_state(net, twin)


def test_micro_batches_are_split_over_replicas() -> None:
    drive(micro_batches, 3)


class Several(nn.Module):
    """Takes and gives several tensors; what is here reads a parameter for each shard, too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.here = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> dict[str, Any]:
        z = torch.tanh(self.one(x)) * self.scale + self.one(y) * factor
        return {"z": z, "both": (self.here(z), x, x), "factor": factor}


def several_tensors() -> None:
    torch.manual_seed(1)
    net = Several()
    twin = copy.deepcopy(net)
    model = wrap(net, {"one": ["worker1", "worker2"]})
    for _ in range(3):
        x, y = torch.randn(5, 6, requires_grad=True), torch.randn(5, 6)
        ours = model(x, y, factor=0.5)
        (ours["z"].sum() + ours["both"][0].pow(2).sum()).backward()
        grad, x.grad = x.grad, None
        shards = []
        for a, b in zip(x.chunk(2), y.chunk(2)):
            own = {f"one.{name}": p.view_as(p) for name, p in twin.one.named_parameters()}
            shards.append(torch.func.functional_call(twin, own, (a.clone(), b.clone()), {"factor": 0.5}))
        z, out = (torch.cat(tensors) for tensors in zip(*((s["z"], s["both"][0]) for s in shards)))
        (z.sum() + out.pow(2).sum()).backward()
        for mine, theirs in ((ours["z"], z), (ours["both"][0], out), (ours["both"][1], x), (ours["both"][2], x)):
            assert torch.equal(mine, theirs), mine - theirs if mine.shape == theirs.shape else mine.shape
        assert ours["factor"] == 0.5 and torch.equal(grad, x.grad)
    for (name, mine), (_, theirs) in zip(model.named_parameters(), twin.named_parameters()):
        assert torch.equal(mine.grad.clone(), theirs.grad), name


def test_several_tensors_and_parameters_that_stay() -> None:
    drive(several_tensors, 3)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Writing(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.detach().sum())
        return super().forward(x)


def hooked() -> nn.Module:
    part = nn.Linear(4, 4)
    part.register_forward_hook(note_call)
    return part


def note_call(module: nn.Module, args: Any, result: Any) -> None:
    """A hook that replicas would run each in its own process."""


class Loss(nn.Module):
    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x).sum()


PLACED = {"features": ["worker1", "worker2"]}


def refused() -> None:
    tied = Net(nn.Linear(4, 4), nn.Linear(4, 4))
    tied.classifier.weight = tied.features.weight
    nested = Net(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    for net, placement, error, text in (
        (tied, PLACED, NotSupported, "one tensor"),
        (nested, {**PLACED, "features.0": "worker1"}, NotSupported, "placed too"),
        (nested, {**PLACED, "classifier": ["worker1"]}, ValueError, "two workers"),
        (nested, {"features": ["worker1", "worker1"]}, ValueError, "each once"),
        (nested, {"features": ["worker1", "worker9"]}, ValueError, "not in this group"),
        (nested, {**PLACED, "classifier": ["worker1", "worker2", "worker3"]}, ValueError, "same number"),
    ):
        with pytest.raises(error, match=text):
            wrap(net, placement)
    with pytest.raises(NotSupported, match="captured"):
        wrap(nested, PLACED, capture="eager")
    for features, x, text in (
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(4, 4), "random numbers"),
        (Counting(4, 4), torch.randn(4, 4), "calls"),
        (Writing(4, 4), torch.randn(4, 4), "seen"),
        (hooked(), torch.randn(4, 4), "hooks"),
        (nn.Linear(4, 4), torch.randn(1, 4), "1 shards"),
        (nn.Linear(4, 4), torch.randn(()), "first dimension"),
    ):
        model = wrap(Net(features, nn.Linear(4, 4)), PLACED)
        with pytest.raises(NotSupported, match=text):
            model(x)
        model.close()
    model = wrap(Net(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)), PLACED)
    with pytest.raises(NotSupported, match="the last shard, of 1 samples: fx: Expected more than 1 value per channel"):
        model(torch.randn(3, 4))
    model = wrap(Loss(nn.Linear(4, 4)), PLACED)
    with pytest.raises(NotSupported, match="outside of the model"):
        model(torch.randn(4, 4))
    model = wrap(Net(nn.Linear(4, 4), nn.Linear(4, 4)), PLACED)
    with pytest.raises(NotSupported, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, 4))
    with pytest.raises(NotSupported, match="before wrap"):
        model.features.gain = 2.0
    with pytest.raises(NotSupported, match="before wrap"):
        model.features.apply(nn.Module.eval)
    with pytest.raises(NotSupported, match="before wrap"):
        model.features.compile()
    model = wrap(Net(LoadsItself(), nn.Linear(4, 4)), PLACED)
    with pytest.raises(NotSupported, match="before wrap"):
        model.load_state_dict(model.state_dict())


def test_what_is_not_that_of_one_process_is_refused() -> None:
    drive(refused, 4)


def state() -> None:
    net, twin, run = pair(convolutions, TWO)
    assert_same_state(net, twin)
    alone = copy.deepcopy(net)
    assert type(alone) is type(twin)
    assert_same_state(alone, twin)
    other = convolutions().eval()
    net.load_state_dict(other.state_dict())
    twin.load_state_dict(other.state_dict())
    net.eval(), twin.eval()
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(net(x), run(x))
    assert [name for name, _ in net.named_parameters()] == [name for name, _ in twin.named_parameters()]
    net.features[0].weight.requires_grad_(False)
    twin.features[0].weight.requires_grad_(False)
    net(x).sum().backward()
    run(x).sum().backward()
    for (name, mine), (_, theirs) in zip(net.named_parameters(), twin.named_parameters()):
        assert (mine.grad is None and theirs.grad is None) or torch.equal(mine.grad.clone(), theirs.grad), name


def test_there_is_one_logical_copy() -> None:
    drive(state, 3)


def replaced(folder: str) -> None:
    net, twin, run = pair(dense, TWO)
    mine, theirs = OPTIMIZERS["adam"](net.parameters()), OPTIMIZERS["adam"](twin.parameters())
    for number in range(4):
        x, y = torch.randn(4, 12), torch.randint(0, 4, (4,))
        for forward, optimizer in ((net, mine), (run, theirs)):
            optimizer.zero_grad()
            F.cross_entropy(forward(x), y).backward()
            optimizer.step()
        if number == 1:
            rpc.save_checkpoint({"model": net, "optimizer": mine}, folder)
            net.replace("worker2", "worker3")
    assert_same_state(net, twin)


def test_a_checkpoint_and_another_worker(tmp_path: Path) -> None:
    drive(partial(replaced, str(tmp_path / "checkpoint")), 4)


def killed(rank: int) -> Any:
    if rank == 1:
        leave_after_a_loss()
    if rank == 2:
        rpc.shutdown()  # serves until it is killed
    if rank:
        return None
    net, _, _ = pair(dense, TWO)
    net(torch.randn(4, 12)).sum().backward()
    rpc.rpc_async("worker2", die)
    started = time.monotonic()
    with pytest.raises(rpc.PeerLost, match="worker2"):
        while time.monotonic() < started + 40:
            net(torch.randn(4, 12)).sum().backward()
    seconds = time.monotonic() - started
    net.close()
    dismiss("worker1")
    with pytest.raises(rpc.PeerLost):
        rpc.shutdown(timeout=20)
    return seconds


def test_a_replica_that_dies_ends_the_step() -> None:
    outcomes = run_group(killed, 3, timeout=250.0)
    assert not outcomes[0].error, outcomes[0].text
    assert outcomes[0].result < 30
    assert not outcomes[1].error, outcomes[1].text
