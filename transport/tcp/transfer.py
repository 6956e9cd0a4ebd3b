"""Transfers and windows of a ``tcp`` channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..channel import DONE, Transfer, Window, Work
from ..region import RemoteRegion, local_bytes
from .posts import Posts, TcpWork
from .wire import HEADER, LAST, NOTIFY, READ, SILENT, WRITE, Buffers, memory_at

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class _Piece:
    __slots__ = ("index", "remote", "tensor", "view", "write")

    def __init__(self, index: int, remote: RemoteRegion, tensor: torch.Tensor, write: bool) -> None:
        self.index, self.remote, self.tensor, self.write = index, remote, tensor, write
        self.view = memory_at(*local_bytes(tensor))


class TcpTransfer(Transfer):
    """One WRITE frame a copy, sent from where the tensor lies; one READ frame a copy, answered into where it lies."""

    __slots__ = ("__weakref__", "_framed", "_imm", "_live", "_pieces", "_posts", "nbytes")

    def __init__(self, posts: Posts, sides: Sequence[tuple[RemoteRegion, torch.Tensor, bool]], imm: int | None) -> None:
        self._posts, self._imm = posts, imm
        self._pieces = [_Piece(index, *side) for index, side in enumerate(sides)]
        self._live = [piece for piece in self._pieces if piece.remote.nbytes]
        self.nbytes = sum(piece.remote.nbytes for piece in self._live)
        writes = all(piece.write for piece in self._live)
        self._framed = self.nbytes + HEADER.size * len(self._live) if writes else 0

    def post(self) -> Work:
        if not self._live:
            self._posts.notify(self._imm)
            return DONE
        reads = {piece.index: piece.view for piece in self._live if not piece.write}
        # With READs the peer is told when their data is here, so by a frame of its own.
        work = TcpWork(self._posts, [piece.tensor for piece in self._live], reads, self._imm if reads else None)
        self._posts.post(self._frames, self.nbytes, self._framed, work)
        return work

    def _frames(self, seq: int, last_flags: int) -> Buffers:
        parts: Buffers = []
        last = self._live[-1]
        for piece in self._live:
            op, flags, imm = WRITE if piece.write else READ, 0, 0
            if piece is last:
                flags, imm = last_flags, self._imm + 1 if self._framed and self._imm is not None else 0
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

    __slots__ = ("_imm", "_posts", "_remote", "_tensor", "_view")

    def __init__(self, posts: Posts, remote: RemoteRegion, local: torch.Tensor, imm: int) -> None:
        self._posts, self._remote, self._imm, self._tensor = posts, remote, imm + 1, local
        self._view = memory_at(*local_bytes(local))

    def put(self, offset: int, nbytes: int) -> None:
        remote, view = self._remote, self._view[offset : offset + nbytes]
        self._posts.put(
            WRITE if nbytes else NOTIFY,
            LAST | SILENT,
            self._imm,
            (remote.region, remote.key, remote.offset + offset, nbytes),
            view,
        )

    put_now = put  # what the socket does not take is left to the I/O thread
