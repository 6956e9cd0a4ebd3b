"""How the tensors of a message reach their places.

Four ways, chosen by the sender: *inline* (small: its bytes ride in the frame), *written* (the receiver had granted a landing
place: one WRITE, the frame only announces it), *read* (the receiver allocates in its arena and READs from the sender's memory),
*handed* (a result that only lies in the sender's arena and that nobody needs there: the receiver uses it where it is). What
travels is a *run* of bytes. Usually one tensor lies in it; other tensors of the message that share its memory only refer to it.
``layout`` decides which part of a tensor's memory is its run.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ..base.recursion import ROOM
from ..transport import Block, Channel, Device, RdmaError, RemoteRegion, size_class
from . import layout
from .layout import Description

# The function behind ``ctypes.string_at``, without a Python function in between.
string_at = ctypes._string_at  # type: ignore[attr-defined]

INLINE_BYTES = 64 << 10  # a copy through the ring and out of it costs less than the bookkeeping of a landing place
_INLINE_TOTAL = 96 << 10
_TINY_BYTES = 256
"""A tensor of at most so many bytes always rides in the frame: the descriptor of a landing place is a fifth as large."""
INLINE, WRITTEN, READ, HANDED, VIEW, SAME = range(6)
_MAX_CACHE = 4096
_MAX_KNOWN = 4096
"""Encoded places of at most so many bytes are remembered, as a peer may send any number of places with each call."""

_ENTRY = struct.Struct("<BH")  # way, length of the description that follows
_HANDED_BYTES = 2 * RemoteRegion.WIRE_SIZE
_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")
WORD_BYTES = 8
"""Of the word of a recallable request: its sender may give it up, and write to what is lent, before the receiver has READ that.
The word is not 0 then. The receiver looks at it when it has READ all else."""
_INDEX = struct.Struct("<I")  # after a VIEW or SAME: the tensor in whose run this one lies, or that it is


class Landing:
    """Fresh memory promised to the peer of a channel: one block for each of ``sizes`` (bytes), with room up to its size class.
    ``places``: the descriptors to hand out, joined. ``blocks``: those that were not taken, the next one last; they go back when
    this dies."""

    __slots__ = ("_arena", "blocks", "places", "sizes")

    def __init__(self, channel: Channel, sizes: tuple[int, ...]) -> None:
        """Raises ``ArenaFull``, and the error of a channel that has ended."""
        self.blocks: list[Block] = []
        channel.check()
        device, pool = channel.device, channel.own_pool or channel.pool
        self._arena, self.sizes = device.arena, sizes
        places = []
        for size in sizes:
            block = device.arena.allocate(size, pool)
            self.blocks.append(block)
            segment = block.segment
            places.append(RemoteRegion.packed(device.uid, device.epoch, segment.number, segment.key, block.offset, size))
        self.blocks.reverse()
        self.places = b"".join(places)

    def __del__(self) -> None:
        for block in self.blocks:
            self._arena.free(block)


@lru_cache(_MAX_CACHE)
def size_classes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The size class of each."""
    return tuple([size_class(size) for size in sizes])


class Places(dict[bytes, list[RemoteRegion]]):
    """The places at one peer, by ``Landing.places``. Memory is used again, so the same places come again: they are parsed once.
    A parsed place refers to its channel, and so to all memory of the peer: it must not outlive the link."""

    def __missing__(self, blob: bytes) -> list[RemoteRegion]:
        size = RemoteRegion.WIRE_SIZE
        found = [RemoteRegion.load(blob[at : at + size]) for at in range(0, len(blob), size)]
        if len(blob) <= _MAX_KNOWN:
            if len(self) >= _MAX_CACHE:
                self.clear()
            self[blob] = found
        return found


class Outgoing(NamedTuple):
    """The tensors of one message, ready to send."""

    table: bytes
    data: bytes
    tensors: int
    lent: list[torch.Tensor]
    """Flat runs that the receiver will READ (no landing place was at hand): they stay alive until it is done."""
    sizes: tuple[int, ...] = ()
    """Bytes of each run that does not ride in the frame: with the function this is the signature of a call."""
    grant: int = 0
    """The number of the grant whose landing places were used, or none of them fitted."""
    own: bool = False
    """Whether the program's own memory is lent, and no copy."""


NOTHING = Outgoing(b"", b"", 0, [])


Entry = tuple[torch.Tensor | None, int, bytes, bytes]
"""A tensor before it is decided how it travels: run, way, description, and what follows it: bytes (``INLINE``) or index
(``VIEW``, ``SAME``). The way of a run that does not ride in the frame is not known yet."""


