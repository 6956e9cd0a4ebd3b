"""Federated averaging: clients train on their own data, the server averages their weights."""

import pickle
import threading
from concurrent import futures

import grpc

from .. import tasks

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Client:
    def __init__(self):
        self.ended = threading.Event()

    def train(self, request, context):
        return tasks.train(*request)

    def stop(self, request, context):
        self.ended.set()
        return True


def client(address):
    service, library = Client(), grpc.server(futures.ThreadPoolExecutor(1), options=OPTIONS)
    methods = {"train": service.train, "stop": service.stop}
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(method, pickle.loads, pickle.dumps) for name, method in methods.items()
    }
    library.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Client", handlers),))
    library.add_insecure_port(address)
    library.start()
    service.ended.wait()
    library.stop(grace=5).wait()


def serve(addresses):
    channels = [grpc.insecure_channel(address, options=OPTIONS) for address in addresses]
    train = [channel.unary_unary("/Client/train", pickle.dumps, pickle.loads) for channel in channels]
    weights, losses = [p.detach() for p in tasks.net().parameters()], []
    for number in range(tasks.STEPS):
        running = [train[each].future((weights, each, number), wait_for_ready=True) for each in range(tasks.WORKERS)]
        found = [each.result() for each in running]
        losses += [loss for loss, _ in found]
        weights = tasks.mean([each for _, each in found])
    for channel in channels:
        channel.unary_unary("/Client/stop", pickle.dumps, pickle.loads)(True)
        channel.close()
    return losses


def run(rank, place):
    addresses = [f"unix:{place}/client{each}" for each in range(tasks.WORKERS)]
    if rank == 0:
        return serve(addresses)
    client(addresses[rank - 1])
    return None
