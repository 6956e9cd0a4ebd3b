"""A model whose stages are at two workers, trained by micro-batches."""

import threading

import torch
import torch.distributed.autograd as autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer

from .. import tasks


class Stage:
    def __init__(self, first, last):
        self.part, self.lock = tasks.net()[first:last], threading.Lock()

    def forward(self, x):
        given = x.to_here()
        with self.lock:
            return self.part(given)

    def parameters(self):
        return [rpc.RRef(p) for p in self.part.parameters()]


def train():
    stages = [rpc.remote("stage0", Stage, (0, 2)), rpc.remote("stage1", Stage, (2, 3))]
    parameters = [each for stage in stages for each in stage.rpc_sync().parameters()]
    optimizer, losses = DistributedOptimizer(torch.optim.SGD, parameters, lr=tasks.RATE), []
    for x, y in tasks.batches(0):
        with autograd.context() as context:
            outputs = []
            for part in x.chunk(tasks.MICRO_BATCHES):
                halfway = stages[0].remote().forward(rpc.RRef(part))
                outputs.append(stages[1].rpc_async().forward(halfway))
            parts = zip(torch.futures.wait_all(outputs), y.chunk(tasks.MICRO_BATCHES))
            loss = sum(tasks.loss_of(output, wanted) / tasks.MICRO_BATCHES for output, wanted in parts)
            autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return losses


def run(rank, place):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{place}/store")
    rpc.init_rpc(["stage0", "stage1"][rank], rank=rank, world_size=2, rpc_backend_options=options)
    losses = train() if rank == 0 else None
    rpc.shutdown()
    return losses
