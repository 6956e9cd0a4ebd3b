"""Transfers of a ``verbs`` channel: work requests written once into memory, linked, and posted again and again.

A copy is one work request, or several where it is larger than the port's largest message. The notification rides on the last
WRITE; behind READs it is a WRITE of no bytes with a fence, which leaves when their data is here.

The local side must be registered. Memory of the arena is. Other memory is registered by ``prepare`` for as long as the
transfer lives; what ``rebind`` brings, and the source of a single ``memcpy``, is staged in the arena instead
(``bytes_staged``), because to register costs more than to copy until it is very large.

GPU memory is registered for good (``verbs/gpu``), or staged, whatever its size and in both directions. It is posted when what
the posting thread's current stream had been given is done (``gpu/behind``)."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ..channel import DONE, NOTHING, Transfer, Window, Work, rebound
from ..errors import RdmaError, RemoteAccessError, fresh
from ..memory.arena import Arena, Block
from ..nic.native import MemoryRegion
from ..nic.queues import Chain, Lane
from ..region import RemoteRegion, local_bytes
from ..words import completions, kernels
from ..words import layout as at
from .registrations import Place

Side = tuple[RemoteRegion, Place, torch.Tensor, bool]
"""The remote range and its place, the local tensor, and whether the copy is a WRITE."""
STAGED_MAX = 64 << 20
"""Bytes up to which other memory is staged rather than registered for one post."""
_PATIENCE_NS = 1_000_000


class VerbsWork(Work):
    """One post under way."""

    __slots__ = ("_channel", "_lane", "_seq")

    def __init__(self, channel: Any, lane: Lane, seq: int) -> None:
        self._channel, self._lane, self._seq = channel, lane, seq

    def done(self) -> bool:
        kernels.progress(self._lane.port)
        return self._lane.passed(self._seq)

    def wait(self, timeout: float | None = None) -> None:
        self._lane.wait(self._seq, timeout)
        if (error := self.exception()) is not None:
            raise fresh(error)

    def exception(self) -> RdmaError | None:
        if self._lane.reached >= self._seq or not self.done() or self._lane.reached >= self._seq:
            return None
        return self._channel.ended()


class GpuReadWork(VerbsWork):
    """One post that READs into GPU memory. It is done when the GPU sees the data."""

    __slots__ = ("_lock", "_transfer")

    def __init__(self, channel: Any, lane: Lane, seq: int, transfer: VerbsTransfer) -> None:
        super().__init__(channel, lane, seq)
        self._lock = threading.Lock()
        self._transfer: VerbsTransfer | None = transfer

    def done(self) -> bool:
        done = super().done()
        if done:
            self._land()
        return done

    def wait(self, timeout: float | None = None) -> None:
        super().wait(timeout)
        self._land()

    def _land(self) -> None:
        with self._lock:
            if self._transfer is not None and self._lane.reached >= self._seq:
                self._transfer.land()
                self._transfer = None


class Held:
    """The blocks and memory regions of a transfer, which outlive it (``Leftovers``)."""

    __slots__ = ("blocks", "regions")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.regions: list[MemoryRegion] = []


class Leftovers:
    """The blocks and regions of one channel's dead transfers. They are given back when no post on them is under way."""

    def __init__(self, lane: Lane, arena: Arena) -> None:
        self._lane, self._arena = lane, arena
        self._left: deque[tuple[int, Held]] = deque()  # filled by finalizers: append only
        self.ended = False
        """Whether the lane has ended, so that no post is under way any more."""

    def __len__(self) -> int:
        return len(self._left)

    def leave(self, held: Held) -> None:
        """A transfer died. Runs in finalizers: takes no lock."""
        self._left.append((self._lane.posted, held))

    def sweep(self) -> None:
        """Give back what nothing reads any more. Any thread."""
        while self._left:
            try:
                seq, held = self._left.popleft()
            except IndexError:
                return
            if not self.ended and self._lane.reached < seq:
                self._left.appendleft((seq, held))
                return
            for block in held.blocks:
                self._arena.free(block)
            for region in held.regions:
                region.close()


class _Piece:
    """One copy: the remote range and its place, the local tensor, and how work requests reach the tensor."""

    __slots__ = ("block", "chunks", "place", "registered", "remote", "source", "tensor", "write")

    def __init__(self, remote: RemoteRegion, place: Place, tensor: torch.Tensor, write: bool) -> None:
        self.remote, self.place, self.tensor, self.write = remote, place, tensor, write
        self.chunks: list[tuple[Chain, int, int]] = []  # (chain, index there, offset)
        self.registered: MemoryRegion | None = None
        self.block: Block | None = None
        self.source = (0, 0)
        """The address, in work requests, of the first byte of the tensor or of its copy in the arena, and the key."""


