"""The picture of docs/design.md: what crosses in a model with a skip connection and a tensor that three workers read.

    python -m experiments.transfer_graph docs/transfer_graph.png

Trains for two steps over five workers on this host, and prints the tables.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rdmarpc as rpc
from rdmarpc.graph import Transfers

from .harness.processes import Group, Launcher, run_job

PLACEMENT = {"stem": "worker1", "wide": "worker2", "deep": "worker3", "skip": "worker4", "head": "worker4"}


class Branches(nn.Module):
    """A stem, two branches and a skip connection, whose sum goes to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(inplace=True))
        self.wide = nn.Conv2d(32, 64, 5, padding=2)
        self.deep = nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(64, 64, 3, padding=1))
        self.skip = nn.Conv2d(32, 64, 1)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        return self.head(self.skip(x) + self.wide(x) + self.deep(x))


def train(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker; the first one trains with batches of 16 images of 32x32, and tells what crossed."""
    options = rpc.RpcBackendOptions(init_method=job["init_method"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=5, rpc_backend_options=options)
    if rank == 0:
        model = rpc.wrap(Branches(), PLACEMENT)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            nn.functional.cross_entropy(model(torch.randn(16, 3, 32, 32)), torch.randint(10, (16,))).backward()
            optimizer.step()
            optimizer.zero_grad()
        launcher.tell(("trained", model.transfers()[0]))
    rpc.shutdown()


def trained() -> Transfers:
    """What crosses in a step."""
    found: list[Transfers] = []
    with tempfile.TemporaryDirectory() as folder:
        job = {"init_method": f"file://{folder}/meeting"}
        run_job([Group("transfer graph", train, 5)], job, lambda group, event: found.append(event[1]), 120.0)
    return found[0]


def main(path: Path) -> None:
    transfers = trained()
    print(transfers)
    transfers.draw(path)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "transfer_graph.png"))
