"""What contexts leave behind: nothing, with the garbage collector off."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import psutil
import pytest
import torch
from group import results, run_group
from test_autograd_contexts import gone_everywhere
from timing import eventually

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.calls import agent

SIZE = 1 << 18  # of a large activation, in float32: 1 MiB
STEPS = 500

watched: list[weakref.ref] = []
contexts: list[weakref.ref] = []


class Saves(torch.autograd.Function):
    """Twice the tensor; saves something large of its own that is watched."""

    @staticmethod
    def forward(ctx, tensor, fails):
        kept = torch.ones(SIZE)
        watched.append(weakref.ref(kept))
        ctx.save_for_backward(kept)
        ctx.fails = fails
        return tensor * 2

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        if ctx.fails:
            raise ValueError("fails")
        return gradient * 2 * kept[0], None


def saves(path, tensor, fails=False):
    if not contexts or contexts[-1]() is None:
        contexts[:] = [weakref.ref(autograd._current_context()._found)]
    made = Saves.apply(tensor, fails)
    return rpc.rpc_sync(path[0], saves, (path[1:], made, fails)) if path else made


def without_collector():
    gc.collect()
    gc.disable()


def left():
    return sum(each() is not None for each in watched), sum(each() is not None for each in contexts)


def nothing_left(*workers):
    for worker in workers:
        eventually(partial(rpc.rpc_sync, worker, left), (0, 0))


def saved(rank):
    without_collector()
    others = ["worker1", "worker2"]
    for worker in others:
        rpc.rpc_sync(worker, without_collector) if rank == 0 else None
    if rank == 0:
        tensor = torch.ones(30_000, requires_grad=True)
        with autograd.context() as context_id:
            contexts[:] = [weakref.ref(autograd._current_context()._found)]
            loss = saves(["worker1", "worker2", "worker1"], tensor).sum()
            assert [rpc.rpc_sync(worker, left) for worker in others] == [(2, 1), (1, 1)]
            autograd.backward(context_id, [loss], retain_graph=True)
            assert [rpc.rpc_sync(worker, left) for worker in others] == [(2, 1), (1, 1)]
            autograd.backward(context_id, [loss])
            # What the graph had saved goes with the pass that may free it; the context lives on.
            assert [rpc.rpc_sync(worker, left) for worker in others] == [(0, 1), (0, 1)]
            assert left() == (0, 1)
            assert autograd.get_gradients(context_id)[tensor][0] == 2 * 16
        del loss
        nothing_left("worker0", *others)
        # Without a backward pass, with one that fails, with one begun elsewhere, and with one that something takes no part in.
        for how in ("none", "fails", "elsewhere", "survey"):
            with autograd.context() as context_id:
                contexts[:] = [weakref.ref(autograd._current_context()._found)]
                if how == "elsewhere":
                    root = rpc.remote("worker1", saved_root, (tensor,))
                    root.backward(context_id)
                    del root
                    continue
                loss = saves(others, tensor, how == "fails").sum()
                if how == "fails":
                    for _ in range(3):
                        with pytest.raises(ValueError):
                            autograd.backward(context_id, [loss], retain_graph=True)
                    with pytest.raises(ValueError):
                        remote = rpc.remote("worker1", saved_root, (tensor, True))
                        remote.backward(context_id)
                    del remote
                if how == "survey":
                    shared = Saves.apply(tensor, False)
                    unused = rpc.rpc_sync("worker1", saves, ([], shared))
                    loss = loss + (rpc.rpc_sync("worker2", saves, ([], shared)) + shared).sum()
                    autograd.backward(context_id, [loss])
                    del unused, shared
                del loss
            nothing_left("worker0", *others)
        gone_everywhere("worker0", *others)
    rpc.shutdown()


def saved_root(tensor, fails=False):
    return saves(["worker2"], tensor, fails).sum()


def test_saved_tensors_and_contexts_die():
    results(run_group(saved, 3))


def memory():
    return psutil.Process().memory_info().rss, agent.current().device.arena.used, threading.active_count()


def large(tensor, weight):
    return (tensor * weight).tanh() * weight


def steps(rank):
    without_collector()
    if rank == 0:
        rpc.rpc_sync("worker1", without_collector)
        tensor, weight = torch.rand(SIZE), torch.rand(SIZE, requires_grad=True)
        marks = []
        for step in range(STEPS):
            with autograd.context() as context_id:
                out = rpc.rpc_sync("worker1", large, (tensor, weight))
                loss = rpc.rpc_sync("worker1", large, (out, weight)).sum()
                autograd.backward(context_id, [loss])
                assert autograd.get_gradients(context_id)[weight].shape == (SIZE,)
            if step in (STEPS // 5, STEPS - 1):
                gone_everywhere("worker0", "worker1")
                marks.append((memory(), rpc.rpc_sync("worker1", memory)))
        for before, after in zip(*marks, strict=True):
            assert after[0] - before[0] < STEPS // 4 << 20, marks  # threads have heaps of their own, of some tens of MiB
            assert after[1] - before[1] < 16 << 20, marks
            assert after[2] - before[2] <= 2, marks
    rpc.shutdown()


def test_memory_stays_flat():
    results(run_group(steps, 2))
