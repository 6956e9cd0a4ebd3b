"""Words between streams under stress: threads at both ends, delays before all that the GPU does, memory that goes round."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import gpu
import pytest
import torch
from group import results, run_group

import rdmarpc as rpc
from rdmarpc.calls import agent

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
THREADS, CALLS = 3, 25


def altered(values: list[torch.Tensor], pause: float) -> list[torch.Tensor]:
    time.sleep(pause)
    made = []
    for value in values:
        slot = torch.empty_like(value)
        slot.copy_(value)
        made.append(slot)
    return made


def send(to: str, seed: int, failed: list[str]) -> None:
    rng = random.Random(seed)
    stream = torch.Stream(gpu.device())
    with stream:
        for call in range(CALLS):
            sizes = [rng.choice((1, 100, 5000, 70_000)) for _ in range(rng.randint(1, 3))]
            values = [torch.empty(size, device=gpu.device(rng.randrange(gpu.count()))) for size in sizes]
            for at, value in enumerate(values):
                on = torch.Stream(value.device)
                on.wait_stream(torch.accelerator.current_stream(value.device))
                with on:
                    gpu.fill_later(value, float(seed * 1000 + call + at), rng.choice((0.0, 0.0, 2.0)))
                torch.accelerator.current_stream(value.device).wait_stream(on)
            future = rpc.rpc_async(to, altered, (values, rng.choice((0.0, 0.0, 0.005))))
            del value, values
            for at, back in enumerate(future.wait()):
                wanted = float(seed * 1000 + call + at)
                if back.numel() != sizes[at] or not back.eq(wanted).all():
                    failed.append(f"{to}, call {call}, tensor {at}: wanted {wanted}, got {back.cpu()[:4]}")
                    return


def both_ways(rank: int) -> Any:
    failed: list[str] = []
    rpc.rpc_sync(f"worker{1 - rank}", altered, ([torch.ones(1, device=gpu.device())], 0.0))
    threads = [
        threading.Thread(target=send, args=(f"worker{1 - rank}", 10 * rank + number, failed)) for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a call hangs"
    found = agent.current().counters()
    rpc.shutdown()
    assert not failed, failed
    return found["bytes_staged"]


@pytest.mark.parametrize("delay", [0, 300])
def test_threads_of_two_workers_send_each_other_tensors(delay: int) -> None:
    found = results(run_group(both_ways, gpu=True, timeout=90, environment={"SOFTCUDA_DELAY_US": str(delay)}))
    assert found == [0, 0]
