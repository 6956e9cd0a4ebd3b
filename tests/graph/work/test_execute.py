"""Plans at work over transport alone."""

from __future__ import annotations

import copy
import struct
import time

import pytest
import torch
from cluster import Split
from torch import nn

from rdmarpc.graph.wire.header import Header
from rdmarpc.graph.work.command import STEP, TO_NONE, Command
from rdmarpc.graph.servers.updates import numbers_of
from rdmarpc.transport import RdmaError, RemoteRegion


def chain() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 4))


PLACEMENT = {"0": "w1", "1": "w1", "2": "w2", "3": "w1"}


def test_gradients_of_inputs_and_steps(cluster):
    net = chain()
    twin = copy.deepcopy(net)
    split = Split(cluster, net, PLACEMENT)
    optimizer = torch.optim.SGD(twin.parameters(), 1e-3)
    for worker, count in split.counts.items():
        group = {**optimizer.defaults, "params": list(range(count))}
        cluster.ask("optimizer", {worker: (1, torch.optim.SGD, optimizer.defaults, [group], 0)})
    numbers, _ = numbers_of(optimizer.param_groups)
    step = Command(STEP, 1, struct.pack(f"<{len(numbers)}d", *numbers))
    early = {}
    for number in range(10):
        x = torch.randn(8, 16, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        for worker, count in split.counts.items():
            for position in range(count):
                split.caller.control.zero(worker, position, TO_NONE)
        split(x).pow(2).sum().backward()
        split.caller.control.step(dict.fromkeys(split.counts, step))
        optimizer.zero_grad()
        twin(other).pow(2).sum().backward()
        optimizer.step()
        assert torch.equal(x.grad, other.grad)
        counters = cluster.ask("counters", dict.fromkeys(split.counts, ()))
        if number == 2:
            early = counters
    for worker, late in counters.items():
        # Seven more steps: no registration, no staging copy, and the same memory.
        for key in ("registrations", "bytes_staged", "arena_used"):
            assert late[key] == early[worker][key], key
    split.caller.close()


def test_plans_are_replaced_and_their_numbers_used_again(cluster):
    net = chain()
    split = Split(cluster, net, PLACEMENT, plans=2)
    split(torch.randn(2, 16)).sum().backward()
    used = []
    for size in range(3, 20):
        x = torch.randn(size, 16)
        output = split(x)
        assert torch.equal(output, net(x))
        output.sum().backward()
        used.append(cluster.channels["w1"]._next_number)
    assert len(split.caller.plans.placements()) == 2
    assert used[-1] == used[3]
    split.caller.close()


def test_credits_that_nobody_took_end_with_their_plan(cluster):
    """Every plan is replaced while the credits of its last step wait to be read: they must not count for the next one, which
    gets the same numbers."""
    net = chain()
    split = Split(cluster, net, PLACEMENT, plans=1)
    for size in range(2, 8):
        x = torch.randn(size, 16)
        output = split(x)
        assert torch.equal(output, net(x))
        output.sum().backward()
        del output
        time.sleep(0.1)  # they come after the backward, and until the next forward nobody looks
    split.caller.close()


def test_an_unwanted_write_is_an_error_not_data(cluster):
    net = chain()
    split = Split(cluster, net, PLACEMENT)
    x = torch.randn(2, 16)
    assert torch.equal(split(x), net(x))
    [plan] = split.caller.plans._kept.values()
    [outlet] = plan.fittings.outlets_of("activation", "input 0")
    target = outlet._targets[0]
    target.write(Header(99, 7), None, 1.0)
    with pytest.raises(RdmaError, match="a write that nobody allowed"):
        for _ in range(2):
            split(x)
    split.caller.close()


def test_gaps_are_staged_once_and_counted(cluster):
    net = nn.Sequential(nn.Identity(), nn.Linear(8, 4))
    split = Split(cluster, net, {"1": "w1"})
    for _ in range(3):
        wide = torch.randn(4, 16)
        assert torch.equal(split(wide[:, ::2]), net(wide[:, ::2]))
        [there] = cluster.ask("counters", {"w1": ()}).values()
        named = {key: value for key, value in there.items() if key.startswith("bytes_staged[")}
        assert list(named.values()) == [4 * 8 * 4], named  # the slots have room for gaps from now on
    turned = torch.randn(8, 4).t()
    assert torch.equal(split(turned), net(turned))
    split.caller.close()


def test_bad_descriptors_are_refused():
    with pytest.raises(RdmaError):
        RemoteRegion.load(b"nonsense")
