"""A model whose stages are at two workers, trained by micro-batches."""

import pickle
import threading
from concurrent import futures

import grpc
import torch

from .. import tasks

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Stage:
    def __init__(self, first, last):
        self.part, self.kept, self.ended = tasks.net()[first:last], {}, threading.Event()
        self.optimizer = torch.optim.SGD(self.part.parameters(), lr=tasks.RATE)

    def forward(self, request, context=None):
        number, x = request
        x.requires_grad_()
        y = self.part(x)
        self.kept[number] = x, y
        return y.detach()

    def backward(self, request, context=None):
        number, gradient = request
        x, y = self.kept.pop(number)
        y.backward(gradient)
        return x.grad

    def step(self, request=None, context=None):
        self.optimizer.step()
        self.optimizer.zero_grad()
        return True

    def stop(self, request, context):
        self.ended.set()
        return True


def serve(address):
    stage, library = Stage(2, 3), grpc.server(futures.ThreadPoolExecutor(1), options=OPTIONS)
    methods = {name: getattr(stage, name) for name in ("forward", "backward", "step", "stop")}
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(method, pickle.loads, pickle.dumps) for name, method in methods.items()
    }
    library.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Stage", handlers),))
    library.add_insecure_port(address)
    library.start()
    stage.ended.wait()
    library.stop(grace=5).wait()


def train(address):
    first, losses = Stage(0, 2), []
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        forward, backward, step, stop = (
            channel.unary_unary(f"/Stage/{name}", pickle.dumps, pickle.loads)
            for name in ("forward", "backward", "step", "stop")
        )
        for x, y in tasks.batches(0):
            outputs = []
            for number, part in enumerate(x.chunk(tasks.MICRO_BATCHES)):
                halfway = first.forward((number, part))
                outputs.append(forward.future((number, halfway), wait_for_ready=True))
            total, waiting = torch.zeros(()), []
            for number, (output, wanted) in enumerate(zip(outputs, y.chunk(tasks.MICRO_BATCHES))):
                given = output.result().requires_grad_()
                loss = tasks.loss_of(given, wanted) / tasks.MICRO_BATCHES
                loss.backward()
                total += loss.detach()
                waiting.append(backward.future((number, given.grad)))
            for number, gradient in enumerate(waiting):
                first.backward((number, gradient.result()))
            step(True)
            first.step()
            losses.append(total.item())
        stop(True)
    return losses


def run(rank, place):
    if rank == 0:
        return train(f"unix:{place}/stage1")
    serve(f"unix:{place}/stage1")
    return None
