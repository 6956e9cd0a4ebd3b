"""Several workers gone at once: the error names the one that died, not one that left because of it."""

from __future__ import annotations

import pytest
import torch
from cluster import TIMEOUT, Cluster, Split
from torch import nn

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
def test_a_post_to_a_worker_that_left_names_the_one_that_died(kind):
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
