"""Distributed autograd: two workers that compute and differentiate together, beside the same computation in one process.

An iteration over the workers and a local one take turns, and the time above the local one is a median of their differences: a
machine that becomes slower or faster meanwhile does so for both. The workers of rdmarpc and those of torch RPC take turns
too; torch RPC's, which never rest, are stopped in between.
"""

import importlib
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .measure import Samples
from .processes import Group, Launcher

OURS = "rdmarpc", "rdmarpc.autograd"
THEIRS = "torch.distributed.rpc", "torch.distributed.autograd"
OPERATIONS = 100
"""In the graph of `engine`."""


class Layer(NamedTuple):
    """What the cases use of an RPC layer: two modules with the same names in them."""

    rpc: Any
    autograd: Any


def groups() -> list[Group]:
    return [Group("rdmarpc", ours, 2), Group("torch RPC", theirs, 2, freeze=True)]


def ours(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last; worker0 tells ("progress", text) and ("measured", records)."""
    layer = Layer(*map(importlib.import_module, OURS))
    meeting = f"file://{job['meeting_place']}/autograd_rdmarpc"
    options = layer.rpc.RpcBackendOptions(init_method=meeting, transport=job["device"])
    layer.rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        measure(layer, "rdmarpc", job, launcher)
    layer.rpc.shutdown()


def theirs(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """The same over torch RPC."""
    logging.captureWarnings(True)  # torch warns of its own deprecated parts
    layer = Layer(*map(importlib.import_module, THEIRS))
    meeting = f"file://{job['meeting_place']}/autograd_torch_rpc"
    options = layer.rpc.TensorPipeRpcBackendOptions(init_method=meeting, rpc_timeout=job["timeout_s"])
    layer.rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        measure(layer, "torch_rpc", job, launcher)
    layer.rpc.shutdown()


def measure(layer: Layer, what: str, job: dict[str, Any], launcher: Launcher) -> None:
    """All rounds, as worker0 drives them. Each case gives microseconds of its iterations (forward and backward) and those of
    the backward alone: `what` over the workers, "local" here, "above" the difference, each but the first named after `what`."""
    samples = Samples()
    for name, (make, times, together) in CASES.items():
        case = make(layer.rpc, job["linear"])
        check(layer, case)
        for number in range(job["rounds"]):
            launcher.wait_for_turn()
            launcher.tell(("progress", f"autograd, {name}, round {number + 1}"))
            there, here = zip(*[(over_workers(layer, case), local(case)) for _ in range(times)])
            for part, of_there, of_here in zip((name, f"{name}_backward"), zip(*there), zip(*here)):
                above = [one - other for one, other in zip(of_there, of_here)]
                for measured, ns in ((what, of_there), (f"{what}_local", of_here), (f"{what}_above", above)):
                    samples.add(part, 0, measured, together * statistics.median(ns) / 1e3)
    launcher.tell(("measured", samples.records()))


class Case(NamedTuple):
    """The same loss over two workers and in one process, and the leaves of both that are in this one."""

    there: Callable[[], Tensor]
    here: Callable[[], Tensor]
    leaves: list[Tensor]
    others: list[Tensor]
    """Leaves of `here` that the other worker has in `there`."""


def over_workers(layer: Layer, case: Case) -> tuple[int, int]:
    """Nanoseconds of an iteration, and of its backward."""
    begin = time.perf_counter_ns()
    with layer.autograd.context() as context:
        loss = case.there()
        middle = time.perf_counter_ns()
        layer.autograd.backward(context, [loss])
        end = time.perf_counter_ns()
    return time.perf_counter_ns() - begin, end - middle


def local(case: Case) -> tuple[int, int]:
    """The same of one process, by the engine alone."""
    begin = time.perf_counter_ns()
    loss = case.here()
    middle = time.perf_counter_ns()
    torch.autograd.grad(loss, case.leaves + case.others)
    end = time.perf_counter_ns()
    return end - begin, end - middle


def check(layer: Layer, case: Case) -> None:
    """Both compute the same; the iterations that this takes do not count."""
    with layer.autograd.context() as context:
        layer.autograd.backward(context, [case.there()])
        found = layer.autograd.get_gradients(context)
    for leaf, gradient in zip(case.leaves, torch.autograd.grad(case.here(), case.leaves)):
        torch.testing.assert_close(found[leaf], gradient, rtol=1e-3, atol=1e-3)


def tiny(rpc: Any, _: int) -> Case:
    """A call with two tensors of 36 bytes each."""
    leaves = [torch.ones(3, 3, requires_grad=True) for _ in range(2)]
    return Case(
        lambda: rpc.rpc_sync("worker1", torch.add, args=tuple(leaves)).sum(), lambda: torch.add(*leaves).sum(), leaves, []
    )


def engine(rpc: Any, _: int) -> Case:
    """No call at all, but a graph of many operations."""
    leaf = torch.ones(3, 3, requires_grad=True)

    def loss() -> Tensor:
        value = leaf
        for _ in range(OPERATIONS):
            value = value * 1.01
        return value.sum()

    return Case(loss, loss, [leaf], [])


def linear(rpc: Any, size: int) -> Case:
    """Two linear layers, the second at the other worker: activations (size, size) and their gradients cross both ways. What
    PyTorch's tutorial on RPC and CUDA measures, on the CPU."""
    first, second = new_linear(size), new_linear(size)
    remote = rpc.remote("worker1", new_linear, args=(size,))
    x = torch.randn(size, size)
    return Case(
        lambda: remote.rpc_sync().forward(first(x)).sum(),
        lambda: second(first(x)).sum(),
        list(first.parameters()),
        list(second.parameters()),
    )


def new_linear(size: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(size, size)


CASES: dict[str, tuple[Callable[[Any, int], Case], int, int]] = {
    "tiny": (tiny, 300, 1),
    "engine": (engine, 300, 1),
    "linear": (linear, 10, 10),
}
"""How often each runs in a round, and of how many iterations the time is given."""
