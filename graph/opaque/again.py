"""What ``torch.utils.checkpoint`` runs twice."""

from __future__ import annotations

from typing import Any

import torch

from ...transport import NotSupported


def runs_again() -> bool:
    """Whether ``torch.utils.checkpoint`` runs what is called now once more in the backward."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


class ActsAgain(NotSupported):
    """What ``torch.utils.checkpoint`` runs twice changes something each time: no graph has that."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} changes what it keeps, and torch.utils.checkpoint runs it twice, which a trace does not",
            hint="use checkpoint inside of a part that lies at one worker",
        )
