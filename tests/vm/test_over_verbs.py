"""Calls, references, autograd and training over ``verbs``: the scenarios that the other devices pass, on an RDMA device."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import packets
import programs
import pytest
import test_autograd_landing
import test_autograd_results
import test_calls
import test_distributed_optimizer
import test_landing
import test_rref
import test_tensors
import test_wrap
from group import results, run_group

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


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_training_is_equal_to_the_bit(optimizer: str) -> None:
    make, placement, shape, classes = test_wrap.CASES[4]
    test_wrap.drive(partial(test_wrap.train, make, placement, optimizer, shape, classes), 3, transport="verbs", timeout=110.0)


def test_the_training_job(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """As a user starts it: losses as in one process, nothing registered in the steady state, every byte by RDMA."""
    before = packets.counters()
    done = programs.run(
        *("-m", "experiments.train", "device=verbs", "epochs=1", "torch_rpc=false", f"hydra.run.dir={tmp_path}"), timeout=110
    )
    assert done.returncode == 0, done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["equal_to_single_process"]["rdmarpc"]
    counters = result["counters"]
    assert counters["steps"] > 0 and counters["bytes_direct"] > 0
    assert counters["registrations"] == 0
    record_property("bytes_direct", counters["bytes_direct"])
    sent = packets.counters() - before
    assert sent["sent_pkts"] >= packets.needed(counters["bytes_direct"])
