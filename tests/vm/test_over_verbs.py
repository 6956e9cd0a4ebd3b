"""Calls, references, autograd and training over ``verbs``: the scenarios that the other devices pass, on an RDMA device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import packets
import pytest
import test_autograd_landing
import test_autograd_results
import test_calls
import test_distributed_optimizer
import test_landing
import test_rref
import test_tensors
import torch
from group import results, run_group
from trained import train

import rdmarpc as rpc

pytestmark = pytest.mark.rdma

SCENARIOS: list[tuple[Callable[[int], Any], int]] = [
    (test_calls.simple_values, 2),
    (test_calls.errors, 2),
    (partial(test_calls.in_flight, 800), 2),
    (test_calls.callbacks, 2),
    (test_tensors.round_trips, 2),
    (test_tensors.sharing_survives, 2),
    (test_landing.grants, 2),
    (test_landing.from_the_second_call, 2),
    (test_landing.born_registered, 2),
    (test_calls.references, 3),
    (test_rref.four_ways, 3),
    (test_rref.pickling, 3),
    (test_autograd_landing.repeated, 2),
    (test_autograd_results.arguments, 2),
    (test_autograd_results.graphs, 2),
    (test_distributed_optimizer.modules, 3),
]


def name(value: Any) -> str | None:
    return getattr(getattr(value, "func", value), "__name__", None)


@pytest.mark.parametrize("scenario, size", SCENARIOS, ids=name)
def test_calls_references_and_autograd(scenario: Callable[[int], Any], size: int) -> None:
    results(run_group(scenario, size, transport="verbs", timeout=110.0, rpc_timeout=60))


def at_driver(kind: type[torch.optim.Optimizer], rank: int) -> int:
    nbytes = train(kind) if rank == 0 else 0
    rpc.shutdown()
    return nbytes


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_training_is_equal_to_the_bit(
    kind: type[torch.optim.Optimizer], record_property: Callable[[str, object], None]
) -> None:
    """As many packets have left as what all devices have written needs."""
    before = packets.counters()
    nbytes = results(run_group(partial(at_driver, kind), 3, transport="verbs", timeout=200.0, rpc_timeout=60))[0]
    sent = packets.counters() - before
    record_property("bytes_direct", nbytes)
    assert nbytes > 0 and sent["sent_pkts"] >= packets.needed(nbytes)
