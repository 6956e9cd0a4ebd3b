"""Distributed autograd, case by case: gradients against local autograd on the same values."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
import torch.nn.functional as F
from group import results, run_group
from torch.utils.checkpoint import checkpoint

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.calls import agent

FAR_S = 100.0  # a limit of calls that is longer than the test's own


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def identity(x):
    return x


def scaled(x, by):
    return x * by


def table(rows, width):
    global TABLE
    generator = torch.Generator().manual_seed(rows)
    TABLE = torch.randn(rows, width, dtype=torch.float64, generator=generator).requires_grad_()


def look_up(rows, sparse):
    return F.embedding(rows, TABLE, sparse=sparse)


def of_table(context_id):
    return autograd.get_gradients(context_id).get(TABLE)


def same(context_id, loss, leaves, want, exact=True):
    """Backward in the context, the gradients of ``leaves`` here against those of ``want``, a loss made by local autograd."""
    expected = torch.autograd.grad(want, leaves, allow_unused=True, materialize_grads=False)
    autograd.backward(context_id, [loss])
    got = autograd.get_gradients(context_id)
    assert len(got) == sum(each is not None for each in expected)
    for tensor, gradient in zip(leaves, expected):
        assert tensor.grad is None
        if gradient is None:
            assert tensor not in got
        else:
            assert (torch.equal if exact else torch.allclose)(got[tensor], gradient), (got[tensor], gradient)


def surveys():
    return agent.current().counters()["autograd_surveys"]


# -- calls that take no part


def unused_calls(rank):
    if rank == 0:
        before = time.monotonic()
        x = leaf(3)
        with autograd.context() as context_id:
            y = x * 2
            used, _ = rpc.rpc_sync("worker1", identity, (y,)), rpc.rpc_sync("worker2", identity, (y,))
            same(context_id, used.sum(), [x], (x * 2).sum())
            # A second pair in the same context.
            z = leaf(3)
            loss = (rpc.rpc_sync("worker2", scaled, (z * 1, 3)) * rpc.rpc_sync("worker1", identity, (z,))).sum()
            autograd.backward(context_id, [loss])
            assert torch.equal(autograd.get_gradients(context_id)[z], 6 * z.detach())
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 2.0, dtype=torch.float64))
        with autograd.context() as context_id:
            there = rpc.rpc_sync("worker1", identity, (x,))
            rpc.rpc_sync("worker2", identity, (there,))  # takes what was received, and is not used
            rpc.rpc_sync("worker1", identity, ([there, x],))
            same(context_id, (there * x).sum(), [x], (x * x).sum())
        with autograd.context() as context_id:
            # What waits is on another worker: it passed on to a third what it returned, for nothing.
            same(context_id, rpc.rpc_sync("worker1", spread, (x,)).sum(), [x], (x * 3).exp().sum())
        assert surveys() >= 2 and time.monotonic() - before < 60
        # By reference: the owner asks.
        with autograd.context() as context_id:
            rref = rpc.remote("worker1", spread, (x,))
            loss = rpc.remote("worker1", total, (rref,))
            loss.backward(context_id)
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.autograd.grad((x * 3).exp().sum(), x)[0])
        assert rpc.rpc_sync("worker1", surveys) == 1
        # A reference that its owner holds, and an unused call with what was fetched from another.
        with autograd.context() as context_id:
            fetched = rpc.remote("worker1", scaled, (x, 2)).to_here() * 1
            rpc.rpc_sync("worker2", identity, (fetched,))
            rpc.RRef(fetched.sum()).backward(context_id)
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((3,), 2.0, dtype=torch.float64))
    rpc.shutdown()


def spread(x):
    y = x * 3
    rpc.rpc_sync("worker2", identity, (y,))
    return y.exp()


def total(rref):
    return rref.to_here().sum()


def test_calls_that_take_no_part_are_not_waited_for():
    results(run_group(unused_calls, 3, rpc_timeout=FAR_S))


# -- what travels


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor
    note: str = ""


def mixed(pair, extra, factor, flags):
    assert pair.left.requires_grad and not pair.left.is_leaf and not pair.right.requires_grad
    assert [each.requires_grad for each in extra["list"]] == flags
    return {"sum": pair.left + pair.right, "n": 7, "pair": Pair(extra["list"][1] * factor, pair.right, pair.note), "none": None}


def in_place(x, y):
    assert x is y
    x.mul_(3)
    x[0] = 5
    return x, x.view(-1)[1:]


def halves(x):
    return torch.split(x, 2)


def is_plain(parameter, inside):
    assert type(parameter) is torch.Tensor is type(inside["deep"][0]) and parameter is inside["deep"][0]
    assert parameter.requires_grad and parameter.grad_fn is not None
    return parameter * 2


def through(module, x):
    return module(x)


def reentrant(x):
    return checkpoint(torch.sin, x, use_reentrant=True)


def checkpointed(x):
    return checkpoint(lambda inner: (inner * inner).sin(), x, use_reentrant=False)


def arguments(rank):
    if rank == 0:
        a, b, c = leaf(4), torch.randn(4, dtype=torch.float64), leaf(4)
        with autograd.context() as context_id:
            given = Pair(a * 1, b, "note"), {"list": [b, c]}, 2.5, [False, True]
            found = rpc.rpc_sync("worker1", mixed, given)
            assert found["n"] == 7 and found["none"] is None and found["pair"].note == "note"
            assert not found["pair"].right.requires_grad
            same(context_id, (found["sum"] * found["pair"].left).sum(), [a, c], ((a + b) * (c * 2.5)).sum())
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128):
            x, y = leaf(5, dtype=dtype), leaf(5)
            with autograd.context() as context_id:
                loss = rpc.rpc_sync("worker1", scaled, (x, x)).abs().sum() + rpc.rpc_sync("worker1", scaled, (y, 2)).sum()
                same(context_id, loss, [x, y], (x * x).abs().sum() + (y * 2).sum())
        x = leaf(6)
        with autograd.context() as context_id:
            y = x * 2
            changed, tail = rpc.rpc_sync("worker1", in_place, (y, y))
            first, _, third = rpc.rpc_sync("worker1", halves, (y,))
            loss = changed.prod() + tail.sum() + (first * third).sum()
            alone = (x * 2 * 3).index_fill(0, torch.tensor([0]), 5.0)
            want = alone.prod() + alone[1:].sum() + ((x * 2)[:2] * (x * 2)[4:]).sum()
            same(context_id, loss, [x], want)
        parameter = torch.nn.Parameter(torch.randn(3, dtype=torch.float64))
        with autograd.context() as context_id:
            found = rpc.rpc_sync("worker1", is_plain, (parameter, {"deep": [parameter]}))
            same(context_id, (found * parameter).sum(), [parameter], (parameter * 2 * parameter).sum())
        linear = torch.nn.Linear(3, 3, dtype=torch.float64)
        x = leaf(2, 3)
        with autograd.context() as context_id:  # a module is copied: its parameters are leaves where it arrives
            same(context_id, rpc.rpc_sync("worker1", through, (linear, x)).square().sum(), [x], linear(x).square().sum())
        x = leaf(7)
        with autograd.context() as context_id:
            same(context_id, rpc.rpc_sync("worker1", checkpointed, (x,)).sum(), [x], (x * x).sin().sum())
    rpc.shutdown()


def test_what_travels_with_gradients():
    results(run_group(arguments))


def sparse_and_references(rank):
    if rank == 0:
        rpc.rpc_sync("worker1", table, (10, 3))
        table(10, 3)
        rows, weights = torch.tensor([1, 5, 1]), torch.randn(3, 3, dtype=torch.float64)
        for sparse in (True, False):
            with autograd.context() as context_id:
                loss = (rpc.rpc_sync("worker1", look_up, (rows, sparse)) * weights).sum()
                loss += rpc.rpc_sync("worker1", look_up, (rows[:1], sparse)).sum()
                autograd.backward(context_id, [loss])
                got = rpc.rpc_sync("worker1", of_table, (context_id,))
                want = (look_up(rows, False) * weights).sum() + look_up(rows[:1], False).sum()
                assert got.is_sparse == sparse
                assert torch.allclose(got.to_dense(), torch.autograd.grad(want, TABLE)[0])
        # A sparse tensor that is sent, and its sparse gradient that comes back.
        dense = leaf(3, 3)
        with autograd.context() as context_id:
            found = rpc.rpc_sync("worker1", torch.sparse.sum, (dense.to_sparse(),))
            same(context_id, found, [dense], torch.sparse.sum(dense.to_sparse()))
        x = leaf(3)
        with autograd.context() as context_id:  # fetched from there, and fetched by there
            mine = rpc.RRef(x * 2)
            there = rpc.remote("worker1", total, (mine,))
            loss = there.to_here() * rpc.rpc_sync("worker1", total, (mine,)) + (mine.to_here() * x).sum()
            want = (x * 2).sum() * (x * 2).sum() + (x * 2 * x).sum()
            same(context_id, loss, [x], want, exact=False)  # summed in another order
        rref = rpc.RRef((x * x).sum())
        rref.backward()
        assert torch.equal(x.grad, 2 * x.detach())
        x.grad = None
    rpc.shutdown()


def test_sparse_gradients_and_references():
    results(run_group(sparse_and_references))


# -- the graph and its life


class Seen:
    """A hook that counts, and keeps what it saw."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []

    def __call__(self, gradient):
        self.gradients.append(gradient.clone())


