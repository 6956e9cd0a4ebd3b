"""What one end of a connection may do, and the other may not: cross-memory attach, and to see the other's process."""

from __future__ import annotations

import os
import traceback
from functools import partial

import pytest
import sandbox
import torch
from called import identity
from group import results, run_group

import rdmarpc as rpc
from rdmarpc.calls import agent

pytestmark = pytest.mark.skipif(bool(sandbox.why_not()), reason=sandbox.why_not())
LARGE = 100_000


def staged():
    return agent.current().counters()["bytes_staged"]


def add(first, second):
    return first + second


def _large_calls(peer):
    for size in (LARGE, 3 * LARGE, 1):
        tensor = torch.randn(size)
        assert torch.equal(rpc.rpc_sync(peer, add, (tensor, tensor)), 2 * tensor)
    keyed = {"a": torch.ones(LARGE), "b": "c" * 600_000}
    found = rpc.rpc_sync(peer, identity, (keyed,))
    assert torch.equal(found["a"], keyed["a"]) and found["b"] == keyed["b"]
    rref = rpc.remote(peer, torch.ones, (LARGE,))
    assert rref.to_here().sum() == LARGE


def calls_both_ways(meeting, refused):
    """The workers ``refused`` may not attach to others."""
    if meeting.rank in refused:
        sandbox.forbid("process_vm_readv", "process_vm_writev")
    meeting.join(world_size=2)
    peer = f"worker{1 - meeting.rank}"
    meeting.step("joined", 2)
    _large_calls(peer)
    meeting.step("called", 2)
    count = staged()
    text = agent.current().device.explain()
    rpc.shutdown()
    return count, text


@pytest.mark.parametrize("device", ["shm", "auto"])
@pytest.mark.parametrize("refused", [[0], [1], [0, 1]])
def test_attach_that_is_refused_in_one_direction_costs_a_counted_staging_copy(refused, device):
    found = results(run_group(partial(calls_both_ways, refused=refused), dynamic=True, transport=device))
    for rank, (count, text) in enumerate(found):
        # What is sent to a worker that may not attach is staged, and only that.
        assert (count > 0) == (1 - rank in refused), text
        assert ("refused towards us" in text) == (1 - rank in refused)
        assert ("refused (this system" in text) == (rank in refused)


def serves(meeting):
    if meeting.rank == 1:
        sandbox.forbid("process_vm_readv", "process_vm_writev")
    meeting.join(world_size=2)
    losses = []
    if meeting.rank == 0:
        torch.manual_seed(0)
        net = torch.nn.Linear(400, 400)
        model = rpc.serve(net, ["worker1"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = model(torch.ones(8, 400)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    rpc.shutdown()
    return losses


def test_parameters_are_served_where_attach_works_in_one_direction():
    losses, _ = results(run_group(serves, dynamic=True, transport="shm"))
    assert losses[2] < losses[0]


def apart(meeting):
    """Worker 1 runs in a PID namespace below worker 0's, which it does not see."""
    if meeting.rank == 1:
        sandbox.children_apart()
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        meeting.join(world_size=2)
        meeting.step("joined", 2)
        _large_calls(f"worker{1 - meeting.rank}")
        [link] = [link for link in agent.current().links.rows.values() if link.name != f"worker{meeting.rank}"]
        channel = link.channel
        assert channel.device.name in ("shm", "cuda"), channel.device.name
        assert (channel.pid == 0) == (meeting.rank == 1)
        assert not channel.peer_ended()
        meeting.step("called", 2)
        rpc.shutdown()
        if meeting.rank == 1:
            os._exit(0)
        return 0
    except BaseException:
        if meeting.rank == 1:
            traceback.print_exc()
            os._exit(1)
        raise


@pytest.mark.skipif(os.geteuid() != 0, reason="PID namespaces need root")
def test_a_peer_whose_process_cannot_be_seen_is_alive():
    assert results(run_group(apart, dynamic=True)) == [0, 0]
