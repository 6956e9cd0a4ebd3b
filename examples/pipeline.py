"""A pipeline over two workers. First a network is trained with its two halves on different workers (``wrap``), as if it were in
one process. Then the trained halves serve as the stages of a pipeline: a batch is cut into micro-batches, and while the
second stage works on one of them the first has the next (Huang et al., "GPipe", NeurIPS 2019).

A stage gets an ``RRef`` to its input and leaves its output where it is; the next one fetches it from there. Whoever directs all
this holds references only.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading

import torch
from torch import nn
from torch.nn import functional as F

import rdmarpc as rpc

MICRO_BATCH = 60


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.classifier = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


class Stage:
    """Half of the network, for inference. One micro-batch at a time, however many are on their way to it."""

    def __init__(self, half: nn.Module) -> None:
        self.half, self.lock, self.served = half.eval(), threading.Lock(), 0

    def run(self, x: rpc.RRef[torch.Tensor]) -> torch.Tensor:
        given = x.to_here()  # from where it was made: the stage before
        with self.lock, torch.no_grad():
            self.served += 1
            return self.half(given)

    def count(self) -> int:
        return self.served


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images (n, 1, 8, 8) in [0, 1] and their labels. The last 360 are held out."""
    from sklearn.datasets import load_digits  # here: only one worker needs it

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16, torch.tensor(y)[order]


def train(x: torch.Tensor, y: torch.Tensor, epochs: int) -> nn.Module:
    """The trained network, in this process."""
    torch.manual_seed(0)
    net = Net()
    model = rpc.wrap(net, placement={"features": "worker0", "classifier": "worker1"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        for chosen in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    trained = Net()
    trained.load_state_dict(model.state_dict())
    model.close()
    return trained


def serve(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The network's outputs for ``x`` (n, 1, 8, 8), by both workers at once."""
    first = rpc.remote("worker0", Stage, (net.features,))
    second = rpc.remote("worker1", Stage, (net.classifier,))
    outputs = []
    for piece in x.split(MICRO_BATCH):
        halfway = first.remote().run(rpc.RRef(piece))
        outputs.append(second.rpc_async().run(halfway))
    y = torch.cat(torch.futures.wait_all(outputs))
    by_first, by_second = first.rpc_sync().count(), second.rpc_sync().count()
    print(f"{len(outputs)} micro-batches: {by_first} by the first stage, {by_second} by the second")
    return y


def worker(rank: int, epochs: int, meeting: str) -> None:
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=f"file://{meeting}/store")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        x, y = digits()
        net = train(x[:-360], y[:-360], epochs)
        scores = serve(net, x[-360:])
        accuracy = (scores.argmax(1) == y[-360:]).float().mean().item()
        with torch.no_grad():
            same = torch.allclose(scores, net(x[-360:]), atol=1e-5)
        print(f"accuracy on images never seen: {accuracy:.1%}; the pipeline computes what the network does: {same}")
        rpc.shutdown()
        sys.exit(accuracy < 0.95 or not same)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as meeting:
        torch.multiprocessing.spawn(worker, (given.epochs, meeting), nprocs=2)
