"""Tensors as the collectives take them: flat, contiguous, on the CPU, without a graph; and back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from ..transport import NotSupported

Flat = torch.Tensor


def check(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise unless these are dense tensors of one type on the CPU."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise NotSupported(f"{what} of a tensor on {tensor.device}", hint="the backend rdmarpc takes tensors on the CPU")
        if tensor.layout is not torch.strided:
            raise NotSupported(f"{what} of a tensor with layout {tensor.layout}")
        if not _has_memory(tensor):
            kind = type(tensor).__name__
            raise NotSupported(f"{what} of a {kind} without memory of its own", hint="give the tensor that holds the values")
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"{what} of tensors of several types: {tensors[0].dtype} and {tensor.dtype}")


def plain(tensor: torch.Tensor, other: torch.Tensor | None = None) -> bool:
    """Whether these are dense, on the CPU, of one type, and what their memory says: what most calls are made with."""
    one = tensor.is_cpu and tensor.layout is torch.strided and literal(tensor) and _has_memory(tensor)
    return one and (other is None or (other.dtype == tensor.dtype and plain(other)))


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is memory where a tensor's values are. Subclasses that wrap other tensors have none, nor do fake tensors,
    those of ``torch.func``, and those whose storage was given back."""
    try:
        return tensor.data_ptr() != 0 or not tensor.numel()
    except RuntimeError:
        return False


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or, of the result of a functional collective (``DTensor.to_local`` gives such), the tensor that it
    stands for, once it is there."""
    wait = getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()


def literal(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor holds its values, one after the other. A view may be the conjugate or the negative of what
    lies there."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def writing(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """What the writing of results runs in: no graph, and the mode of inference if one of them was made in it. The thread that
    writes is not always the caller's."""
    return torch.inference_mode() if any(each.is_inference() for each in tensors) else torch.no_grad()


def source(tensor: torch.Tensor) -> Flat:
    """The values of a tensor, in its memory if they lie there."""
    values = tensor.detach()
    return values.view(-1) if literal(values) else values.resolve_conj().resolve_neg().contiguous().view(-1)


def check_places(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise unless each element of these has a place of its own."""
    for tensor in tensors:
        if tensor.numel() > 1 and any(step == 0 and count > 1 for step, count in zip(tensor.stride(), tensor.shape)):
            raise ValueError(f"{what} into a tensor several of whose elements are one place in memory: clone it before")


def check_apart(places: Sequence[Flat], what: str) -> None:
    """Raise if two of these have memory in common: which of them it holds in the end would depend on timing."""
    spans = sorted((each.data_ptr(), each.nbytes) for each in places if each.numel())
    if any(after < start + nbytes for (start, nbytes), (after, _) in pairwise(spans)):
        raise ValueError(f"{what} into tensors that share memory with each other: clone them before")


def check_own(place: Flat, part: Flat, what: str) -> None:
    """Raise unless what stays at this rank fits its place. What peers send is compared when it comes."""
    if place.numel() != part.numel():
        raise ValueError(f"{what} of {part.numel()} elements into a tensor of {place.numel()}")


def target(tensor: torch.Tensor, back: list[Callable[[], object]], *, read: bool = False) -> Flat:
    """Where a tensor's new values go: its memory if they may lie there, else a buffer, and ``back`` gets the call that copies
    the buffer into the tensor. ``read``: the values are read before."""
    plain = tensor.detach()
    if literal(plain):
        return plain.view(-1)
    check_places([plain], "a collective")
    buffer = source(plain).view(plain.shape) if read else torch.empty(plain.shape, dtype=plain.dtype)
    back.append(lambda: plain.copy_(buffer))
    return buffer.view(-1)


def split(tensor: torch.Tensor, sizes: Sequence[int], count: int, what: str) -> list[Flat]:
    """A flat contiguous tensor cut along dimension 0 of its original, whose rows are ``sizes`` (empty: ``count`` equal
    parts)."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if sizes:
        if len(sizes) != count or sum(sizes) != rows:
            raise ValueError(
                f"{what}: the split sizes {list(sizes)} do not add up to the {rows} rows, one for each of {count} ranks"
            )
        each = tensor.numel() // rows if rows else 0
        return list(tensor.detach().view(-1).split([size * each for size in sizes]))
    if tensor.numel() % count or (tensor.dim() and rows % count and tensor.numel()):
        raise ValueError(f"{what}: {tuple(tensor.shape)} is not divisible by {count} ranks")
    part = tensor.numel() // count
    return list(tensor.detach().view(-1).split(part)) if part else [tensor.detach().view(-1)] * count
