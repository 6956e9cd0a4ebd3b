"""Tells torch of the backend ``rdmarpc``, and its compiler to leave the backend's code alone. Imports neither torch nor
anything else before a group is made.

Where this package is installed torch has the name already (``autoload``), else it has it from the import of ``rdmarpc``. A
program may import this package before torch: then torch is told as soon as its module of groups has been imported. So is its
compiler, which many programs never import.

Torch's groups and RPC are C++, which ``torch.compile`` does not trace. Ours are Python: it would trace what a call does, and
end with an error at the first batch of another size, or at the first attribute of a group. So all our files are on its list of
what it leaves alone. What it makes of a call to a group stays as it is: a graph, or a break between two.
"""

from __future__ import annotations

import pkgutil
import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

from ..base.imports import after_import

NAME = "rdmarpc"
_GROUPS, _RULES = "torch.distributed.distributed_c10d", "torch._dynamo.trace_rules"
_ROOT = __name__.partition(".")[0]
_TRACED = "experiments"
"""These are programs, which may want to be compiled."""
_TIMEOUT = timedelta(minutes=30)
"""Of a group whose maker names none: torch's."""


def register() -> None:
    """Once a process."""
    devices = ["cpu", "cuda"]
    after_import(_GROUPS, lambda groups: groups.Backend.register_backend(NAME, create, extended_api=True, devices=devices))
    after_import(_RULES, _leave_out)


def _leave_out(rules: ModuleType) -> None:
    inside = {module.name for module in pkgutil.iter_modules(sys.modules[_ROOT].__path__)}
    for name in {*inside, "graph", "transport"} - {_TRACED}:
        rules.add(f"{_ROOT}.{name}")


def create(options: Any, backend_options: Any = None) -> Any:
    """The ``ProcessGroup`` of torch's ``DistributedBackendOptions``. ``backend_options``: ``pg_options`` of the program."""
    from ..options import RpcBackendOptions
    from ..transport import cuda_driver
    from . import by_name
    from .backend import ProcessGroup

    if backend_options is not None and not isinstance(backend_options, RpcBackendOptions):
        raise TypeError(f"pg_options of the backend {NAME} are RpcBackendOptions, got {type(backend_options).__name__}")
    named = options.global_ranks_in_group  # none of the group of all, and of groups over stores of their own
    job = sys.modules[_GROUPS].GroupMember.WORLD if named else None
    ranks = named or range(options.group_size)
    timeout = _TIMEOUT if options.timeout is None else options.timeout
    by_name.replace()
    group = ProcessGroup(options.store, options.group_rank, ranks, timeout, backend_options, job)
    if not cuda_driver.count():  # ShardedTensor takes the first device that is no CPU, whether there is one or not
        sys.modules[_GROUPS].Backend.backend_capability[NAME] = ["cpu"]
    return group
