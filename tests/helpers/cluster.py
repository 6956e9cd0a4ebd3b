"""Worker processes over transport alone, without RPC: this process is the caller ``w0``, set-up goes through pipes."""

from __future__ import annotations

import operator
import pickle
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from forks import forks
from torch import nn

from rdmarpc.graph.caller.caller import Caller
from rdmarpc.graph.plan.analyze import TransferGraph, analyze
from rdmarpc.graph.plan.program import Machine
from rdmarpc.graph.trace.capture import TensorSpec, capture, skeleton
from rdmarpc.graph.work.host import Host
from rdmarpc.transport import Channel, Device, open_device

TIMEOUT = 30.0


def connect(device: Device, name: str, rank: int, addresses: list[bytes], size: int) -> dict[str, Channel]:
    """One channel a pair: the higher rank connects."""
    channels = {f"w{peer}": device.connect(addresses[peer], hello=name.encode(), timeout=TIMEOUT) for peer in range(rank)}
    for _ in range(rank + 1, size):
        channel = device.accept(timeout=TIMEOUT)
        channels[channel.peer_hello.decode()] = channel
    return channels


def serve(rank: int, size: int, kind: str, arena_limit: int | None, pipe: Connection) -> None:
    """Body of a worker process: answers (method, args) for its host until the pipe closes."""
    torch.set_num_threads(1)
    device = open_device(kind, arena_limit=arena_limit)
    pipe.send(device.address)
    channels = connect(device, f"w{rank}", rank, pipe.recv(), size)
    host: Host | None = None
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            break
        try:
            if method == "open":
                host = Host(f"w{rank}", device, channels.__getitem__, args[0], TIMEOUT)
                answer = None
            elif method == "gradients":
                assert host is not None
                answer = {name: parameter.grad for name, parameter in host.root.named_parameters()}
            else:
                answer = getattr(host if hasattr(host, method) else host.access, method)(*args)
            pipe.send((True, answer))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
    if host is not None:
        host.close()
    device.close()


class Cluster:
    """``size`` workers; ``processes[r]`` and ``pipes[r]`` for r >= 1."""

    def __init__(self, size: int, kind: str = "shm", arena_limit: int | None = None) -> None:
        self.device = open_device(kind, arena_limit=arena_limit)
        self.processes: dict[str, Any] = {}
        self.pipes: dict[str, Connection] = {}
        for rank in range(1, size):
            ours, theirs = forks().Pipe()
            process = forks().Process(target=serve, args=(rank, size, kind, arena_limit, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes[f"w{rank}"], self.pipes[f"w{rank}"] = process, ours
        addresses = [self.device.address]
        for pipe in self.pipes.values():
            assert pipe.poll(TIMEOUT), "a worker process did not start"
            addresses.append(pipe.recv())
        for pipe in self.pipes.values():
            pipe.send(addresses)
        self.channels = connect(self.device, "w0", 0, addresses, size)
        self._lock = threading.Lock()

    def ask(self, method: str, args: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        with self._lock:
            for worker, arguments in args.items():
                self.pipes[worker].send((method, arguments))
            answers = {}
            for worker in args:
                assert self.pipes[worker].poll(TIMEOUT), f"{worker} does not answer {method}"
                good, answer = self.pipes[worker].recv()
                assert good, f"{worker}: {answer}"
                answers[worker] = answer
            return answers

    def close(self) -> None:
        for pipe in self.pipes.values():
            pipe.close()
        for process in self.processes.values():
            process.join(5.0)
            if process.is_alive():
                process.kill()
        self.device.close()


class Split:
    """A model split over a cluster, as ``wrap`` does it but with flags and parameters left alone."""

    def __init__(self, cluster: Cluster, net: nn.Module, placement: dict[str, str], **options: Any) -> None:
        self.cluster, self.net, self.placement = cluster, net, placement
        self.shape = skeleton(net)
        parts: dict[str, dict[str, nn.Module]] = {}
        for name, worker in placement.items():
            if worker != "w0":
                parts.setdefault(worker, {})[name] = net.get_submodule(name)
        parts = pickle.loads(pickle.dumps(parts))
        cluster.ask("open", {worker: (modules,) for worker, modules in parts.items()})
        mode = {w: _mode(modules) for w, modules in parts.items()}
        cluster.ask("add_mode", {worker: (1, mode[worker]) for worker in parts})
        counts = {w: sum(1 for part in m.values() for _ in part.parameters()) for w, m in parts.items()}
        machine = Machine(net.get_submodule, lambda path: operator.attrgetter(path)(net))
        self.caller = Caller("w0", cluster.device, cluster.channels.__getitem__, cluster.ask, counts, machine, **options)
        self.caller.control.zeroing.trainable[1] = {worker: bytes(mode[worker][1]) for worker in parts}
        self.counts = counts

    def owner(self, path: str) -> str:
        return self.placement.get(path.split(".")[0], "w0")

    def graph(self, tensors: tuple[torch.Tensor, ...]) -> TransferGraph:
        specs = [TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        return analyze(capture(self.shape, specs, lambda *t: (t, {})), self.owner, "w0")

    def __call__(self, *tensors: torch.Tensor) -> Any:
        signature = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        plan = self.caller.plan(signature, lambda: self.graph(tensors))
        return self.caller.forward(plan, tensors, 1)


def _mode(modules: dict[str, nn.Module]) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    training = tuple(m.training for part in modules.values() for m in part.modules())
    grads = tuple(p.requires_grad for part in modules.values() for p in part.parameters())
    return training, grads
