"""``wrap``: training over several processes gives the bits that training in one process gives."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import wrap_models as models
from called import let_go
from group import die, dismiss, may_stage, results, run_group, until_dismissed
from torch import nn
from twins import assert_same_state

import rdmarpc as rpc
from rdmarpc import wrap
from rdmarpc.calls import agent
from rdmarpc.ground import here

DEVICES = ["shm", "tcp"]
STEADY = ("registrations", "bytes_staged", "rpc_messages", "plans")


def on_driver(body: Callable[[], Any], rank: int) -> Any:
    """``body`` runs at worker0; the others only serve."""
    try:
        return body() if rank == 0 else None
    finally:
        rpc.shutdown()


def drive(body: Callable[[], Any], size: int = 2, **options: Any) -> Any:
    return results(run_group(partial(on_driver, body), size, **options))[0]


def both(make: Callable[[], nn.Module], placement: dict[str, str], **options: Any) -> tuple[Any, nn.Module]:
    """A wrapped model and its twin in this process."""
    torch.manual_seed(1)
    net = make()
    twin = copy.deepcopy(net)
    return wrap(net, placement, **options), twin


def batches(count: int, *shape: int, classes: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(shape, generator=generator), torch.randint(0, classes, shape[:1], generator=generator))
        for _ in range(count)
    ]


# -- equal bits, and nothing but prepared writes from the second step on

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, betas=(0.8, 0.99)),
}


def train(
    make: Callable[[], nn.Module], placement: dict[str, str], optimizer: str, shape: tuple[int, ...], classes: int
) -> None:
    model, twin = both(make, placement)
    mine, theirs = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](twin.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5) for o in (mine, theirs)]
    early: dict[str, int] = {}
    for number, (x, y) in enumerate(batches(12, *shape, classes=classes)):
        mine.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        mine.step()
        theirs.zero_grad()
        expected = F.cross_entropy(twin(x), y)
        expected.backward()
        theirs.step()
        assert loss.item() == expected.item(), f"step {number}"
        for schedule in schedules:
            schedule.step()
        if number == 1:
            early = model.counters()
    late = model.counters()
    steady = [key for key in STEADY if key != "bytes_staged" or not may_stage()]
    assert {key: late[key] for key in steady} == {key: early[key] for key in steady}
    assert late["bytes_staged"] <= late["bytes_direct"]
    if "shm" in here.current().device.name:
        assert late["bytes_staged"] == 0
    assert late["steps"] == 12
    assert_same_state(model, twin)
    model.close()


CASES = [
    (models.mlp, {"0": "worker1", "4": "worker1"}, (8, 20), 4),
    (models.mlp, {"0": "worker0", "1": "worker1", "2": "worker1", "3": "worker2", "4": "worker2"}, (8, 20), 4),
    (models.Cnn, {"features": "worker0", "middle": "worker1", "classifier": "worker1"}, (8, 1, 8, 8), 10),
    (models.Cnn, {"features": "worker1", "classifier": "worker0"}, (8, 1, 8, 8), 10),
    (models.Cnn, {"features": "worker1", "middle": "worker2", "classifier": "worker1"}, (8, 1, 8, 8), 10),
    (models.Skip, {"a": "worker1", "b": "worker2", "c": "worker1"}, (8, 20), 4),
    (models.Skip, {"a": "worker1", "b": "worker2"}, (8, 20), 4),
    (models.PingPong, {"first": "worker1", "third": "worker1"}, (8, 20), 4),
    (models.PingPong, {"second": "worker1", "third": "worker2"}, (8, 20), 4),
]


@pytest.mark.parametrize("make, placement, shape, classes", CASES)
def test_training_is_equal_to_the_bit(make, placement, shape, classes):
    drive(partial(train, make, placement, "sgd", shape, classes), 3)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_optimizers_with_a_schedule(optimizer):
    make, placement, shape, classes = CASES[4]
    drive(partial(train, make, placement, optimizer, shape, classes), 3)


@pytest.mark.parametrize("device", DEVICES)
def test_every_device(device):
    make, placement, shape, classes = CASES[4]
    drive(partial(train, make, placement, "momentum", shape, classes), 3, transport=device)


def structures() -> None:
    model, twin = both(models.TuplesAndInputs, {"pair": "worker1", "join": "worker2"})
    x, y = torch.randn(5, 20, requires_grad=True), torch.randn(5, 20)
    copied = x.detach().clone().requires_grad_()
    for double in (False, True):
        ours, theirs = model(x, y=y, double=double), twin(copied, y=y, double=double)
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.equal(ours[key], theirs[key])
        (ours["out"].sum() + ours["left"].pow(2).sum()).backward()
        (theirs["out"].sum() + theirs["left"].pow(2).sum()).backward()
        assert torch.equal(x.grad, copied.grad)
    assert model.counters(False)["plans"] == 2


def test_structures_several_inputs_and_outputs():
    drive(structures, 3)


def batch_sizes_and_evaluation() -> None:
    model, twin = both(models.Cnn, {"features": "worker1", "classifier": "worker2"}, plans=2)
    mine, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    for size in (8, 8, 3, 8, 5, 3, 8):
        x, y = batches(1, size, 1, 8, 8, classes=10)[0]
        for network, optimizer in ((model, mine), (twin, theirs)):
            network.train()
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
        model.eval()
        twin.eval()
        with torch.no_grad():
            # Kept outputs stay what they are, however many there are.
            kept = [model(x * scale) for scale in range(6)]
            for scale, output in enumerate(kept):
                assert torch.equal(output, twin(x * scale))
                assert not output.requires_grad
    assert_same_state(model, twin)
    assert len(model.placement_table().split("\n\n")) == 2
    with torch.inference_mode():
        assert torch.equal(model(x), twin(x))


def test_other_batch_sizes_and_evaluation_between_steps():
    drive(batch_sizes_and_evaluation, 3)


def accumulation() -> None:
    model, twin = both(models.Skip, {"a": "worker1", "b": "worker2", "c": "worker1"})
    mine, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    for number, (x, y) in enumerate(batches(6, 8, 20)):
        for network, optimizer in ((model, mine), (twin, theirs)):
            for part in x.split(4):
                F.cross_entropy(network(part), y[: len(part)]).backward()
            # Two forwards first, their backwards in the other order.
            losses = [F.cross_entropy(network(part), y[4:]) for part in x.split(4)]
            losses[1].backward()
            losses[0].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        assert_same_state(model, twin)


def test_gradient_accumulation():
    drive(accumulation, 3)


def partial_losses() -> None:
    model, twin = both(models.Forked, {"trunk": "worker1", "one": "worker1", "two": "worker2"})
    mine, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    for number, (x, y) in enumerate(batches(6, 8, 20)):
        for network, optimizer in ((model, mine), (twin, theirs)):
            optimizer.zero_grad()
            F.cross_entropy(network(x)[number % 2], y).backward()
            optimizer.step()
        assert_same_state(model, twin)


def test_a_loss_over_some_of_the_outputs():
    drive(partial_losses, 3)


def frozen() -> None:
    model, twin = both(models.Cnn, {"features": "worker1", "classifier": "worker2"})
    for network in (model, twin):
        network.features.requires_grad_(False)
        network.features.eval()
    mine, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    for x, y in batches(3, 8, 1, 8, 8, classes=10):
        for network, optimizer in ((model, mine), (twin, theirs)):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
    assert ("features", "gradient") not in {(c.name, c.kind) for c in model.transfers()[0].crossings}
    assert_same_state(model, twin)
    for network in (model, twin):
        network.train()
        network.requires_grad_(True)
        F.cross_entropy(network(x), y).backward()
    theirs.step()
    mine.step()
    assert_same_state(model, twin)


def test_frozen_parts():
    drive(frozen, 3)


def layouts() -> None:
    def make() -> nn.Module:
        return models.Cnn().to(memory_format=torch.channels_last)

    model, twin = both(make, {"features": "worker1", "middle": "worker2"})
    for x, y in batches(3, 8, 1, 8, 8, classes=10):
        losses = [F.cross_entropy(network(x), y) for network in (model, twin)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == losses[1].item()
    assert model.counters()["bytes_staged"] == 0


def test_channels_last_crosses_as_it_lies():
    drive(layouts, 3)


# -- slots are never overwritten under anybody


def aliases() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 20), models.Positional(), models.Keeping())
    twin = copy.deepcopy(net)
    model = wrap(net, {"1": "worker1", "2": "worker2"})
    mine, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    for number, (x, y) in enumerate(batches(8, 8, 20)):
        for network, optimizer in ((model, mine), (twin, theirs)):
            if number % 3 == 2:
                optimizer.zero_grad(set_to_none=number % 2 == 0)
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
    assert_same_state(model, twin)


def test_what_parts_keep_stays_as_it_was():
    drive(aliases, 3)


def discarded() -> None:
    model, twin = both(models.mlp, {"0": "worker1", "4": "worker1"})
    for x, _ in batches(10, 8, 20):
        assert torch.equal(model(x), twin(x))  # with gradients, and dropped
    first, second = model(x), model(x)
    with pytest.raises(rpc.RdmaError, match="depth=2"):
        model(x)
    del first
    gc.collect()
    second.sum().backward()
    with pytest.raises(rpc.NotSupported, match="second time"):
        output = model(x)
        output.sum().backward(retain_graph=True)
        output.sum().backward()
    del output
    assert torch.equal(model(x), twin(x))


def test_discarded_forwards_and_depth():
    drive(discarded)


def slow_consumer() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 20), models.Slow())
    twin = copy.deepcopy(net)
    twin[1].seconds = 0
    model = wrap(net, {"0": "worker1", "1": "worker2"}, depth=3)
    mine, theirs = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(4):
        outputs = [(model(x), twin(x), y) for x, y in batches(3, 8, 20)]
        for ours, expected, y in outputs:
            F.cross_entropy(ours, y).backward()
            F.cross_entropy(expected, y).backward()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
        del outputs, ours, expected
    assert_same_state(model, twin)


def test_slow_consumer_with_depth():
    drive(slow_consumer, 3)


# -- state


def round_trip() -> None:
    model, twin = both(models.Cnn, {"features": "worker1", "classifier": "worker2"})
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]
    other = models.Cnn()
    model.load_state_dict(other.state_dict())
    assert_same_state(model, other)
    models.Cnn().load_state_dict(model.state_dict())
    assert torch.equal(model.features.state_dict()["0.weight"], other.features[0].weight)
    with pytest.raises(RuntimeError, match=r"Missing key.*features.0.weight"):
        model.load_state_dict({k: v for k, v in other.state_dict().items() if k != "features.0.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for classifier.weight"):
        model.load_state_dict({**other.state_dict(), "classifier.weight": torch.zeros(1, 1)})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*features.9.x"):
        model.load_state_dict({**other.state_dict(), "features.9.x": torch.zeros(1)})


def test_state_dict_round_trip():
    drive(round_trip, 3)


def optimizer_state() -> None:
    placement = {"0": "worker1", "4": "worker2"}
    data = batches(6, 8, 20)

    def steps(network: nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> None:
        for x, y in data[part]:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()

    model, twin = both(models.mlp, placement)
    mine, theirs = torch.optim.Adam(model.parameters(), 1e-2), torch.optim.Adam(twin.parameters(), 1e-2)
    steps(model, mine, slice(0, 3))
    steps(twin, theirs, slice(0, 6))
    again = wrap(models.mlp(), placement)
    again.load_state_dict(model.state_dict())
    resumed = torch.optim.Adam(again.parameters(), 1.0)
    resumed.load_state_dict(mine.state_dict())
    steps(again, resumed, slice(3, 6))
    assert_same_state(again, twin)
    ours, expected = resumed.state_dict(), theirs.state_dict()
    assert list(ours["state"]) == list(expected["state"])
    for index, entries in expected["state"].items():
        for key, value in entries.items():
            assert torch.equal(ours["state"][index][key], value)


def test_optimizer_state_round_trip():
    drive(optimizer_state, 3)


def stand_ins() -> None:
    model, _ = both(models.Cnn, {"features": "worker1", "classifier": "worker1"})
    x, y = batches(1, 8, 1, 8, 8, classes=10)[0]
    F.cross_entropy(model(x), y).backward()
    for attempt in (
        lambda: model.classifier.weight * 2,
        lambda: model.classifier.weight.norm(),
        lambda: model.half(),
        lambda: model.classifier.weight.register_hook(print),
    ):
        with pytest.raises(rpc.NotSupported, match="worker1"):
            attempt()
    assert model.classifier.weight.grad is not None
    model.zero_grad()
    assert model.classifier.weight.grad is None
    assert "RemoteLinear" in repr(model)


def test_remote_parameters_never_lie():
    drive(stand_ins)


# -- errors


def bad_wraps() -> None:
    before = here.current().counters()["rpc_messages"]
    with pytest.raises(ValueError, match=r"part 'nose'.*'features', 'middle', 'classifier'"):
        wrap(models.Cnn(), {"nose": "worker1"})
    with pytest.raises(ValueError, match=r"worker 'worker9'.*'worker0', 'worker1', 'worker2'"):
        wrap(models.Cnn(), {"features": "worker9"})
    local = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    local[0].hook = lambda: None
    with pytest.raises(rpc.NotSupported, match="cannot be pickled"):
        wrap(local, {"0": "worker1"})
    local[0].hook = None
    local[1].weight = local[0].weight
    with pytest.raises(rpc.NotSupported, match=r"'0.weight' and '1.weight' are one tensor"):
        wrap(local, {"0": "worker1", "1": "worker2"})
    with pytest.raises(rpc.NotSupported, match="no shape yet"):
        wrap(nn.Sequential(nn.LazyLinear(3)), {"0": "worker1"})
    assert here.current().counters()["rpc_messages"] == before
    with pytest.raises(rpc.NotSupported, match=r"depends on data[^$]*hint"):
        wrap(models.Branching(), {"a": "worker1"}, capture="fx")(torch.zeros(2, 20))
    with pytest.raises(rpc.NotSupported, match="depends on data"):
        wrap(nn.Sequential(models.Counting()), {"0": "worker1"}, capture="fx")(torch.zeros(2, 20))
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        wrap(models.mlp(), {"0": "worker1"})(torch.zeros(2, 21))
    model, twin = both(models.SharedInPlace, {"a": "worker1", "b": "worker1", "c": "worker2"}, capture="fx")
    x = torch.randn(2, 20)
    assert torch.equal(model(x), twin(x))  # what a part writes into what another one reads is seen
    model.close()
    with pytest.raises(rpc.RdmaError, match="closed"):
        model(torch.zeros(2, 20))


def test_errors_at_wrap_and_capture():
    drive(bad_wraps, 3)


def remote_errors() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 20), models.Failing(), nn.Linear(4, 4))
    twin = copy.deepcopy(net)
    with torch.no_grad():
        for network in (net, twin):
            network[0].weight.copy_(torch.eye(20))
            network[0].bias.zero_()
    model = wrap(net, {"0": "worker1", "1": "worker2", "2": "worker1"})
    good = torch.randn(8, 20)
    bad = good.clone()
    for _ in range(3):
        bad[0, 0] = 100
        with pytest.raises(KeyError, match=r"^'the forward of this part fails'$") as caught:
            model(bad)
        assert "on worker 'worker2'" in str(caught.value.__cause__) and "Traceback" in str(caught.value.__cause__)
        bad[0, 0] = 200
        output = model(bad)
        with pytest.raises(ZeroDivisionError, match=r"^the backward of this part fails$") as failed:
            output.sum().backward()
        assert "on worker 'worker2'" in str(failed.value.__cause__) and "in backward" in str(failed.value.__cause__)
        model.zero_grad()
        twin.zero_grad()
        # The first layer stays the identity: it is what tells the second to fail.
        trained = [[p for name, p in network.named_parameters() if name[0] != "0"] for network in (model, twin)]
        optimizers = [torch.optim.SGD(parameters, 0.1) for parameters in trained]
        for network, optimizer in zip((model, twin), optimizers):
            network(good).sum().backward()
            optimizer.step()
        assert_same_state(model, twin)


def test_errors_in_remote_parts():
    drive(remote_errors, 3)


def too_slow() -> None:
    model = wrap(nn.Sequential(models.Held()), {"0": "worker1"}, timeout=4.0)
    with pytest.raises(rpc.TransferTimeout, match=r"activation .* from 'worker1' did not come within 4.0 s"):
        model(torch.zeros(2, 20))
    rpc.rpc_sync("worker1", let_go, ("forward",))
    model.close()


def test_time_limit():
    drive(too_slow)


class Dying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(20, 20), 0

    def forward(self, x):
        self.count += 1
        if self.count == 3:
            die()
        return self.layer(x)


def leave_after_a_loss() -> None:
    """Whoever survives hears of the loss, and stays until the caller dismisses it: the other one has to be found gone first."""
    found = threading.Event()
    agent.current().on_peer_lost(lambda worker, error: found.set())
    until_dismissed()
    assert found.wait(20)
    with pytest.raises((rpc.PeerLost, rpc.TransferTimeout)):
        rpc.shutdown(timeout=20)


def killed(rank: int) -> Any:
    if rank != 0:
        leave_after_a_loss()
        return "left"
    model = wrap(nn.Sequential(nn.Linear(20, 20), Dying(), nn.Linear(20, 4)), {"0": "worker2", "1": "worker1", "2": "worker2"})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    started = time.monotonic()
    with pytest.raises(rpc.PeerLost, match="worker1"):
        for x, y in batches(5, 8, 20):
            started = time.monotonic()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    seconds = time.monotonic() - started
    with pytest.raises(rpc.PeerLost, match="worker1"):
        model(x)
    model.close()
    dismiss("worker2")
    with pytest.raises(rpc.PeerLost):
        rpc.shutdown(timeout=20)
    return seconds


@pytest.mark.parametrize("device", DEVICES)
def test_a_worker_is_killed_in_mid_step(device):
    outcomes = run_group(killed, 3, transport=device)
    assert not outcomes[0].error, outcomes[0].text
    assert outcomes[0].result < 15.0
    assert outcomes[1].exit_code == -9
    assert outcomes[2].result == "left", outcomes[2].text
