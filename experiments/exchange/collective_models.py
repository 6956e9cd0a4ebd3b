"""Models for the step of DistributedDataParallel: the exposed part of its communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], object]


class _Gru(nn.Module):
    """7.3 million parameters: a GRU of 1024, and a head of 1000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(1024, 1024, batch_first=True), nn.Linear(1024, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.gru(x)[0][:, -1])
        return out


def _resnet() -> nn.Module:
    """25.6 million parameters in 106 tensors, about as many as ResNet-50 has weights."""
    layers: list[nn.Module] = []
    for _ in range(53):
        layers += [nn.Linear(694, 694), nn.ReLU()]
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-50-sized": (_resnet, (16, 694)),
    "GRU": (_Gru, (4, 10, 1024)),
}


def steps(name: str, groups: dict[str, Any]) -> tuple[int, dict[str, Step]]:
    """Bytes of the gradients; forward and backward with each group, and ``alone``."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    x = torch.randn(shape)

    def step_of(model: nn.Module) -> Step:
        def step() -> None:
            model.zero_grad(set_to_none=False)
            model(x).sum().backward()

        return step

    alone = make()
    found = {"alone": step_of(alone)}
    for what, group in groups.items():
        found[what] = step_of(DistributedDataParallel(make(), process_group=group, gradient_as_bucket_view=True))
    return sum(each.numel() * 4 for each in alone.parameters()), found
