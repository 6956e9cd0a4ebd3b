"""``rdmarpc.install``."""

from __future__ import annotations

import os

from . import children, hook, modules


def install() -> None:
    """Stand in for ``torch.distributed.rpc``, ``.autograd``, ``DistributedOptimizer`` and ``RemoteModule``, for every library
    in this process and in the Python processes that it starts. Call it before other imports: names that other modules took
    from torch's are exchanged, but not what they made of them (subclasses, defaults of arguments, objects)."""
    children.tell(os.environ)
    hook.register()
    if modules.replaced():
        modules.load()  # modules that hold torch's names already would not ask for ours
