"""The three libraries behind one face: calls of named functions at servers, any number under way.

Settings. rdmarpc: the device alone. torch RPC: as many threads as calls, and TensorPipe's transports for that device alone, so
that no thread polls the others: shm with cross-memory attach; sockets with several lanes; ibv. gRPC: messages of raw bytes,
looked at in place, over one connection for each call under way; a Unix socket in place of shm, TCP in place of the others.
"""

from __future__ import annotations

import contextlib
import importlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from . import notes
from .functions import WRITES, function, together
from .meeting import init_method

TITLES = {"rdmarpc": "rdmarpc", "torch_rpc": "torch RPC", "grpc": "gRPC"}
PEERS = frozenset({"torch_rpc", "grpc", "pipelining", "gloo"})
"""Libraries that are left out where they fail."""
PACKAGES = {"grpc": "grpc"}
"""What has to be installed for a library, beside torch."""

TENSORPIPE: dict[str, dict[str, Any]] = {
    "shm": {"_transports": ["shm"], "_channels": ["cma", "basic"]},
    "tcp": {"_transports": ["uv"], "_channels": ["mpt_uv", "basic"]},
    "verbs": {"_transports": ["ibv"], "_channels": ["basic"]},
}
GRPC_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
]
SERVICE = "Calls"


class Client(Protocol):
    """Calls functions at servers. Any thread may use it."""

    def start(self, name: str, x: Tensor, done: Callable[[], Any] | None = None, server: int = 0) -> Any:
        """Begin a call; ``done`` runs when its result is there. Hand what this returns to ``finish``."""

    def finish(self, call: Any) -> Tensor:
        """Wait for a call; the result is only looked at."""


Drive = Callable[[Client, dict[str, Any]], Any]


def serve_or_drive(drive: Drive, rank: int, job: dict[str, Any]) -> Any:
    """A process from its first line to its last: the first ``job["clients"]`` ranks drive, the others serve until all clients
    have ended. ``job["register"]``: a module whose ``begin(job)`` adds functions to those that there are.
    Returns what ``drive`` does, and `None` at servers."""
    together.clients = job["clients"]
    if "register" in job:
        importlib.import_module(job["register"]).begin(job | {"rank": rank})
    if job["library"] == "grpc":
        return _grpc(drive, rank, job)
    return _rpc(drive, rank, job)


# -- torch RPC and rdmarpc: the same names


class RpcClient:
    def __init__(self, rpc: Any) -> None:
        self._rpc = rpc

    def start(self, name: str, x: Tensor, done: Callable[[], Any] | None = None, server: int = 0) -> Any:
        future = self._rpc.rpc_async(f"server{server}", function(name), args=(x,))
        return future if done is None else future.then(partial(_after, done))

    def finish(self, call: Any) -> Tensor:
        return call.wait()


def _after(done: Callable[[], Any], future: Any) -> Tensor:
    done()
    return future.value()


def _rpc(drive: Drive, rank: int, job: dict[str, Any]) -> Any:
    clients, servers = job["clients"], job["servers"]
    common = {
        "init_method": init_method(rank, job),
        "num_worker_threads": max(16, job["threads"]),
        "rpc_timeout": job["timeout_s"],
    }
    if job["library"] == "rdmarpc":
        rpc = importlib.import_module("rdmarpc")
        options = rpc.RpcBackendOptions(transport=_transport(job), arena_limit=8 << 30, **common)
    else:
        rpc = importlib.import_module("torch.distributed.rpc")
        options = rpc.TensorPipeRpcBackendOptions(**TENSORPIPE.get(job["device"], {}), **common)
    for name in job["functions"]:
        function(name)  # a server must know TorchScript functions before they are called
    me = f"client{rank}" if rank < clients else f"server{rank - clients}"
    rpc.init_rpc(me, rank=rank, world_size=clients + servers, rpc_backend_options=options)
    found = drive(RpcClient(rpc), job | {"rank": rank}) if rank < clients else None
    rpc.shutdown()
    return found


def _transport(job: dict[str, Any]) -> str:
    return f"{job['device']}://{job['interface']}" if "interface" in job else job["device"]


# -- gRPC


class GrpcClient:
    def __init__(self, channels: Sequence[Sequence[Any]]) -> None:
        """``channels``: those to each server."""
        self._channels = channels
        self._methods: dict[tuple[int, int, str], Any] = {}
        self._next = 0

    def start(self, name: str, x: Tensor, done: Callable[[], Any] | None = None, server: int = 0) -> Any:
        self._next = (self._next + 1) % len(self._channels[server])
        key = server, self._next, name
        if key not in self._methods:
            self._methods[key] = self._channels[server][self._next].unary_unary(f"/{SERVICE}/{name}")
        call = self._methods[key].future(message(x))
        if done is not None:
            call.add_done_callback(lambda _: done())
        return call

    def finish(self, call: Any) -> Tensor:
        return tensor(call.result())


def message(x: Tensor) -> bytes:
    """The bytes of a contiguous float32 tensor: a copy, because gRPC takes nothing else."""
    return bytes(memoryview(x.detach().reshape(-1).view(torch.uint8).numpy()))


def tensor(received: bytes | bytearray) -> Tensor:
    """Float32 numbers over the bytes of a message. Those over `bytes` are only read."""
    return torch.frombuffer(received, dtype=torch.float32)


def _grpc(drive: Drive, rank: int, job: dict[str, Any]) -> Any:
    clients, place = job["clients"], Path(job["meeting_place"])
    if rank >= clients:

        def answer(name: str, request: bytes) -> bytes:
            return message(function(name)(tensor(bytearray(request) if name in WRITES else request)))

        serve_grpc({name: partial(answer, name) for name in job["functions"]}, place, rank - clients, job)
        return None
    with grpc_channels(place, rank, job) as channels:
        return drive(GrpcClient(channels), job | {"rank": rank})


@contextlib.contextmanager
def grpc_channels(place: Path, rank: int, job: dict[str, Any]) -> Iterator[list[list[Any]]]:
    """``job["calls"]`` connections of client ``rank`` to each server; afterwards the client has ended."""
    grpc = importlib.import_module("grpc")
    deadline = time.monotonic() + job["timeout_s"]
    channels: list[list[Any]] = []
    for server in range(job["servers"]):
        target = notes.wait_for(place / f"server{server}", deadline, f"server{server} of gRPC did not start").read_text()
        channels.append([grpc.insecure_channel(target, options=GRPC_OPTIONS) for _ in range(job["calls"])])
    try:
        yield channels
    finally:
        (place / f"ended{rank}").touch()
        for channel in (channel for each in channels for channel in each):
            channel.close()


def serve_grpc(methods: Mapping[str, Callable[[bytes], bytes]], place: Path, number: int, job: dict[str, Any]) -> None:
    """Server ``number`` with ``job["threads"]``, until all clients have ended."""
    import grpc

    def handler(method: Callable[[bytes], bytes]) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: method(request))

    handlers = {name: handler(method) for name, method in methods.items()}
    server = grpc.server(futures.ThreadPoolExecutor(job["threads"]), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    if job["device"] == "shm":
        target = f"unix-abstract:experiment-{uuid.uuid4().hex}"
        server.add_insecure_port(target)
    else:
        address = job.get("address", "127.0.0.1")
        port = server.add_insecure_port(f"{job.get('bind', address)}:0")
        target = f"{address}:{port}"
    server.start()
    notes.write(place / f"server{number}", target)
    while not all((place / f"ended{client}").exists() for client in range(job["clients"])):
        time.sleep(0.05)
    server.stop(grace=5.0).wait()