def graphs(rank):
    if rank == 0:
        x = leaf(3)
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", scaled, (x * 1, x)).sum()
            for times in range(1, 4):
                autograd.backward(context_id, [loss], retain_graph=True)
                # Each of the two that arrive is added by itself, so the sum of several passes may be rounded elsewhere.
                torch.testing.assert_close(autograd.get_gradients(context_id)[x], times * 2 * x.detach())
            autograd.backward(context_id, [loss])
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                autograd.backward(context_id, [loss])
        with autograd.context() as context_id, torch.no_grad():
            found = rpc.rpc_sync("worker1", scaled, (x, 2))
            assert found.grad_fn is None
            assert not autograd._retrieve_context(context_id)._send_functions()
            assert not autograd._retrieve_context(context_id)._recv_functions()
        with autograd.context():
            kept = rpc.rpc_sync("worker1", scaled, (x, 2))
            with pytest.raises(RuntimeError, match=r"use rdmarpc\.autograd\.backward"):
                kept.sum().backward()
        with autograd.context() as context_id, pytest.raises(RuntimeError, match="was received in autograd context"):
            autograd.backward(context_id, [(kept * x).sum()])
        with autograd.context() as context_id:
            same(context_id, (rpc.rpc_sync("worker1", scaled, (kept.detach(), x))).sum(), [x], (kept.detach() * x).sum())
        # Here and at the other worker: it would put gradients of its leaves into .grad.
        for worker in ("worker0", "worker1"):
            with autograd.context() as context_id, pytest.raises(RuntimeError, match=r"use_reentrant=False\) works"):
                autograd.backward(context_id, [rpc.rpc_sync(worker, reentrant, (x,)).sum()])
            assert x.grad is None
        # Hooks of a leaf see the sum, once; so do those behind its accumulator; at work on both sides of a call.
        for unused in (False, True):
            x, on_leaf, on_inner, behind = leaf(3), Seen(), Seen(), []
            x.register_hook(on_leaf)
            inner = x * 2
            inner.register_hook(on_inner)
            inner.grad_fn.next_functions[0][0].register_hook(lambda *_, behind=behind: behind.append(1))
            with autograd.context() as context_id:
                first = rpc.rpc_sync("worker1", scaled, (x, 2))
                second = rpc.rpc_sync("worker1", scaled, (x + first, 3))
                third = rpc.rpc_sync("worker1", scaled, (inner, inner))
                if unused:
                    rpc.rpc_sync("worker1", scaled, ([x, inner], 2))
                autograd.backward(context_id, [(first * second * third * x).sum()], retain_graph=True)
                got = autograd.get_gradients(context_id)[x]
            assert x.grad is None and len(on_leaf.gradients) == len(on_inner.gradients) == 1
            assert behind
            (x * 2 * (x + x * 2) * 3 * inner * inner * x).sum().backward()  # the hooks see it too
            assert torch.allclose(x.grad, got) and torch.allclose(*on_leaf.gradients) and torch.allclose(*on_inner.gradients)
    rpc.shutdown()


def test_graphs_and_hooks():
    results(run_group(graphs))
