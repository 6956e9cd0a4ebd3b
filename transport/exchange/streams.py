"""The streams of one member of an exchange to all others: by the compiled loop where their memory is mapped here, else by
posts."""

from __future__ import annotations

import abc
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..channel import Transfer, Work
from ..device import Device
from ..words import kernels as words
from ..words.atomics import FOLD_BYTES
from ..words.records import BELL_BYTES
from . import kernels
from .kernels import CALL_WORDS, CHANGED, CLOSED, HEADER, LANE_WORDS, MISMATCH, OK, TIMEOUT
from .lane import Lane

Span = tuple[int, int]
"""Address and bytes."""
NOTHING: Mapping[int, Span] = {}
_HEAD = struct.Struct("<12q")
_SIDES = struct.Struct("<8q")
_PIECE_HEAD = struct.Struct("<4q")
_CLASSES = (1024, 16384)


class Head(NamedTuple):
    """What all members have to agree on: the header of every piece of a call, besides the bytes of its message."""

    sequence: int
    code: int
    elements: int


class Fold(NamedTuple):
    """Add up what arrives, with what lies at ``own``, into ``result``. ``whole``: what is added is also what is sent."""

    code: int
    own: int
    result: int
    nbytes: int
    whole: bool


class Streams(abc.ABC):
    """One thread at a time. ``begin`` a call, then ``advance`` until it gives ``OK``."""

    folds = False
    """Whether ``begin`` takes a ``Fold``."""

    def __init__(self, device: Device, rank: int, lanes: Mapping[int, Lane], bell: int) -> None:
        """``lanes``: by rank, open, all of one size. ``bell``: number of the bell that their news ring."""
        self.rank, self.lanes, self.port = rank, dict(sorted(lanes.items())), device.port
        self.order = list(self.lanes)
        first = next(iter(self.lanes.values()))
        self.piece, self.depth = first.piece, first.depth
        self.words = np.zeros(CALL_WORDS + LANE_WORDS * len(self.lanes), np.int64)
        self.address, self._view = int(self.words.ctypes.data), memoryview(self.words).cast("B")
        self._spare = np.zeros(len(self.lanes) + 2 + FOLD_BYTES // 4, np.int64)
        self.words[: kernels.CALL_BUDGET + 1] = (
            len(self.lanes),
            self.piece,
            self.depth,
            device.memory.bells + bell * BELL_BYTES,
            words.SPIN,
        )
        self.words[kernels.CALL_SOURCES] = self._spare.ctypes.data
        self.words[kernels.CALL_SCRATCH] = self._spare.ctypes.data + 8 * (len(self.lanes) + 1)
        self.head = Head(0, 0, 0)
        for number, (rank_there, lane) in enumerate(self.lanes.items()):
            at = CALL_WORDS + LANE_WORDS * number
            self.words[at + kernels.LANE_ARRIVED] = lane.arrived
            self.words[at + kernels.LANE_CREDITED] = lane.credited
            self.words[at + kernels.LANE_IN] = lane.slots.data_ptr()
            self.words[at + kernels.LANE_RANK] = rank_there

    def pieces(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self.piece))

    def begin(self, head: Head, outs: Mapping[int, Span], ins: Mapping[int, Span], fold: Fold | None = None) -> None:
        """Begin a call: send the spans of ``outs`` to those ranks, put what comes from the ranks of ``ins`` into their spans.
        The memory stays where it is until the call is done. With ``fold`` only the bytes of ``ins`` count, all are alike, and
        all ranks are in it."""
        self.head = head
        folding = (fold.code, fold.own, fold.result, self.rank, fold.nbytes, 0) if fold is not None else (-1, 0, 0, 0, 0, 0)
        sources = int(self.words[kernels.CALL_SOURCES])
        scratch = int(self.words[kernels.CALL_SCRATCH])
        whole = 0 if fold is None else int(fold.whole)
        _HEAD.pack_into(self._view, 8 * kernels.CALL_SEQUENCE, *head, *folding, sources, scratch, whole)
        at = 8 * (CALL_WORDS + kernels.LANE_FROM)
        for rank in self.order:
            source, target = outs.get(rank), ins.get(rank)
            sent = (source[0], source[1], 0, self.pieces(source[1])) if source is not None else (0, 0, 0, 0)
            got = (target[0], target[1], 0, self.pieces(target[1])) if target is not None else (0, 0, 0, 0)
            _SIDES.pack_into(self._view, at, *sent, *got)
            at += 8 * LANE_WORDS

    @abc.abstractmethod
    def advance(self, slice_ns: int) -> int:
        """Go on for at most ``slice_ns``: ``OK``, ``TIMEOUT``, ``CHANGED`` or, with ``at_fault``, ``MISMATCH`` or
        ``CLOSED``."""

    def rest(self, slice_ns: int) -> None:
        """Sleep until something comes, or a slot becomes free, for at most ``slice_ns``; or return at once."""
        kernels.rest(self.address, slice_ns, self.port)

    # -- for errors

    def _word(self, rank: int, word: int) -> int:
        return int(self.words[CALL_WORDS + LANE_WORDS * self.order.index(rank) + word])

    def at_fault(self) -> int:
        """The rank that ``MISMATCH`` or ``CLOSED`` is about."""
        return self.order[int(self.words[kernels.CALL_LANE])]

    def needs(self, rank: int) -> bool:
        """Whether the call under way waits for this rank: for its pieces, or for room in its slots."""
        return self.awaits(rank) or self._word(rank, kernels.LANE_PUSHED) < self._word(rank, kernels.LANE_PUSH)

    def awaits(self, rank: int) -> bool:
        """Whether the call under way has still to hear from this rank: its next piece is not here."""
        left = self._word(rank, kernels.LANE_PULLED) < self._word(rank, kernels.LANE_PULL)
        return left and words.load(self.lanes[rank].arrived) <= self._word(rank, kernels.LANE_TAKEN)

    def full(self, rank: int) -> bool:
        """Whether the call under way waits for room in the slots of this rank."""
        left = self._word(rank, kernels.LANE_PUSHED) < self._word(rank, kernels.LANE_PUSH)
        used = self._word(rank, kernels.LANE_SENT) - words.load(self.lanes[rank].credited)
        return left and used >= self.depth

    def header(self, rank: int) -> tuple[Head, int] | None:
        """The head of the next piece that has come from this rank, and the bytes of its message; ``None``: none has come."""
        lane, taken = self.lanes[rank], self._word(rank, kernels.LANE_TAKEN)
        if words.load(lane.arrived) <= taken:
            return None
        at = taken % self.depth * lane.stride
        sequence, code, nbytes, count = _PIECE_HEAD.unpack_from(lane.slots[at : at + _PIECE_HEAD.size].numpy())
        return Head(sequence, code, count), nbytes

    def expected(self, rank: int) -> int:
        """The bytes of the message that the call under way expects from this rank."""
        return self._word(rank, kernels.LANE_TO_BYTES)


