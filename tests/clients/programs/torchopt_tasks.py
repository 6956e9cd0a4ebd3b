"""TorchOpt's distributed calls: tasks of meta-learning go to all workers, gradients return by distributed autograd."""

from __future__ import annotations

from typing import Any

import torch
import torchopt
import torchopt.distributed as todist
from ranks import implementation, start
from torch import nn

WORLD, STEPS, TASKS = 3, 4, 6


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def outer_loss(tasks: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """The mean of the losses after one step inside each task; called with a slice of the tasks at each worker."""
    inner, losses = torchopt.MetaSGD(model, lr=0.1), []
    start_state = torchopt.extract_state_dict(model), torchopt.extract_state_dict(inner)
    for task in tasks.unbind():
        x, y = task[:, :4], task[:, 4:]
        inner.step(nn.functional.mse_loss(model(x), y))
        losses.append(nn.functional.mse_loss(model(x), y))
        torchopt.recover_state_dict(model, start_state[0])
        torchopt.recover_state_dict(inner, start_state[1])
    return torch.stack(losses).mean()


@todist.parallelize(partitioner=todist.dim_partitioner(0, exclusive=True), reducer=torch.cat)
def squared(x: torch.Tensor) -> torch.Tensor:
    return x.square() + todist.get_world_rank() * 0


@todist.auto_init_rpc()
def worker(rank: int) -> dict[str, Any] | None:
    found = train() if rank == 0 else None
    todist.barrier()
    return found


def train() -> dict[str, Any]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(8), []
    for _ in range(STEPS):
        tasks = torch.randn(TASKS, 10, 5, generator=generator)
        optimizer.zero_grad()
        with todist.autograd.context() as context:
            loss = outer_loss(tasks, model)
            todist.autograd.backward(context, loss)
        optimizer.step()
        losses.append(loss.detach())
    parted = squared(torch.arange(6.0))
    alone = todist.remote_sync_call(torch.add, args=(torch.ones(2), 3), partitioner=1)
    return {"losses": losses, "model": model.state_dict(), "parted": parted, "alone": alone, "rpc": implementation()}


if __name__ == "__main__":
    start(worker, WORLD)
