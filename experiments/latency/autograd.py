"""Distributed autograd: two workers that compute and differentiate together, beside the same computation alone.

Alone is: in one process; or, where most of the time is computation, by the same two workers with nothing crossing but two small
calls (``Case.apart``): a core that waits for its turn is cold, and the threads of both want the same cores, whatever crosses.

An iteration over the workers and one alone take turns, and the time above is a median of their differences: a machine that
becomes slower or faster meanwhile does so for both. The workers of rdmarpc and those of torch RPC take turns too, and the
others are stopped in between.
"""

import importlib
import logging
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..harness.measure import Samples
from ..harness.processes import Group, Launcher

OURS = "rdmarpc", "rdmarpc.autograd"
THEIRS = "torch.distributed.rpc", "torch.distributed.autograd"
OPERATIONS = 100
"""The number of operations in the graph of `engine`."""


class Layer(NamedTuple):
    """The parts of an RPC layer that the cases use: two modules with the same names in them."""

    rpc: Any
    autograd: Any


def groups() -> list[Group]:
    return [Group("rdmarpc", ours, 2), Group("torch RPC", theirs, 2, freeze=True)]


def ours(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    layer = Layer(*map(importlib.import_module, OURS))
    work(layer, "rdmarpc", layer.rpc.RpcBackendOptions(transport=job["device"]), rank, job, launcher)


def theirs(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    logging.captureWarnings(True)  # torch warns of its own deprecated parts
    layer = Layer(*map(importlib.import_module, THEIRS))
    work(layer, "torch_rpc", layer.rpc.TensorPipeRpcBackendOptions(rpc_timeout=job["timeout_s"]), rank, job, launcher)


def work(layer: Layer, what: str, options: Any, rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last; worker0 tells ("progress", text) and ("measured", records)."""
    options.init_method = f"file://{job['meeting_place']}/autograd_{what}"
    layer.rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        measure(layer, what, job, launcher)
    layer.rpc.shutdown()


def measure(layer: Layer, what: str, job: dict[str, Any], launcher: Launcher) -> None:
    """All rounds, as worker0 drives them. Each case gives microseconds of its iterations (forward and backward) and those of
    the backward: `what` over the workers, "local" alone, "above" the difference, each but the first named after `what`."""
    samples = Samples()
    for name, (make, times, together) in CASES.items():
        case = make(layer.rpc, job["linear"])
        check(layer, case)
        for number in range(job["rounds"]):
            launcher.wait_for_turn()
            launcher.tell(("progress", f"autograd, {name}, round {number + 1}"))
            there, here = zip(*[(over_workers(layer, case), (case.apart or partial(local, case))()) for _ in range(times)])
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
    apart: Callable[[], tuple[int, int]] | None = None
    """Nanoseconds of an iteration, and of its backward, by both workers with no tensor crossing."""


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
        partial(apart, rpc, first, x),
    )


def apart(rpc: Any, first: nn.Linear, x: Tensor) -> tuple[int, int]:
    """Both workers compute what they do in `linear`, one after the other, from tensors that they have."""
    begin = time.perf_counter_ns()
    hidden = first(x)
    rpc.rpc_sync("worker1", second_forward, args=(len(x),))
    out = torch.ones_like(hidden, requires_grad=True)
    loss = out.sum()
    middle = time.perf_counter_ns()
    (gradient,) = torch.autograd.grad(loss, out)
    rpc.rpc_sync("worker1", second_backward)
    torch.autograd.grad(hidden, list(first.parameters()), gradient)
    end = time.perf_counter_ns()
    return end - begin, end - middle


class Second(NamedTuple):
    """The other worker's part of `apart`."""

    layer: nn.Linear
    x: Tensor
    out: list[Tensor]


_second: list[Second] = []


def second_forward(size: int) -> None:
    if not _second:
        _second.append(Second(new_linear(size), torch.randn(size, size, requires_grad=True), []))
    part = _second[0]
    part.out.append(part.layer(part.x))


def second_backward() -> None:
    part = _second[0]
    out = part.out.pop()
    torch.autograd.grad(out, [part.x, *part.layer.parameters()], torch.ones(()).expand_as(out))


def new_linear(size: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(size, size)


CASES: dict[str, tuple[Callable[[Any, int], Case], int, int]] = {
    "tiny": (tiny, 300, 1),
    "engine": (engine, 300, 1),
    "linear": (linear, 10, 10),
}
"""How often each runs in a round, and of how many iterations the time is given."""
