"""What is posted on a ``verbs`` channel: work requests written once into memory, linked, and posted again and again.

A copy is one work request, or several where it is larger than the port's largest message. The notification rides on the last
WRITE; behind READs it is a WRITE of no bytes with a fence, which leaves when their data is here.

The local side must be registered. Memory of the arena is. Other memory is registered by ``prepare`` for as long as the
transfer lives; what ``rebind`` brings, and the source of a single ``memcpy``, is staged in the arena instead
(``bytes_staged``), because to register costs more than to copy until it is very large.

GPU memory is registered for good (``verbs_gpu``), or staged, whatever its size and in both directions. It is posted when what
the posting thread's current stream had been given is done (``verbs_behind``)."""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import torch

from . import kernels, verbs_kernels
from . import verbs_layout as at
from .arena import Arena, Block
from .channel import DONE, Pair, Transfer, Window, Work
from .errors import RdmaError, fresh
from .region import RemoteRegion, local_bytes
from .verbs_gpu import GpuMemory
from .verbs_lane import Lane
from .verbs_provider import MemoryRegion

Place = tuple[int, int]
"""Address and rkey of remote memory."""
STAGED_MAX = 64 << 20
"""Bytes up to which other memory is staged rather than registered for one post."""
_PATIENCE_NS = 1_000_000
_NOTHING = torch.empty(0, dtype=torch.uint8)
_REQUEST = struct.Struct("<QQQiIIIQI")
_ELEMENT = struct.Struct("<QII")


class Local(Protocol):
    """Our memory, as the adapter reaches it."""

    arena: Arena
    gpu_kind: str

    @property
    def gpu(self) -> GpuMemory: ...

    def lkey(self, address: int, nbytes: int) -> int | None: ...

    def register_local(self, address: int, nbytes: int) -> MemoryRegion: ...

    def arrived(self) -> None: ...

    def count(self, name: str) -> None: ...

    def count_staged(self, nbytes: int) -> None: ...


class Poster(Protocol):
    """The channel, as what is posted on it needs it."""

    local: Local
    max_msg_sz: int

    def lane_for(self, imm: int | None, nbytes: int) -> Lane: ...

    def make_room(self, lane: Lane, why: int, count: int) -> None: ...

    def leave(self, lane: Lane, held: Held) -> None: ...

    def behind(self, indices: Collection[int], post: Callable[[], Work]) -> Work | None: ...

    def prepare(self, pairs: Sequence[Pair], *, notify: int | None = None) -> Transfer: ...

    def notify(self, imm: int) -> None: ...

    def refused(self, why: str) -> RdmaError: ...

    def ended(self) -> RdmaError: ...


class VerbsWork(Work):
    """One post under way."""

    __slots__ = ("_channel", "_lane", "_seq")

    def __init__(self, channel: Poster, lane: Lane, seq: int) -> None:
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
    """One post that READs into GPU memory: done when the GPU sees it there."""

    __slots__ = ("_lock", "_transfer")

    def __init__(self, channel: Poster, lane: Lane, seq: int, transfer: VerbsTransfer) -> None:
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


