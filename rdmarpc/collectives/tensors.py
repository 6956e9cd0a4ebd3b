"""Tensors as the collectives take them: what is refused, and what lies flat in memory already."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import pairwise

import torch

from ..message.layout import span
from ..transport import NotSupported, cuda_driver

Flat = torch.Tensor


def check(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise unless these are dense tensors of one type, on the CPU or on GPUs that this process's driver serves."""
    for tensor in tensors:
        if not tensor.is_cpu and tensor.device.type != cuda_driver.kind():
            hint = "the backend rdmarpc takes tensors on the CPU and on CUDA devices"
            raise NotSupported(f"{what} of a tensor on {tensor.device}", hint=hint)
        if tensor.layout is not torch.strided:
            raise NotSupported(f"{what} of a tensor with layout {tensor.layout}")
        if tensor.is_nested or tensor.is_quantized:
            kind_of = "nested" if tensor.is_nested else "quantized"
            raise NotSupported(f"{what} of a {kind_of} tensor", hint="give its parts: memory does not say all of it")
        if not _has_memory(tensor, span(tensor.shape, tensor.stride())):
            what = f"{what} of a {type(tensor).__name__} without memory of its own"
            raise NotSupported(what, hint="give the tensor that holds the values")
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"{what} of tensors of several types: {tensors[0].dtype} and {tensor.dtype}")


def plain(tensor: torch.Tensor, other: torch.Tensor | None = None) -> bool:
    """Whether these are dense, on the CPU, of one type, and what their memory says: what most calls are made with."""
    dense = tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    one = dense and literal(tensor) and _has_memory(tensor, tensor.numel())
    return one and (other is None or (other.dtype == tensor.dtype and plain(other)))


def _has_memory(tensor: torch.Tensor, extent: int) -> bool:
    """Whether there is memory where a tensor's values are. Subclasses that wrap other tensors have none, nor do fake tensors,
    those of ``torch.func``, and those whose storage was given back, or shrunk. A view of a storage that was given back has an
    address."""
    try:
        if not extent:
            return True
        held = tensor.untyped_storage().nbytes()
        return tensor.data_ptr() != 0 and held >= (tensor.storage_offset() + extent) * tensor.itemsize
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


def values(tensor: torch.Tensor) -> Flat:
    """The values of a tensor, in its memory if they lie there."""
    found = tensor.detach()
    return found.view(-1) if literal(found) else found.resolve_conj().resolve_neg().contiguous().view(-1)


def check_places(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise unless each element of these has a place of its own."""
    for tensor in tensors:
        if tensor.numel() > 1 and any(step == 0 and count > 1 for step, count in zip(tensor.stride(), tensor.shape)):
            raise ValueError(f"{what} into a tensor several of whose elements are one place in memory: clone it before")


def check_apart(tensors: Sequence[torch.Tensor], what: str) -> None:
    """Raise if two of these whose values lie flat in memory have some of it in common: which of them it holds in the end would
    depend on timing."""
    spans = sorted((each.data_ptr(), each.nbytes) for each in tensors if each.numel() and literal(each))
    if any(after < start + nbytes for (start, nbytes), (after, _) in pairwise(spans)):
        raise ValueError(f"{what} into tensors that share memory with each other: clone them before")


def check_own(place: Flat, part: Flat, what: str) -> None:
    """Raise unless what stays at this rank fits its place. What peers send is compared when it comes."""
    if place.numel() != part.numel():
        raise ValueError(f"{what} of {part.numel()} elements into a tensor of {place.numel()}")


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
