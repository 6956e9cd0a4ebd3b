"""A model in three stages by PiPPy, forward and backward over micro-batches, with its drivers.

All its numbers are small multiples of 1/8 in float64, so sums are exact in any order: a stage adds up the gradients of its
micro-batches in the order in which calls arrive, and with other numbers two runs over torch RPC differ. Without PiPPy's
optimizer: it asks the proxy of a reference for ``__getstate__``, which from Python 3.11 on is the proxy's own.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import pippy
import torch
from pippy.microbatch import LossReducer
from pippy.PipelineDriver import PipelineDriver1F1B, PipelineDriverFillDrain
from ranks import free_port, implementation
from torch import nn

STEPS, CHUNKS = 3, 4
DRIVERS = {"FillDrain": PipelineDriverFillDrain, "1F1B": PipelineDriver1F1B}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(16).round_().div_(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        pippy.pipe_split()
        skip = x
        x = torch.relu(self.second(x))
        pippy.pipe_split()
        return self.third(x + skip)


def eighths(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape, generator=generator) / torch.tensor(8.0, dtype=torch.float64)


def drive(_: Any, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {"rpc": implementation()}
    for name, driver in DRIVERS.items():
        torch.manual_seed(11)
        pipe = pippy.Pipe.from_tracing(pippy.TrivialLossWrapper(Net(), nn.MSELoss(reduction="sum")))
        pipeline = driver(pipe, CHUNKS, args.world_size, output_chunk_spec=LossReducer(0.0, lambda a, b: a + b))
        losses = []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            x, y = eighths(generator, 16, 16), eighths(generator, 16, 4)
            pipeline.train()
            losses.append(pipeline(x, y).detach())
        found[name] = {"losses": losses, "gradients": stage_gradients(pipeline)}
    torch.save(found, args.out)


def _gradients(executor: Any) -> dict[str, torch.Tensor]:
    """Of a stage, added up over the steps."""
    return {name: value.grad.clone() for name, value in executor.local_value().mod.named_parameters() if value.grad is not None}


def stage_gradients(pipeline: Any) -> dict[str, Any]:
    from torch.distributed import rpc

    stages = pipeline.remote_stage_executor_rrefs
    return {name: rpc.rpc_sync(rref.owner(), _gradients, args=(rref,)) for name, (_, rref) in sorted(stages.items())}


if __name__ == "__main__":
    settings = {"world_size": 3, "rank": -1, "master_addr": "127.0.0.1", "master_port": str(free_port()), "cuda": 0}
    pippy.run_pippy(drive, argparse.Namespace(**settings, num_worker_threads=64, rpc_timeout=60, out=sys.argv[1]))
