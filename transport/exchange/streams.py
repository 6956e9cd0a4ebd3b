"""The streams of one member of an exchange to all others, moved by the compiled loop: straight to their memory where that is
mapped here, else by way of memory of our own, and posts."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..channel import Transfer, Work
from ..device import Device
from ..errors import PeerLost, RdmaError
from ..words import kernels as words
from ..words.atomics import FOLD_BYTES
from ..words.signals import BELL_BYTES
from . import kernels
from .kernels import CALL_WORDS, CLOSED, HEADER, LANE_WORDS, TIMEOUT, folder
from .lane import Lane

Span = tuple[int, int]
"""Address and bytes."""
NOTHING: Mapping[int, Span] = {}
_PIECE_HEAD, _PIECE_BYTES = struct.Struct("<4q"), struct.Struct("<q")
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


class Plan:
    """What the calls of one signature have in common, as the compiled loop reads it. Its addresses are offsets from those that
    a call gives, or absolute where it gives none."""

    __slots__ = ("address", "changes", "deepens", "grows", "words")

    def __init__(self, numbers: Sequence[int], grows: Sequence[tuple[int, bool]], *, deepens: bool = False) -> None:
        """``grows``: the directions of lanes, as rank and whether out, that have more slots behind this call. ``deepens``: so
        have all lanes of the group then, and every rank knows it: sums may come as far behind as that allows."""
        self.words = np.array(numbers, np.int64)
        self.grows, self.deepens = grows, deepens
        self.changes = bool(grows) or deepens
        self.address = int(self.words.ctypes.data)


_NO_FOLD = Fold(-1, 0, 0, 0, False)
_SUM_CHUNK = 64 << 10
"""Bytes of a chunk of ``Streams.sum_plan``, at most."""
_PAST = 32 << 20
"""Bytes of a sum from which on it goes past the caches: no cache keeps it."""
COPY_PAST = 8 << 20
"""Bytes that come to mapped slots, or stay with their rank, from which on their copies go past the caches: with what is sent,
and with the slots, they are several times as many."""


class Streams:
    """One compiled loop moves all streams, to slots that are mapped here. One thread at a time. ``begin`` a call, then
    ``advance`` until it gives ``OK``."""

    def __init__(self, device: Device, rank: int, lanes: Mapping[int, Lane], bell: int) -> None:
        """``lanes``: by rank, open, all of one size. ``bell``: number of the bell that their news ring."""
        self.rank, self.lanes, self.port = rank, dict(sorted(lanes.items())), device.port
        self.order = list(self.lanes)
        first = next(iter(self.lanes.values()))
        self.piece, self._most = first.piece, first.most
        self.words = np.zeros(CALL_WORDS + LANE_WORDS * len(self.lanes), np.int64)
        self.address = int(self.words.ctypes.data)
        self._spare = np.zeros(len(self.lanes) + 3 + FOLD_BYTES // 4, np.int64)
        bell_address = device.memory.bells + bell * BELL_BYTES
        self.words[: kernels.CALL_BUDGET + 1] = len(self.lanes), self.piece, first.few, bell_address, words.SPIN
        self.words[kernels.CALL_TABLE] = self._spare.ctypes.data
        self._spare[1] = self._spare.ctypes.data + 8 * (len(self.lanes) + 3)
        self.words[kernels.CALL_FOLDER] = folder.address
        self.words[kernels.CALL_RANK] = rank
        for number, (rank_there, lane) in enumerate(self.lanes.items()):
            row = CALL_WORDS + LANE_WORDS * number
            self.words[row + kernels.LANE_ARRIVED] = lane.arrived
            self.words[row + kernels.LANE_CREDITED] = lane.credited
            self.words[row + kernels.LANE_RANK] = rank_there
            self.words[row + kernels.LANE_NOTIFY], self.words[row + kernels.LANE_CREDIT] = self._blocks(lane)
        self._slots: dict[int, memoryview] = {}
        self._ints = memoryview(self.words)
        self._rows = {rank: CALL_WORDS + LANE_WORDS * number for number, rank in enumerate(self.order)}
        for rank in self.lanes:
            self._place(rank)

    def _blocks(self, lane: Lane) -> tuple[int, int]:
        """The work request blocks by which a piece, and a credit, is announced."""
        return lane.notify.address, lane.credit.address  # type: ignore[attr-defined]

    def _place(self, rank: int) -> None:
        """Where the slots of a lane are, and how many."""
        lane, row = self.lanes[rank], self._rows[rank]
        self._slots[rank] = memoryview(lane.slots.numpy())
        self.words[row + kernels.LANE_IN], self.words[row + kernels.LANE_IN_DEPTH] = lane.slots.data_ptr(), lane.in_depth
        self.words[row + kernels.LANE_OUT], self.words[row + kernels.LANE_OUT_DEPTH] = lane.mapped, lane.out_depth

    def offer(self, plan: Plan) -> None:
        """Before a call whose plan ``changes``. Raises ``ArenaFull``, ``PeerLost``."""
        for rank, out in plan.grows:
            if not out:
                self.lanes[rank].grow_in()

    def grow(self, plan: Plan, limit: float, check: Callable[[], None]) -> None:
        """After that call: what comes next goes to the further slots. All plans have to be made again. Raises as
        ``Lane.change_out``."""
        for rank, out in plan.grows:
            lane = self.lanes[rank]
            try:
                lane.change_out(limit, check) if out else lane.change_in()
                self._place(rank)
            except PeerLost:
                if lane.channel.error is None:
                    raise
                # A peer may leave after its last call, which is done here, too. Whoever needs it later finds that out.
        if plan.deepens:
            self.words[kernels.CALL_DEPTH] = self._most

    def _grows(self, rank: int, outs: int, ins: int) -> list[tuple[int, bool]]:
        """Of a call with so many pieces to and from a rank."""
        lane = self.lanes[rank]
        return [
            (rank, out)
            for out, pieces, depth in ((True, outs, lane.out_depth), (False, ins, lane.in_depth))
            if depth < min(pieces, lane.most)
        ]

    def pieces(self, nbytes: int) -> int:
        return max(1, -(-nbytes // self.piece))

    def plan(
        self, code: int, elements: int, outs: Mapping[int, Span], ins: Mapping[int, Span], fold: Fold | None = None
    ) -> Plan:
        """A call that sends the spans of ``outs`` to those ranks, and puts what comes from the ranks of ``ins`` into their
        spans. With ``fold`` only the bytes of ``ins`` count, all are alike, and all ranks are in it."""
        fold = fold or _NO_FOLD
        past = int(sum(nbytes for _, nbytes in ins.values()) >= COPY_PAST)
        numbers = [code, elements, *fold[:4], int(fold.whole), 0, 0, 0, past]
        grows: list[tuple[int, bool]] = []
        for rank in self.order:
            for span in (outs.get(rank), ins.get(rank)):
                numbers += (span[0], span[1], self.pieces(span[1])) if span is not None else (0, 0, 0)
            grows += self._grows(rank, numbers[-4], numbers[-1])
        return Plan(numbers, grows)

    def sum_plan(self, code: int, elements: int, fold: int, nbytes: int) -> Plan:
        """A call that adds up ``nbytes`` of every rank, in place, by the operation ``fold`` (``fold_code``)."""
        part = -(-nbytes // (len(self.lanes) + 1) // HEADER) * HEADER
        chunk = min(_SUM_CHUNK, self.piece)
        chunks = -(-part // chunk)
        numbers = [code, elements, fold, 0, 0, nbytes, 0, part, chunk, chunks, int(nbytes >= _PAST)]
        grows = [each for rank in self.order for each in self._grows(rank, 2 * chunks, 2 * chunks)]
        deepens = self.words[kernels.CALL_DEPTH] < min(2 * chunks, self._most)
        return Plan(numbers + [0, nbytes, 2 * chunks] * 2 * len(self.lanes), grows, deepens=bool(deepens))

    def begin(self, plan: Plan, sequence: int, source: int = 0, target: int = 0, *, patient: bool = False) -> None:
        """Begin a call: its spans lie at these addresses. The memory stays where it is until the call is done. ``patient``: the
        caller computes meanwhile, so that a core is better left to it than kept for waiting."""
        kernels.begin(self.address, plan.address, sequence, source, target, patient)

    @property
    def head(self) -> Head:
        """Of the call under way."""
        return Head(*self.words[kernels.CALL_SEQUENCE : kernels.CALL_COUNT + 1].tolist())

    def advance(self, slice_ns: int) -> int:
        """Go on for at most ``slice_ns``: ``OK``, ``TIMEOUT`` or, with ``at_fault``, ``MISMATCH`` or
        ``CLOSED``."""
        return kernels.exchange(self.address, slice_ns, self.port)

    def rest(self, slice_ns: int) -> None:
        """Sleep until something comes, or a slot becomes free, for at most ``slice_ns``; or return at once."""
        kernels.rest(self.address, slice_ns, self.port)

    # -- for errors

    def _word(self, rank: int, word: int) -> int:
        return self._ints[self._rows[rank] + word]

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
        return left and used >= self.lanes[rank].out_depth

    def header(self, rank: int) -> tuple[Head, int] | None:
        """The head of the next piece that has come from this rank, and the bytes of its message; ``None``: none has come."""
        lane, taken = self.lanes[rank], self._word(rank, kernels.LANE_TAKEN)
        if words.load(lane.arrived) <= taken:
            return None
        sequence, code, nbytes, count = _PIECE_HEAD.unpack_from(self._slots[rank], taken % lane.in_depth * lane.stride)
        return Head(sequence, code, count), nbytes

    def expected(self, rank: int) -> int:
        """The bytes of the message that the call under way expects from this rank."""
        return self._word(rank, kernels.LANE_TO_BYTES)


class PostedStreams(Streams):
    """Not all peers' slots are mapped: the loop moves pieces to slots of our own, and what it has written and taken is posted
    then. The slots lie in the arena from the first piece to a rank on."""

    def __init__(self, device: Device, rank: int, lanes: Mapping[int, Lane], bell: int) -> None:
        self._device = device
        self._out: dict[int, torch.Tensor] = {}
        self._transfers: dict[tuple[int, int, int], Transfer] = {}
        self._posted: dict[tuple[int, int], Work] = {}
        self._sent, self._taken = dict.fromkeys(lanes, 0), dict.fromkeys(lanes, 0)
        """How many pieces, and credits, were posted."""
        # What the loop enters, and counts, for all lanes: words that nobody looks at.
        self._block = np.zeros(words.WR_HEAD + 4 + words.STATS_WORDS, np.int64)
        spare = int(self._block.ctypes.data) + 8 * words.WR_HEAD
        self._block[words.WR_RECORD], self._block[words.WR_CLOSED] = spare, spare + 16
        self._block[words.WR_INFLIGHT], self._block[words.WR_STATS] = spare + 24, spare + 32
        super().__init__(device, rank, lanes, bell)

    def _blocks(self, lane: Lane) -> tuple[int, int]:
        block = int(self._block.ctypes.data)
        return block, block

    def _place(self, rank: int) -> None:
        super()._place(rank)
        for found in [each for each in self._posted if each[0] == rank]:
            self._posted.pop(found).wait()  # it was taken at the peer, so it is over
        self._transfers = {key: each for key, each in self._transfers.items() if key[0] != rank}
        self._out.pop(rank, None)

    def begin(self, plan: Plan, sequence: int, source: int = 0, target: int = 0, *, patient: bool = False) -> None:
        super().begin(plan, sequence, source, target, patient=patient)
        for rank, lane in self.lanes.items():
            if rank not in self._out and self._word(rank, kernels.LANE_PUSH):
                out = self._out[rank] = self._device.empty((lane.stride * lane.out_depth,), dtype=torch.uint8)
                self.words[self._rows[rank] + kernels.LANE_OUT] = out.data_ptr()

    def advance(self, slice_ns: int) -> int:
        slept = False
        while True:
            seen = kernels.counted(self.address)
            status = kernels.exchange(self.address, 0, self.port)
            for number, rank in enumerate(self.order):
                if not self._post(rank):
                    self.words[kernels.CALL_LANE] = number
                    return CLOSED
            if status != TIMEOUT:
                return status
            if kernels.counted(self.address) != seen:
                continue
            if slept or slice_ns <= 0:
                return TIMEOUT
            kernels.sleep(self.address, seen, slice_ns, self.port)
            slept = True

    def needs(self, rank: int) -> bool:
        return super().needs(rank) or self._sent[rank] < self._word(rank, kernels.LANE_SENT)

    def _post(self, rank: int) -> bool:
        """Post what the loop has written to a rank, and taken from it. ``False``: the lane is closed."""
        lane = self.lanes[rank]
        try:
            while (sent := self._sent[rank]) < self._word(rank, kernels.LANE_SENT):
                lane.channel.check()
                slot = sent % lane.out_depth
                earlier = self._posted.get((rank, slot))
                if earlier is not None:
                    earlier.wait()  # it was taken at the peer, so it is over
                self._posted[rank, slot] = self._transfer(rank, lane, slot).post()
                self._sent[rank] += 1  # only now: a piece whose post failed is still needed (``needs``)
        except RdmaError:
            if lane.channel.error is None:
                raise
            return False
        while self._taken[rank] < self._word(rank, kernels.LANE_TAKEN):
            self._taken[rank] += 1
            try:
                lane.credit.post()
            except RdmaError:  # a peer that is gone needs no credit; if it is still needed, the next look finds the loss
                if lane.channel.error is None:
                    raise
        return True

    def _transfer(self, rank: int, lane: Lane, slot: int) -> Transfer:
        start = slot * lane.stride
        nbytes = HEADER + _PIECE_BYTES.unpack_from(self._out[rank][start : start + HEADER].numpy(), 8 * kernels.HEAD_PIECE)[0]
        size = next((each for each in _CLASSES if nbytes <= each <= lane.stride), lane.stride)
        found = self._transfers.get((rank, slot, size))
        if found is None:
            pair = lane.remote[start : start + size], self._out[rank][start : start + size]
            found = self._transfers[rank, slot, size] = lane.channel.prepare([pair], notify=lane.their_arrived)
        return found


def streams(device: Device, rank: int, lanes: Mapping[int, Lane], bell: int) -> Streams:
    """The streams over these lanes, by the best way that all of them have."""
    kind = Streams if all(lane.mapped for lane in lanes.values()) else PostedStreams
    return kind(device, rank, lanes, bell)
