"""A model whose stages are at two workers, trained by micro-batches."""

import torch

import rdmarpc as rpc

from .. import tasks


def train():
    model, losses = rpc.wrap(tasks.net(), placement={"0": "stage0", "2": "stage1"}), []
    optimizer = torch.optim.SGD(model.parameters(), lr=tasks.RATE)
    for x, y in tasks.batches(0):
        optimizer.zero_grad()
        losses.append(model.forward_backward(tasks.loss_of, x, target=y, chunks=tasks.MICRO_BATCHES).item())
        optimizer.step()
    model.close()
    return losses


def run(rank, place):
    options = rpc.RpcBackendOptions(init_method=f"file://{place}/store")
    rpc.init_rpc(["stage0", "stage1"][rank], rank=rank, world_size=2, rpc_backend_options=options)
    losses = train() if rank == 0 else None
    rpc.shutdown()
    return losses
