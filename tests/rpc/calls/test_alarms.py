"""Alarms that raise at any moment of a step: of a wrapped model, of an autograd context, of references, and while a collective
is waited for. What comes after is as in one process."""

from __future__ import annotations

import copy
import random
import signal
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from called import double
from group import Meeting, results, run_group
from rref_things import wait_until_empty
from test_interrupts import raise_timeout
from torch import nn

import rdmarpc as rpc

TURNS = 60


class Alarms:
    """At moments that are drawn. A second one follows the first, which an import may have swallowed."""

    def __init__(self, latest_s: float) -> None:
        self._draw, self._latest_s = random.Random(0), latest_s
        signal.signal(signal.SIGALRM, raise_timeout)

    def interrupt(self, work: Callable[[], object]) -> None:
        """Do ``work`` again and again until the alarm comes. Python's own ``Condition.wait`` makes of one that comes while it
        takes its lock again a RuntimeError, with the alarm's as its context."""
        with pytest.raises((TimeoutError, RuntimeError)) as raised:
            try:
                signal.setitimer(signal.ITIMER_REAL, self._draw.uniform(0.0001, self._latest_s), 0.05)
                while True:
                    work()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        error = raised.value
        alarmed = isinstance(error, TimeoutError) or isinstance(error.__context__, TimeoutError)
        assert alarmed, error


def there_and_back(net, x):
    loss = net(x).square().mean()
    loss.backward()
    return loss


def steps(rank):
    if rank == 0:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        alone = copy.deepcopy(net)
        model = rpc.wrap(net, {"2": "worker1", "4": "worker2"})
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, alone)]
        alarms = Alarms(0.004)
        for turn in range(TURNS):
            x = torch.randn(8 if turn % 3 else 6, 16, generator=torch.Generator().manual_seed(turn))
            alarms.interrupt(partial(there_and_back, model, x))
            losses = []
            for each, optimizer in zip((model, alone), optimizers):
                optimizer.zero_grad()
                losses.append(there_and_back(each, x))
                optimizer.step()
            assert losses[0].item() == losses[1].item(), turn
        found, expected = model.state_dict(), alone.state_dict()
        assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)
    rpc.shutdown()


def test_steps_of_a_wrapped_model():
    results(run_group(steps, 3))


def layer(weight, x):
    return torch.tanh(x @ weight)


def gradients(weight, x):
    with rpc.autograd.context() as context:
        loss = rpc.rpc_sync("worker2", layer, (x, rpc.rpc_sync("worker1", layer, (weight, x)))).sum()
        rpc.autograd.backward(context, [loss])
        found = rpc.autograd.get_gradients(context)
    return found[weight], found[x]


def contexts(rank):
    if rank == 0:
        alarms = Alarms(0.006)
        for turn in range(TURNS):
            generator = torch.Generator().manual_seed(turn)
            weight, x = (torch.randn(64, 64, generator=generator, requires_grad=True) for _ in range(2))
            expected = torch.autograd.grad(layer(x, layer(weight, x)).sum(), (weight, x))
            alarms.interrupt(partial(gradients, weight, x))
            torch.testing.assert_close(gradients(weight, x), expected)
    rpc.shutdown()


def test_autograd_contexts():
    results(run_group(contexts, 3))


def fetched(given):
    reference = rpc.remote("worker1", double, (given,))
    assert reference.rpc_async().sum().wait() == 6 * given.numel()
    return reference.to_here()


def references(rank):
    if rank == 0:
        alarms = Alarms(0.004)
        for turn in range(TURNS):
            given = torch.full(((1, 20_000, 300_000)[turn % 3],), 3.0)
            alarms.interrupt(partial(fetched, given))
            assert torch.equal(fetched(given), given * 2)
        wait_until_empty(range(2))
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_references(device):
    results(run_group(references, transport=device))


def collectives(meeting: Meeting) -> None:
    rank = meeting.rank
    dist.init_process_group("rdmarpc", store=dist.FileStore(f"{meeting._place}-group", 2), rank=rank, world_size=2)
    draw, alarms = random.Random(1), Alarms(0.002)
    for turn in range(TURNS):
        tensor = torch.full(((1, 20_000, 300_000)[turn % 3],), float(rank + 1))
        if rank:
            time.sleep(draw.uniform(0, 0.003))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        if not rank:
            alarms.interrupt(work.wait)
        work.wait()
        assert torch.equal(tensor, torch.full_like(tensor, 3.0)), turn
    dist.destroy_process_group()


def test_a_collective_that_is_waited_for():
    results(run_group(collectives, dynamic=True))
