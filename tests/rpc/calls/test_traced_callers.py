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


def calls(y):
    return rpc.rpc_sync(THERE, double, (y,))


torch.fx.wrap("calls")


class Calls(nn.Module):
    def forward(self, x):
        return calls(x * 2) + 1


class CallsOpenly(nn.Module):
    def forward(self, x):
        return rpc.rpc_sync(THERE, double, (x * 2,))


class CallsIgnored(nn.Module):
    @torch.jit.ignore
    def there(self, x):
        return calls(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.there(x * 2) + 1


def traces(rank):
    """Symbolic traces and TorchScript: a call is one step of the program, or refused by name; nothing of ours is traced."""
    if rank == 0:
        for size in (3, 300_000):
            x = torch.ones(size)
            traced = torch.fx.symbolic_trace(Calls())
            assert torch.equal(traced(x), 4 * x + 1)
            assert torch.equal(torch.jit.script(CallsIgnored())(x), 4 * x + 1)
            for function in (
                calls,
                lambda x: rpc.rpc_async(THERE, double, (x,)).wait(),
                lambda x: rpc.remote(THERE, double, (x,)).to_here(),
            ):
                with pytest.raises(rpc.NotSupported, match=r"within torch.jit.trace(.|\n)*torch.jit.ignore"):
                    torch.jit.trace(function, x, check_trace=False)
        assert [node.op for node in traced.graph.nodes] == ["placeholder", *["call_function"] * 3, "output"]
        with pytest.raises(TypeError, match=r"in args\[0\], a Proxy\)|args\[0\].*torch.fx.wrap"):
            torch.fx.symbolic_trace(CallsOpenly())
        made = torch.fx.experimental.proxy_tensor.make_fx(lambda x: calls(x * 2) + x)(torch.ones(3))
        names = [str(node.target) for node in made.graph.nodes if node.op == "call_function"]
        assert names == ["aten.mul.Tensor", "aten.add.Tensor"]
    rpc.shutdown()


def test_traces_have_nothing_of_our_code():
    results(run_group(traces))


def looks_at_everything(frame, event, arg):
    dict(frame.f_locals)
    frame.f_trace_opcodes = True
    return looks_at_everything


def watched(rank):
    """As coverage tools, debuggers and profilers of Python do, in all threads."""
    threading.settrace(looks_at_everything)
    sys.settrace(looks_at_everything)
    try:
        if rank == 0:
            for size in (1, 300_000, 300_000, 300_000):
                x = torch.rand(size)
                assert torch.equal(rpc.rpc_sync(THERE, double, (x,)), 2 * x)
                assert torch.equal(rpc.remote(THERE, identity, (x,)).to_here(), x)
                assert torch.equal(rpc.rpc_sync(THERE, identity, (x,)), x)
    finally:
        sys.settrace(None)
    if rank == 0:
        profile = cProfile.Profile()
        assert profile.runcall(calls, torch.ones(2)).sum() == 4
    rpc.shutdown()


def test_calls_under_a_tracer_of_python():
    results(run_group(watched))
