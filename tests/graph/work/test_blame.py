"""Several workers gone at once: the error names the one that died, not one that left because of it."""

from __future__ import annotations

import threading

import pytest
import torch
from cluster import TIMEOUT, Cluster, Split
from timing import eventually
from torch import nn

from rdmarpc.graph.edges import station as stations
from rdmarpc.transport import PeerLost


class Disaster(nn.Module):
    """Runs at the driver: w1 dies, w2 leaves and is heard first."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster: Cluster | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cluster is not None:
            self.cluster.processes["w1"].kill()
            self.cluster.processes["w1"].join(TIMEOUT)
            self.cluster.pipes["w2"].close()
            self.cluster.processes["w2"].join(TIMEOUT)
        return x * 2


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_post_to_a_worker_that_left_names_the_one_that_died(kind, monkeypatch):
    monkeypatch.setattr(stations, "_GRACE_S", TIMEOUT)
    torch.set_num_threads(1)
    cluster = Cluster(3, kind)
    try:
        disaster = Disaster()
        net = nn.Sequential(nn.Linear(4, 4), disaster, nn.Linear(4, 4))
        split = Split(cluster, net, {"0": "w1", "2": "w2"}, timeout=10.0)
        x = torch.randn(2, 4)
        assert split(x).shape == (2, 4)
        disaster.cluster = cluster
        with pytest.raises(PeerLost, match="w1") as caught:
            split(x)
        assert caught.value.peer == "w1"
        split.caller.close()
    finally:
        cluster.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_a_post_may_find_the_end_of_one_before_the_death_of_the_other_is_heard(kind, monkeypatch):
    monkeypatch.setattr(stations, "_GRACE_S", TIMEOUT)
    torch.set_num_threads(1)
    cluster = Cluster(3, kind)
    late = threading.Timer(0.2, cluster.processes["w1"].kill)
    try:
        split = Split(cluster, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"0": "w1", "1": "w2"}, timeout=10.0)
        assert split(torch.randn(2, 4)).shape == (2, 4)
        late.start()
        with pytest.raises(PeerLost) as caught:
            split.caller.station.blame(PeerLost("the peer closed the channel", peer="w2", status="CLOSED"))
        assert caught.value.peer == "w1"
        split.caller.close()
    finally:
        if late.is_alive():
            late.join(TIMEOUT)
        cluster.close()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_set_up_beside_a_worker_that_died_names_it(kind):
    """Its channel knows an address only."""
    torch.set_num_threads(1)
    cluster = Cluster(2, kind)
    try:
        split = Split(cluster, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"0": "w1"}, timeout=10.0)
        assert split(torch.randn(2, 4)).shape == (2, 4)
        cluster.processes["w1"].kill()
        station = split.caller.station
        eventually(lambda: station.peers["w1"].error is not None)
        (placement,) = split.caller.plans.placements()
        with pytest.raises(PeerLost, match="worker 'w1' is lost") as caught:
            station.fit(placement, lambda edge: lambda *landed: None)
        assert caught.value.peer == "w1"
        split.caller.close()
    finally:
        cluster.close()
