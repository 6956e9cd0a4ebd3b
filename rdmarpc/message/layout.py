"""The layout of a tensor in a message: the runs of its memory that travel, and the tensor made again over them.

A tensor is a *span* of its storage, from its lowest to its highest element, seen through dtype, shape and strides. The span is
what travels, so that strides survive; elements in between that belong to nobody travel along. Where these are too many (span
above ``SMALL_STORAGE`` and more than twice the elements) the elements are gathered first: a staging copy, after which the
tensor is row-major, as in ``torch.distributed.rpc``. The storage offset is not kept: the span begins the new storage.

Conjugate and negative bits travel as bits: memory goes as it lies.

Tensors of one message that share memory share it where they arrive (``plan``). Tensors of one storage go as one run, the union
of their spans, if not too much of that run is unused (``wasteful``). If it is, tensors whose spans overlap go together, under
the same condition. Otherwise each goes alone, and does not share memory any more where it arrives, as in
``torch.distributed.rpc``. Two equal views (same place, dtype, shape and strides) always share, and one tensor object that
occurs twice arrives as one object.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from ..transport import RdmaError

SMALL_STORAGE = 8192
CONJUGATE, NEGATIVE = 1, 2
_MAX_CACHE = 4096
_HEAD = struct.Struct("<BBBQQ")
"""The head of an encoded description: rank, bits, length of the dtype's name, offset, bytes of the run. The name follows, the
shape, and, with ``_STRIDED``, the strides. Bits: 1 requires_grad, 2 plain, 4 strides, 8 conjugate, 16 negative."""
_STRIDED = 4
_QUANTISED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))


class Description(NamedTuple):
    """The facts that the receiver needs of one tensor. ``strides``: ``None`` is row-major. ``offset``: elements from the start
    of the landed run. ``flips``: conjugate and negative bits. ``nbytes``: bytes of the landed run. ``plain``: the tensor is all
    of the run, row-major, without flips, and not empty."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int
    requires_grad: bool
    flips: int
    nbytes: int
    plain: bool


class Outline(NamedTuple):
    """The facts that the sender needs of all tensors of one dtype, shape, strides and ``requires_grad``."""

    text: bytes
    """The encoded description of such a tensor without flips, at the start of its run."""
    nbytes: int
    """The bytes of the run."""
    strides: tuple[int, ...] | None
    lone: bool
    """Whether the tensor's bytes may be taken from memory as they lie, without a look at its conjugate bit."""


def travels(tensor: torch.Tensor) -> bool:
    """Whether a tensor goes out of band as it is: dense, on the CPU, neither nested nor quantised, with memory of its own."""
    if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.is_nested or tensor.dtype in _QUANTISED:
        return False
    if is_functorch_wrapped_tensor(tensor) or tensor._is_zerotensor():
        return False
    return forward_ad._current_level < 0 or is_memory(tensor)


