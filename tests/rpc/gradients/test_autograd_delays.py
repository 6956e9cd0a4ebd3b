"""Random graphs over four workers, with delays in functions, in nodes, and between messages, which come out of order."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from functools import partial

import pytest
import torch
from group import results, run_group
from test_autograd_many import at_once
from timing import eventually

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.calls import agent
from rdmarpc.links.frames import ERROR, GRADIENTS, REQUEST, RESPONSE

WORKERS, THREADS, CONTEXTS = 4, 3, 8
SIZE = 3000  # doubles: goes to landing places
KEPT_BYTES = 24 << 20

torch.manual_seed(0)
weight = torch.rand(SIZE).double().requires_grad_()
"""Of each worker, the same numbers in all."""
luck = random.Random()


def dawdle():
    if luck.random() < 0.3:
        time.sleep(luck.random() * 0.004)


class Late:
    """Requests, answers and ends of contexts are handled some time after they came, in another order."""

    def __init__(self, seed):
        self.random, self.numbers = random.Random(seed), itertools.count()
        self.waiting, self.changed = [], threading.Condition()
        me = agent.current()
        self.accept, self.answer, self.end = me.callee.accept, me.caller.answer, me.contexts.end
        takes = me.links.handlers
        takes[REQUEST] = takes[GRADIENTS] = lambda link, frame: self.later(self.accept, link, frame)
        takes[RESPONSE] = takes[ERROR] = lambda link, frame: self.later(self.answer, link, frame)
        me.contexts.end = lambda *args: self.later(self.end, *args)
        threading.Thread(target=self.run, daemon=True).start()

    def later(self, what, *args):
        delay = self.random.choice((0.0, 0.0, 0.001, 0.003, 0.01))
        with self.changed:
            heapq.heappush(self.waiting, (time.monotonic() + delay, next(self.numbers), what, args))
            self.changed.notify()

    def run(self):
        me = agent.current()
        while True:
            with self.changed:
                while not self.waiting or self.waiting[0][0] > time.monotonic():
                    self.changed.wait(self.waiting[0][0] - time.monotonic() if self.waiting else None)
                _, _, what, args = heapq.heappop(self.waiting)
            what(*args)
            # This thread has not the polling role: whoever has it learns of jobs and answers that it did not read itself.
            me.pool.call_out()
            me.progress.interrupt()


class Dawdles(torch.autograd.Function):
    """Twice; its backward takes its time, or fails."""

    @staticmethod
    def forward(ctx, tensor, fails):
        ctx.fails = fails
        return tensor * 2

    @staticmethod
    def backward(ctx, gradient):
        dawdle()
        if ctx.fails:
            raise ValueError("as told")
        return gradient * 2, None


def stage(path, fails, tensor, weights=None):
    """By way of the workers of ``path``, on each of which its weight takes part. ``weights``: locally, with these."""
    if weights is None:
        dawdle()
        value = Dawdles.apply(tensor, fails and not path) * weight.sin()
        return rpc.rpc_sync(f"worker{path[0]}", stage, (path[1:], fails, value)) if path else value
    me, *rest = path
    value = tensor * 2 * weights[me].sin()
    return stage(rest, False, value, weights) if rest else value


def of_weight(context_id):
    try:
        return autograd.get_gradients(context_id).get(weight)
    except RuntimeError:
        return None


def program(chance):
    """What a context computes: ways through the workers, of values made so far, and how each is called."""
    ways = []
    for made in range(1, chance.randint(2, 5)):
        path = [chance.randrange(WORKERS) for _ in range(chance.randint(1, 3))]
        ways.append((path, chance.randrange(made), chance.choice(("sync", "async", "remote", "unused", "forgotten"))))
    return ways


def loss_of(ways, tensor, call):
    values = [tensor]
    for path, source, how in ways:
        value = call(path, how, values[source])
        values.append(values[source] if how in ("unused", "forgotten") else value)
    return sum((value * (1 + index)).sum() for index, value in enumerate(values))


def call_one(path, how, value, fails):
    to, args = f"worker{path[0]}", (path[1:], fails, value)
    if how == "sync":
        return rpc.rpc_sync(to, stage, args)
    if how == "remote":
        return rpc.remote(to, stage, args).to_here()
    pending = rpc.rpc_async(to, stage, args)
    return None if how == "forgotten" else pending.wait()


def one_context(rank, number):
    chance = random.Random(1000 * rank + number)
    ways = program(chance)
    end = chance.choice(("backward", "backward", "backward", "fails", "nothing"))
    tensor = torch.rand(SIZE, generator=torch.Generator().manual_seed(number)).double().requires_grad_()
    with autograd.context() as context_id:
        loss = loss_of(ways, tensor, lambda path, how, value: call_one(path, how, value, end == "fails"))
        if end == "nothing":
            return 0
        used = any(how not in ("unused", "forgotten") for _, _, how in ways)
        if end == "fails" and used:
            with pytest.raises(ValueError, match="as told"):
                autograd.backward(context_id, [loss])
            return 0
        autograd.backward(context_id, [loss])
        got = [autograd.get_gradients(context_id)[tensor]]
        got += [rpc.rpc_sync(f"worker{worker}", of_weight, (context_id,)) for worker in range(WORKERS)]
    copies = [weight.detach().clone().requires_grad_() for _ in range(WORKERS)]
    twin = tensor.detach().clone().requires_grad_()
    expected = torch.autograd.grad(
        loss_of(ways, twin, lambda path, how, value: stage(path, False, value, copies)), [twin, *copies], allow_unused=True
    )
    for each, right in zip(got, expected, strict=True):
        torch.testing.assert_close(
            torch.zeros(SIZE).double() if each is None else each,
            torch.zeros(SIZE).double() if right is None else right,
            rtol=1e-10,
            atol=1e-10,
        )
    assert tensor.grad is None
    return 1


def left():
    """What must be nothing in the end, and how much memory is in use."""
    me = agent.current()
    tables = {
        **autograd._get_debug_info(),
        "contexts": rpc.counters()["autograd_contexts"],
        "pending": sum(not pending.control for pending in list(me.caller.pending.values())),
        "expired": len(me.caller.expired),
        "sources": len(me.callee._sources),
        "rrefs": rpc.counters()["rrefs"],
        "grad": int(weight.grad is not None),
    }
    return {name: count for name, count in tables.items() if count}, me.device.arena.used - me.callee.promises.nbytes


def many_late(rank):
    luck.seed(rank)
    Late(rank)
    done = at_once(THREADS, lambda thread: sum(one_context(rank, CONTEXTS * thread + each) for each in range(CONTEXTS)), 60.0)
    finished.set()
    for worker in range(WORKERS):
        eventually(partial(rpc.rpc_sync, f"worker{worker}", has_finished), limit=60.0)
    eventually(lambda: left()[0], {}, limit=20.0)
    eventually(lambda: left()[1] < KEPT_BYTES)
    rpc.shutdown()
    return sum(done)


finished = threading.Event()


def has_finished():
    return finished.is_set()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_random_graphs_and_late_messages(device):
    right = results(run_group(many_late, WORKERS, transport=device, timeout=150, rpc_timeout=60))
    assert sum(right) > WORKERS * THREADS * CONTEXTS // 3
