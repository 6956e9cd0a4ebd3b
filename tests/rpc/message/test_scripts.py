# No annotations as text: TorchScript reads them.
"""TorchScript as the target of calls, in all forms of torch's RPC. Those with references inside: PyTorch's own tests."""

from typing import NamedTuple

import pytest
import torch
from group import results, run_group
from torch import Tensor, nn

import rdmarpc as rpc

THERE = "worker1"


@torch.jit.script
def plus(value, other: int = 1):
    return value + other


def threefold(x: Tensor) -> Tensor:
    return x * 3


under_another_name = torch.jit.script(threefold)
traced = torch.jit.trace(threefold, torch.ones(2))


class Holder:
    @staticmethod
    @torch.jit.script
    def static(x: Tensor) -> Tensor:
        return x * 13


def make_local():
    @torch.jit.script
    def local_function(x: Tensor) -> Tensor:
        return x * 11

    return local_function


local = make_local()


class Point(NamedTuple):
    x: Tensor
    y: int


@torch.jit.script
def moved(point: Point) -> Point:
    return Point(point.x + 1, point.y + 1)


@rpc.functions.async_execution
@torch.jit.script
def later(x: Tensor) -> torch.jit.Future[Tensor]:
    return torch.jit.fork(threefold, x)


@rpc.functions.async_execution
@torch.jit.script
def never_later() -> Tensor:
    return torch.zeros(2)


@torch.jit.interface
class Gives(nn.Module):
    def forward(self) -> Tensor:
        pass


class Module(torch.jit.ScriptModule):
    def __init__(self, size: int):
        super().__init__()
        self.a = torch.ones(size)

    @torch.jit.script_method
    def forward(self) -> Tensor:
        return self.a

    @torch.jit.script_method
    def other(self, x: Tensor) -> Tensor:
        return self.a + x


@torch.jit.ignore
def make(size: int) -> Gives:
    return Module(size)


@torch.jit.script
def construct(size: int) -> Gives:
    return make(size)


@torch.jit.script
class Counter:
    def __init__(self, a: int):
        self.a = a

    def value(self) -> int:
        return self.a


def ways(function, *args, **kwargs):
    return (
        rpc.rpc_sync(THERE, function, args, kwargs),
        rpc.rpc_async(THERE, function, args, kwargs).wait(),
        rpc.remote(THERE, function, args, kwargs).to_here(),
        rpc.remote("worker0", function, args, kwargs).to_here(),
    )


def targets(rank):
    if rank == 0:
        x = torch.ones(2)
        expected = {plus: 2, under_another_name: 3, traced: 3, Holder.static: 13, local: 11, later: 3}
        for function, factor in expected.items():
            assert all(torch.equal(found, x * factor) for found in ways(function, x)), function
        assert all(torch.equal(found, x + 4) for found in ways(plus, x, other=4))
        points = ways(moved, Point(x, 1))
        assert type(points[0]) is type(points[1])
        for found in points:
            assert (type(found).__name__, found.y) == ("Point", 2) and torch.equal(found.x, x + 1)
        for function, size in ((construct, 3), (Module, 3)):
            rref = rpc.remote(THERE, function, (size,))
            assert torch.equal(rref.rpc_sync().forward(), torch.ones(size))
            assert torch.equal(rref.remote().other(torch.ones(size)).to_here(), 2 * torch.ones(size))
            assert all(torch.equal(module.forward(), torch.ones(size)) for module in (rref.to_here(), *ways(function, size)))
        assert all(torch.equal(found, torch.ones(3)) for found in ways(Module(3)))
        assert rpc.remote(THERE, Counter, (7,)).rpc_sync().value() == 7
    rpc.shutdown()


def refused(rank):
    if rank == 0:
        for form in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(RuntimeError, match=r"^plus\(\) expected at most 2 argument\(s\) but received 3"):
                form(THERE, plus, (1, 2, 3))
        with pytest.raises(RuntimeError, match="Async functions must return an IValue of Future type, but got Tensor"):
            rpc.rpc_sync(THERE, never_later)

        @torch.jit.script
        def only_here() -> int:
            return 0

        with pytest.raises(RuntimeError, match="attempted to get undefined function only_here"):
            rpc.rpc_sync(THERE, only_here)
        with pytest.raises(TypeError, match="pickle"):
            rpc.rpc_async(THERE, Module(3).forward)
    rpc.shutdown()


def test_every_form_of_function_and_module_is_a_target():
    results(run_group(targets))


def test_what_torch_refuses_is_refused():
    results(run_group(refused))
