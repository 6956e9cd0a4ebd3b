"""fairscale's pipeline over RPC: remote modules at two workers, micro-batches, distributed autograd and optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from fairscale.experimental.nn.distributed_pipeline import DistributedLoss, DistributedPipeline, PipelineModulesGraph
from ranks import implementation, start
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer

WORKERS, STEPS, CHUNKS = 2, 4, 4


class Layer(nn.Linear):
    """From a generator of its own. Float64, multiples of 1/8, so sums are exact: micro-batches come in any order."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        super().__init__(inputs, outputs, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-8, 9, parameter.shape, generator=generator) / 8)


def values(module: rpc.RRef) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.local_value().parameters()]


def train(checkpoint: str) -> dict[str, Any]:
    layers = [
        RemoteModule("worker1/cpu", Layer, (6, 8, 1)),
        RemoteModule("worker1/cpu", nn.ReLU, ()),
        RemoteModule("worker2/cpu", Layer, (8, 8, 2)),
        RemoteModule("worker2/cpu", Layer, (8, 3, 3)),
    ]
    graph = PipelineModulesGraph()
    graph.add_sequence(layers, [0])
    pipe = DistributedPipeline(graph, chunks=CHUNKS, checkpoint=checkpoint)
    # Steps by signs, of powers of two: parameters stay multiples of 2**-8.
    numbers = {"lr": 2**-4, "etas": (0.5, 2.0), "step_sizes": (2**-8, 2**-2)}
    optimizer = DistributedOptimizer(torch.optim.Rprop, pipe.parameter_rrefs(), **numbers)
    loss_of = DistributedLoss(nn.L1Loss, reduction="sum")
    generator, losses = torch.Generator().manual_seed(7), []
    for _ in range(STEPS):
        x, y = (torch.randint(-8, 9, (16, size), generator=generator).double() / 8 for size in (6, 3))
        with dist_autograd.context() as context:
            loss = loss_of(pipe(x), rpc.RRef(y))
            loss.backward(context)
            optimizer.step(context)
        losses.append(loss.to_here().detach())
    found = [rpc.rpc_sync(layer.get_module_rref().owner(), values, args=(layer.get_module_rref(),)) for layer in layers]
    return {"losses": losses, "parameters": found}


def main(rank: int) -> dict[str, Any] | None:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=32)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=1 + WORKERS, rpc_backend_options=options)
    found = {"rpc": implementation(), **{how: train(how) for how in ("always", "never")}} if rank == 0 else None
    rpc.shutdown()
    return found


if __name__ == "__main__":
    start(main, 1 + WORKERS)
