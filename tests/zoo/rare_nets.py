"""Networks of the zoo that few people write: fixed points, complex numbers, sparse gradients, hooks, early exits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call


class Equilibrium(nn.Module):
    """Looks for a fixed point without gradients, then takes one step with them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell, self.head = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.enter(x)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(20):
                before, z = z, torch.tanh(self.cell(z) * 0.5 + x)
                if (z - before).norm() < 1e-3 * z.norm():
                    break
        return self.head(torch.tanh(self.cell(z) * 0.5 + x))


class Complex(nn.Module):
    """Complex weights and activations, by real and imaginary parts where kernels want them."""

    class Layer(nn.Module):
        def __init__(self, wide: int, high: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(high, wide, dtype=torch.complex64) / wide)
            self.bias = nn.Parameter(torch.zeros(high, dtype=torch.complex64))

        def forward(self, x):
            return x @ self.weight.t() + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = self.Layer(11, 16), self.Layer(16, 16), self.Layer(16, 4)

    def forward(self, x):
        x = torch.fft.rfft(x)
        for layer in (self.one, self.two):
            x = layer(x)
            x = torch.complex(F.relu(x.real), F.relu(x.imag))
        return self.three(x).abs()


class SparseTables(nn.Module):
    """Embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 8, sparse=True), nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
        self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, user, items):
        return self.head(torch.relu(self.mix(torch.cat([self.users(user), self.items(items)], 1))))


class FakeQuant(nn.Module):
    """Training that is aware of a quantisation: observers keep ranges, weights and activations are rounded."""

    class Layer(nn.Linear):
        def __init__(self, wide: int, high: int) -> None:
            super().__init__(wide, high)
            self.register_buffer("least", torch.zeros(()))
            self.register_buffer("most", torch.zeros(()))

        def forward(self, x):
            if self.training:
                self.least.copy_(torch.minimum(self.least, x.detach().min()))
                self.most.copy_(torch.maximum(self.most, x.detach().max()))
            scale = (self.most - self.least).clamp(min=1e-3) / 255
            x = torch.fake_quantize_per_tensor_affine(x, scale, torch.zeros(1, dtype=torch.int32), -128, 127)
            each = self.weight.detach().abs().amax(1) / 127
            zero = torch.zeros(len(each), dtype=torch.int32)
            return F.linear(x, torch.fake_quantize_per_channel_affine(self.weight, each, zero, 0, -127, 127), self.bias)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(self.Layer(20, 16), nn.ReLU(), self.Layer(16, 16), nn.ReLU(), self.Layer(16, 4))

    def forward(self, x):
        return self.layers(x)


class HookedLora(nn.Module):
    """A frozen net; hooks add products of small matrices to what its layers give."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.base.requires_grad_(False)
        self.down = nn.ModuleList([nn.Linear(20, 2, bias=False), nn.Linear(16, 2, bias=False), nn.Linear(16, 2, bias=False)])
        self.up = nn.ModuleList([nn.Linear(2, 16, bias=False), nn.Linear(2, 16, bias=False), nn.Linear(2, 4, bias=False)])
        for at in range(3):
            self.base[2 * at].register_forward_hook(self.Adapter(self, at))

    class Adapter:
        def __init__(self, net: HookedLora, at: int) -> None:
            self.net, self.at = net, at

        def __call__(self, module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
            return result + self.net.up[self.at](self.net.down[self.at](args[0]))

    def forward(self, x):
        return self.base(x)


class EarlyExit(nn.Module):
    """Goes on while it is not sure."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(20, 16)
        self.stages = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.exits = nn.ModuleList([nn.Linear(16, 4) for _ in range(4)])

    def forward(self, x):
        x, found = self.enter(x), []
        for stage, leave in zip(self.stages, self.exits):
            x = torch.tanh(stage(x)) * 1.5
            found.append(leave(x))
            if found[-1].softmax(1).amax(1).mean() > 0.42:
                break
        return found


class Ragged(nn.Module):
    """A list of sequences of different lengths, pooled and joined."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(6, 12), nn.GRU(12, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, rows: Sequence[torch.Tensor]):
        pooled = [self.body(self.embed(row)[None])[0].mean(1) for row in rows]
        return self.head(torch.cat(pooled))


class Nested(nn.Module):
    """The same rows as one nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, rows: Sequence[torch.Tensor]):
        x = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
        x = self.two(torch.relu(self.one(x)))
        return self.head(torch.stack([row.mean(0) for row in x.unbind()]))


class Sampling(nn.Module):
    """An actor that draws its action itself; the critic reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 3)
        self.act, self.critic = nn.Embedding(3, 16), nn.Linear(32, 1)

    def forward(self, state):
        h = self.trunk(state)
        policy = torch.distributions.Categorical(logits=self.actor(h))
        action = policy.sample()
        return {"log_prob": policy.log_prob(action), "value": self.critic(torch.cat([h, self.act(action)], 1)).squeeze(-1)}


class Stateful(nn.Module):
    """Keeps the state of its recurrent layer from one step to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell, self.head = nn.Linear(6, 12), nn.LSTM(12, 12, batch_first=True), nn.Linear(12, 4)
        self.state: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x):
        y, state = self.cell(self.enter(x), self.state)
        self.state = tuple(part.detach() for part in state)
        return self.head(y)


class Standardized(nn.Module):
    """Calls its layers with weights that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        weight = self.two.weight
        weight = (weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 1e-5)
        x = functional_call(self.two, {"weight": weight, "bias": self.two.bias}, (torch.relu(self.one(x)),))
        return self.three(torch.relu(x))


class Depths(nn.Module):
    """Each layer works on the half of the tokens that a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.routers = nn.Embedding(40, 12), nn.ModuleList([nn.Linear(12, 1) for _ in range(3)])
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.GELU()) for _ in range(3)])
        self.head = nn.Linear(12, 40)

    def forward(self, ids):
        x = self.embed(ids)
        for router, layer in zip(self.routers, self.layers):
            weight, chosen = router(x).squeeze(-1).topk(x.shape[1] // 2, dim=1)
            index = chosen[..., None].expand(-1, -1, x.shape[2])
            x = x.scatter_add(1, index, layer(x.gather(1, index)) * torch.sigmoid(weight)[..., None])
        return self.head(x)


class Distances(nn.Module):
    """Kernels by distances, with a solve in between."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.width = nn.Linear(20, 6), nn.Parameter(torch.ones(()))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        h = self.map(x)
        kernel = torch.exp(-torch.cdist(h, h).pow(2) * self.width) + 0.1 * torch.eye(len(h))
        return self.head(torch.linalg.solve(kernel, torch.linalg.cholesky(kernel)[:, :1] @ torch.ones(1, 5)))


class Kinds(nn.Module):
    """Matrices in CSR, quantized numbers, packed weights and ragged rows between parts: none of them can lie at a worker."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.packed = torch.ao.nn.quantized.dynamic.Linear(16, 16)
        self.register_buffer("near", torch.eye(4).roll(1, 0) + torch.eye(4))

    def forward(self, x):
        h = torch.sparse.mm(self.near.to_sparse_csr(), self.one(x))
        h = torch.relu(h).to_sparse_csr() @ self.two.weight + torch.quantize_per_tensor(h, 0.1, 0, torch.quint8).dequantize()
        h = h + self.packed(h.detach())
        rows = torch.nested.as_nested_tensor([h[:1], h[1:]])
        return self.head(F.gelu(self.two(rows)).to_padded_tensor(0.0))