def is_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than its memory: neither inside of a transform of torch.func nor with a tangent."""
    if is_functorch_wrapped_tensor(tensor):
        return False
    return forward_ad._current_level < 0 or forward_ad.unpack_dual(tensor).tangent is None


def check_held(tensor: torch.Tensor, nbytes: int) -> None:
    """Raise ``RuntimeError`` if a tensor's storage ends before the ``nbytes`` from its first to its last element: it was shrunk
    since, as sharded training does between uses. Other memory would go in its place."""
    held = tensor.untyped_storage().nbytes()
    if nbytes and held < tensor.storage_offset() * tensor.itemsize + nbytes:
        what = f"a tensor of {tensor.dtype} and shape {tuple(tensor.shape)}"
        raise RuntimeError(f"{what} has no data to send: its storage was resized to {held} bytes")


def outline(tensor: torch.Tensor) -> Outline:
    """The outline of a tensor that ``travels``."""
    return _outline(tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad)


@functools.lru_cache(_MAX_CACHE)
def _outline(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], requires_grad: bool) -> Outline:
    count, row_major = shape.numel(), strides == dense(shape)
    elements = count if row_major else span(shape, strides)
    gathered = wasteful(elements * dtype.itemsize, count * dtype.itemsize)
    kept = None if row_major or gathered else strides
    nbytes = (count if gathered else elements) * dtype.itemsize
    text = encode(Description(dtype, tuple(shape), kept, 0, requires_grad, 0, nbytes, kept is None and count > 0))
    lone = not gathered and count > 0 and not dtype.is_complex
    return Outline(text, nbytes, kept, lone)


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements of storage from the first to the last one that is used."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))


@functools.lru_cache(_MAX_CACHE)
def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that torch gives to a new tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def wasteful(span_bytes: int, used_bytes: int) -> bool:
    """Whether a span is too large for what is used of it."""
    return span_bytes > SMALL_STORAGE and span_bytes > 2 * used_bytes


@functools.lru_cache(_MAX_CACHE)
def encode(what: Description) -> bytes:
    name = str(what.dtype).removeprefix("torch.").encode()
    bits = what.requires_grad | what.plain << 1 | (what.strides is not None) << 2 | what.flips << 3
    numbers = what.shape if what.strides is None else what.shape + what.strides
    head = _HEAD.pack(len(what.shape), bits, len(name), what.offset, what.nbytes)
    return head + name + struct.pack(f"<{len(numbers)}Q", *numbers)


@functools.lru_cache(_MAX_CACHE)
def decode(text: bytes) -> Description:
    """Raises ``RdmaError`` for what describes no tensor inside its run."""
    try:
        rank, bits, length, offset, nbytes = _HEAD.unpack_from(text)
        at = _HEAD.size + length
        numbers = struct.unpack(f"<{rank * (2 if bits & _STRIDED else 1)}Q", text[at:])
        dtype = getattr(torch, text[_HEAD.size : at].decode(), None)
    except (struct.error, UnicodeDecodeError) as error:
        raise RdmaError(f"what came describes no tensor: {error}") from None
    shape, strides = numbers[:rank], numbers[rank:] if bits & _STRIDED else None
    what = Description(dtype, shape, strides, offset, bool(bits & 1), bits >> 3, nbytes, bool(bits & 2))  # type: ignore[arg-type]
    if not isinstance(dtype, torch.dtype) or dtype in _QUANTISED or what.flips > (CONJUGATE | NEGATIVE) or not _inside(what):
        raise RdmaError(f"what came describes no tensor inside {nbytes} bytes: {shape}, {strides} from {offset}")
    return what


def _inside(what: Description) -> bool:
    """Whether a tensor lies in its run: all of it, where it is plain."""
    elements = math.prod(what.shape) if what.strides is None else span(what.shape, what.strides)
    used = elements * what.dtype.itemsize
    if what.plain:
        return what.strides is None and not what.offset and not what.flips and 0 < used == what.nbytes
    return not used or what.offset * what.dtype.itemsize + used <= what.nbytes


def physical(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor as it lies in memory, without autograd, and the bits that were taken off it."""
    value, flips = tensor.detach(), 0
    if value.is_conj():
        value, flips = value.conj(), CONJUGATE
    if value.is_neg():
        value, flips = torch._neg_view(value), flips | NEGATIVE
    return value, flips


