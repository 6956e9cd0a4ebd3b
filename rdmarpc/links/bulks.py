"""Bodies of messages that are too large for a frame: they stay in the sender's memory, for the receiver to READ."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

import torch

from ..message.tensors import Memory
from ..transport import Channel, RemoteRegion
from .frames import BULK, Frame

_LENGTHS = struct.Struct("<QQQQQ")
"""Bytes of function, payload, table and data, and the number of tensors: a frame's own count has 16 bits."""


class Source(Protocol):
    """The link by which a message came, or goes."""

    channel: Channel

    def count_read(self) -> None:
        """Something large had to be READ."""


class Keeper(Protocol):
    """Keeps what a peer may still READ of a message."""

    @property
    def deadline(self) -> float | None:
        """The time (``time.monotonic``) until which memory may be waited for; ``None``: there is no limit."""

    def hold(self, bulk: torch.Tensor) -> None:
        """Keep this memory alive too."""


class Kept:
    """The memory of an answer that a peer may still READ. ``lend`` is told of its bytes, and of their end."""

    __slots__ = ("_keep", "_lend", "nbytes")
    deadline: float | None = None

    def __init__(self, runs: list[torch.Tensor], lend: Callable[[int], None]) -> None:
        self._keep, self._lend = [*runs], lend
        self.nbytes = sum([run.nbytes for run in runs])
        lend(self.nbytes)

    def hold(self, bulk: torch.Tensor) -> None:
        self._keep.append(bulk)
        self.nbytes += bulk.nbytes
        self._lend(bulk.nbytes)

    def end(self) -> None:
        """Count the memory no longer, because it was READ."""
        self._lend(-self.nbytes)


def leave(
    parts: tuple[bytes, bytes, bytes, bytes], tensors: int, memory: Memory, link: Source, deadline: float | None
) -> tuple[bytes, torch.Tensor]:
    """The payload to send instead of function, payload, table and data, and the memory to keep until they have been read."""
    body = b"".join(parts)
    bulk = memory.empty(link.channel, len(body), deadline)
    memoryview(bulk.numpy())[:] = body
    lengths = _LENGTHS.pack(*[len(part) for part in parts], tensors)
    return lengths + link.channel.device.lend(bulk, link.channel).dump(), bulk


def fetch(frame: Frame, memory: Memory, link: Source, deadline: float | None = None) -> Frame:
    """The frame with its body, READ from the sender if it did not fit."""
    if not frame.flags & BULK:
        return frame
    body, place = place_of(frame, memory, link, deadline)
    link.channel.memcpy(body, place).wait()
    return filled(frame, body, link)


def place_of(frame: Frame, memory: Memory, link: Source, deadline: float | None) -> tuple[torch.Tensor, RemoteRegion]:
    """Memory for a body that did not fit its frame, and where the sender has it."""
    body = memory.empty(link.channel, sum(_LENGTHS.unpack_from(frame.body)[:4]), deadline)
    return body, RemoteRegion.load(frame.body[_LENGTHS.size :])


def table_of(frame: Frame, body: torch.Tensor | None) -> tuple[bytes, int]:
    """The table of a message, of its frame or of the body that was READ, and the number of its tensors."""
    if body is None:
        return frame.body[frame.function + frame.payload :], frame.tensors
    function, payload, table, _, tensors = _LENGTHS.unpack_from(frame.body)
    return body[function + payload : function + payload + table].numpy().tobytes(), tensors


def filled(frame: Frame, body: torch.Tensor, link: Source) -> Frame:
    """The frame with its body, which was READ."""
    function, payload, table, _, tensors = _LENGTHS.unpack_from(frame.body)
    link.count_read()
    content, data = body.numpy(), function + payload + table
    inner, rest = content[:data].tobytes(), bytearray(content[data:])
    return frame._replace(tensors=tensors, function=function, payload=payload, table=table, body=inner, data=rest)
