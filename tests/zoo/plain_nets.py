"""Networks of the zoo that need torch alone: sequences, images, mixtures, fields."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn


class Tagger(nn.Module):
    def __init__(self, kind: str = "LSTM") -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 12)
        self.lower = getattr(nn, kind)(12, 16, batch_first=True, bidirectional=True)
        self.upper = getattr(nn, kind)(32, 16, batch_first=True)
        self.head = nn.Linear(16, 8)

    def forward(self, x):
        x, _ = self.lower(self.embed(x))
        x, _ = self.upper(x)
        return self.head(x)


class Packed(nn.Module):
    """Sequences of several lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(40, 12), nn.LSTM(12, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.rnn(packed)
        return self.head(hidden[-1])


class Translator(nn.Module):
    """nn.Transformer with masks, and tied embeddings at one place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.body = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 40)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.body(self.embed(source), self.embed(target), tgt_mask=mask))


class TiedLm(nn.Module):
    """Input and output embedding are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.place = nn.Parameter(torch.randn(32, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.blocks(self.embed(x) + self.place[: x.shape[1]], mask=mask, is_causal=True)
        return F.linear(self.norm(h), self.embed.weight)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 16), nn.ReLU())
        self.mean, self.logvar = nn.Linear(16, 4), nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 20))

    def forward(self, x, noise):
        h = self.encoder(x)
        mean, logvar = self.mean(h), self.logvar(h)
        z = mean + noise * torch.exp(0.5 * logvar)
        return {"x": self.decoder(z), "kl": -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum(1).mean()}


class NoisyVae(Vae):
    """Draws its noise itself."""

    def forward(self, x):
        return super().forward(x, torch.randn_like(self.mean(self.encoder(x))))


class Residual(nn.Module):
    def __init__(self, before: int, after: int, time: int = 0) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(2, after), nn.Conv2d(after, after, 3, padding=1)
        self.time = nn.Linear(time, after) if time else None
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, t=None):
        h = self.conv1(F.silu(self.norm1(x)))
        if self.time is not None:
            h = h + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class DiffusionUnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([Residual(8, 8, 16), Residual(8, 16, 16)])
        self.middle = Residual(16, 16, 16)
        self.up = nn.ModuleList([Residual(32, 8, 16), Residual(16, 8, 16)])
        self.out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x, t):
        freqs = torch.exp(-math.log(100) * torch.arange(4, device=t.device) / 4)
        angles = t.float()[:, None] * freqs[None]
        t = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x, skips = self.stem(x), []
        for block in self.down:
            x = block(x, t)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, t)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1), t)
        return self.out(x)


class Unet(nn.Module):
    """Transposed convolutions, batch norm, skips."""

    def __init__(self) -> None:
        super().__init__()

        def double(before: int, after: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
                nn.Conv2d(after, after, 3, padding=1),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
            )

        self.enc1, self.enc2, self.bottom = double(3, 8), double(8, 16), double(16, 32)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.dec2 = nn.ConvTranspose2d(32, 16, 2, 2), double(32, 16)
        self.up1, self.dec1 = nn.ConvTranspose2d(16, 8, 2, 2), double(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        e1 = self.enc1(x)
        e2 = self.enc2(self.pool(e1))
        b = self.bottom(self.pool(e2))
        d2 = self.dec2(torch.cat([self.up2(b), e2], 1))
        d1 = self.dec1(torch.cat([self.up1(d2), e1], 1))
        return self.head(d1)


class Expert(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Moe(nn.Module):
    """Dense mixture: every expert sees every token, weighted by the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate = nn.Embedding(40, 12), nn.Linear(12, 4)
        self.experts = nn.ModuleList([Expert(12) for _ in range(4)])
        self.head = nn.Linear(12, 40)

    def forward(self, x):
        x = self.embed(x)
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        gates = torch.zeros(*x.shape[:-1], 4).scatter(-1, chosen, weights)
        mixed = sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return self.head(x + mixed)


class SparseMoe(Moe):
    """Experts see their tokens only: how many, the data decides."""

    def forward(self, x):
        x = self.embed(x)
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            mixed = mixed.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        return self.head(x + mixed.view_as(x))


class AuxiliaryLayer(nn.Module):
    """Leaves its balance loss in an attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 2), nn.ModuleList([Expert(width) for _ in range(2)])
        self.aux: Any = None

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        self.aux = weights.mean((0, 1)).pow(2).sum()
        return x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class AuxiliaryMoe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 12)
        self.layers = nn.ModuleList([AuxiliaryLayer(12) for _ in range(3)])
        self.head = nn.Linear(12, 40)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x), sum(layer.aux for layer in self.layers)


