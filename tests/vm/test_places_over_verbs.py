"""Tensors that lie at workers, and ``wrap``, over ``verbs``: the scenarios that the other devices pass, on an RDMA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import packets
import pytest
import test_graphed
import test_remote_tensor
import test_stream
import test_wrap_batches
import test_wrap_ends
import test_wrap_training
import torch
from beside import assert_same, both, sgd, step
from group import run_group
from standing_group import StandingGroup
from torch import nn

from rdmarpc import places

pytestmark = pytest.mark.rdma

SCENARIOS: list[Callable[[], object]] = [
    test_remote_tensor.crossing,
    test_remote_tensor.late_errors,
    partial(test_remote_tensor.threads, 3, 5),
    partial(test_stream.much_memory, 8),  # more than a region holds
    test_wrap_batches.over_a_network,
    partial(test_wrap_training.trained, "skips", "turns"),
    partial(test_graphed.like_one_process, "two places"),
]


def steady() -> int:
    """From the third step on what crosses is made where the adapter sends it from: nothing is staged."""
    model, twin = both(wide, {"0-1": "worker1", "2-4": "worker2"})
    x, y = torch.randn(64, 64), torch.randint(8, (64,))
    there = x.to(places.device("worker1")), y.to(places.device("worker2"))
    optimizers = [sgd(model), sgd(twin)]
    before, staged = model.counters()["bytes_direct"], []
    for _ in range(6):
        assert_same(step(model, optimizers[0], *there), step(twin, optimizers[1], x, y))
        staged.append(model.counters()["bytes_staged"])
    assert staged[2] == staged[5], staged
    assert_same(model.state_dict(), twin.state_dict())
    return model.counters()["bytes_direct"] - before


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))


@pytest.fixture(scope="module")
def group() -> Iterator[StandingGroup]:
    found = StandingGroup(3, transport="verbs", rpc_timeout=60)
    yield found
    found.end()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda value: getattr(value, "func", value).__name__)
def test_tensors_at_workers(group: StandingGroup, scenario: Callable[[], object]) -> None:
    group.run(scenario, timeout=200.0)


def test_what_crosses_is_sent_from_where_it_was_made(
    group: StandingGroup, record_property: Callable[[str, object], None]
) -> None:
    """As many packets have left as what all devices have written needs."""
    before = packets.counters()
    nbytes = group.run(steady, timeout=200.0)
    sent = packets.counters() - before
    record_property("bytes_direct", nbytes)
    assert nbytes > 0 and sent["sent_pkts"] >= packets.needed(nbytes)


def test_a_worker_is_killed_in_mid_step() -> None:
    outcomes = run_group(partial(test_wrap_ends.losing, "steps"), 3, transport="verbs", timeout=200.0)
    assert outcomes[1].exit_code == -9
