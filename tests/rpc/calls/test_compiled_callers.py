"""Functions that make calls, under what traces, compiles or profiles Python: as with torch's RPC, it leaves our code alone."""

from __future__ import annotations

import cProfile
import sys
import threading

import pytest
import torch
from called import double, identity
from group import results, run_group
from torch import nn

import rdmarpc as rpc

SIZES = (3, 5, 8, 300_000, 1)
THERE = "worker1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.scale * 2


def synchronous(x):
    y = x + 1
    return rpc.rpc_sync(THERE, double, (y,)).sum() + y.shape[0]


def asynchronous(x):
    first, second = rpc.rpc_async(THERE, double, args=(x,)), rpc.rpc_async(THERE, torch.add, args=(x, x.shape[0]))
    first.wait()
    return sum(value.sum() for value in torch.futures.wait_all([first, second]))


def referred(x):
    rref = rpc.remote(THERE, double, args=(x * 2,))
    here = rpc.RRef(x)
    return rref.to_here().sum() + here.local_value().sum() + rref.owner().id


def through_proxies(x):
    rref = rpc.remote(THERE, Net)
    there = rref.remote().forward(x)
    return rref.rpc_sync().forward(x).sum() + rref.rpc_async().forward(x).wait().sum() + there.to_here().sum()


def remote_module(x, module):
    return module(x).sum() + module.forward_async(x * 2).wait().sum()


def trained(x, parameters):
    with rpc.autograd.context() as context:
        rref = rpc.remote(THERE, Net)
        loss = rref.rpc_sync().forward(x).sum() * parameters.to_here().sum()
        rpc.autograd.backward(context, [loss])
        grads = rpc.autograd.get_gradients(context)
        optimizer = rpc.optim.DistributedOptimizer(torch.optim.SGD, [parameters], lr=0.5)
        optimizer.step(context)
    return loss.detach() + len(grads)


def asked(x):
    info = rpc.get_worker_info(THERE)
    return x.sum() + info.id + rpc.get_rpc_timeout()


def compiles(rank):
    if rank == 0:
        module = rpc.nn.RemoteModule(THERE, Net)
        for backend in ("eager", "aot_eager"):
            for function, args in (
                (synchronous, ()),
                (asynchronous, ()),
                (referred, ()),
                (through_proxies, ()),
                (remote_module, (module,)),
                (asked, ()),
            ):
                torch._dynamo.reset()
                compiled = torch.compile(function, backend=backend)
                for size in SIZES:
                    x = torch.arange(float(size))
                    assert compiled(x, *args) == function(x, *args), (function.__name__, size)
            torch._dynamo.reset()
            one, other = (rpc.remote(THERE, torch.ones, (1,)) for _ in range(2))
            compiled = torch.compile(trained, backend=backend)
            for size in SIZES[:3]:
                x = torch.arange(float(size))
                assert compiled(x, one) == trained(x, other)
                assert torch.equal(one.to_here(), other.to_here())
        # The graphs are those of the lines around the calls.
        from torch._dynamo.testing import CompileCounterWithBackend

        torch._dynamo.reset()
        counted = CompileCounterWithBackend("eager")
        compiled = torch.compile(synchronous, backend=counted)
        for size in SIZES:
            compiled(torch.ones(size))
        nodes = {node.target for graph in counted.graphs for node in graph.graph.nodes if node.op == "call_function"}
        assert all(getattr(target, "__module__", "").startswith(("_operator", "torch")) for target in nodes), nodes
        assert counted.frame_count <= 6
    rpc.shutdown()


def test_functions_that_call_are_compiled_at_several_batch_sizes():
    results(run_group(compiles, timeout=300))
