"""Trainers whose model's parameters are kept at a server."""

import torch

import rdmarpc as rpc

from .. import tasks

TRAINERS = [f"trainer{each}" for each in range(tasks.WORKERS)]


def train(trainer):
    model = rpc.serve(tasks.net(), ["server"], torch.optim.SGD, lr=tasks.RATE, workers=TRAINERS)
    losses = []
    for batch in tasks.batches(trainer):
        losses.append(tasks.gradients(model, batch)[0])
        model.optimizer.step()
    model.close()
    return losses


def run(rank, place):
    options = rpc.RpcBackendOptions(init_method=f"file://{place}/store")
    rpc.init_rpc([*TRAINERS, "server"][rank], rank=rank, world_size=tasks.WORKERS + 1, rpc_backend_options=options)
    losses = train(rank) if rank < tasks.WORKERS else None
    rpc.shutdown()
    return losses
