"""How a tensor of a message reaches its place.

Three ways, chosen by the sender: *inline* (small: its bytes ride in the frame), *written* (the receiver had granted a landing
place: one WRITE, the frame only announces it), *read* (the receiver allocates in its arena and READs from the sender's memory).

A tensor travels as a flat run of elements plus shape and strides, so that views keep their strides; a view that uses less
than half of the run it spans is compacted first (a staging copy, counted).
"""

from __future__ import annotations

import ctypes
import pickle
import struct
from typing import NamedTuple

import torch

from .serialize import travels
from .transport import Channel, Device, RemoteRegion

INLINE_BYTES = 4096
_INLINE_TOTAL = 32768
INLINE, WRITTEN, READ = 0, 1, 2

_ENTRY = struct.Struct("<BH")  # way, length of the description that follows


class Description(NamedTuple):
    """What the receiver must know. ``elements``: of the flat run; ``nbytes``: its size."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    requires_grad: bool
    elements: int
    nbytes: int


_Key = tuple[torch.dtype, torch.Size, tuple[int, ...] | None, bool, int]
_encoded: dict[_Key, bytes] = {}
_decoded: dict[bytes, Description] = {}
_MAX_CACHE = 4096


def describe(tensor: torch.Tensor, device: Device) -> tuple[torch.Tensor, bytes]:
    """The flat run to send and the encoded description of what to make of it."""
    value = tensor.detach()
    if value.is_conj():
        value = value.resolve_conj()
    if value.is_neg():
        value = value.resolve_neg()
    strides: tuple[int, ...] | None = None
    count = value.numel()
    if not value.is_contiguous():
        span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        if span > 2 * count:
            value = value.contiguous()
            device.count_staged(value.numel() * value.element_size())
        else:
            strides, count = value.stride(), span
            value = value.as_strided((span,), (1,))
    key = (tensor.dtype, tensor.shape, strides, tensor.requires_grad, count)
    return value, _encoded.get(key) or _encode(key)


def _encode(key: _Key) -> bytes:
    if len(_encoded) >= _MAX_CACHE:
        _encoded.clear()
    dtype, shape, strides, requires_grad, count = key
    text = _encoded[key] = pickle.dumps((dtype, tuple(shape), strides, requires_grad, count), 5)
    return text


def decode(text: bytes) -> Description:
    found = _decoded.get(text)
    if found is None:
        if len(_decoded) >= _MAX_CACHE:
            _decoded.clear()
        dtype, shape, strides, requires_grad, count = pickle.loads(text)
        found = _decoded[text] = Description(dtype, shape, strides, requires_grad, count, count * dtype.itemsize)
    return found


def shaped(run: torch.Tensor, what: Description) -> torch.Tensor:
    """The tensor over a landed flat run."""
    if what.strides is not None:
        run = run.as_strided(what.shape, what.strides)
    elif what.shape != (what.elements,):
        run = run.view(what.shape)
    return run.requires_grad_() if what.requires_grad else run


class Landing(NamedTuple):
    """Fresh arena memory promised to a sender, by sizes in bytes. ``places``: the descriptors to hand out, joined."""

    runs: list[torch.Tensor]
    sizes: tuple[int, ...]
    places: bytes

    @staticmethod
    def allocate(device: Device, sizes: tuple[int, ...]) -> Landing:
        made = [device.landing(size) for size in sizes]
        return Landing([run for run, _ in made], sizes, b"".join([place for _, place in made]))


def load_places(blob: bytes, known: dict[bytes, list[RemoteRegion]]) -> list[RemoteRegion]:
    """``Landing.places``, parsed. Memory comes round again, so the same places do: ``known`` has those of the same link. (A
    parsed place refers to its channel, and with it to all memory of the peer: it must not outlive the link.)"""
    found = known.get(blob)
    if found is None:
        if len(known) >= _MAX_CACHE:
            known.clear()
        size = RemoteRegion.WIRE_SIZE
        found = known[blob] = [RemoteRegion.load(blob[at : at + size]) for at in range(0, len(blob), size)]
    return found


class Described(NamedTuple):
    """The tensors of a message before it is decided how they travel."""

    runs: list[tuple[torch.Tensor | None, bytes, bytes]]
    """Flat run, description, bytes: the run is ``None`` if the bytes ride in the frame, else the bytes are empty."""
    sizes: tuple[int, ...]
    """Bytes of each tensor that does not ride in the frame: with the function this is the signature of a call."""


class Outgoing(NamedTuple):
    """The tensors of one message, ready to send."""

    table: bytes
    data: bytes
    tensors: int
    lent: list[torch.Tensor]
    """Flat runs that the receiver will READ (no landing place was at hand): they stay alive until it is done."""


NOTHING = Outgoing(b"", b"", 0, [])


def describe_all(tensors: list[torch.Tensor], device: Device) -> Described:
    runs: list[tuple[torch.Tensor | None, bytes, bytes]] = []
    sizes = []
    inline = 0
    for tensor in tensors:
        nbytes = tensor.nbytes
        if nbytes <= INLINE_BYTES and inline + nbytes <= _INLINE_TOTAL and tensor.is_contiguous():
            runs.append((None, *_describe_small(tensor, nbytes)))
            inline += nbytes
            continue
        run, text = describe(tensor, device)
        sizes.append(run.nbytes)
        runs.append((run, text, b""))
    return Described(runs, tuple(sizes))


def pack_lone(tensor: torch.Tensor) -> tuple[bytes, bytes] | None:
    """Description and bytes of a small dense tensor; ``None`` for any other. The short way for the commonest message."""
    if not travels(tensor) or not 0 < (nbytes := tensor.nbytes) <= INLINE_BYTES or not tensor.is_contiguous():
        return None
    return _describe_small(tensor, nbytes)


def unpack_lone(text: bytes, data: bytes) -> torch.Tensor:
    what = _decoded.get(text) or decode(text)
    return shaped(torch.frombuffer(bytearray(data), dtype=what.dtype), what)


def _describe_small(tensor: torch.Tensor, nbytes: int) -> tuple[bytes, bytes]:
    """Description and bytes of a contiguous tensor that rides in the frame."""
    key = (tensor.dtype, tensor.shape, None, tensor.requires_grad, nbytes // tensor.itemsize)
    return _encoded.get(key) or _encode(key), _raw(tensor) if nbytes else b""


def _raw(tensor: torch.Tensor) -> bytes:
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    # A third of the cost of going through numpy, and every dtype has it.
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def pack(described: Described, device: Device, channel: Channel, places: list[RemoteRegion] | None) -> Outgoing:
    """Move the large tensors to ``places`` if these fit; otherwise give out descriptors that the receiver may READ."""
    table, data, lent = [], [], []
    fits = places is not None and tuple([place.nbytes for place in places]) == described.sizes
    remaining = iter(places if places is not None and fits else ())
    for run, text, raw in described.runs:
        if run is None:
            table.append(_ENTRY.pack(INLINE, len(text)) + text)
            data.append(raw)
        elif fits:
            channel.memcpy(next(remaining), run)
            table.append(_ENTRY.pack(WRITTEN, len(text)) + text)
        else:
            source = lendable(run, device, channel)
            lent.append(source)
            table.append(_ENTRY.pack(READ, len(text)) + text + device.lend(source).dump())
    return Outgoing(b"".join(table), b"".join(data), len(described.runs), lent)


def lendable(run: torch.Tensor, device: Device, channel: Channel) -> torch.Tensor:
    """``run`` itself where the peer can read it, else a staging copy in the arena (counted)."""
    if device.can_lend(run, channel):
        return run
    staged = device.empty(run.shape, dtype=run.dtype)
    staged.copy_(run)
    device.count_staged(run.numel() * run.element_size())
    return staged


def unpack(
    table: bytes, data: bytes, count: int, device: Device, channel: Channel, landing: Landing | None
) -> tuple[list[torch.Tensor], tuple[int, ...], bool]:
    """The tensors of a message, the sizes of its large ones, and whether they were READ (then the sender waits for our
    release)."""
    tensors: list[torch.Tensor] = []
    sizes: list[int] = []
    landed = iter(landing.runs if landing is not None else ())
    at = offset = 0
    was_read = False
    for _ in range(count):
        way, length = _ENTRY.unpack_from(table, at)
        at += _ENTRY.size
        what = decode(table[at : at + length])
        at += length
        if way == INLINE:
            # A bytearray of its own: received tensors are writable and outlive the frame.
            piece = bytearray(data[offset : offset + what.nbytes])
            offset += what.nbytes
            run = torch.frombuffer(piece, dtype=what.dtype) if piece else torch.empty(0, dtype=what.dtype)
        else:
            sizes.append(what.nbytes)
            if way == WRITTEN:
                run = next(landed).view(what.dtype)
            else:
                run = device.empty(what.elements, dtype=what.dtype)
                channel.memcpy(run, RemoteRegion.load(table[at : at + RemoteRegion.WIRE_SIZE])).wait()
                at += RemoteRegion.WIRE_SIZE
                was_read = True
        tensors.append(shaped(run, what))
    return tensors, tuple(sizes), was_read


def traffic(out: Outgoing) -> dict[str, int]:
    """Payload bytes of a message by the way they take: ``inline``, ``direct`` (written to a granted place), ``read``."""
    totals = {"inline": len(out.data), "direct": 0, "read": 0}
    at = 0
    while at < len(out.table):
        way, length = _ENTRY.unpack_from(out.table, at)
        at += _ENTRY.size + length
        if way != INLINE:
            totals["direct" if way == WRITTEN else "read"] += decode(out.table[at - length : at]).nbytes
        if way == READ:
            at += RemoteRegion.WIRE_SIZE
    return totals
