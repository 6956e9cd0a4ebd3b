"""Names in tables of what crosses: those that the user has for modules, parameters and inputs."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from test_wrap import drive
from torch import nn

import rdmarpc as rpc


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, mask):
        y = self.ln(x)
        return x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]


class Decoder(nn.Module):
    """As GPT-2: tied embeddings, a list of blocks, a dict as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.h = nn.ModuleList(Attention() for _ in range(3))
        self.lm_head = nn.Linear(8, 20, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf")).triu(1)
        for block in self.h:
            x = block(x, mask)
        return {"logits": self.lm_head(x)}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return F.relu(self.conv2(F.relu(self.bn1(self.conv1(x)))) + x)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.scale, self.head = nn.Sequential(nn.Linear(6, 8)), nn.Parameter(torch.ones(8)), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(F.relu(self.features(x) * self.scale))


class Starts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.line = nn.Parameter(torch.ones(6)), nn.Linear(6, 4)

    def forward(self, x):
        return self.line(x) * self.table.sum()


def tables() -> None:
    perceptron = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    resnet = nn.Sequential(Residual(), Residual(), nn.Flatten())
    x, image, ids = torch.randn(8, 6), torch.randn(2, 4, 6, 6), torch.randint(0, 20, (2, 5))
    cases = [
        (perceptron, {"0": "worker1"}, x, "auto", {"input input", "0"}),
        (Decoder(), {"h.0": "worker1", "h.1.attn": "worker2"}, ids, "fx", {"h.0", "h.1.ln", "h.1.attn[0]", "triu()"}),
        (Decoder(), {"h.0": "worker1", "h.1.attn": "worker2"}, ids, "export", {"h.1.ln.layer_norm()", "triu()"}),
        (Decoder(), {"h.0": "worker1"}, ids, "eager", {"input x", "input mask", "h.0"}),
        (resnet, {"0.conv1": "worker1", "1": "worker2"}, image, "auto", {"input input", "0.conv1", "0.relu() #2", "1"}),
        (
            Halves(),
            {"features": ["worker1", "worker2"]},
            x,
            "auto",
            {"input x (replica 0)", "input x (replica 1)", "features.0.weight", "features.0.bias", "scale"}
            | {"relu() (replica 0)", "relu() (replica 1)", "start of features.0.weight"},
        ),
        (Starts(), {"line": "worker1"}, x, "auto", {"input x", "mul()", "sum()"}),
    ]
    for net, placement, given, capture, wanted in cases:
        known = [name for name, _ in (*net.named_modules(), *net.named_parameters(remove_duplicate=False)) if name]
        model = rpc.wrap(net, placement, capture=capture)
        result = model(given)
        (result["logits"] if isinstance(result, dict) else result).sum().backward()
        [found, *_] = model.transfers()
        names = {crossing.name for crossing in found.crossings}
        assert wanted <= names, (wanted - names, names)
        words = [*names, *(text for c in found.crossings for text in (c.producer, c.allocator))]
        words += [operation for segment in found.segments for operation in segment.operations]
        for word in words:
            check(word, known)
        assert "@" not in str(found)
        model.close()


def check(word: str, known: list[str]) -> None:
    """Made of paths of the model, functions, inputs and numbers of replicas, and nothing else."""
    path = "|".join(sorted(map(re.escape, known), key=len, reverse=True))
    place = rf"(({path})(\.\w+\(\))?|\w+\(\)|input \w+|constant \d+|the loss)(\[\w+\])?( \(replica \d\))?( #\d+)?"
    before = r"(start of |slot of |parameter |backward of )?"
    assert re.fullmatch(rf"({before}{place}(: \w+( #\d+)?)?(, )?)*|start", word), word


def test_names_in_tables_are_those_of_the_model() -> None:
    drive(tables, 3, timeout=250.0)