class MappedStreams(Streams):
    """All peers' slots are mapped: one compiled loop moves all streams."""

    folds = True

    def __init__(self, device: Device, rank: int, lanes: Mapping[int, Lane], bell: int) -> None:
        super().__init__(device, rank, lanes, bell)
        for number, lane in enumerate(self.lanes.values()):
            at = CALL_WORDS + LANE_WORDS * number
            assert lane.mapped
            self.words[at + kernels.LANE_OUT] = lane.mapped
            self.words[at + kernels.LANE_NOTIFY] = lane.notify.address  # type: ignore[attr-defined]
            self.words[at + kernels.LANE_CREDIT] = lane.credit.address  # type: ignore[attr-defined]

    def advance(self, slice_ns: int) -> int:
        return kernels.exchange(self.address, slice_ns, self.port)


class PostedStreams(Streams):
    """Pieces are posted from slots of our own, which lie in the arena."""

    def __init__(self, device: Device, rank: int, lanes: Mapping[int, Lane], bell: int) -> None:
        super().__init__(device, rank, lanes, bell)
        self._out = {rank: device.empty((lane.stride * self.depth,), dtype=torch.uint8) for rank, lane in self.lanes.items()}
        self._transfers: dict[tuple[int, int, int], Transfer] = {}
        self._posted: dict[tuple[int, int], Work] = {}

    def advance(self, slice_ns: int) -> int:
        start = 0
        while True:
            seen = kernels.counted(self.address)
            status = self._step()
            if status != TIMEOUT:
                return status
            kick = int(self.words[kernels.CALL_KICK])
            if kick and words.load(kick) != int(self.words[kernels.CALL_SEEN]):
                return CHANGED
            if kernels.counted(self.address) != seen:
                continue
            if start:
                return TIMEOUT
            if slice_ns <= 0:
                return TIMEOUT
            kernels.sleep(self.address, seen, slice_ns, self.port)
            start = 1

    def _step(self) -> int:
        words.progress(self.port)
        done = True
        for number, (rank, lane) in enumerate(self.lanes.items()):
            row = self.words[CALL_WORDS + LANE_WORDS * number :][:LANE_WORDS]
            if row[kernels.LANE_PUSHED] < row[kernels.LANE_PUSH]:
                if lane.channel.error is not None:
                    self.words[kernels.CALL_LANE] = number
                    return CLOSED
                self._push(rank, lane, row)
            if row[kernels.LANE_PULLED] < row[kernels.LANE_PULL] and not self._pull(rank, lane, row):
                self.words[kernels.CALL_LANE] = number
                return MISMATCH
            done &= bool(
                row[kernels.LANE_PUSHED] >= row[kernels.LANE_PUSH] and row[kernels.LANE_PULLED] >= row[kernels.LANE_PULL]
            )
        return OK if done else TIMEOUT

    def _push(self, rank: int, lane: Lane, row: np.ndarray) -> None:
        total, base = int(row[kernels.LANE_FROM_BYTES]), int(row[kernels.LANE_FROM])
        while row[kernels.LANE_PUSHED] < row[kernels.LANE_PUSH]:
            sent = int(row[kernels.LANE_SENT])
            if sent - words.load(lane.credited) >= self.depth:
                return
            at = int(row[kernels.LANE_PUSHED]) * self.piece
            nbytes, slot = min(self.piece, total - at), sent % self.depth
            earlier = self._posted.get((rank, slot))
            if earlier is not None:
                earlier.wait()  # it was taken at the peer, so it is over
            place = self._out[rank][slot * lane.stride :]
            _PIECE_HEAD.pack_into(
                place[: _PIECE_HEAD.size].numpy(), 0, self.head.sequence, self.head.code, total, self.head.elements
            )
            words.copy(place.data_ptr() + HEADER, base + at, nbytes)
            row[kernels.LANE_SENT] += 1
            row[kernels.LANE_PUSHED] += 1
            self._posted[rank, slot] = self._transfer(rank, lane, slot, HEADER + nbytes).post()

    def _transfer(self, rank: int, lane: Lane, slot: int, nbytes: int) -> Transfer:
        size = next((each for each in _CLASSES if nbytes <= each <= lane.stride), lane.stride)
        found = self._transfers.get((rank, slot, size))
        if found is None:
            at = slot * lane.stride
            pair = lane.remote[at : at + size], self._out[rank][at : at + size]
            found = self._transfers[rank, slot, size] = lane.channel.prepare([pair], notify=lane.their_arrived)
        return found

    def _pull(self, rank: int, lane: Lane, row: np.ndarray) -> bool:
        """Take what has come. ``False``: the next piece is not of this call."""
        total, base = int(row[kernels.LANE_TO_BYTES]), int(row[kernels.LANE_TO])
        while row[kernels.LANE_PULLED] < row[kernels.LANE_PULL]:
            taken = int(row[kernels.LANE_TAKEN])
            if words.load(lane.arrived) <= taken:
                return True
            slot = lane.slots[taken % self.depth * lane.stride :]
            if _PIECE_HEAD.unpack_from(slot[: _PIECE_HEAD.size].numpy()) != (
                self.head.sequence,
                self.head.code,
                total,
                self.head.elements,
            ):
                return False
            at = int(row[kernels.LANE_PULLED]) * self.piece
            words.copy(base + at, slot.data_ptr() + HEADER, min(self.piece, total - at))
            row[kernels.LANE_TAKEN] += 1
            row[kernels.LANE_PULLED] += 1
            if lane.channel.error is None:
                lane.credit.post()
        return True


def streams(device: Device, rank: int, lanes: Mapping[int, Lane], bell: int) -> Streams:
    """The streams over these lanes, by the best way that all of them have."""
    kind = MappedStreams if all(lane.mapped for lane in lanes.values()) else PostedStreams
    return kind(device, rank, lanes, bell)


def fold_local(code: int, result: int, sources: Sequence[int], nbytes: int) -> None:
    """``result = s0 OP s1 OP ...`` over addresses; ``code`` as ``atomics.fold_code`` gives it."""
    table = np.array(sources, np.int64)
    scratch = np.zeros(FOLD_BYTES // 4, np.int64)
    kernels.fold_all(code, result, int(table.ctypes.data), len(sources), nbytes, int(scratch.ctypes.data))
