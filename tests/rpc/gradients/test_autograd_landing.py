"""Gradients travel as arguments do: in a repeated step they are written straight to places granted ahead."""

from __future__ import annotations

import pytest
import torch
from group import may_stage, results, run_group

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.calls import agent
from rdmarpc.gradients import behind

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


def travelling(rank):
    """Of a leaf that travels itself nothing is looked up but whether somebody has put a hook behind it."""
    if rank == 0:
        leaves = [torch.randn(3, requires_grad=True) for _ in range(2)]
        marks, make = [], behind.Mark
        behind.Mark = lambda accumulator: marks.append(make(accumulator)) or marks[-1]

        def gradients():
            with autograd.context() as context_id:
                autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, leaves).sum()])
                return autograd.get_gradients(context_id)

        found = gradients()
        assert torch.equal(found[leaves[0]], leaves[1]) and torch.equal(found[leaves[1]], leaves[0])
        assert not marks
        seen = []
        accumulator = leaves[0].expand_as(leaves[0]).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda outputs, inputs: seen.append(inputs[0].clone()))
        found = gradients()
        assert torch.equal(found[leaves[0]], leaves[1]) and torch.equal(found[leaves[1]], leaves[0])
        assert len(marks) == 1 and len(seen) == 1 and torch.equal(seen[0], leaves[1])
        del accumulator
        gradients()
        assert len(seen) == 1
    rpc.shutdown()


def test_leaves_that_travel_cost_no_look_at_their_accumulators():
    results(run_group(travelling))
