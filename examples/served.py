"""Two trainers and a parameter server that keeps the weights: all gradients are one write, and all weights one write back."""

from __future__ import annotations

import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import rdmarpc as rpc

WORKERS, SERVERS = ["trainer0", "trainer1"], ["server0"]


def train(rank: int) -> float:
    """Runs at both trainers, each with half of the images. The share of 360 others that it recognises in the end."""
    torch.manual_seed(rank)
    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = rpc.serve(net, SERVERS, torch.optim.SGD, lr=0.2, momentum=0.9, workers=WORKERS)
    schedule = torch.optim.lr_scheduler.StepLR(model.optimizer, 4, gamma=0.3)
    for _ in range(8):
        for chosen in torch.arange(rank, len(x) - 360, len(WORKERS)).split(32):
            loss = F.cross_entropy(model(x[chosen]), y[chosen]) / len(WORKERS)
            model.optimizer.zero_grad()
            loss.backward()
            model.optimizer.step()
        schedule.step()
    if rank == 0:
        print(model.placement_table())
    accuracy = (model(x[-360:]).argmax(1) == y[-360:]).float().mean().item()
    model.close()
    return accuracy


def worker(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=f"file://{meeting}/store")
    rpc.init_rpc((WORKERS + SERVERS)[rank], rank=rank, world_size=3, rpc_backend_options=options)
    accuracy = train(rank) if rank < len(WORKERS) else 1.0
    rpc.shutdown()
    if rank == 0:
        print(f"accuracy on images never seen: {accuracy:.1%}")
    sys.exit(accuracy < 0.9)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(worker, (place,), nprocs=len(WORKERS + SERVERS))
