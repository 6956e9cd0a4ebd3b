"""Models of programs that train over servers (``served_programs``): 5 numbers a row in, 10 classes out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def layered() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 10))


def in_double() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 64), nn.GELU(), nn.Linear(64, 10)).double()


def weight_normed() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 10))
    nn.utils.parametrizations.weight_norm(net[0])
    return net


class Tied(nn.Module):
    """One weight is the embedding, and the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 6), nn.LayerNorm(6)
        self.last = nn.Linear(6, 10, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.embedding((x.abs() * 3).long().clamp(0, 9)).mean(1)))


class Rare(nn.Module):
    """Two branches take turns, so that gradients are missing; a scalar is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.seldom, self.last = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, 10)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        branch = self.often if self.calls % 3 else self.seldom
        return self.last(torch.tanh(branch(x) * self.scale))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.last = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.norm(self.convolution(x.unsqueeze(1)))).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(1, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cells(x.unsqueeze(-1))[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 10)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.block(self.first(x.unsqueeze(-1))).mean(1))


class Bare(nn.Module):
    """Parameters of no layer, in lists and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 10))
        self.biases = nn.ParameterList([nn.Parameter(torch.randn(10)) for _ in range(2)])
        self.scales = nn.ParameterDict({"all": nn.Parameter(torch.rand(10))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scales["all"]
        out = torch.einsum("bi,io->bo", x, self.weight) + torch.stack(list(self.biases)).square().sum(0)
        return out * torch.cat([scale[:5], scale[5:]])


NETS = ["layered", "in_double", "weight_normed", "Tied", "Rare", "Buffered", "Recurrent", "Attending", "Bare"]
