"""The workers of the mini-batch benchmark that stand for torch RPC and gRPC, each as a careful user would write it: one call a
mini-batch takes all gradients to the server and answers with all weights, which replace the old ones without another copy.

gRPC has no tensors: their bytes are joined to one message, and looked at in place on the other side.
"""

import logging
import time
from collections.abc import Callable
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..harness import notes
from ..harness.measure import Samples, per_iteration
from ..harness.processes import Launcher
from .models import MODELS
from .worker import TIMEOUT_S, gradients, iterations, turns

Exchange = Callable[[nn.Module], None]


class Server:
    """Keeps one model at a time: weights, and the gradients that came last."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def keep(self, name: str) -> None:
        """Keep the weights of the model with this name, and none for an empty name."""
        self.gradients = []
        self.weights = [] if not name else [p.detach() for p in MODELS[name].make().parameters()]


_server = Server()


def measure(what: str, exchange: Exchange, keep: Callable[[str], None], job: dict[str, Any], launcher: Launcher) -> None:
    """All rounds, as worker0 drives them."""
    samples = Samples()
    for name, model, number in turns(job, launcher):
        nbytes = 4 * model.parameters
        if number == 0:
            keep(name)
            net = model.make()
        for parameter, gradient in zip(net.parameters(), gradients(net)):
            parameter.grad = gradient
        samples.add(name, nbytes, what, per_iteration(partial(exchange, net), max(2, iterations(nbytes) // 10)))
        net.zero_grad()
        if number == job["rounds"] - 1:
            keep("")
            del net
    launcher.tell(("measured", samples.records()))


# -- torch RPC


def torch_rpc(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last."""
    import torch.distributed.rpc as rpc

    logging.captureWarnings(True)  # torch warns of its own deprecated parts
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{job['meeting_place']}/torch_rpc", rpc_timeout=TIMEOUT_S)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)

    def exchange(net: nn.Module) -> None:
        weights = rpc.rpc_sync("worker1", exchanged, args=([parameter.grad for parameter in net.parameters()],))
        for parameter, new in zip(net.parameters(), weights):
            parameter.data = new

    if rank == 0:
        measure("torch_rpc", exchange, lambda name: rpc.rpc_sync("worker1", kept, args=(name,)), job, launcher)
    rpc.shutdown()


def exchanged(received: list[Tensor]) -> list[Tensor]:
    """Called at the server."""
    _server.gradients = received
    return _server.weights


def kept(name: str) -> None:
    """Called at the server."""
    _server.keep(name)


# -- gRPC

OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
SERVICE = "Parameters"


def grpc(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last. Messages are bytes as they are."""
    logging.captureWarnings(True)  # torch warns of the messages' memory, which is only read
    address = Path(job["meeting_place"]) / "grpc"
    if rank == 1:
        serve_grpc(address)
        return
    import grpc as library

    deadline = time.monotonic() + TIMEOUT_S
    while not address.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with library.insecure_channel(address.read_text(), options=OPTIONS) as channel:
        methods = {name: channel.unary_unary(f"/{SERVICE}/{name}") for name in ("exchange", "keep", "stop")}

        def exchange(net: nn.Module) -> None:
            parameters = list(net.parameters())
            answer = methods["exchange"](joined([p.grad for p in parameters if p.grad is not None]), timeout=TIMEOUT_S)
            for parameter, new in zip(parameters, parted(answer, parameters)):
                parameter.data = new

        measure("grpc", exchange, lambda name: methods["keep"](name.encode(), timeout=TIMEOUT_S), job, launcher)
        methods["stop"](b"", timeout=TIMEOUT_S)


def serve_grpc(address: Path) -> None:
    """The server, until it is told to stop; it writes where it listens into that file."""
    import threading

    import grpc as library

    stop = threading.Event()

    def exchange(request: bytes, context: Any) -> bytes:
        _server.gradients = parted(request, _server.weights)
        return joined(_server.weights)

    def keep(request: bytes, context: Any) -> bytes:
        _server.keep(request.decode())
        return b""

    def end(request: bytes, context: Any) -> bytes:
        stop.set()
        return b""

    methods = {"exchange": exchange, "keep": keep, "stop": end}
    handlers = {name: library.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    server = library.server(futures.ThreadPoolExecutor(1), options=OPTIONS)
    server.add_generic_rpc_handlers((library.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    notes.write(address, f"127.0.0.1:{port}")
    stop.wait()
    server.stop(grace=5.0).wait()


def joined(tensors: list[Tensor]) -> bytes:
    """Their bytes, one after the other."""
    return b"".join(memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy()) for tensor in tensors)


def parted(message: bytes, like: list[Any]) -> list[Tensor]:
    """Tensors over the bytes of a message. They are only read."""
    found, at = [], 0
    for tensor in like:
        found.append(torch.frombuffer(message, dtype=tensor.dtype, count=tensor.numel(), offset=at).view(tensor.shape))
        at += tensor.nbytes
    return found
