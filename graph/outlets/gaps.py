"""Payloads with gaps into a slot that is not mapped here (``tcp``, ``verbs``): written from where they lie.

Either all from the first to the last element goes, gaps included, as one copy, or each run between two gaps does. Neither
copies a payload aside. What is left over lies in short runs between wide gaps, and is laid out anew first
(``GapWrites``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from ...transport import RemoteRegion
from ..wire.strided import span

if TYPE_CHECKING:
    from ...transport import Channel, Device, Transfer, Work

_A_COPY = 4096
"""So many bytes of gaps cost about what one copy more in a transfer costs."""
MOST = 256
"""Runs of a payload that go each by itself."""

Run = tuple[int, int, int]
"""Where in the payload, where in the slot, how long: bytes."""


@functools.lru_cache(1024)
def runs(shape: tuple[int, ...], strides: tuple[int, ...], given: tuple[int, ...], itemsize: int) -> tuple[Run, ...] | None:
    """The copies that bring a payload with these strides into a slot where it has the strides ``given``. ``None``: too many."""
    dims = sorted((step, there, size) for size, step, there in zip(shape, strides, given) if size > 1 and step)
    run, extent, overlap = 1, 1, False
    outer: list[tuple[int, int, int]] = []
    for step, there, size in dims:
        overlap |= step < extent
        extent += (size - 1) * step
        if not outer and step == there == run:
            run *= size
        else:
            outer.append((step, there, size))
    count = prod(size for _, _, size in outer)
    if strides == given:
        every = span(shape, strides)
        gaps = (every - run * count) * itemsize
        if overlap or count > MOST or gaps <= count * _A_COPY:
            return ((0, 0, every * itemsize),)
    if overlap or count > MOST:
        return None
    starts = itertools.product(*(range(size) for _, _, size in outer))
    found = []
    for start in starts:
        here = sum(at * step for at, (step, _, _) in zip(start, outer))
        there = sum(at * step for at, (_, step, _) in zip(start, outer))
        found.append((here * itemsize, there * itemsize, run * itemsize))
    return tuple(found)


class Copies:
    """The prepared write of such a payload into one slot: header, runs, and the strides behind them."""

    def __init__(
        self,
        channel: Channel,
        device: Device,
        head: tuple[RemoteRegion, torch.Tensor],
        room: RemoteRegion,
        strides_at: int,
        given: Sequence[int],
        found: Sequence[Run],
        number: int,
    ) -> None:
        """``head``: where the header goes, and from where; ``room``: what is behind it in the slot; ``number``: of the
        notification."""
        words = device.empty(len(given), dtype=torch.int64)
        words.copy_(torch.tensor(given, dtype=torch.int64, device="cpu"))
        behind = room[strides_at : strides_at + 8 * len(given)]
        longest = max(nbytes for _, _, nbytes in found)
        # Many copies use memory that needs no registration; a single one may be large, and this memory is never touched.
        alone = len(found) == 1
        idle = torch.empty(longest, dtype=torch.uint8, device="cpu") if alone else device.empty(longest, dtype=torch.uint8)
        pairs = [(room[there : there + nbytes], idle[:nbytes]) for _, there, nbytes in found]
        self._runs = found
        self._transfer: Transfer = channel.prepare([head, *pairs, (behind, words)], notify=number)
        self.unbind(1)

    def post(self, payload: torch.Tensor) -> Work:
        """``payload`` must stay as it is until the work is done."""
        size = payload.element_size()
        memory = payload.as_strided((span(payload.shape, payload.stride()),), (1,))
        for at, (here, _, nbytes) in enumerate(self._runs, 1):
            self._transfer.rebind(at, memory[here // size : (here + nbytes) // size])
        return self._transfer.post()

    def unbind(self, first: int) -> None:
        """Let go of the payload, from this copy on (the first one is 1)."""
        for at in range(first, 1 + len(self._runs)):
            self._transfer.unbind(at)