class Chain:
    """Work requests in memory, linked, the last one signalled. ``requests``: (opcode, flags, address, lkey, remote address,
    rkey, bytes, imm)."""

    __slots__ = ("_elements", "_memory", "address", "count", "nbytes", "words")

    def __init__(self, requests: Sequence[tuple[int, int, int, int, int, int, int, int]]) -> None:
        self.count = len(requests)
        self._memory = np.zeros(self.count * at.SEND_WR_BYTES, np.uint8)
        self._elements = np.zeros(max(self.count, 1) * at.SGE_BYTES, np.uint8)
        first, first_element = self._memory.ctypes.data, self._elements.ctypes.data
        memory, elements = memoryview(self._memory), memoryview(self._elements)
        self.nbytes = 0
        for index, (opcode, flags, address, lkey, remote, rkey, nbytes, imm) in enumerate(requests):
            last = index == self.count - 1
            here = index * at.SEND_WR_BYTES
            following = 0 if last else first + here + at.SEND_WR_BYTES
            element = first_element + index * at.SGE_BYTES
            flags |= at.SEND_SIGNALED if last else 0
            order = int.from_bytes(imm.to_bytes(4, "little"), "big")
            _REQUEST.pack_into(memory, here, 0, following, element, int(nbytes > 0), opcode, flags, order, remote, rkey)
            _ELEMENT.pack_into(elements, index * at.SGE_BYTES, address, nbytes, lkey)
            self.nbytes += nbytes
        self.words = np.zeros(verbs_kernels.CHAIN_WORDS, np.int64)
        self.words[:] = first, first + (self.count - 1) * at.SEND_WR_BYTES, self.count, self.nbytes
        self.address = self.words.ctypes.data

    def point(self, index: int, address: int, lkey: int) -> None:
        """Have request ``index`` take its local bytes from there."""
        here = index * at.SGE_BYTES
        self._elements[here : here + 8].view(np.uint64)[0] = address
        self._elements[here + at.SGE_LKEY : here + at.SGE_LKEY + 4].view(np.uint32)[0] = lkey


class Held:
    """What a transfer has besides its tensors. It outlives it until nothing of it is under way (``VerbsChannel.sweep``)."""

    __slots__ = ("blocks", "regions")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.regions: list[MemoryRegion] = []


class _Piece:
    """One copy: where it is at the peer, what it is here, and by what it is reached."""

    __slots__ = ("block", "chunks", "gpu", "place", "registered", "remote", "source", "staged", "tensor", "write")

    def __init__(self, remote: RemoteRegion, place: Place, tensor: torch.Tensor, write: bool) -> None:
        self.remote, self.place, self.tensor, self.write = remote, place, tensor, write
        self.chunks: list[tuple[Chain, int, int]] = []  # (chain, index there, offset)
        self.registered: MemoryRegion | None = None
        self.block: Block | None = None
        self.staged = False
        self.gpu = -1
        """Index of the GPU whose memory the tensor is; below 0: it is the host's."""
        self.source = (0, 0)
        """What work requests call its first byte, or that of its copy in the arena, and the key."""


