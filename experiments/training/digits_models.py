"""The models, each a chain of three named parts: `stem`, `features`, `classifier`.

No part draws random numbers while it runs (no dropout), so a part gives the same bits in whichever process it lives.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn


def cnn(channels: list[int], hidden: int) -> nn.Sequential:
    """Two convolutions and two linear layers for 8x8 images."""
    first, second = channels
    stem = nn.Sequential(nn.Conv2d(1, first, 3, padding=1), nn.ReLU())
    features = nn.Sequential(nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    classifier = nn.Sequential(nn.Linear(second * 16, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return nn.Sequential(OrderedDict(stem=stem, features=features, classifier=classifier))


def mlp(hidden: list[int]) -> nn.Sequential:
    """Three linear layers for 8x8 images."""
    first, second = hidden
    stem = nn.Sequential(nn.Flatten(), nn.Linear(64, first), nn.ReLU())
    features = nn.Sequential(nn.Linear(first, second), nn.ReLU())
    classifier = nn.Linear(second, 10)
    return nn.Sequential(OrderedDict(stem=stem, features=features, classifier=classifier))


def build(model: dict[str, Any], seed: int) -> nn.Sequential:
    """The model of a `conf/model/*.yaml`, with weights that depend on `seed` only."""
    sizes = {key: value for key, value in model.items() if key not in ("name", "placement")}
    torch.manual_seed(seed)
    if model["name"] == "cnn":
        return cnn(**sizes)
    if model["name"] == "mlp":
        return mlp(**sizes)
    raise ValueError(f"model.name={model['name']} is not one of: cnn, mlp")
