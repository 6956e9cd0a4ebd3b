"""``wrap`` with inputs and values whose shapes vary: dynamic edges, which plan is static, what counts as a miss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import wrap_models as models
from test_wrap import STEADY, assert_same_state, both, drive
from torch import nn


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
            table = model.placement_table().split("\n\n")[-1]
            dynamic = sum(line.endswith("  no") for line in table.splitlines())
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
    assert sum(miss.count for miss in model.misses()) == counters["misses"]
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
    drive(partial(train, models.Recurrent, placement, sentences(64 if device == "shm" else 30), device), size, transport=device)
