"""What is posted on a ``tcp`` channel: transfers, windows, and the work that tells how they ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from . import kernels
from .channel import DONE, Transfer, Window, Work
from .errors import RdmaError, fresh
from .notify import wait_done
from .region import RemoteRegion, local_bytes
from .tcp_wire import HEADER, LAST, NOTIFY, READ, SILENT, WRITE, memory_at

_NOTHING = torch.empty(0, dtype=torch.uint8)
Buffers = list[bytes | memoryview]


class Poster(Protocol):
    """The channel, as what is posted on it needs it."""

    peer: str
    error: RdmaError | None
    answers: int
    """Address of the count of answers."""
    answered: int
    """The last post that was answered."""

    def post(self, transfer: TcpTransfer, work: TcpWork) -> None: ...

    def post_notify(self, imm: int | None) -> None: ...

    def put(self, op: int, flags: int, imm: int, place: tuple[int, int, int, int], view: memoryview) -> None: ...

    def call_when_answered(self, work: TcpWork, callback: Callable[[], None]) -> bool: ...


class TcpWork(Work):
    """One post under way. It keeps the local tensors alive until the peer has answered."""

    __slots__ = ("_channel", "callback", "error", "imm", "keep", "reads", "seq")

    def __init__(self, channel: Poster, keep: Sequence[torch.Tensor], reads: dict[int, memoryview], imm: int | None) -> None:
        self._channel, self.keep, self.reads = channel, keep, reads
        self.imm = imm  # to be sent when the reads have come
        self.seq = 0  # given by the channel
        self.error: RdmaError | None = None
        self.callback: Callable[[], None] | None = None  # given by the channel

    def done(self) -> bool:
        return kernels.load(self._channel.answers) >= self.seq

    def wait(self, timeout: float | None = None) -> None:
        channel = self._channel
        wait_done(channel.answers, self.seq, timeout, 0, peer=channel.peer, device="tcp")
        if (error := self.exception()) is not None:
            raise fresh(error)

    def exception(self) -> RdmaError | None:
        if self.error is not None:
            return self.error
        return self._channel.error if self.done() and self.seq > self._channel.answered else None

    def then(self, callback: Callable[[], None]) -> None:
        if not self._channel.call_when_answered(self, callback):
            callback()


class _Piece:
    __slots__ = ("index", "remote", "tensor", "view", "write")

    def __init__(self, index: int, remote: RemoteRegion, tensor: torch.Tensor, write: bool) -> None:
        self.index, self.remote, self.tensor, self.write = index, remote, tensor, write
        self.view = memory_at(*local_bytes(tensor))


class TcpTransfer(Transfer):
    """One WRITE frame a copy, sent from where the tensor lies; one READ frame a copy, answered into where it lies."""

    __slots__ = ("__weakref__", "_channel", "_imm", "_live", "_pieces", "nbytes")

    def __init__(self, channel: Poster, sides: Sequence[tuple[RemoteRegion, torch.Tensor, bool]], imm: int | None) -> None:
        self._channel, self._imm = channel, imm
        self._pieces = [_Piece(index, *side) for index, side in enumerate(sides)]
        self._live = [piece for piece in self._pieces if piece.remote.nbytes]
        self.nbytes = sum(piece.remote.nbytes for piece in self._live)

    def post(self) -> Work:
        if not self._live:
            self._channel.post_notify(self._imm)
            return DONE
        reads = {piece.index: piece.view for piece in self._live if not piece.write}
        # With READs the peer is told when their data is here, so by a frame of its own.
        work = TcpWork(self._channel, [piece.tensor for piece in self._live], reads, self._imm if reads else None)
        self._channel.post(self, work)
        return work

    def frames(self, seq: int) -> Buffers:
        parts: Buffers = []
        last = self._live[-1]
        inline = self._imm is not None and all(piece.write for piece in self._live)
        for piece in self._live:
            op, flags, imm = WRITE if piece.write else READ, 0, 0
            if piece is last:
                flags, imm = LAST, self._imm + 1 if inline and self._imm is not None else 0
            remote = piece.remote
            parts.append(HEADER.pack(op, flags, piece.index, imm, seq, remote.region, remote.key, remote.offset, remote.nbytes))
            if piece.write:
                parts.append(piece.view)
        return parts

    def rebind(self, index: int, tensor: torch.Tensor) -> None:
        piece = self._pieces[index]
        address, nbytes = local_bytes(tensor)
        if nbytes != piece.remote.nbytes:
            raise ValueError(f"copy {index} was prepared for {piece.remote.nbytes} bytes, got {nbytes}")
        piece.tensor, piece.view = tensor, memory_at(address, nbytes)

    def unbind(self, index: int) -> None:
        piece = self._pieces[index]
        piece.tensor, piece.view = _NOTHING, memoryview(b"")


class TcpWindow(Window):
    """Unacknowledged WRITEs. The range was checked when the window was made; should the peer refuse a ``put`` nevertheless,
    the channel ends with ``RemoteAccessError``, because nobody else would hear of it."""

    __slots__ = ("_channel", "_imm", "_remote", "_tensor", "_view")

    def __init__(self, channel: Poster, remote: RemoteRegion, local: torch.Tensor, imm: int) -> None:
        self._channel, self._remote, self._imm, self._tensor = channel, remote, imm + 1, local
        self._view = memory_at(*local_bytes(local))

    def put(self, offset: int, nbytes: int) -> None:
        remote, view = self._remote, self._view[offset : offset + nbytes]
        self._channel.put(
            WRITE if nbytes else NOTIFY,
            LAST | SILENT,
            self._imm,
            (remote.region, remote.key, remote.offset + offset, nbytes),
            view,
        )

    put_now = put  # what the socket does not take is left to the I/O thread
