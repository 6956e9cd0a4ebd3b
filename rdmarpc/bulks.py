"""Bodies of messages that are too large for a frame: they stay in the sender's memory, for the receiver to READ."""

from __future__ import annotations

import struct
from typing import Any

import torch

from .frames import BULK, Frame
from .link import Link
from .patience import Patience
from .transport import RemoteRegion

_LENGTHS = struct.Struct("<QQQQ")


class Kept:
    """What a peer may still read of an answer: runs of ``nbytes`` in all."""

    __slots__ = ("keep", "nbytes")

    def __init__(self, runs: list[torch.Tensor]) -> None:
        self.keep: Any = runs
        self.nbytes = sum([run.nbytes for run in runs])


def leave(
    parts: tuple[bytes, bytes, bytes, bytes], memory: Patience, link: Link, deadline: float | None
) -> tuple[bytes, torch.Tensor]:
    """The payload to send instead of function, payload, table and data, and the memory to keep until they have been read."""
    body = b"".join(parts)
    bulk = memory.empty(link.channel, len(body), deadline)
    memoryview(bulk.numpy())[:] = body
    lengths = _LENGTHS.pack(*[len(part) for part in parts])
    return lengths + link.channel.device.lend(bulk, link.channel).dump(), bulk


def fetch(frame: Frame, memory: Patience, link: Link, deadline: float | None = None) -> Frame:
    """The frame with its body, READ from the sender if it did not fit."""
    if not frame.flags & BULK:
        return frame
    function, payload, table, data = _LENGTHS.unpack_from(frame.body)
    body = memory.empty(link.channel, function + payload + table + data, deadline)
    link.channel.memcpy(body, RemoteRegion.load(frame.body[_LENGTHS.size :])).wait()
    link.count_read()
    return frame._replace(function=function, payload=payload, table=table, body=body.numpy().tobytes())
