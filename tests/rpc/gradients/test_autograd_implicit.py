"""Backward passes over fetched tensors without a context: into ``.grad`` at every owner, as in one process."""

from __future__ import annotations

import threading

import pytest
import torch
from group import results, run_group

import rdmarpc as rpc
from rdmarpc import autograd

HAVE: dict[str, torch.Tensor] = {}


def leaf(name):
    HAVE[name] = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    return HAVE[name]


def result(name):
    """A value with a graph, over a leaf here."""
    return torch.tanh(HAVE[name]) * HAVE[name]


def further(rref):
    """A value over what another worker has."""
    return rref.to_here() ** 2


def grad_of(name):
    return HAVE[name].grad


def clear(name):
    HAVE[name].grad = None


def expected(loss):
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    for each in loss if isinstance(loss, tuple) else (loss,):
        each(x).sum().backward()
    return x.grad


def check(name, *losses, to="worker1"):
    found = rpc.rpc_sync(to, grad_of, (name,))
    wanted = expected(losses)
    assert torch.equal(found, wanted), (found, wanted)
    rpc.rpc_sync(to, clear, (name,))


def value(x):
    return torch.tanh(x) * x


def scenario(rank):
    if rank == 0:
        x = rpc.remote("worker1", leaf, ("x",))
        x.to_here().sum().backward()
        check("x", lambda x: x)
        for _ in range(2):  # twice: .grad adds up
            (x.to_here() * 3).sum().backward()
        check("x", lambda x: x * 3, lambda x: x * 3)
        fetched = x.to_here()  # one tensor, several passes; it is a leaf with a .grad here as well
        (fetched * 2).sum().backward()
        (fetched**2).sum().backward()
        loss = (fetched**3).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        check("x", lambda x: x * 2, lambda x: x**2, lambda x: x**3, lambda x: x**3)
        assert fetched.is_leaf and torch.equal(fetched.grad, expected((lambda x: x * 2 + x**2 + 2 * x**3,)))
        # Values with graphs; fetched twice in one pass, both from one pass of the owner.
        y = rpc.remote("worker1", result, ("x",))
        (y.to_here() * y.to_here() + x.to_here()).sum().backward()
        check("x", lambda x: (lambda y: y * y + x)(value(x)))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.to_here().sum().backward()
        y = rpc.remote("worker1", result, ("x",))
        loss = (y.to_here() * 2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        check("x", lambda x: value(x) * 2, lambda x: value(x) * 2)
        # Further on, to a third worker.
        z = rpc.remote("worker2", further, (x,))
        (z.to_here() * 5).sum().backward()
        check("x", lambda x: x**2 * 5)
        # autograd.grad adds to no .grad; hooks of the leaf come before; no graph of the backward pass.
        fetched = x.to_here()
        torch.autograd.grad((fetched * 2).sum(), [fetched])
        assert rpc.rpc_sync("worker1", grad_of, ("x",)) is None
        fetched.register_hook(lambda gradient: gradient * 10)
        (fetched * 2).sum().backward()
        check("x", lambda x: x * 20)
        with pytest.raises(RuntimeError, match="has a hook, and a "):
            (fetched * 2).sum().backward()
        with pytest.raises(RuntimeError, match="create_graph=True"):
            (x.to_here() ** 2).sum().backward(create_graph=True)
        rpc.rpc_sync("worker1", clear, ("x",))
        with torch.no_grad():
            assert not x.to_here()._backward_hooks
        mixed(x)
        threads = [threading.Thread(target=lambda: [(x.to_here() * 4).sum().backward() for _ in range(5)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        check("x", lambda x: x * 80)
    rpc.shutdown()


def mixed(x):
    """With contexts: around, within and beside."""
    outside = x.to_here()
    with autograd.context() as context_id:
        inside = x.to_here()
        autograd.backward(context_id, [(inside * outside).sum()])
        found = autograd.get_gradients(context_id)
        assert torch.equal(found[outside], inside.detach()) and list(found) == [outside]  # a leaf here, of this context
        assert rpc.rpc_sync("worker1", grad_of, ("x",)) is None  # the context has it
        (outside * 6).sum().backward()  # without the context, in its block
        with pytest.raises(RuntimeError, match=r"use rdmarpc\.autograd\.backward"):
            (x.to_here() * 2).sum().backward()
    check("x", lambda x: x * 6)


def test_backward_without_a_context():
    results(run_group(scenario, 3))
