"""Owners of a distributed optimizer: their errors, their end, what a step costs them, what it leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from group import die, dismiss, results, run_group, until_dismissed
from test_distributed_optimizer import OWNERS, apply, grad_of, times, zeros
from timing import eventually
from torch import optim
from torch.optim import lr_scheduler

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.optim import DistributedOptimizer

# -- errors


def broken() -> torch.Tensor:
    raise LookupError("no parameter")


class BadStep(optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if rpc.get_worker_info().id == 2:
            raise ArithmeticError("cannot step")
        super().step()


class BadStart(optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        if rpc.get_worker_info().id == 2:
            raise ArithmeticError("cannot start")


def failing(rank: int) -> None:
    if rank == 0:
        rrefs = [rpc.remote(f"worker{1 + at}", zeros) for at in range(2)]
        with pytest.raises(ArithmeticError, match=r"worker2(?s:.*)cannot start"):
            DistributedOptimizer(BadStart, rrefs, lr=1.0)
        with pytest.raises(LookupError, match=r"worker1(?s:.*)no parameter"):
            DistributedOptimizer(optim.SGD, [rpc.remote("worker1", broken), *rrefs], lr=1.0)
        with pytest.raises(rpc.NotSupported, match=r"LBFGS\.step needs a closure"):
            DistributedOptimizer(optim.LBFGS, rrefs)
        for wrong in ([zeros()], [{"params": rrefs}, rrefs[0]], [{"params": [zeros()]}]):
            with pytest.raises(TypeError, match="RRefs"):
                DistributedOptimizer(optim.SGD, wrong, lr=1.0)
        with pytest.raises(ValueError, match="appear in more than one"):
            DistributedOptimizer(optim.SGD, [{"params": rrefs}, {"params": rrefs[:1]}], lr=1.0)
        with pytest.raises(ValueError, match="Invalid learning rate"):
            DistributedOptimizer(optim.SGD, rrefs, lr=-1.0)
        bad = DistributedOptimizer(BadStep, rrefs, lr=1.0)
        with pytest.raises(ArithmeticError, match=r"worker2(?s:.*)cannot step"):
            apply(bad, rrefs, 1.0)
        # The other owner has stepped; and the lock of the one that failed is free again.
        assert torch.equal(rrefs[0].to_here(), torch.full((5,), -1.0)) and torch.equal(rrefs[1].to_here(), torch.zeros(5))
        good = DistributedOptimizer(optim.SGD, rrefs, lr=1.0)
        apply(good, rrefs, 1.0)
        assert torch.equal(rrefs[1].to_here(), torch.full((5,), -1.0))
        assert rpc.rpc_sync("worker2", grad_of, args=(rrefs[1],)) is None
        with pytest.raises(RuntimeError, match="Could not find autograd context with id: 12345"):
            good.step(12345)
        for refused in (good.zero_grad, lambda: good.add_param_group({"params": rrefs})):
            with pytest.raises(rpc.NotSupported):
                refused()
    rpc.shutdown()


def test_errors_name_the_worker():
    results(run_group(failing, 3))


def widow(rank: int) -> None:
    if rank > 0:
        until_dismissed()
    else:
        rrefs = [rpc.remote(f"worker{1 + at}", zeros) for at in range(2)]
        optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=1.0)
        apply(optimizer, rrefs, 1.0)
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", times, args=(rrefs[0], 1.0))])
            rpc.rpc_async("worker2", die)
            for call in (lambda: optimizer.step(context_id), optimizer.state_dict):
                with pytest.raises(rpc.PeerLost, match="worker2"):
                    call()
        assert torch.equal(rrefs[0].to_here(), torch.full((5,), -2.0))
        dismiss("worker1")
    rpc.shutdown(graceful=False)


def test_an_owner_that_died():
    outcomes = run_group(widow, 3)
    results(outcomes[:1])


# -- what it costs, and what it leaves


def alive_here() -> int:
    return rpc._rref_context_get_debug_info()["num_owner_rrefs"]


def steady(rank: int) -> None:
    if rank == 0:
        rrefs = [rpc.remote(f"worker{1 + at % 2}", zeros) for at in range(4)]
        optimizer = DistributedOptimizer(optim.Adam, rrefs, lr=1.0)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        with autograd.context() as context_id:
            losses = [rpc.rpc_async(rref.owner(), times, args=(rref, 1.0)) for rref in rrefs]
            autograd.backward(context_id, [sum(loss.wait() for loss in losses)])
            for _ in range(3):
                optimizer.step(context_id)
                scheduler.step()
            before = rpc.counters()
            for _ in range(20):
                optimizer.step(context_id)
                scheduler.step()
            after = rpc.counters()
        told = {key: after[key] - before[key] for key in ("rpc_calls", "rpc_reads", "bytes_staged", "registrations")}
        assert told == {"rpc_calls": 40, "rpc_reads": 0, "bytes_staged": 0, "registrations": 0}
        assert after["bytes_direct"] - before["bytes_direct"] < 40 * 512, after
        held = [rpc.rpc_sync(worker, alive_here) for worker in OWNERS[:2]]
        del optimizer, scheduler
        eventually(lambda: [rpc.rpc_sync(worker, alive_here) for worker in OWNERS[:2]], [count - 1 for count in held])
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_step_is_one_small_message_an_owner(device):
    results(run_group(steady, 3, transport=device))