class VerbsTransfer(Transfer):
    __slots__ = ("__weakref__", "_chains", "_channel", "_gpus", "_held", "_lane", "_pieces", "_staging", "revoked")

    def __init__(self, channel: Any, sides: Sequence[Side], imm: int | None, *, once: bool = False) -> None:
        self._channel = channel
        self.revoked = ""
        self._chains: list[Chain] = []
        self._staging: list[_Piece] = []
        self._gpus: list[_Piece] = []
        self._held: Held | None = None
        self._pieces = [_Piece(*side) for side in sides]
        live = [piece for piece in self._pieces if piece.remote.nbytes]
        self._lane = channel.lane
        for piece in live:
            self._bind(piece, stage=once)
        self._build(live, imm)

    def _build(self, live: list[_Piece], imm: int | None) -> None:
        limit, most = self._channel.max_msg_sz, self._lane.chain_max
        requests: list[tuple[int, int, int, int, int, int, int, int]] = []
        owners: list[tuple[_Piece, int]] = []
        for piece in live:
            address, lkey = piece.source
            remote, rkey = piece.place
            opcode = at.WR_RDMA_WRITE if piece.write else at.WR_RDMA_READ
            for offset in range(0, piece.remote.nbytes, limit):
                nbytes = min(limit, piece.remote.nbytes - offset)
                requests.append((opcode, 0, address + offset, lkey, remote + offset, rkey, nbytes, 0))
                owners.append((piece, offset))
        if imm is not None:
            if requests and all(piece.write for piece in live):
                requests[-1] = (at.WR_RDMA_WRITE_WITH_IMM, *requests[-1][1:7], imm)
            else:
                requests.append((at.WR_RDMA_WRITE_WITH_IMM, at.SEND_FENCE if live else 0, 0, 0, 0, 0, 0, imm))
        for start in range(0, len(requests), most):
            chain = Chain(requests[start : start + most])
            self._chains.append(chain)
            for index, (piece, offset) in enumerate(owners[start : start + most]):
                piece.chunks.append((chain, index, offset))

    def _bind(self, piece: _Piece, *, stage: bool) -> None:
        """Settle how the local tensor of a piece is reached."""
        local = self._channel.local
        address, nbytes = local_bytes(piece.tensor, local.gpu_kind)
        self._let_go(piece)
        if not piece.tensor.is_cpu:
            self._gpus.append(piece)
            found = local.gpu.reach(piece.tensor)
            if found is None:
                self._stage(piece, nbytes)
            else:
                piece.source = found
            return
        lkey = local.lkey(address, nbytes)
        if lkey is not None:
            piece.source = address, lkey
        elif stage and piece.write and nbytes <= STAGED_MAX:
            self._stage(piece, nbytes)
        else:
            piece.registered = local.local(address, nbytes)
            self._hold().regions.append(piece.registered)
            piece.source = address, piece.registered.lkey

    def _stage(self, piece: _Piece, nbytes: int) -> None:
        """Have a piece copied through a block of the arena."""
        local = self._channel.local
        if piece.block is None:
            piece.block = local.arena.allocate(nbytes)
            self._hold().blocks.append(piece.block)
        self._staging.append(piece)
        address = piece.block.segment.address + piece.block.offset
        lkey = local.lkey(address, nbytes)
        if lkey is None:
            raise RdmaError("the arena that copies leave from is closed")
        piece.source = address, lkey

    def _hold(self) -> Held:
        if self._held is None:
            self._held = Held()
            weakref.finalize(self, self._channel.leftovers.leave, self._held).atexit = False
        return self._held

    def _let_go(self, piece: _Piece) -> None:
        """Release what a piece holds, after its last post is done."""
        region, piece.registered = piece.registered, None
        if region is not None and self._held is not None:
            self._held.regions.remove(region)
            region.close()
        for pieces in (self._staging, self._gpus):
            if piece in pieces:
                pieces.remove(piece)

    def _fill(self) -> None:
        """Copy what is staged; GPUs do so on their current streams."""
        local = self._channel.local
        for piece in self._staging:
            if not piece.write:
                continue
            if not piece.tensor.is_cpu:
                assert piece.block is not None
                local.gpu.stage(piece.block, piece.tensor, out=True)
            else:
                kernels.copy(piece.source[0], *local_bytes(piece.tensor))
            local.memory.count("bytes_staged", piece.remote.nbytes)

    def land(self) -> None:
        """The bytes of its READs are here: have them where they belong, and GPUs see them."""
        local = self._channel.local
        landed = [piece for piece in self._staging if not piece.write]
        for piece in landed:
            assert piece.block is not None
            local.gpu.stage(piece.block, piece.tensor, out=False)
            local.memory.count("bytes_staged", piece.remote.nbytes)
        local.gpu.wait({piece.tensor.device.index for piece in landed})
        local.arrived()

    def post(self) -> Work:
        if self._staging:
            self._fill()
        if self._gpus:
            indices = {piece.tensor.device.index for piece in self._gpus}
            later = self._channel.local.gpu.behind(self._channel, indices, self._post)
            if later is not None:
                return later
        return self._post()

    def _post(self) -> Work:
        channel = self._channel
        lane, seq = self._lane, 0
        for chain in self._chains:
            while (seq := completions.post(lane.address, chain.address)) <= 0:
                if seq == completions.REVOKED:
                    raise RemoteAccessError(self.revoked, peer=self._lane.peer, device="verbs", status="REM_ACCESS_ERR")
                channel.make_room(seq, chain.count)
        if not self._chains:
            return DONE
        if any(not piece.write for piece in self._gpus):
            return GpuReadWork(channel, lane, seq, self)
        return VerbsWork(channel, lane, seq)

    def rebind(self, index: int, tensor: torch.Tensor) -> None:
        piece = self._pieces[index]
        rebound(index, piece.remote.nbytes, tensor, self._channel.local.gpu_kind)
        piece.tensor = tensor
        if not piece.remote.nbytes:
            return
        self._bind(piece, stage=True)
        address, lkey = piece.source
        for chain, at_index, offset in piece.chunks:
            chain.point(at_index, address + offset, lkey)

    def unbind(self, index: int) -> None:
        self._let_go(self._pieces[index])
        self._pieces[index].tensor = NOTHING

    def revoke(self, why: str) -> int:
        """Never post this transfer again, because remote memory of it is gone. Returns the number of its last post."""
        self.revoked = why
        return max((completions.revoke(self._lane.address, chain.address) for chain in self._chains), default=0)


