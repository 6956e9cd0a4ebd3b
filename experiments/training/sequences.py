"""From a sequence of symbols to the same backwards: an encoder and a decoder (GRU) with attention between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SYMBOLS, LENGTH, HELD_OUT = 16, 8, 128


class Reverser(nn.Module):
    """Symbols and one more, which begins an answer; attention by products, as Luong et al. have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(SYMBOLS + 1, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.answer = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, SYMBOLS))

    def forward(self, given: Tensor, before: Tensor) -> Tensor:
        """``given``, ``before``: int64 (n, length), what is to be answered and the symbols before each of the answer.
        Returns logits (n, length, SYMBOLS)."""
        read, state = self.encoder(self.table(given))
        said, _ = self.decoder(self.table(before), state)
        looked_at = torch.softmax(said @ read.transpose(1, 2), 2) @ read
        logits: Tensor = self.answer(torch.cat([said, looked_at], 2))
        return logits


class Sequences:
    """Its net, and what it learns from."""

    def __init__(self, seed: int, width: int) -> None:
        """``width``: units of every layer."""
        self._held_out = torch.randint(SYMBOLS, (HELD_OUT, LENGTH), generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        self.net = Reverser(width)

    def loss(self, batch: int, drawn: torch.Generator) -> Tensor:
        given = torch.randint(SYMBOLS, (batch, LENGTH), generator=drawn)
        wanted = given.flip(1)
        before = torch.cat([torch.full((batch, 1), SYMBOLS), wanted[:, :-1]], 1)
        return F.cross_entropy(self.net(given, before).flatten(0, 1), wanted.flatten())

    def held_out(self) -> float:
        """The share of symbols that are right where the decoder goes on from its own answers; no sequence was drawn for
        training but by chance, one of 16 ** 8."""
        given = self._held_out
        before = torch.full((HELD_OUT, 1), SYMBOLS)
        for _ in range(LENGTH):
            answered = self.net(given, before).argmax(2)
            before = torch.cat([before, answered[:, -1:]], 1)
        return float((before[:, 1:] == given.flip(1)).double().mean())
