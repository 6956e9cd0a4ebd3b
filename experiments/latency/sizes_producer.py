"""The two ends of the micro-benchmark: by calls of a library, and by a prepared write into the consumer's memory.

In every step the producer changes the tensor's last element, and the consumer answers with the largest: so each answer shows
that the end of this step's tensor has arrived. All elements are compared once for each size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rdmarpc import transport

from ..harness import notes
from ..harness.libraries import Client
from ..harness.measure import per_iteration
from ..harness.processes import Launcher
from ..harness.turns import Figure

ARRIVED, ANSWERED = 1, 2  # notifications


def iterations(size: int) -> int:
    """Steps of a turn, besides the first, which does not count."""
    return min(200, max(3, int(3e8) // size))


def contents(size: int) -> Tensor:
    """So many bytes of numbers below 1 that differ."""
    return torch.arange(size // 4, dtype=torch.float32).remainder_(65521.0).div_(65536.0)


class Steps:
    """Counts the steps of one size and checks every answer."""

    def __init__(self, x: Tensor, send: Callable[[], float]) -> None:
        self._x, self._send, self._number = x, send, 0

    def __call__(self) -> None:
        self._number += 1
        self._x[-1] = expected = 1.0 + self._number
        if (found := self._send()) != expected:
            raise RuntimeError(f"step {self._number} with {self._x.nbytes} bytes: {found} arrived, not {expected}")


def drive(client: Client, job: dict[str, Any]) -> list[Figure]:
    """By calls; microseconds a step, the median."""
    figures: list[Figure] = []
    for size in job["sizes"]:
        x = contents(size)
        echoed = client.finish(client.start("identity", x))
        if not torch.equal(echoed.view(-1), x):
            raise RuntimeError(f"{size} bytes came back with other contents")
        del echoed

        def send(x: Tensor = x) -> float:
            return client.finish(client.start("largest", x)).item()

        figures.append(("step", size, per_iteration(Steps(x, send), iterations(size))))
    return figures


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """By prepared writes: rank 0 produces, rank 1 consumes. ``library`` "sender_copy": the tensor lies in ordinary memory and
    is copied into registered memory in every step; "zero_copy": it was made in registered memory."""
    place = Path(job["meeting_place"])
    device = transport.open_device(job["device"])
    if rank == 0:
        channel = device.connect(_get(place, "address", job), timeout=job["timeout_s"])
        launcher.tell(("figures", [_produce(device, channel, size, place, job) for size in job["sizes"]]))
    else:
        notes.write(place / "address", device.address)
        channel = device.accept(timeout=job["timeout_s"])
        for size in job["sizes"]:
            _consume(device, channel, size, place, job)
    notes.write(place / f"ended{rank}", b"1")
    _get(place, f"ended{1 - rank}", job)
    channel.close()
    device.close()


def _produce(device: Any, channel: Any, size: int, place: Path, job: dict[str, Any]) -> Figure:
    source = device.empty((size // 4,), dtype=torch.float32)
    source.copy_(contents(size))
    answer = channel.empty((1,), dtype=torch.float32)
    notes.write(place / f"answer{size}", device.export(answer))
    remote = transport.RemoteRegion.load(_get(place, f"landing{size}", job))
    transfer = channel.prepare([(remote, source)], notify=ARRIVED)
    answered = channel.expect(ANSWERED)
    copied = job["library"] == "sender_copy"
    x = source.clone() if copied else source

    def send() -> float:
        if copied:
            source.copy_(x)
        transfer.post().wait(job["timeout_s"])
        answered.wait(job["timeout_s"])
        return answer.item()

    return "step", size, per_iteration(Steps(x, send), iterations(size))


def _consume(device: Any, channel: Any, size: int, place: Path, job: dict[str, Any]) -> None:
    landing = channel.empty((size // 4,), dtype=torch.float32)
    notes.write(place / f"landing{size}", device.export(landing))
    result = device.empty((1,), dtype=torch.float32)
    remote = transport.RemoteRegion.load(_get(place, f"answer{size}", job))
    answer = channel.prepare([(remote, result)], notify=ANSWERED)
    arrived = channel.expect(ARRIVED)
    for step in range(iterations(size) + 1):
        arrived.wait(job["timeout_s"])
        result[0] = landing.amax()
        if step == 0 and not torch.equal(landing[:-1], contents(size)[:-1]):
            raise RuntimeError(f"{size} bytes arrived with other contents")
        answer.post().wait(job["timeout_s"])


def _get(place: Path, name: str, job: dict[str, Any]) -> bytes:
    """Waits for the other end to write it."""
    deadline = time.monotonic() + job["timeout_s"]
    return notes.wait_for(place / name, deadline, f"the other process did not say its {name}").read_bytes()
