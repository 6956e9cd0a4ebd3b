"""The prepared writes into one slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..plan.place import Edge
from ..wire.tail import Tail, tail_bytes
from .gaps import Copies, runs

if TYPE_CHECKING:
    from ...transport import Channel, Device, Mapped, RemoteRegion, Transfer

_LAYOUTS = 16
"""Prepared writes of payloads with gaps that a slot keeps."""


class Prepared:
    """Good for as long as the slot lies where it does.

    ``bare`` writes the header, ``full`` header and payload. ``room``: what is behind the header, or the payload where it lies
    elsewhere; ``mapped``: the same as memory of this process, where it is that too. ``capacity``: bytes of a payload with gaps
    that have room there; ``tail``: what is behind them, of a mapped slot. ``registers``: payloads have to be in registered
    memory, and the slot is not mapped.
    """

    __slots__ = (
        "_channel",
        "_device",
        "_edge",
        "_gaps",
        "_gpus",
        "_head",
        "_number",
        "bare",
        "capacity",
        "full",
        "mapped",
        "registers",
        "room",
        "tail",
    )

    def __init__(
        self,
        channel: Channel,
        device: Device,
        edge: Edge,
        head: tuple[RemoteRegion, torch.Tensor],
        room: RemoteRegion,
        number: int,
        staging: bool,
    ) -> None:
        """``head``: where the header goes, and from where; ``number``: of the notification; ``staging``: every payload is
        copied into registered memory, so nothing is mapped."""
        self._channel, self._device, self._edge = channel, device, edge
        self._head, self._number = head, number
        self._gpus: dict[torch.device, Transfer] = {}
        self._gaps: dict[tuple[tuple[int, ...], tuple[int, ...]], Copies] = {}
        """By the strides of the payload here, and there."""
        self.room = room
        self.capacity = max(0, room.nbytes - tail_bytes(len(edge.shape), edge.depth))
        self.bare = channel.prepare([head], notify=number)
        self.full = self._of_payload(None) if edge.nbytes else self.bare
        self.mapped: Mapped | None = channel.map(room) if edge.nbytes and not staging else None
        self.registers = bool(edge.nbytes) and not staging and self.mapped is None and channel.registered_only
        self.tail = None if self.mapped is None else Tail(self.mapped.memory[self.capacity :], len(edge.shape))

    def _of_payload(self, gpu: torch.device | None) -> Transfer:
        payload = self.room[: self._edge.nbytes]
        # Has the right size, is never sent and never touched, so it takes no memory.
        idle = torch.empty(payload.nbytes, dtype=torch.uint8, device=gpu or "cpu")
        found = self._channel.prepare([self._head, (payload, idle)], notify=self._number)
        found.unbind(1)
        return found

    def from_gpu(self, gpu: torch.device) -> Transfer:
        """The write of header and payload from an accelerator: the first call prepares it."""
        if gpu not in self._gpus:
            self._gpus[gpu] = self._of_payload(gpu)
        return self._gpus[gpu]

    def with_gaps(self, payload: torch.Tensor, given: tuple[int, ...]) -> Copies:
        """The write of a payload that lies so, and lands with the strides ``given`` behind it: the first call prepares it."""
        key = (payload.stride(), given)
        if key not in self._gaps:
            if len(self._gaps) >= _LAYOUTS:
                self._gaps.clear()
            there = payload.stride() if payload.is_contiguous() else given
            found = runs(self._edge.shape, payload.stride(), there, payload.element_size())
            assert found is not None
            self._gaps[key] = Copies(
                self._channel, self._device, self._head, self.room, self.capacity, given, found, self._number
            )
        return self._gaps[key]
