"""More models for ``wrapped_programs``, like those of ``served_nets``."""

from __future__ import annotations

import copy

import served_nets
import torch
import torch.nn.functional as F
from served_nets import *  # noqa: F403
from torch import nn
from torch.utils.checkpoint import checkpoint


class Deep(nn.Module):
    """Blocks in a list, in residuals, with dropout: the first one is frozen, the last one shares a weight with another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.SiLU(), nn.Dropout(0.1), nn.Linear(12, 6)) for _ in range(4)
        )
        self.head = nn.Linear(6, 10)
        self.blocks[0].requires_grad_(False)
        self.blocks[3][1].weight = self.blocks[2][1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Recomputed(nn.Module):
    """Activations are computed again in the backward, in both of torch's ways."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Tanh())
        self.two = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.last = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.one, x, use_reentrant=False)
        return self.last(checkpoint(self.two, x, use_reentrant=True))


class Spectral(nn.Module):
    """Buffers that a forward writes, by parametrizations and by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8))
        self.two = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
        self.last = nn.Linear(8, 10)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.tensor(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.one(x))
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        return self.last(self.two(x - self.mean))


class Momentum(nn.Module):
    """A teacher that follows: parameters of one part are averages of another's."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 10))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for mine, its in zip(self.teacher.parameters(), self.student.parameters()):
                    mine.mul_(0.9).add_(its, alpha=0.1)
        return self.student(x) + 0.5 * self.teacher(x).detach()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.cfloat))
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.first(x).float()
        turned = torch.complex(seen, seen.flip(-1)) * self.filter
        return self.last((turned.real * turned.conj().imag).to(x.dtype))


class Experts(nn.Module):
    """Routes rows by values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 3)
        self.experts = nn.ModuleDict({str(n): nn.Linear(5, 10) for n in range(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 10)
        for n, expert in enumerate(self.experts.values()):
            rows = (chosen == n).nonzero().squeeze(-1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


class Pooled(nn.Module):
    """A normalization by groups, and convolutions in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4, momentum=None)
        self.second = nn.Conv2d(4, 4, 1, groups=2)
        self.groups = nn.GroupNorm(2, 4)
        self.last = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :, None] * x[:, None]
        x = torch.stack([x, -x], 1).contiguous(memory_format=torch.channels_last)
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.last(self.groups(self.second(x)).mean((2, 3)))


def halved() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 10)).bfloat16()


def normed() -> nn.Module:
    """Old hooks of torch's that set a weight before each forward."""
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 8)), nn.ELU(), nn.utils.spectral_norm(nn.Linear(8, 10)))


NETS = [
    *served_nets.NETS,
    "Deep",
    "Deep",
    "Recomputed",
    "Spectral",
    "Momentum",
    "Complex",
    "Experts",
    "Pooled",
    "halved",
    "normed",
]
