"""What torch calls at the end of its import, by the entry point ``torch.backends``. It is installed as a package of its own,
``rdmarpc_autoload``, so that ``import torch`` does not import all of ``rdmarpc``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def register() -> None:
    """Tell torch of the backend ``rdmarpc``."""
    if dist.is_available():
        dist.Backend.register_backend("rdmarpc", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any = None) -> Any:
    from rdmarpc.collectives.register import create

    return create(options, backend_options)
