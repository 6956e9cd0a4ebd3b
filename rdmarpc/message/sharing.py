"""Tensors of one message that share memory, and share it where they arrive.

Tensors of one storage go as one run, the union of their spans, if not too much of that run is unused (``layout.wasteful``). If
it is, tensors whose spans overlap go together, under the same condition. Otherwise each goes alone, and does not share memory
any more where it arrives, as in ``torch.distributed.rpc``. Two equal views (same place, dtype, shape and strides) always share,
and one tensor object that occurs twice arrives as one object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import layout

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
    """The places of the tensors that share memory, by index; ``None`` if none do. ``layout.travels`` is true for all
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
        tensor = tensors[index]
        if id(tensor) in first:
            places[index] = Place(first[id(tensor)], None, 0, True)
            continue
        first[id(tensor)] = index
    for index in first.values() if len(first) > 1 else ():
        tensor = tensors[index]
        if not tensor.numel():
            continue  # no memory to share
        key = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
        if key in views:
            views[key].members.append(index)
            continue
        low = int(tensor.storage_offset()) * tensor.itemsize
        nbytes = layout.span(tensor.shape, tensor.stride()) * tensor.itemsize
        layout.check_held(tensor, nbytes)
        views[key] = _View(low, low + nbytes, layout.outline(tensor).nbytes, [index])
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
    if len(views) == 1 or layout.wasteful(high - low, sum(view.alone for view in views)):
        return False
    base = min(view.members[0] for view in views)
    run = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensors[base].untyped_storage(), low, (high - low,), (1,))
    for view in views:
        for index in view.members:
            places[index] = Place(base, run, view.low - low, False)
    return True
