"""``monitored_barrier``, ``split_group``, ``_set_pg_timeout``, ``_coalescing_manager`` and the flight recorder of
``torch.distributed`` for groups of this backend.

torch has no hook there: the first asks whether the backend is called gloo, the second for an accelerator, the third sets the
timeouts of gloo and NCCL only, the fourth goes on collecting calls, and keeps their tensors, after its body has raised, and the
last (torch 2.15) asks for what groups in C++ have, and groups in Python have not, which it does not record. So these functions
are replaced when the first group is made, and call torch's own for groups of other backends."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def _monitored_barrier(group: Any, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
    group.monitored_barrier(timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout, wait_all_ranks)


def _split_group(
    parent: Any,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
    **_: Any,
) -> Any:
    """The new group of this rank's part, ``None`` if it is in none. Parts have ranks of ``parent``. Only their members meet."""
    parts = split_ranks or []
    ranks = [rank for part in parts for rank in part]
    if not parts or not all(parts):
        raise ValueError("split_ranks needs at least one rank in each of its parts")
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < parent.size() for rank in ranks):
        raise ValueError(f"split_ranks has a rank twice, or one that is not among the {parent.size()} of the group: {parts}")
    mine = next((sorted(part) for part in parts if parent.rank() in part), None)
    if mine is None:
        c10d._process_group_name([], True)  # from torch 2.15 on this counts the groups, by which all ranks name the next one
        return None
    members = [dist.get_global_rank(parent, rank) for rank in mine]
    text = group_desc or f"{parent.group_desc}:split"
    # Groups of torch 2.10 are always sorted.
    kept: dict[str, Any] = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
    return dist.new_group(members, timeout, use_local_synchronization=True, group_desc=text, **kept)


@contextlib.contextmanager
def _coalescing_manager(theirs: Callable[..., Any], group: Any, **named: Any) -> Iterator[Any]:
    with theirs(group, **named) as manager:
        try:
            yield manager
        except BaseException:
            c10d._world.pg_coalesce_state.pop(group, None)
            group.collected.works = None
            raise


_REPLACED: dict[str, tuple[str, Callable[[Any], Callable[..., Any]]]] = {
    "monitored_barrier": ("group", lambda theirs: _monitored_barrier),
    "split_group": ("parent_pg", lambda theirs: _split_group),
    "_set_pg_timeout": ("group", lambda theirs: lambda group, timeout: group.set_timeout(timeout)),
    "_coalescing_manager": ("group", lambda theirs: functools.partial(_coalescing_manager, theirs)),
    "_maybe_attach_flight_recorder": ("pg", lambda theirs: lambda group, **_: None),
}
"""What torch calls the group, and what is called with ours instead, made of torch's function."""
_replaced: list[str] = []


def _for_ours(theirs: Callable[..., Any], named: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's function, and ``ours`` for groups of this backend that this rank is in."""
    from .backend import ProcessGroup

    shape = inspect.signature(theirs)

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = shape.bind(*args, **kwargs).arguments
        found = given.pop(named, None)
        found = c10d.GroupMember.WORLD if found is None else found
        return ours(found, **given) if isinstance(found, ProcessGroup) else theirs(*args, **kwargs)

    return call


def replace() -> None:
    """Once a process; a second time does nothing."""
    for name, (named, made) in _REPLACED.items():
        if name not in _replaced and hasattr(c10d, name):
            _replaced.append(name)
            theirs = getattr(c10d, name)
            ours = _for_ours(theirs, named, made(theirs))
            for module in (c10d, dist):
                if hasattr(module, name):
                    setattr(module, name, ours)
