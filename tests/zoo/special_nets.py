"""Networks of the zoo that need torch alone: chance, state, unusual parts and results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations


class LayerDrop(nn.Module):
    """Leaves out layers by chance, drawn here."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(20, 20) for _ in range(5)])

    def forward(self, x):
        for layer in self.layers:
            if not self.training or torch.rand([]) > 0.4:
                x = x + torch.tanh(layer(x))
        return x


class StochasticDepth(nn.Module):
    """Scales branches by a mask of samples, drawn here."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(20, 20) for _ in range(5)])

    def forward(self, x):
        for layer in self.layers:
            keep = torch.bernoulli(torch.full((x.shape[0], 1), 0.7)) if self.training else 1.0
            x = x + torch.tanh(layer(x)) * keep
        return x


class Warmed(nn.Module):
    """Reads a schedule that a loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.beta, self.calls = nn.Linear(20, 16), nn.Linear(16, 4), 0.0, 0

    def forward(self, x):
        self.calls += 1
        return self.two(torch.tanh(self.one(x)) * (1 + self.calls / 10))


class Quantized(nn.Module):
    """VQ-VAE: a codebook in buffers, that moving averages update."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(20, 8), nn.Linear(8, 20)
        self.register_buffer("codes", torch.randn(12, 8))
        self.register_buffer("counts", torch.ones(12))

    def forward(self, x):
        z = self.encoder(x)
        chosen = torch.cdist(z, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen, 12).float()
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.lerp_((hot.t() @ z) / self.counts[:, None].clamp(min=0.1), 0.1)
        q = self.codes[chosen]
        return self.decoder(z + (q - z).detach()), (z - q.detach()).pow(2).mean()


class Coupling(nn.Module):
    """Normalizing flow."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6)) for _ in range(4)])

    def forward(self, x):
        logdet = torch.zeros(x.shape[0])
        for net in self.nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            x = torch.cat([b * scale.exp() + shift, a], 1)
            logdet = logdet + scale.sum(1)
        return x, logdet


class Mixture(nn.Module):
    """A mixture density network: its result goes through ``torch.distributions``."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 16), nn.Tanh())
        self.weights, self.means, self.scales = nn.Linear(16, 3), nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x, y):
        h = self.trunk(x)
        parts = torch.distributions.Normal(self.means(h), self.scales(h).exp())
        mixture = torch.distributions.Categorical(logits=self.weights(h))
        return torch.distributions.MixtureSameFamily(mixture, parts).log_prob(y[:, 0])


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, state, action):
        h = self.trunk(state)
        policy = torch.distributions.Categorical(logits=self.actor(h))
        return {"log_prob": policy.log_prob(action), "entropy": policy.entropy(), "value": self.critic(h).squeeze(-1)}


class Hyper(nn.Module):
    """A net that makes the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 20 * 4 + 4))
        self.stem = nn.Linear(20, 20)

    def forward(self, x, task):
        made = self.maker(task)
        weight, bias = made[:, :80].view(-1, 4, 20), made[:, 80:]
        return torch.bmm(weight, torch.relu(self.stem(x)).unsqueeze(2)).squeeze(2) + bias


class Report(NamedTuple):
    logits: torch.Tensor
    features: torch.Tensor
    note: str


class Reporting(nn.Module):
    """Gives a namedtuple; a part gives one, too."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(20, 16), nn.Linear(16, 4)

        def forward(self, x):
            h = torch.relu(self.one(x))
            return Report(self.two(h), h, "stage")

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.head = self.Stage(), nn.Linear(16, 4)

    def forward(self, x):
        found = self.stage(x)
        return found._replace(logits=found.logits + self.head(found.features))


class Spectral(nn.Module):
    """Spectral and weight norm as parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.one = parametrizations.spectral_norm(nn.Linear(20, 16))
        self.two = parametrizations.weight_norm(nn.Linear(16, 16))
        self.three = parametrizations.orthogonal(nn.Linear(16, 4))

    def forward(self, x):
        return self.three(torch.relu(self.two(torch.relu(self.one(x)))))


class OldNorms(nn.Module):
    """The same by the old functions, with hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.utils.spectral_norm(nn.Linear(20, 16))
        self.two, self.three = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.three(torch.relu(self.two(torch.relu(self.one(x)))))


class Graph(nn.Module):
    """Graph convolution by hand: gather, scatter, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 3)

    def forward(self, x, edges, of):
        for layer in self.layers:
            sent = layer(x)[edges[0]]
            x = torch.relu(x + torch.zeros_like(x).index_add(0, edges[1], sent))
        pooled = torch.zeros(2, x.shape[1]).scatter_reduce(0, of[:, None].expand_as(x), x, "mean", include_self=False)
        return self.head(pooled)


class Dense(nn.Module):
    """DenseNet's concatenations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.BatchNorm2d(8 + 4 * i), nn.ReLU(), nn.Conv2d(8 + 4 * i, 4, 3, padding=1)) for i in range(4)]
        )
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1).mean((2, 3)))


class Patches(nn.Module):
    """ViT: class token, positions, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 8, 8)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.randn(1, 17, 16) * 0.02)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True) for _ in range(3)]
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Clip(nn.Module):
    """Two towers, a temperature, a symmetric loss."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Patches(), nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 5))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pixels, words):
        a, b = F.normalize(self.image(pixels), dim=-1), F.normalize(self.text(words).mean(1), dim=-1)
        logits = self.scale.exp() * a @ b.t()
        wanted = torch.arange(len(logits))
        return (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.t(), wanted)) / 2


class Attending(nn.Module):
    """Sequence to sequence with attention, one step of the decoder a turn of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = nn.Embedding(40, 12), nn.GRU(12, 16, batch_first=True)
        self.cell, self.score, self.out = nn.GRUCell(12 + 16, 16), nn.Linear(16, 16), nn.Linear(32, 40)

    def forward(self, source, target):
        memory, hidden = self.encoder(self.embed(source))
        hidden, given, said = hidden[0], self.embed(target), []
        for step in range(target.shape[1]):
            weights = torch.softmax((memory @ self.score(hidden).unsqueeze(2)).squeeze(2), 1)
            context = (weights.unsqueeze(1) @ memory).squeeze(1)
            hidden = self.cell(torch.cat([given[:, step], context], 1), hidden)
            said.append(self.out(torch.cat([hidden, context], 1)))
        return torch.stack(said, 1)


class Pixel(nn.Module):
    """Masked convolutions: a weight is masked in every forward."""

    class Masked(nn.Conv2d):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_buffer("mask", torch.ones_like(self.weight))
            self.mask[:, :, self.kernel_size[0] // 2, self.kernel_size[1] // 2 :] = 0

        def forward(self, x):
            return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Masked(3, 8, 5, padding=2), self.Masked(8, 8, 5, padding=2), nn.Conv2d(8, 3, 1)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x