class Dlrm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.tables = nn.ModuleList([nn.EmbeddingBag(30, 8, mode="sum") for _ in range(4)])
        self.top = nn.Sequential(nn.Linear(8 + 10, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense, ids):
        x = self.bottom(dense)
        all_ = torch.stack([x] + [table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        products = torch.bmm(all_, all_.transpose(1, 2))
        rows, columns = torch.triu_indices(5, 5, offset=1)
        return self.top(torch.cat([x, products[:, rows, columns]], 1)).squeeze(1)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 8)

    def forward(self, a, b):
        a, b = F.normalize(self.head(self.trunk(a))), F.normalize(self.head(self.trunk(b)))
        return a @ b.t()


class Nerf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(27, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.two = nn.Sequential(nn.Linear(32 + 27, 32), nn.ReLU())
        self.density, self.color = nn.Linear(32, 1), nn.Sequential(nn.Linear(32 + 3, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, points, views):
        waves = [points] + [f(2.0**k * points) for k in range(4) for f in (torch.sin, torch.cos)]
        x = torch.cat(waves, -1)
        h = self.two(torch.cat([self.one(x), x], -1))
        density = F.relu(self.density(h)).squeeze(-1)
        alpha = 1 - torch.exp(-density)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        color = torch.sigmoid(self.color(torch.cat([h, views[:, None].expand(-1, points.shape[1], -1)], -1)))
        return ((alpha * through)[..., None] * color).sum(1)


class SpectralConv(nn.Module):
    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x):
        f = torch.fft.rfft(x)
        out = torch.zeros_like(f)
        out[:, :, : self.modes] = torch.einsum("bix,iox->box", f[:, :, : self.modes], self.weight)
        return torch.fft.irfft(out, n=x.size(-1))


class Fno(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(2, 8)
        self.spectral = nn.ModuleList([SpectralConv(8, 4) for _ in range(2)])
        self.local = nn.ModuleList([nn.Conv1d(8, 8, 1) for _ in range(2)])
        self.project = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, x):
        x = self.lift(x).permute(0, 2, 1)
        for spectral, local in zip(self.spectral, self.local):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x.permute(0, 2, 1))


class NeuralOde(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(20, 8), nn.Linear(8, 4)
        self.field = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 8))

    def rate(self, t, y):
        return self.field(torch.cat([y, torch.full_like(y[:, :1], t)], 1))

    def forward(self, x):
        y, step = self.stem(x), 0.25
        for number in range(4):
            t = number * step
            k1 = self.rate(t, y)
            k2 = self.rate(t + step / 2, y + step / 2 * k1)
            y = y + step * k2
        return self.head(y)


class Adaptive(NeuralOde):
    """The size of its steps is decided by values."""

    def forward(self, x):
        y, t, step = self.stem(x), 0.0, 0.5
        while t < 1.0:
            step = min(step, 1.0 - t)
            full = y + step * self.rate(t, y)
            half = y + step / 2 * self.rate(t, y)
            half = half + step / 2 * self.rate(t + step / 2, half)
            if (full - half).abs().max().item() < 0.05 or step < 0.1:
                y, t = half, t + step
            else:
                step = step / 2
        return self.head(y)
