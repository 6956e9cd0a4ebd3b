"""Gradients travel as arguments do: in a repeated step they are written straight to places granted ahead."""

from __future__ import annotations

import pytest
import torch
from group import may_stage, results, run_group

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.calls import agent

ROWS, WIDTH = 100, 300
SMALL = 100_000  # bytes: frames, and what rides in them


def product(x, weight):
    return x @ weight


def counters():
    return agent.current().counters()


def step(x, weight, factors):
    """Forward: ``x`` and ``weight`` there, the product back. Backward: its gradient there, theirs back."""
    with autograd.context() as context_id:
        autograd.backward(context_id, [(rpc.rpc_sync("worker1", product, (x, weight)) * factors).sum()])
        return autograd.get_gradients(context_id)


def repeated(rank):
    if rank == 0:
        x, weight = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH, requires_grad=True)
        factors = torch.randn(ROWS, WIDTH)
        for _ in range(2):
            step(x, weight, factors)
        before = counters(), rpc.rpc_sync("worker1", counters)
        for _ in range(3):
            got = step(x, weight, factors)
        after = counters(), rpc.rpc_sync("worker1", counters)
        want = torch.autograd.grad((x @ weight * factors).sum(), [x, weight])
        assert torch.equal(got[x], want[0]) and torch.equal(got[weight], want[1])
        here, there = ({key: late[key] - early[key] for key in late} for early, late in zip(before, after))
        for counts, payload in (
            (here, x.nbytes + weight.nbytes + factors.nbytes),
            (there, factors.nbytes + x.nbytes + weight.nbytes),
        ):
            assert counts["rpc_reads"] == counts["registrations"] == 0, counts
            assert 0 <= counts["bytes_staged"] <= (3 * payload if may_stage() else 0), counts
            assert 3 * payload <= counts["bytes_direct"] <= 3 * payload + SMALL, (counts, payload)
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_gradients_of_a_repeated_step_are_written_straight_to_their_places(device):
    results(run_group(repeated, transport=device))
