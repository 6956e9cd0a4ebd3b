"""Trainers send gradients to a server and get new weights when all have sent theirs."""

import threading

import torch
import torch.distributed.rpc as rpc

from .. import tasks


class Server(tasks.Optimized):
    def __init__(self):
        super().__init__()
        self.lock, self.arrived, self.answer = threading.Lock(), {}, torch.futures.Future()

    @rpc.functions.async_execution
    def exchange(self, trainer, gradients):
        with self.lock:
            self.arrived[trainer] = gradients
            answer = self.answer
            if len(self.arrived) == tasks.WORKERS:
                weights = self.step([self.arrived[each] for each in range(tasks.WORKERS)])
                self.arrived, self.answer = {}, torch.futures.Future()
                answer.set_result(weights)
        return answer


def train(server, trainer):
    model, losses = tasks.net(), []
    for batch in tasks.batches(trainer):
        loss, gradients = tasks.gradients(model, batch)
        tasks.load(model, server.rpc_sync().exchange(trainer, gradients))
        losses.append(loss)
    return losses


def run(rank, place):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{place}/store")
    name = f"trainer{rank - 1}" if rank else "server"
    rpc.init_rpc(name, rank=rank, world_size=tasks.WORKERS + 1, rpc_backend_options=options)
    losses = None
    if rank == 0:
        server = rpc.RRef(Server())
        running = [rpc.rpc_async(f"trainer{each}", train, (server, each)) for each in range(tasks.WORKERS)]
        losses = torch.futures.wait_all(running)[0]
    rpc.shutdown()
    return losses
