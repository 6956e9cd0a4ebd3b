"""The functions once more, compiled to TorchScript when this module is imported."""

import torch
from torch import Tensor


@torch.jit.script
def identity_script(x: Tensor) -> Tensor:
    return x


@torch.jit.script
def heavy_script(x: Tensor) -> Tensor:
    for _ in range(100):
        x *= 2
        x /= 2
    return x