class VerbsWindow(Window):
    """One work request whose range is filled in by each ``put``."""

    __slots__ = ("_chain", "_channel", "_lane", "_local", "_lock", "_notify", "_remote", "_slices")

    def __init__(self, channel: Any, remote: RemoteRegion, place: Place, local: torch.Tensor, imm: int) -> None:
        self._channel, self._notify = channel, imm
        self._slices = (remote, local)
        self._local, nbytes = local_bytes(local)
        self._remote = place[0]
        lkey = channel.local.lkey(self._local, nbytes)
        if nbytes and lkey is None:
            raise ValueError("the local side of a window is arena memory")
        self._lane = channel.lane
        self._chain = Chain(
            [(at.WR_RDMA_WRITE_WITH_IMM, 0, self._local, lkey or 0, self._remote, place[1], max(nbytes, 1), imm)]
        )
        self._lock = threading.Lock()

    def put(self, offset: int, nbytes: int) -> None:
        while self.put_now(offset, nbytes):
            self._lane.wait_for_room(1)

    def put_now(self, offset: int, nbytes: int) -> bool:
        channel = self._channel
        if not nbytes:
            channel.notify(self._notify)
            return False
        if nbytes > channel.max_msg_sz:
            remote, local = self._slices
            flat = local.view(-1).view(torch.uint8)
            channel.prepare([(remote[offset : offset + nbytes], flat[offset : offset + nbytes])], notify=self._notify).post()
            return False
        with self._lock:
            lane, chain = self._lane, self._chain.address
            for limit in (_PATIENCE_NS, 0):
                seq = completions.put(lane.address, chain, self._local + offset, self._remote + offset, nbytes, lane.max_inline)
                if seq > 0:
                    return False
                if seq != completions.FULL:
                    channel.make_room(seq, 1)  # raises
                if limit:
                    # The adapter takes microseconds for what is before us, unless the peer has no receives left.
                    channel.device.count("send_queue_full")
                    lane.wait_for_room(1, limit)
        return True
