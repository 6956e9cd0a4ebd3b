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
import test_wrap
import test_wrap_strided
from group import results, run_group

import rdmarpc as rpc

pytestmark = pytest.mark.rdma

SCENARIOS: list[tuple[Callable[[int], Any], int]] = [
    (test_calls.simple_values, 2),
    (test_calls.errors, 2),
    (test_calls.in_flight, 2),
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


@pytest.mark.parametrize("scenario, size", SCENARIOS, ids=lambda value: getattr(value, "__name__", None))
def test_calls_references_and_autograd(scenario: Callable[[int], Any], size: int) -> None:
    results(run_group(scenario, size, transport="verbs", timeout=110.0, rpc_timeout=60))


def trained(optimizer: str) -> int:
    """A traced run, compared with its twin; returns how many bytes the devices of all workers have written."""
    make, placement, shape, classes = test_wrap.CASES[4]
    test_wrap.train(make, placement, optimizer, shape, classes)
    return sum(rpc.rpc_sync(f"worker{rank}", rpc.counters)["bytes_direct"] for rank in range(3))


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_training_is_equal_to_the_bit(optimizer: str, record_property: Callable[[str, object], None]) -> None:
    moved(partial(trained, optimizer), 3, record_property)


@pytest.mark.timeout(420)
def test_payloads_with_gaps(record_property: Callable[[str, object], None]) -> None:
    moved(test_wrap_strided.every, 2, record_property)


def moved(body: Callable[[], int], size: int, record_property: Callable[[str, object], None]) -> None:
    """``body()`` at worker 0 says how many bytes all devices have written: so many packets have left."""
    before = packets.counters()
    nbytes = test_wrap.drive(body, size, transport="verbs", timeout=400.0)
    sent = packets.counters() - before
    record_property("bytes_direct", nbytes)
    assert nbytes > 0 and sent["sent_pkts"] >= packets.needed(nbytes)
