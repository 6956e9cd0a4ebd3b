"""Tells torch of the backend ``rdmarpc``. Imports neither torch nor anything else before a group is made.

A program may import this package before torch: then torch is told as soon as its module of groups has been imported."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ..ground.imports import AfterImport

NAME = "rdmarpc"
_GROUPS = "torch.distributed.distributed_c10d"


def _create(options: Any, backend_options: Any = None) -> Any:
    from ..options import RpcBackendOptions
    from . import by_name, compiled
    from .backend import ProcessGroup

    if backend_options is not None and not isinstance(backend_options, RpcBackendOptions):
        raise TypeError(f"pg_options of the backend {NAME} are RpcBackendOptions, got {type(backend_options).__name__}")
    by_name.replace()
    compiled.leave_out()
    ranks = options.global_ranks_in_group or range(options.group_size)  # torch names none for the group of all
    return ProcessGroup(options.store, options.group_rank, ranks, options.timeout, backend_options)


def _tell(groups: ModuleType) -> None:
    if NAME not in groups.Backend.backend_list:
        groups.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _tell_and_end(groups: ModuleType) -> None:
    _tell(groups)
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


_finder = AfterImport(_GROUPS, _tell_and_end)


def register() -> None:
    """Once a process; a second time does nothing. Later, if torch is not imported yet."""
    groups = sys.modules.get(_GROUPS)
    if groups is not None:
        _tell(groups)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
