"""Functions that no worker has called yet: all the same, each with a name of its own."""

from types import FunctionType

import torch


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


COUNT = 2_000

for _number in range(COUNT):
    _name = f"identity_{_number}"
    globals()[_name] = _function = FunctionType(identity.__code__, globals(), _name)
    _function.__qualname__ = _name  # by which it is pickled

_unused = iter(range(COUNT))


def take() -> tuple[FunctionType, int]:
    """A function that this process has not been given before, and its number. StopIteration when there are no more."""
    number = next(_unused)
    return globals()[f"identity_{number}"], number
