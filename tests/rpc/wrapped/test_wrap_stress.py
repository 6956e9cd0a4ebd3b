"""``wrap`` for very many steps: parts that dawdle, workers that are stopped now and then, forwards that are dropped, plans that
are replaced. Every loss and every weight is that of the twin in this process."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from halt import halt
from test_wrap import assert_same_state, both, drive
from torch import nn
from wrap_models import Dawdling

import rdmarpc as rpc

SIZES = (4,) * 18 + (7, 2)
"""Of batches; more than there are plans."""


class Crossing(nn.Module):
    """Two workers that dawdle; what the first makes is used by the second, and past that one and the caller by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Dawdling(20, 16, 1), Dawdling(16, 16, 2), Dawdling(16, 4, 3)
        self.here = nn.Linear(16, 16)

    def forward(self, x):
        a = torch.tanh(self.first(x))
        b = torch.tanh(self.second(a))
        return self.third(a + self.here(b))


def stop_now_and_then(pids: list[int], over: threading.Event) -> None:
    """From another thread: each of them stands still for a moment, for less than makes it lost."""
    chance = random.Random(4)
    while not over.wait(chance.uniform(0.1, 1.0)):
        pid = chance.choice(pids)
        halt(pid)
        time.sleep(chance.uniform(0.01, 0.4))
        os.kill(pid, signal.SIGCONT)


def one_step(networks: list[nn.Module], chance: random.Random) -> list[list[float]]:
    """The same for both; returns what each computed."""
    size, kind = chance.choice(SIZES), chance.randrange(10)
    x, y = torch.randn(2, size, 20), torch.randint(0, 4, (2, size))
    losses: list[list[float]] = []
    for network in networks:
        if kind == 0:  # dropped before its backward
            losses.append([network(x[0]).sum().item()])
            continue
        if kind == 1:
            with torch.no_grad():
                losses.append([network(x[0]).sum().item()])
            continue
        if kind == 2:  # two at once, backwards in the other order
            outputs = [F.cross_entropy(network(x[at]), y[at]) for at in (0, 1)]
            for output in reversed(outputs):
                output.backward()
        else:
            outputs = [F.cross_entropy(network(x[0]), y[0])]
            outputs[0].backward()
        losses.append([output.item() for output in outputs])
    return losses


def many_steps(steps: int, seconds: float) -> int:
    torch.manual_seed(3)
    model, twin = both(Crossing, {"first": "worker1", "second": "worker2", "third": "worker1"}, plans=2)
    optimizers = [torch.optim.SGD(network.parameters(), 0.01, momentum=0.9) for network in (model, twin)]
    pids = [rpc.rpc_sync(worker, os.getpid) for worker in ("worker1", "worker2")]
    over = threading.Event()
    stopper = threading.Thread(target=stop_now_and_then, args=(pids, over))
    stopper.start()
    chance, until = random.Random(5), time.monotonic() + seconds
    done = 0
    try:
        while done < 20 or (done < steps and time.monotonic() < until):
            ours, expected = one_step([model, twin], chance)
            assert ours == expected, f"step {done}: {ours}, {expected}"
            if chance.random() < 0.8:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            done += 1
            if done % 500 == 0:
                assert_same_state(model, twin)
    finally:
        over.set()
        stopper.join()
    assert_same_state(model, twin)
    model.close()
    return done


def train_for_long(device: str, steps: int, seconds: float) -> int:
    """Returns how many steps there was time for."""
    return drive(partial(many_steps, steps, seconds), 3, timeout=seconds + 100, transport=device)


@pytest.mark.parametrize("device, steps", [("shm", 2000), ("tcp", 300)])
def test_training_for_long_is_equal_to_the_bit(device, steps):
    print(f"{train_for_long(device, steps, 10.0)} steps")
