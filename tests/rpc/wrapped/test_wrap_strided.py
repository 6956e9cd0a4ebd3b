"""Payloads with gaps, expanded ones, strides that no memory order has: bits as in one process, and nothing is staged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from group import may_stage
from test_wrap import DEVICES, assert_same_state, drive
from torch import nn

import rdmarpc as rpc
from rdmarpc.ground import here


class Unet(nn.Module):
    """Skip connections: the gradients of a concatenation are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.bottom, self.up = nn.Conv2d(6, 10, 3, padding=1), nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, x):
        skip = F.gelu(self.down(x))
        low = F.gelu(self.middle(F.max_pool2d(skip, 2)))
        low = F.interpolate(F.gelu(self.bottom(low)), scale_factor=2.0)
        return self.up(torch.cat([skip, low], 1)).flatten(1).mean(1)


class Dense(nn.Module):
    """Every layer reads what all before it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * at, 4, 3, padding=1) for at in range(4))

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            found.append(F.gelu(layer(torch.cat(found, 1))))
        return torch.cat(found, 1).sum((1, 2, 3))


class Vit(nn.Module):
    """Patches, a class token, attention, and a head that reads the token alone, or all but that."""

    def __init__(self, token: bool) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 4, stride=4), nn.Parameter(torch.randn(1, 1, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.norm, self.head, self.first = nn.LayerNorm(16), nn.Sequential(nn.GELU(), nn.Linear(16, 3)), token

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.norm(self.block(torch.cat([self.token.expand(len(x), -1, -1), x], 1)))
        x = x[:, 0] if self.first else x[:, 1:]
        return self.head(x).reshape(len(x), -1).sum(1)


class Clip(nn.Module):
    """Two towers, and a product of what both give."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Sequential(nn.Flatten(), nn.Linear(768, 8)), nn.Linear(16, 8)

    def forward(self, x):
        image, text = self.image(x), self.text(x[:, 0, 0, ::1])
        both = torch.stack([F.normalize(image, dim=-1), F.normalize(text, dim=-1)])
        return (both[0] @ both[1].t()).diagonal()


class Branches(nn.Module):
    """Inception: branches, concatenated, and an auxiliary head."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 5, 3, padding=1)
        self.three = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, 2, 1))
        self.aux, self.last = nn.Linear(11, 4), nn.Linear(11, 4)

    def forward(self, x):
        y = torch.cat([self.one(x), self.two(x), self.three(x)], 1)
        return (self.last(y.mean((2, 3))) + 0.3 * self.aux(y.amax((2, 3)))).sum(1)


class Odd(nn.Module):
    """Views of every kind go there, and come back as gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.GELU() for _ in range(7))

    def forward(self, x):
        views = [
            x[:, :, ::2],
            x.transpose(1, 3)[:, 1:],
            x.mean((2, 3), keepdim=True).expand_as(x),
            x.unfold(3, 4, 2),
            x[:, :1].select(3, 0),
            torch.view_as_complex(x.reshape(*x.shape[:3], -1, 2)).conj().real,
            x.sum().expand(5, 7),
        ]
        return torch.stack([part(view).sum() + part(view).norm() for part, view in zip(self.parts, views)])


class Without(nn.Module):
    """What has no elements goes there, and comes back as gradients with strides of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.GELU() for _ in range(4))

    def forward(self, x):
        views = [x[:0], x[:, :0].transpose(0, 2), x[..., :0].flatten(1), x[:0, ::2].expand(0, 2, 16, 16)]
        found = [part(view) for part, view in zip(self.parts, views)]
        return torch.stack([part.sum(0).sum() + part.mean(-1).sum() for part in found]).nan_to_num().sum() + x.sum()


CASES: list[tuple[Any, dict[str, str]]] = [
    (Unet, {"down": "worker1", "bottom": "worker1"}),
    (Dense, {"layers.0": "worker1", "layers.2": "worker1"}),
    (lambda: Vit(True), {"patches": "worker1", "head": "worker1"}),
    (lambda: Vit(False), {"block": "worker1", "head": "worker1"}),
    (Clip, {"image": "worker1"}),
    (Clip, {"text": "worker1"}),
    (Branches, {"two": "worker1", "aux": "worker1"}),
    (Odd, {"parts": "worker1"}),
    (Without, {"parts": "worker1"}),
    (Odd, {"parts.0": "worker1", "parts.2": "worker1", "parts.4": "worker1"}),
]


def train(make: Any, placement: dict[str, str], **options: Any) -> tuple[Any, list[dict[str, int]]]:
    """Four steps of both, bit for bit; the counters before the first and after each."""
    torch.manual_seed(1)
    net = make()
    model, twin = rpc.wrap(copy.deepcopy(net), placement, **options), net
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (model, twin) if list(net.parameters())]
    seen = [model.counters()]
    for number in range(4):
        x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(number))
        losses, gradients = [], []
        for which in (model, twin):
            given = x.clone().requires_grad_()
            losses.append(which(given))
            losses[-1].tanh().sum().backward()
            gradients.append(given.grad)
        assert torch.equal(*losses), f"{make}, step {number}: {losses}"
        assert torch.equal(*gradients), f"{make}, step {number}: gradient of the input"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append(model.counters())
    assert_same_state(model, twin)
    return model, seen


class Comb(nn.Module):
    """Single elements, far from each other: more of them than are sent one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.GELU()

    def forward(self, x):
        return self.part(x.repeat(1, 1, 8, 8).reshape(-1, 64)[:, 3]).reshape(len(x), -1).sum(1)


def nothing_is_staged() -> None:
    """From the third step on, on devices that map slots or send from any memory; what is staged before is named."""
    for make, placement in CASES[2::3] if may_stage() else CASES:  # fewer in the guest, which is slow
        model, seen = train(make, placement)
        if not may_stage():
            assert staged(seen[2:]) == {}, (placement, staged(seen[2:]))
        found = staged(seen)
        total = found.pop("bytes_staged", 0)
        assert total == sum(found.values()), (placement, found)
        lines = [line for line in model.placement_table().splitlines() if "bytes staged so far (" in line]
        assert bool(lines) == bool(total), (placement, lines)
        model.close()


def combed() -> None:
    model, seen = train(Comb, {"part": "worker1"})
    later = staged(seen[2:])
    if here.current().device.name.startswith(("shm", "cuda")):
        assert later == {}
    else:
        once = 2 * 3072 * 4  # in two steps
        assert later["bytes_staged[getitem()]"] >= once  # over verbs the gradient of that name is staged too
        assert may_stage() or later["bytes_staged"] == later["bytes_staged[getitem()]"] == once
        why = "memory that the adapter does not know" if may_stage() else "short runs between wide gaps"
        assert why in model.placement_table()
    model.close()


def staged(seen: list[dict[str, int]], start: str = "bytes_staged") -> dict[str, int]:
    """What the last of these counters has more than the first."""
    found = {key: value - seen[0].get(key, 0) for key, value in seen[-1].items() if key.startswith(start)}
    return {key: value for key, value in found.items() if value}


def every() -> int:
    """Returns how many bytes both workers have written."""
    nothing_is_staged()
    combed()
    return sum(rpc.rpc_sync(f"worker{rank}", rpc.counters)["bytes_direct"] for rank in range(2))


@pytest.mark.parametrize("device", DEVICES)
def test_gaps_are_not_staged(device):
    drive(every, 2, transport=device, timeout=250.0)
