"""``wrap`` for very many steps, with workers that are stopped now and then, and forwards that are dropped: every loss and every
weight is that of the twin in this process."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from beside import assert_same, both, sgd
from halt import halt
from nets import Skip
from standing_group import StandingGroup

import rdmarpc as rpc

SIZES = (4,) * 18 + (7, 2)


def stop_now_and_then(pids: list[int], over: threading.Event) -> None:
    """From another thread: each of them stands still for a moment, for less than makes it lost."""
    chance = random.Random(4)
    while not over.wait(chance.uniform(0.1, 1.0)):
        pid = chance.choice(pids)
        halt(pid)
        time.sleep(chance.uniform(0.01, 0.4))
        os.kill(pid, signal.SIGCONT)


def many_steps(steps: int, seconds: float) -> int:
    torch.manual_seed(3)
    networks = both(Skip, {"a": "worker1", "b": "worker2", "c": "worker1"})
    optimizers = [sgd(network) for network in networks]
    pids = [rpc.rpc_sync(worker, os.getpid) for worker in ("worker1", "worker2")]
    over = threading.Event()
    stopper = threading.Thread(target=stop_now_and_then, args=(pids, over))
    stopper.start()
    chance, until, done = random.Random(5), time.monotonic() + seconds, 0
    try:
        while done < 20 or (done < steps and time.monotonic() < until):
            size, kind = chance.choice(SIZES), chance.randrange(10)
            x, y = torch.randn(2, size, 20), torch.randint(0, 4, (2, size))
            seen: list[list[float]] = [[], []]
            for network, found in zip(networks, seen):
                with torch.set_grad_enabled(kind != 1):
                    outputs = [F.cross_entropy(network(x[at]), y[at]) for at in range(1 + (kind == 2))]
                found += [output.item() for output in outputs]
                if kind > 1:  # dropped, or the last one's backward first
                    for output in reversed(outputs):
                        output.backward()
            assert seen[0] == seen[1], f"step {done}"
            if chance.random() < 0.8:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            done += 1
    finally:
        over.set()
        stopper.join()
    assert_same(networks[0].state_dict(), networks[1].state_dict())
    return done


def train_for_long(device: str, steps: int, seconds: float) -> int:
    """Returns how many steps there was time for."""
    group = StandingGroup(3, transport=device)
    try:
        return group.run(many_steps, steps, seconds, timeout=seconds + 100)
    finally:
        group.end()


@pytest.mark.parametrize("device, steps", [("shm", 2000), ("tcp", 300)])
def test_training_for_long_is_equal_to_the_bit(device, steps):
    print(f"{train_for_long(device, steps, 10.0)} steps")
