"""``monitored_barrier``, ``split_group``, ``_set_pg_timeout``, ``_coalescing_manager`` and the flight recorder of
``torch.distributed`` for groups of this backend.

torch has no hook there: the first asks whether the backend is called gloo, the second for an accelerator, the third sets the
timeouts of gloo and NCCL only, the fourth goes on collecting calls, and keeps their tensors, after its body has raised, and the
last (torch 2.15) asks for what groups in C++ have, and groups in Python have not, which it does not record. So these functions
are replaced when the first group is made, and call torch's own for groups of other backends."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def _ours(group: Any) -> Any:
    """A group of this backend that this rank is in, else ``None``."""
    from .backend import ProcessGroup

    found = c10d.GroupMember.WORLD if group is None else group
    return found if isinstance(found, ProcessGroup) else None


def _monitored_barrier(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def monitored_barrier(
        group: Any = c10d.GroupMember.WORLD, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        found = _ours(group)
        if found is None:
            theirs(group, timeout, wait_all_ranks)
            return
        found.monitored_barrier(timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout, wait_all_ranks)

    return monitored_barrier


def _split_group(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def split_group(
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: Any = None,
    ) -> Any:
        found = _ours(parent_pg)
        if found is None:
            return theirs(parent_pg, split_ranks, timeout, pg_options, group_desc, backend)
        return _split(found, split_ranks or [], timeout, group_desc)

    return split_group


def _split(parent: Any, parts: Sequence[Sequence[int]], timeout: timedelta | None, description: str | None) -> Any:
    """The new group of this rank's part, ``None`` if it is in none. Parts have ranks of ``parent``. Only their members meet."""
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
    text = description or f"{parent.group_desc}:split"
    return dist.new_group(members, timeout, use_local_synchronization=True, group_desc=text, sort_ranks=False)


def _set_pg_timeout(theirs: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(theirs)
    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        found = _ours(group)
        if found is None:
            theirs(timeout, group)
            return
        found.set_timeout(timeout)

    return set_pg_timeout


def _coalescing_manager(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    @contextlib.contextmanager
    def coalescing_manager(group: Any = None, *args: Any, **named: Any) -> Iterator[Any]:
        with theirs(group, *args, **named) as manager:
            try:
                yield manager
            except BaseException:
                if (found := _ours(group)) is not None:
                    c10d._world.pg_coalesce_state.pop(found, None)
                    found.collected.works = None
                raise

    return coalescing_manager


def _maybe_attach_flight_recorder(theirs: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(theirs)
    def maybe_attach_flight_recorder(pg: Any, *args: Any) -> None:
        if _ours(pg) is None:
            theirs(pg, *args)

    return maybe_attach_flight_recorder


_REPLACED = {
    "monitored_barrier": _monitored_barrier,
    "split_group": _split_group,
    "_set_pg_timeout": _set_pg_timeout,
    "_coalescing_manager": _coalescing_manager,
    "_maybe_attach_flight_recorder": _maybe_attach_flight_recorder,
}
_replaced: list[str] = []


def replace() -> None:
    """Once a process; a second time does nothing."""
    for name, made in _REPLACED.items():
        if name not in _replaced and hasattr(c10d, name):
            _replaced.append(name)
            ours = made(getattr(c10d, name))
            for module in (c10d, dist):
                if hasattr(module, name):
                    setattr(module, name, ours)