def flattened(tensor: torch.Tensor) -> tuple[torch.Tensor, bytes, int]:
    """The run of a tensor that goes alone (not contiguous: still to be gathered), its encoded description, and its bytes."""
    value, flips = physical(tensor)
    known = outline(tensor)
    text = encode(decode(known.text)._replace(flips=flips, plain=False)) if flips else known.text
    if known.strides is not None and known.nbytes:
        value = value.as_strided((known.nbytes // value.itemsize,), (1,))
    return value, text, known.nbytes


def rebuilt(run: torch.Tensor, what: Description) -> torch.Tensor:
    """The tensor over a landed run: contiguous, at the start of its storage, of any dtype. Maybe ``run`` itself, which the
    caller gives away."""
    if what.plain:
        # Detached, and in place: what arrives is nobody's view.
        value = run if run.dtype is what.dtype else run.view(what.dtype).detach()
        if len(what.shape) != 1:
            value = value.as_strided_(what.shape, dense(what.shape))
        return value.requires_grad_() if what.requires_grad else value
    value = torch.empty(0, dtype=what.dtype, device=run.device)
    strides = what.strides if what.strides is not None else dense(what.shape)
    if what.nbytes:
        value.set_(run.untyped_storage(), what.offset, what.shape, strides)
    else:
        value = torch.empty_strided(what.shape, strides, dtype=what.dtype, device=run.device)
    if what.flips & NEGATIVE:
        value = torch._neg_view(value)
    if what.flips & CONJUGATE:
        value = value.conj()
    return value.requires_grad_() if what.requires_grad else value


def as_it_lies(tensor: torch.Tensor) -> Outline | None:
    """The outline of a tensor that ``travels`` and whose span may be taken from memory as it lies; ``None`` for any other. The
    short way."""
    found = _outline(tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad)
    if not found.lone or tensor.is_neg():
        return None
    if tensor.untyped_storage().nbytes() < tensor.storage_offset() * tensor.itemsize + found.nbytes:
        check_held(tensor, found.nbytes)
    return found


_ALIGN = 16  # the largest element: offsets from here are whole numbers of elements of any dtype


class Place(NamedTuple):
    """The place of a tensor in the runs of its message."""

    base: int
    """Index of the first tensor of the message that lies in this run; the tensor's own index, if it is the first."""
    run: torch.Tensor | None
    """The run (uint8); ``None`` if this tensor is an equal view of ``base``, which goes alone."""
    offset: int
    """Bytes from the start of the run to the tensor's first element."""
    same: bool
    """Whether it is the same object as ``base``."""


class _View(NamedTuple):
    low: int
    high: int
    alone: int
    """The bytes of its run if it goes alone."""
    members: list[int]


def plan(tensors: Sequence[torch.Tensor]) -> dict[int, Place] | None:
    """The places of the tensors that share memory, by index; ``None`` if none do. ``travels`` is true for all
    tensors."""
    storages: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        storages.setdefault(tensor.untyped_storage()._cdata, []).append(index)
    if len(storages) == len(tensors):
        return None
    places: dict[int, Place] = {}
    for members in storages.values():
        if len(members) > 1:
            _plan_storage(tensors, members, places)
    return places or None


def _plan_storage(tensors: Sequence[torch.Tensor], members: list[int], places: dict[int, Place]) -> None:
    first: dict[int, int] = {}
    views: dict[tuple[object, ...], _View] = {}
    for index in members:
        base = first.setdefault(id(tensors[index]), index)
        if base != index:
            places[index] = Place(base, None, 0, True)
    for index in first.values() if len(first) > 1 else ():
        tensor = tensors[index]
        if not tensor.numel():
            continue  # no memory to share
        key = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        if key in views:
            views[key].members.append(index)
            continue
        low = int(tensor.storage_offset()) * tensor.itemsize
        nbytes = span(tensor.shape, tensor.stride()) * tensor.itemsize
        check_held(tensor, nbytes)
        views[key] = _View(low, low + nbytes, outline(tensor).nbytes, [index])
    if not views:
        return
    distinct = sorted(views.values(), key=lambda view: view.low)
    if not _together(tensors, distinct, places):
        for cluster in _clusters(distinct):
            if not _together(tensors, cluster, places):
                for view in cluster:
                    for index in view.members[1:]:
                        places[index] = Place(view.members[0], None, 0, False)


def _clusters(views: list[_View]) -> list[list[_View]]:
    """Groups of views whose spans overlap, of views in order of their start."""
    found: list[list[_View]] = []
    end = -1
    for view in views:
        if view.low < end:
            found[-1].append(view)
        else:
            found.append([view])
        end = max(end, view.high)
    return found


def _together(tensors: Sequence[torch.Tensor], views: list[_View], places: dict[int, Place]) -> bool:
    """Place views in one run, unless it would be wasteful (or there is nothing to share)."""
    if sum(len(view.members) for view in views) < 2:
        return True
    low, high = views[0].low // _ALIGN * _ALIGN, max(view.high for view in views)
    if len(views) == 1 or wasteful(high - low, sum(view.alone for view in views)):
        return False
    base = min(view.members[0] for view in views)
    run = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensors[base].untyped_storage(), low, (high - low,), (1,))
    for view in views:
        for index in view.members:
            places[index] = Place(base, run, view.low - low, False)
    return True
