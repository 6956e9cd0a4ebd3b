"""Trainers send gradients to a server and get new weights when all have sent theirs."""

import pickle
import threading
from concurrent import futures

import grpc

from .. import tasks

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Server(tasks.Optimized):
    def __init__(self):
        super().__init__()
        self.arrived, self.weights = {}, None
        self.all_here = threading.Barrier(tasks.WORKERS, action=self.step_together)
        self.left, self.ended = 0, threading.Event()

    def step_together(self):
        self.weights = self.step([self.arrived[each] for each in range(tasks.WORKERS)])

    def exchange(self, request, context):
        trainer, gradients = request
        self.arrived[trainer] = gradients
        self.all_here.wait()
        return self.weights

    def leave(self, request, context):
        self.left += 1
        if self.left == tasks.WORKERS:
            self.ended.set()
        return True


def serve(address):
    server, library = Server(), grpc.server(futures.ThreadPoolExecutor(tasks.WORKERS), options=OPTIONS)
    methods = {"exchange": server.exchange, "leave": server.leave}
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(method, pickle.loads, pickle.dumps) for name, method in methods.items()
    }
    library.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Server", handlers),))
    library.add_insecure_port(address)
    library.start()
    server.ended.wait()
    library.stop(grace=5).wait()


def train(address, trainer):
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        exchange = channel.unary_unary("/Server/exchange", pickle.dumps, pickle.loads)
        leave = channel.unary_unary("/Server/leave", pickle.dumps, pickle.loads)
        model, losses = tasks.net(), []
        for batch in tasks.batches(trainer):
            loss, gradients = tasks.gradients(model, batch)
            tasks.load(model, exchange((trainer, gradients), wait_for_ready=True))
            losses.append(loss)
        leave(True)
    return losses


def run(rank, place):
    address = f"unix:{place}/server"
    if rank < tasks.WORKERS:
        return train(address, rank)
    serve(address)
    return None