class VerbsTransfer(Transfer):
    __slots__ = ("__weakref__", "_chains", "_channel", "_gpus", "_held", "_pieces", "_staging", "lane", "nbytes", "revoked")

    def __init__(
        self,
        channel: Poster,
        sides: Sequence[tuple[RemoteRegion, Place, torch.Tensor, bool]],
        imm: int | None,
        *,
        once: bool = False,
    ) -> None:
        self._channel = channel
        self.revoked = ""
        self._chains: list[Chain] = []
        self._staging: list[_Piece] = []
        self._gpus: list[_Piece] = []
        self._held: Held | None = None
        self._pieces = [_Piece(*side) for side in sides]
        live = [piece for piece in self._pieces if piece.remote.nbytes]
        self.nbytes = sum(piece.remote.nbytes for piece in live)
        self.lane = channel.lane_for(imm, self.nbytes)
        for piece in live:
            self._bind(piece, stage=once)
        self._build(live, imm)

    def _build(self, live: list[_Piece], imm: int | None) -> None:
        limit, most = self._channel.max_msg_sz, self.lane.chain_max
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
            piece.gpu = piece.tensor.device.index
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
            piece.registered = local.register_local(address, nbytes)
            self._hold().regions.append(piece.registered)
            piece.source = address, piece.registered.lkey

    def _stage(self, piece: _Piece, nbytes: int) -> None:
        """It goes through memory of the arena."""
        local = self._channel.local
        if piece.block is None:
            piece.block = local.arena.allocate(nbytes)
            self._hold().blocks.append(piece.block)
        piece.staged = True
        self._staging.append(piece)
        address = piece.block.segment.address + piece.block.offset
        lkey = local.lkey(address, nbytes)
        assert lkey is not None
        piece.source = address, lkey

    def _hold(self) -> Held:
        if self._held is None:
            self._held = Held()
            weakref.finalize(self, self._channel.leave, self.lane, self._held).atexit = False
        return self._held

    def _let_go(self, piece: _Piece) -> None:
        """Its last post is done."""
        region, piece.registered = piece.registered, None
        if region is not None and self._held is not None:
            self._held.regions.remove(region)
            region.close()
        if piece.staged:
            self._staging.remove(piece)
            piece.staged = False
        if piece.gpu >= 0:
            self._gpus.remove(piece)
            piece.gpu = -1

    def _fill(self) -> None:
        """Copy what is staged; GPUs do so on their current streams."""
        local = self._channel.local
        for piece in self._staging:
            if not piece.write:
                continue
            if piece.gpu >= 0:
                assert piece.block is not None
                local.gpu.stage(piece.block, piece.tensor, out=True)
            else:
                kernels.copy(piece.source[0], *local_bytes(piece.tensor))
            local.count_staged(piece.remote.nbytes)

    def land(self) -> None:
        """The bytes of its READs are here: have them where they belong, and GPUs see them."""
        local = self._channel.local
        landed = [piece for piece in self._staging if not piece.write]
        for piece in landed:
            assert piece.block is not None
            local.gpu.stage(piece.block, piece.tensor, out=False)
            local.count_staged(piece.remote.nbytes)
        local.gpu.wait({piece.gpu for piece in landed})
        local.arrived()

    def post(self) -> Work:
        if self._staging:
            self._fill()
        if self._gpus:
            later = self._channel.behind({piece.gpu for piece in self._gpus}, self._post)
            if later is not None:
                return later
        return self._post()

    def _post(self) -> Work:
        channel = self._channel
        lane, seq = self.lane, 0
        for chain in self._chains:
            while (seq := verbs_kernels.post(lane.address, chain.address)) <= 0:
                if seq == verbs_kernels.REVOKED:
                    raise channel.refused(self.revoked)
                channel.make_room(lane, seq, chain.count)
        if not self._chains:
            return DONE
        if any(not piece.write for piece in self._gpus):
            return GpuReadWork(channel, lane, seq, self)
        return VerbsWork(channel, lane, seq)

    def rebind(self, index: int, tensor: torch.Tensor) -> None:
        piece = self._pieces[index]
        nbytes = local_bytes(tensor, self._channel.local.gpu_kind)[1]
        if nbytes != piece.remote.nbytes:
            raise ValueError(f"copy {index} was prepared for {piece.remote.nbytes} bytes, got {nbytes}")
        piece.tensor = tensor
        if not nbytes:
            return
        self._bind(piece, stage=True)
        address, lkey = piece.source
        for chain, at_index, offset in piece.chunks:
            chain.point(at_index, address + offset, lkey)

    def unbind(self, index: int) -> None:
        self._let_go(self._pieces[index])
        self._pieces[index].tensor = _NOTHING

    def revoke(self, why: str) -> int:
        """Some of its remote memory is gone: it is never posted again. Returns what has to be completed until all is quiet."""
        self.revoked = why
        return max((verbs_kernels.revoke(self.lane.address, chain.address) for chain in self._chains), default=0)


class VerbsWindow(Window):
    """One work request whose range is filled in by each ``put``."""

    __slots__ = ("_chain", "_channel", "_lane", "_local", "_lock", "_notify", "_remote", "_slices")

    def __init__(self, channel: Poster, remote: RemoteRegion, place: Place, local: torch.Tensor, imm: int) -> None:
        self._channel, self._notify = channel, imm
        self._slices = (remote, local)
        self._local, nbytes = local_bytes(local)
        self._remote = place[0]
        lkey = channel.local.lkey(self._local, nbytes)
        if nbytes and lkey is None:
            raise ValueError("the local side of a window is arena memory")
        self._lane = channel.lane_for(None, 0)
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
                seq = verbs_kernels.put(
                    lane.address, chain, self._local + offset, self._remote + offset, nbytes, lane.max_inline
                )
                if seq > 0:
                    return False
                if seq != verbs_kernels.FULL:
                    channel.make_room(lane, seq, 1)  # raises
                if limit:
                    # The adapter takes microseconds for what is before us, unless the peer has no receives left.
                    channel.local.count("send_queue_full")
                    lane.wait_for_room(1, limit)
        return True
