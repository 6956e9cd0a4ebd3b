"""A worker that has learned where another one's memory is, and uses what it was told for others."""

from __future__ import annotations

import pytest
import torch
from called import identity
from group import results, run_group

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.transport import RemoteAccessError, RemoteRegion

DEVICES = ["shm", "tcp"]
_kept = {}


def prepare():
    """At the victim: something large, which peers may read."""
    _kept["parameter"] = agent.current().device.empty((50_000,), dtype=torch.float32).fill_(1.0)


def send_something():
    """At the innocent one, twice: so a landing place is granted to it."""
    for _ in range(2):
        rpc.rpc_sync("worker1", identity, (torch.ones(50_000),))


def reveal():
    """All that an attacker could learn of the victim's memory. The last one is its to read."""
    me = agent.current()
    [link] = [link for link in me.links.rows.values() if link.name == "worker2"]
    places = [landing.places for (owner, _), landing in me.callee.promises.landings.items() if owner is link]
    assert places
    return [link.inbox, *places, me.device.export(_kept["parameter"])]


def unharmed():
    return bool((_kept["parameter"] == 1.0).all())


def attack(rank):
    if rank == 0:
        rpc.rpc_sync("worker1", prepare)
        rpc.rpc_sync("worker2", send_something)
        descriptors = [RemoteRegion.load(blob) for blob in rpc.rpc_sync("worker1", reveal)]
        me = agent.current()
        [link] = [link for link in me.links.rows.values() if link.name == "worker1"]
        landed = []
        for remote in descriptors:
            try:
                link.channel.memcpy(remote, torch.full((remote.nbytes,), 0x5A, dtype=torch.uint8)).wait(10.0)
                landed.append(remote)
            except RemoteAccessError:
                pass
        assert not landed, f"{len(landed)} of {len(descriptors)} were written"
        for remote in descriptors[:-1]:
            with pytest.raises(RemoteAccessError):
                link.channel.memcpy(torch.empty(remote.nbytes, dtype=torch.uint8), remote).wait(10.0)
        assert rpc.rpc_sync("worker1", unharmed)
        rpc.rpc_sync("worker2", send_something)  # its ring is as it was
    rpc.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_one_peers_ring_landing_places_and_parameters_are_not_anothers_to_write(device):
    results(run_group(attack, 3, transport=device))


def relay(tensor):
    return rpc.rpc_sync("worker2", identity, (tensor,))


def passes_on(rank):
    if rank == 0:
        tensor = torch.randn(100_000)
        for _ in range(4):
            assert torch.equal(rpc.rpc_sync("worker1", relay, (tensor,)), tensor)
        staged = rpc.rpc_sync("worker1", _staged)
        kept = [rpc.rpc_sync("worker1", relay, (tensor,)) for _ in range(5)]
        assert all(torch.equal(each, tensor) for each in kept)
        for each in kept:
            each.fill_(0)  # they are ours
        assert torch.equal(rpc.rpc_sync("worker1", relay, (tensor,)), tensor)
        assert rpc.rpc_sync("worker1", _staged) == staged
    rpc.shutdown()


def _staged():
    return agent.current().counters()["bytes_staged"]


@pytest.mark.parametrize("device", DEVICES)
def test_what_came_from_one_peer_is_passed_on_to_another(device):
    results(run_group(passes_on, 3, transport=device))