def describe_all(tensors: Sequence[torch.Tensor], device: Device) -> tuple[list[Entry], tuple[int, ...]]:
    """``layout.travels`` is true for all tensors. Also the sizes in bytes of the runs that do not ride in the frame."""
    entries: list[Entry] = []
    sizes = []
    inline = 0
    places = layout.plan(tensors) if len(tensors) > 1 else None
    for index, tensor in enumerate(tensors):
        place = places.get(index) if places is not None else None
        known, gathered = layout.as_it_lies(tensor) if place is None else None, False
        if known is not None:
            run, text, nbytes = tensor, known.text, known.nbytes
        elif place is not None and place.same:
            entries.append((None, SAME, b"", _INDEX.pack(place.base)))
            continue
        else:
            run, text, nbytes = _describe(tensor, place)
            if place is not None and place.base != index:
                entries.append((None, VIEW, text, _INDEX.pack(place.base)))
                continue
            gathered = not run.is_contiguous()
            run = run.contiguous()
        if nbytes <= _TINY_BYTES or (nbytes <= INLINE_BYTES and inline + nbytes <= _INLINE_TOTAL):
            entries.append((None, INLINE, text, string_at(run.data_ptr(), nbytes)))
            inline += nbytes
            continue
        if gathered:
            device.count_staged(nbytes)
        if known is not None:
            run = tensor.detach()
            if known.strides is not None:
                run = run.as_strided((nbytes // tensor.itemsize,), (1,))
        sizes.append(nbytes)
        entries.append((run, READ, text, b""))
    return entries, tuple(sizes)


@lru_cache(_MAX_CACHE)
def _entry(way: int, text: bytes) -> bytes:
    return _ENTRY.pack(way, len(text)) + text


def _describe(tensor: torch.Tensor, place: layout.Place | None) -> tuple[torch.Tensor, bytes, int]:
    """The run in which a tensor lies (not contiguous: still to be gathered), what to make of it, and its size in bytes."""
    if place is not None and place.run is not None:
        flips, strides = layout.physical(tensor)[1], tensor.stride()
        kept = None if strides == layout.dense(tensor.shape) else strides
        offset, nbytes = place.offset // tensor.itemsize, place.run.nbytes
        what = Description(tensor.dtype, tuple(tensor.shape), kept, offset, tensor.requires_grad, flips, nbytes, False)
        return place.run, layout.encode(what), nbytes
    layout.check_held(tensor, layout.span(tensor.shape, tensor.stride()) * tensor.itemsize)
    return layout.flattened(tensor)


def unpack_lone(text: bytes, data: bytearray) -> torch.Tensor:
    """The tensor lies in ``data``."""
    what = layout.decode(text)
    if len(data) != what.nbytes:
        raise RdmaError(f"a tensor of {what.nbytes} bytes came with {len(data)}")
    run = torch.frombuffer(data, dtype=what.dtype)
    return run if what.plain and len(what.shape) == 1 and not what.requires_grad else layout.rebuilt(run, what)


Memory = Any
"""The source of memory for messages (``calls/memory``): its ``empty(channel, nbytes, deadline)``."""


Take = Callable[[tuple[int, ...]], tuple[int, list[RemoteRegion]] | None]
"""Gives landing places that are at hand for runs of these size classes, and the number of their grant."""


def pack(
    tensors: Sequence[torch.Tensor], device: Device, channel: Channel, take: Take, memory: Memory, deadline: float | None = None
) -> Outgoing:
    """Move the large runs to landing places, if each is of the size class that its place was made for; otherwise give out
    descriptors that the receiver may READ. ``layout.travels`` is true for all tensors. ``deadline``: how long ``memory`` for
    staging may be waited for."""
    isinstance(None, ROOM)
    entries, sizes = describe_all(tensors, device)
    classes = size_classes(sizes)
    grant, places = (take(classes) if sizes else None) or (0, [])
    made_for = tuple(map(attrgetter("nbytes"), places))
    if made_for != sizes and size_classes(made_for) == classes:
        places, made_for = [place.resized(size) for place, size in zip(places, sizes)], sizes
    written, remaining = made_for == sizes, iter(places)
    table: list[bytes] = []
    data: list[bytes] = []
    lent: list[torch.Tensor] = []
    own = False
    for run, way, text, rest in entries:
        if run is None:
            table.append(_entry(way, text))
            (data if way == INLINE else table).append(rest)
        elif written:
            channel.memcpy(next(remaining), run)
            table.append(_entry(WRITTEN, text))
        else:
            source = _lendable(run, device, channel, memory, deadline)
            own = own or source is run
            lent.append(source)
            table.append(_entry(READ, text) + device.lend(source, channel).dump())
    return Outgoing(b"".join(table), b"".join(data), len(entries), lent, sizes, grant, own)


def check_wanted(word: torch.Tensor) -> None:
    """Raise ``RdmaError`` if the word of a recallable request, READ after its tensors, says that it was given up."""
    if word.count_nonzero():
        raise RdmaError(
            "its caller gave this call up before its arguments were read, and may have changed them: it does not run"
        )


def pack_handed(tensor: torch.Tensor, place: bytes) -> Outgoing:
    """A contiguous tensor without conjugate or negative bit that was handed over (``memory.Handovers.give``)."""
    return Outgoing(_entry(HANDED, layout.outline(tensor).text) + place, b"", 1, [])


def _lendable(run: torch.Tensor, device: Device, channel: Channel, memory: Memory, deadline: float | None) -> torch.Tensor:
    """``run`` itself where the peer can read it, else a staging copy that it alone can reach (counted)."""
    if device.can_lend(run, channel):
        return run
    staged = memory.empty(channel, run.nbytes, deadline).view(run.dtype).view(run.shape)
    staged.copy_(run)
    device.count_staged(run.numel() * run.element_size())
    return staged


_AFTER = {READ: RemoteRegion.WIRE_SIZE, HANDED: _HANDED_BYTES, VIEW: _INDEX.size, SAME: _INDEX.size}
"""Bytes that follow the description of an entry."""
_TAKEN = {WRITTEN: "direct", READ: "read", HANDED: "handed"}


def _entries(table: bytes, count: int) -> tuple[list[tuple[int, bytes, int]], int]:
    """Way and description of each tensor in a table, and where what follows these begins; and where the entries end."""
    found, at = [], 0
    for _ in range(count):
        way, length = _ENTRY.unpack_from(table, at)
        at += _ENTRY.size + length
        found.append((way, table[at - length : at], at))
        at += _AFTER.get(way, 0)
    return found, at


def unpack(
    table: bytes,
    data: bytearray,
    count: int,
    channel: Channel,
    landing: Landing | None,
    known: Places,
    were_read: list[torch.Tensor],
) -> tuple[list[torch.Tensor], tuple[int, ...]]:
    """The tensors of a message, and the sizes of the runs that need a landing place. ``known``: the places at the sender.
    ``were_read``: the runs ``to_read``."""
    tensors: list[torch.Tensor] = []
    runs: list[torch.Tensor] = []
    sizes: list[int] = []
    offset, left = 0, iter(were_read)
    whole = memoryview(data)
    for way, text, at in _entries(table, count)[0]:
        if way >= VIEW:
            _share(tensors, runs, _INDEX.unpack_from(table, at)[0], text if way == VIEW else None, channel)
            continue
        what = layout.decode(text)
        if way == INLINE:
            # Memory of its own: received tensors are kept one by one. All of ``data`` is one tensor's already.
            piece = data if what.nbytes == len(data) else bytearray(whole[offset : offset + what.nbytes])
            offset += what.nbytes
            if len(piece) != what.nbytes:
                raise RdmaError(f"a tensor of {what.nbytes} bytes came with {len(piece)}", peer=channel.peer)
            run = torch.frombuffer(piece, dtype=what.dtype if what.plain else torch.uint8) if piece else _EMPTY
        elif way == HANDED:
            run = channel.adopt(*known[table[at : at + _HANDED_BYTES]])
        else:
            sizes.append(what.nbytes)
            if way == WRITTEN:
                if landing is None or not landing.blocks or what.nbytes > landing.blocks[-1].nbytes:
                    raise RdmaError("a tensor was written to a landing place that is not known here", peer=channel.peer)
                run = channel.device.arena.hold(landing.blocks.pop(), what.nbytes, torch.uint8, what.nbytes)
            elif (found := next(left, None)) is not None:
                run = found
            else:
                raise RdmaError("a tensor is to be READ, of which the head of its message says nothing", peer=channel.peer)
        runs.append(run)
        tensors.append(layout.rebuilt(run, what))
    return tensors, tuple(sizes)


def _share(tensors: list[torch.Tensor], runs: list[torch.Tensor], base: int, text: bytes | None, channel: Channel) -> None:
    """Add a tensor that lies in the run of number ``base``, as its description says; without one it is that tensor itself."""
    if base >= len(runs):
        raise RdmaError("a tensor lies in the memory of one that comes after it", peer=channel.peer)
    run = runs[base]
    runs.append(run)
    if text is None:
        tensors.append(tensors[base])
        return
    what = layout.decode(text)
    if what.nbytes > run.nbytes:
        raise RdmaError(f"a view of {what.nbytes} bytes in a run of {run.nbytes}", peer=channel.peer)
    # Over a tensor of its own: ``run`` itself may have become the tensor that lies in it.
    tensors.append(layout.rebuilt(run.detach(), what))


def to_read(table: bytes, count: int) -> tuple[list[tuple[int, RemoteRegion]], RemoteRegion | None]:
    """Bytes and place of each run of a message that is to be READ, and the place of its word, if it is recallable."""
    entries, end = _entries(table, count)
    found = [(text, table[at : at + RemoteRegion.WIRE_SIZE]) for way, text, at in entries if way == READ]
    runs = [(layout.decode(text).nbytes, RemoteRegion.load(place)) for text, place in found]
    if not (rest := table[end:]):
        return runs, None
    if len(rest) != RemoteRegion.WIRE_SIZE or (word := RemoteRegion.load(rest)).nbytes != WORD_BYTES:
        raise RdmaError(f"{len(rest)} bytes behind the tensors of a message name no word")
    return runs, word


def traffic(out: Outgoing) -> dict[str, int]:
    """Payload bytes of a message by the way they take: ``inline``, ``direct`` (written to a granted place), ``read``,
    ``handed``."""
    totals = {"inline": len(out.data), "direct": 0, "read": 0, "handed": 0}
    for way, text, _ in _entries(out.table, out.tensors)[0]:
        if way in _TAKEN:
            totals[_TAKEN[way]] += layout.decode(text).nbytes
    return totals
