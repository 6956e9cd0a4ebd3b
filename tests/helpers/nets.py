"""Small models for the tests of ``wrap``, a few layers of each kind. Each entry of ``NETS`` has an input that fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.middle, self.classifier = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8 * 16, 4)

    def forward(self, x):
        return self.classifier(torch.flatten(F.relu(self.middle(self.features(x))), 1))


class Skip(nn.Module):
    """Values that several parts read, a parameter and a buffer of its own, a part that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = F.relu(self.a(x))
        z = torch.tanh(self.b(torch.tanh(self.b(y)))) * self.scale
        return self.c(z + y)


class Language(nn.Module):
    """Tied embeddings, attention with a mask, a norm, tokens of any length; logits of the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(16, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))[:, -1]


class Recurrent(nn.Module):
    """Packed sequences, whose lengths come from the values."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(20, 10), nn.LSTM(10, 12, 2, batch_first=True, bidirectional=True)
        self.gru, self.head = nn.GRU(24, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, ids):
        lengths = 1 + ids[:, 0] % ids.shape[1]
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(self.gru(out)[1][0])


class Experts(nn.Module):
    """Which experts run, and on how many rows, depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(20, 3), nn.ModuleList(nn.Linear(20, 20) for _ in range(3))
        self.head = nn.Linear(20, 4)

    def forward(self, x):
        scores = self.router(x).softmax(1)
        best, y = scores.argmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return self.head(y)


class Unet(nn.Module):
    """The gradients of a concatenation are parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.bottom, self.up = nn.Conv2d(6, 10, 3, padding=1), nn.ConvTranspose2d(16, 4, 3, padding=1)

    def forward(self, x):
        skip = F.gelu(self.down(x))
        low = F.gelu(self.middle(F.max_pool2d(skip, 2)))
        low = F.interpolate(F.gelu(self.bottom(low)), scale_factor=2.0)
        return self.up(torch.cat([skip, low], 1)).mean((2, 3))


class Vit(nn.Module):
    """Patches, an expanded token, strided reads of one token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(1, 16, 4, stride=4), nn.Parameter(torch.randn(1, 1, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Sequential(nn.GELU(), nn.Linear(16, 4))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.norm(self.block(torch.cat([self.token.expand(len(x), -1, -1), x], 1)))
        return self.head(x[:, 0])


class Spectral(nn.Module):
    """Complex numbers, writes into slices, a write that is read before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.mix, self.head = nn.Linear(20, 16), nn.Linear(6, 6), nn.Linear(16, 4)
        self.weights = nn.Parameter(torch.randn(5, dtype=torch.cfloat) * 0.3)

    def forward(self, x):
        table = torch.zeros(x.shape[0], 9, dtype=torch.cfloat)
        table[:, :5] = torch.fft.rfft(self.lift(x))[:, :5] * self.weights
        y = torch.fft.irfft(table, n=16)
        y += torch.tanh(x[:, :16])
        y[:, 0] = 0.5
        y[:, 10:] = self.mix(y[:, 4:10].clone())
        y.view(-1).mul_(2.0)
        return self.head(y)


class Odd(nn.Module):
    """Views of every kind are read, and come back as gradients; some have no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 1), nn.Linear(9, 4)

    def forward(self, x):
        x = self.first(x)
        views = [
            x[:, :, ::2],
            x.transpose(1, 3)[:, 1:],
            x.mean((2, 3), keepdim=True).expand_as(x),
            x.unfold(3, 4, 2),
            x[:, :1].select(3, 0),
            torch.view_as_complex(x.reshape(*x.shape[:3], -1, 2)).conj().real,
            x.sum().expand(len(x), 7),
            x[..., :0],
            x.flip(1).permute(0, 2, 3, 1),
        ]
        return self.second(torch.stack([F.gelu(view).flatten(1).sum(1) for view in views], 1))


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], torch.Tensor]
    classes: int = 4


def _floats(*shape: int) -> Callable[[int, torch.Generator], torch.Tensor]:
    return lambda size, generator: torch.randn(size, *shape, generator=generator)


def _ids(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(20, (size, 5 + size % 3), generator=generator)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(inplace=True), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))


def _channels_last() -> nn.Module:
    return Cnn().to(memory_format=torch.channels_last)


NETS: dict[str, Case] = {
    "perceptron": Case(_mlp, _floats(20)),
    "convolutions": Case(Cnn, _floats(1, 8, 8)),
    "channels last": Case(_channels_last, _floats(1, 8, 8)),
    "skips": Case(Skip, _floats(20)),
    "language": Case(Language, _ids, 20),
    "recurrent": Case(Recurrent, _ids),
    "experts": Case(Experts, _floats(20)),
    "unet": Case(Unet, _floats(1, 8, 8)),
    "vit": Case(Vit, _floats(1, 8, 8)),
    "spectral": Case(Spectral, _floats(20)),
    "views": Case(Odd, _floats(1, 8, 8)),
}


def data(name: str, sizes: tuple[int, ...]) -> list[tuple[Any, torch.Tensor]]:
    case, generator = NETS[name], torch.Generator().manual_seed(2)
    return [(case.inputs(n, generator), torch.randint(case.classes, (n,), generator=generator)) for n in sizes]
