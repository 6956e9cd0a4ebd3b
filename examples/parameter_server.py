"""A parameter server: trainers send it gradients and get back new weights (Li et al., "Scaling Distributed Machine Learning
with the Parameter Server", OSDI 2014).

The server takes gradients as they come. When ``together`` of them are there it makes one step with their mean and answers all
of their senders at once (``async_execution``: until then no thread of the server waits). A trainer works on its next
gradient while its last one is under way, so nobody waits for the slowest.
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

Tensors = list[torch.Tensor]


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images (n, 64) in [0, 1] and their labels. The last 360 are held out."""
    from sklearn.datasets import load_digits  # here: only the server needs it

    x, y = load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return torch.tensor(x, dtype=torch.float32)[order] / 16, torch.tensor(y)[order]


class Server:
    """Owns the weights. Every method may run for several trainers at once."""

    def __init__(self, trainers: int, together: int) -> None:
        self.model = new_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.5)
        self.trainers, self.together = trainers, together
        self.lock = threading.Lock()
        self.arrived: list[Tensors] = []
        self.answer: torch.futures.Future[Tensors] = torch.futures.Future()
        self.steps = 0

    def weights(self) -> Tensors:
        return [p.detach().clone() for p in self.model.parameters()]

    @rpc.functions.async_execution
    def update(self, gradients: Tensors) -> torch.futures.Future[Tensors]:
        """Completes with new weights when enough others have come."""
        with self.lock:
            self.arrived.append(gradients)
            answer = self.answer
            self.step_if_complete()
        return answer

    def leave(self) -> None:
        """One trainer less to wait for."""
        with self.lock:
            self.trainers -= 1
            self.step_if_complete()

    def step_if_complete(self) -> None:
        if not self.arrived or len(self.arrived) < min(self.together, self.trainers):
            return
        for parameter, *gradients in zip(self.model.parameters(), *self.arrived):
            parameter.grad = torch.stack(gradients).mean(0)
        self.optimizer.step()
        self.steps += 1
        complete, self.answer, self.arrived = self.answer, torch.futures.Future(), []
        complete.set_result(self.weights())

    def accuracy(self, x: torch.Tensor, y: torch.Tensor) -> float:
        return (self.model(x).argmax(1) == y).float().mean().item()


def train(server: rpc.RRef[Server], x: torch.Tensor, y: torch.Tensor, epochs: int) -> float:
    """Runs on a trainer, with its share of the images. The last loss."""
    model = new_model()
    under_way: torch.futures.Future[Tensors] | None = None
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(32):
            model.zero_grad()
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
            if under_way is not None:
                with torch.no_grad():
                    for parameter, new in zip(model.parameters(), under_way.wait()):
                        parameter.copy_(new)
            under_way = server.rpc_async().update([p.grad.clone() for p in model.parameters()])
    under_way.wait()
    server.rpc_sync().leave()
    return loss.item()


def worker(rank: int, trainers: int, epochs: int, meeting: str) -> None:
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=f"file://{meeting}/store")
    name = f"trainer{rank - 1}" if rank else "server"
    rpc.init_rpc(name, rank=rank, world_size=trainers + 1, rpc_backend_options=options)
    if rank == 0:
        x, y = digits()
        server = Server(trainers, together=max(1, trainers - 1))
        reference, running = rpc.RRef(server), []
        for n in range(trainers):
            share = x[:-360][n::trainers], y[:-360][n::trainers]
            running.append(rpc.rpc_async(f"trainer{n}", train, (reference, *share, epochs), timeout=0))
        losses = torch.futures.wait_all(running)
        accuracy = server.accuracy(x[-360:], y[-360:])
        print(f"{server.steps} steps, losses {', '.join(f'{loss:.3f}' for loss in losses)}")
        print(f"accuracy on images never seen: {accuracy:.1%}")
        rpc.shutdown()
        sys.exit(accuracy < 0.95)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=25)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as meeting:
        torch.multiprocessing.spawn(worker, (given.trainers, given.epochs, meeting), nprocs=given.trainers + 1)
