"""``torchrun --standalone --nproc-per-node=2 --max-restarts=2 examples/elastic_ddp.py FOLDER``: DistributedDataParallel over
the backend ``rdmarpc``. A worker dies in the middle of training, torchrun starts the group again, and training goes on from the
last checkpoint. The parameters are those of one process that adds up the halves of the gradients in the order of the ranks, bit
for bit.

``FOLDER`` holds the checkpoint; all workers must see it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rdmarpc  # noqa: F401

STEPS, EVERY, KILLED = 20, 4, 10


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(100 * step + rank)
    return F.cross_entropy(model(torch.randn(32, 16, generator=data)), torch.randint(4, (32,), generator=data))


def alone(size: int) -> nn.Module:
    """The model after training in one process, on the data of all ranks."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for step in range(STEPS):
        parts = [torch.autograd.grad(loss_of(net, step, rank), list(net.parameters())) for rank in range(size)]
        for parameter, gradients in zip(net.parameters(), zip(*parts)):
            total = gradients[0] / size
            for gradient in gradients[1:]:
                total = total + gradient / size
            parameter.grad = total
        optimizer.step()
    return net


def train(folder: Path) -> nn.Module:
    rank, last = dist.get_rank(), folder / "last"
    net = network()
    model, optimizer = DistributedDataParallel(net), torch.optim.Adam(net.parameters(), 0.01)
    first, start = not last.exists(), 0
    if not first:
        state = torch.load(last)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
        print(f"rank {rank} goes on from step {start}", flush=True)
    for step in range(start, STEPS):
        if step == KILLED and first and rank == 1:
            os._exit(1)
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0 and rank == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, folder / "next")
            (folder / "next").replace(last)
    return net


def main(folder: Path) -> bool:
    torch.set_num_threads(1)
    dist.init_process_group("rdmarpc")
    ours, oracle = train(folder), alone(dist.get_world_size())
    same = all(torch.equal(one, other) for one, other in zip(ours.parameters(), oracle.parameters()))
    print(f"rank {dist.get_rank()}: all parameters are those of one process: {same}", flush=True)
    dist.destroy_process_group()
    return same


if __name__ == "__main__":
    sys.exit(not main(Path(sys.argv[1])))
