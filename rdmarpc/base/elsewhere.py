"""Whether a tensor lies at a worker, and whether a step is captured, for rooms that must not import ``places``: that replaces
names of torch. ``places`` says so here."""

from __future__ import annotations

from collections.abc import Callable

import torch

classes: list[type[torch.Tensor]] = []
"""Of tensors that lie at workers; empty until there may be some."""
refusals: list[Callable[[str], None]] = []


def lies_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory in this process."""
    return type(tensor) in classes


def refuse(why: str) -> None:
    """What happens is no operation of torch: a capture that is under way (``graphed``) cannot repeat it."""
    for each in refusals:
        each(why)
