"""``wrap`` with inputs and values whose shapes vary: dynamic edges, which plan is static, what counts as a miss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import wrap_models as models
from test_wrap import STEADY, assert_same_state, both, drive
from torch import nn

from rdmarpc import wrap
from rdmarpc.wrapped.signature import OWN_PLANS

Batch = tuple[torch.Tensor, torch.Tensor]


def sentences(count: int, batches: tuple[int, int] = (4, 4), seed: int = 3) -> list[Batch]:
    """Token numbers of random lengths 10 to 80, and a class each."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    result = []
    for _ in range(count):
        shape = (number(*batches), number(10, 80))
        result.append((torch.randint(0, 50, shape, generator=generator), torch.randint(0, 4, shape[:1], generator=generator)))
    return result


def train(make: Callable[[], nn.Module], placement: dict[str, str], data: list[Batch], device: str) -> None:
    model, twin = both(make, placement)
    mine, theirs = (torch.optim.SGD(network.parameters(), 0.1, momentum=0.9) for network in (model, twin))
    seen = 0
    for number, (x, y) in enumerate(data):
        before = model.counters()
        losses = [F.cross_entropy(network(x), y) for network in (model, twin)]
        for loss, optimizer in zip(losses, (mine, theirs)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[0].item() == losses[1].item(), f"step {number}, {tuple(x.shape)}"
        after = model.counters()
        if after["misses"] > before["misses"] and after["plans"] == before["plans"]:
            # A miss, but not the first: nothing is set up, and each dynamic edge is read once.
            dynamic = len([crossing for crossing in model.transfers()[-1].crossings if not crossing.static])
            assert dynamic
            assert after["dynamic_reads"] - before["dynamic_reads"] == dynamic
            assert {key: after[key] for key in STEADY if key != "bytes_staged"} == {
                key: before[key] for key in STEADY if key != "bytes_staged"
            }
            seen += 1
    assert seen > len(data) // 3
    assert_same_state(model, twin)
    counters = model.counters()
    if device == "shm":
        assert counters["bytes_staged"] == 0
    else:
        assert counters["bytes_staged"] == sum(n for key, n in counters.items() if key.startswith("bytes_staged["))
    assert sum(miss.times for miss in model.misses()) == counters["misses"]
    assert model.misses()[0].what.startswith("tokens: 4x")
    model.close()


@pytest.mark.parametrize(
    "size, placement, device",
    [
        (2, {"embedding": "worker1", "second": "worker1"}, "shm"),
        (3, {"first": "worker1", "second": "worker2", "head": "worker1"}, "shm"),
        (3, {"first": "worker1", "second": "worker2"}, "tcp"),
    ],
)
def test_lengths_vary(size, placement, device):
    data = sentences(64 if device == "shm" else 30)
    drive(partial(train, models.Recurrent, placement, data, device), size, transport=device)


def shapes_in(model: nn.Module, plan: int = -1) -> set[tuple[int | None, ...]]:
    return {crossing.shape for crossing in model.transfers()[plan].crossings}


# -- other models, all in one group of processes


def gated() -> None:
    """Batch and length vary, both directions: traced with a symbol for the length, then with one for the batch too."""
    model, twin = both(
        partial(models.Recurrent, "GRU", bidirectional=True), {"first": "worker1", "second": "worker2", "head": "worker1"}
    )
    mine, theirs = (torch.optim.Adam(network.parameters(), 1e-2) for network in (model, twin))
    for x, y in sentences(12, (2, 6), seed=4):
        losses = [F.cross_entropy(network(x), y) for network in (model, twin)]
        for loss, optimizer in zip(losses, (mine, theirs)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[0].item() == losses[1].item()
    assert_same_state(model, twin)
    assert {(None, None, 24), (None, 4)} <= shapes_in(model)
    assert model.counters()["bytes_staged"] == 0
    model.close()


def packed() -> None:
    """How long the output of a part is depends on the values of its input: dynamic from the first step, the rest is not."""
    model, twin = both(models.Sentences, {"packed": "worker1", "head": "worker2"})
    mine, theirs = (torch.optim.SGD(network.parameters(), 0.1) for network in (model, twin))
    generator = torch.Generator().manual_seed(6)
    for _ in range(8):
        x = torch.randint(0, 50, (4, 20), generator=generator)
        lengths = torch.randint(1, 21, (4,), generator=generator)
        for network, optimizer in ((model, mine), (twin, theirs)):
            optimizer.zero_grad()
            F.cross_entropy(network(x, lengths), torch.arange(4)).backward()
            optimizer.step()
    assert_same_state(model, twin)
    counters = model.counters()
    assert (counters["misses"], counters["plans"]) == (0, 1)
    # What was packed goes on to the head, and its gradient comes back.
    assert counters["dynamic_reads"] == 8 * 2
    assert shapes_in(model) == {(4, 20, 10), (4,), (4, None, 24), (4, 4)}
    model.close()


def sizes() -> None:
    """Sizes are no constants of the trace: they are computed where the tensors are, and cross where they are needed."""
    model, twin = both(models.Sizes, {"a": "worker1", "b": "worker2"})
    for shape in ((3, 5), (3, 7), (4, 7), (2, 3), (2, 3), (1, 1), (1, 2), (5, 1)):
        x = torch.randn(*shape, 6, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        (ours, count), (expected, number) = model(x), twin(other)
        assert torch.equal(ours, expected), shape
        assert (count, type(count)) == (number, type(number)), shape
        ours.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(x.grad, other.grad), shape
    assert "int64[]" in model.placement_table()
    model.close()


def selecting() -> None:
    net = nn.Sequential(nn.Linear(20, 20), models.Selecting(), nn.Tanh())
    twin = copy.deepcopy(net)
    model = wrap(net, {"0": "worker1", "1": "worker2"})
    for size in (8, 8, 8, 3, 4, 0):
        x = torch.randn(size, 20)
        for network in (model, twin):
            network(x).square().sum().backward()
    theirs = torch.optim.SGD(twin.parameters(), 0.1)
    torch.optim.SGD(model.parameters(), 0.1).step()
    theirs.step()
    assert_same_state(model, twin)
    assert shapes_in(model, 0) == {(8, 20), (None,)}
    assert shapes_in(model, 1) == {(None, 20), (None,)}
    model.close()


def looped() -> None:
    """A loop over the length in Python: nothing about sizes is proven, every edge is dynamic."""
    model, twin = both(models.Looped, {"layer": "worker1"})
    for length in (5, 7, 3, 1):
        x = torch.randn(length, 6)
        assert torch.equal(model(x), twin(x))
    assert len(model.transfers()) == 2
    assert shapes_in(model) == {(None, None), ()}
    model.close()


def policy() -> None:
    """Own plans for shapes that come again, up to a limit; other dtypes and structures are other families; all is named."""
    model, twin = both(models.mlp, {"0": "worker1", "4": "worker1"}, plans=64)

    def step(size: int) -> tuple[int, int]:
        x = torch.randn(size, 20)
        ours = model(x)
        assert torch.equal(ours, twin(x))
        ours.square().sum().backward()
        counters = model.counters(False)
        return counters["plans"], counters["misses"]

    assert [step(size) for size in (8, 3, 8, 3, 3)] == [(1, 0), (2, 1), (2, 1), (3, 1), (3, 1)]
    for size in range(20, 40):
        step(size)
    assert model.counters(False)["plans"] == 3
    for size in range(20, 40):
        step(size)
    assert model.counters(False)["plans"] == 3 + OWN_PLANS - 2
    misses = {miss.what: miss.times for miss in model.misses()}
    assert misses["input: 8x20 -> 3x20"] == 1
    assert misses["input: 8x20 -> 39x20"] == 2
    assert str(model.misses()[0]).endswith("(2 times)")
    before = model.counters()
    for size in range(40, 60):
        step(size)
    after = model.counters()
    assert {key: after[key] for key in STEADY} == {key: before[key] for key in STEADY}
    assert after["misses"] == before["misses"] + 20
    plans = after["plans"]
    with torch.no_grad():
        model.eval()
        assert torch.equal(model(torch.ones(8, 20)), twin(torch.ones(8, 20)))
    assert model.counters(False)["plans"] == plans + 1
    model.train()
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        model(torch.zeros(8, 21))
    assert step(61) == (plans + 1, after["misses"] + 1)
    model.close()


def others() -> None:
    for check in (gated, packed, sizes, selecting, looped, policy):
        check()


def test_models_whose_sizes_vary():
    drive(others, 3)
