"""An encoder of sentences: those that follow each other in Python's own documentation shall lie near each other.

The text is that of ``help()``, which comes with Python (``pydoc_data``), so it differs a little between versions of Python.
"""

from __future__ import annotations

import re
import zlib
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, LONGEST, SHORTEST, HELD_OUT, SHARPNESS = 8192, 16, 5, 128, 10.0
"""Rows of the table that words are hashed to; words of a sentence, at most and at least; pairs that are kept for the test; by
what the products of two sentences are multiplied before the softmax."""


class Encoder(nn.Module):
    """Words to a vector of length 1: a table, a GRU, the mean over the words."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width, padding_idx=0)
        self.reader = nn.GRU(width, width, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        """``words``: int64 (n, LONGEST), 0 where there is none."""
        there = (words > 0).unsqueeze(2)
        rows = self.table(words)
        read, _ = self.reader(rows)
        return F.normalize(((read + rows) * there).sum(1) / there.sum(1), dim=1)


class Sentences:
    """Its net, and what it learns from."""

    def __init__(self, seed: int, width: int) -> None:
        """``width``: of a row and of the vectors."""
        pairs = neighbours()
        pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))]
        self.kept, self.pairs = pairs[:HELD_OUT], pairs[HELD_OUT:]
        torch.manual_seed(seed)
        self.net = Encoder(width)

    def loss(self, batch: int, drawn: torch.Generator) -> Tensor:
        """Each sentence has to find its neighbour among those of the batch."""
        chosen = self.pairs[torch.randint(len(self.pairs), (batch,), generator=drawn)]
        return F.cross_entropy(SHARPNESS * self._products(chosen), torch.arange(batch))

    def held_out(self) -> float:
        """The share of held-out sentences whose neighbour is among the ten nearest of all held-out neighbours."""
        nearest = self._products(self.kept).topk(10).indices
        return float((nearest == torch.arange(HELD_OUT).unsqueeze(1)).any(1).double().mean())

    def _products(self, pairs: Tensor) -> Tensor:
        one, other = self.net(pairs.flatten(0, 1)).view(len(pairs), 2, -1).unbind(1)
        return one @ other.T


def neighbours() -> Tensor:
    """Pairs of neighbouring sentences, int64 (n, 2, LONGEST): each word's row of the table, 0 behind the last."""
    found = []
    for text in topics.values():
        for paragraph in text.split("\n\n"):
            sentences = [numbers(sentence) for sentence in re.split(r"[.:;]\s", paragraph)]
            found += [pair for pair in zip(sentences[::2], sentences[1::2]) if min(map(len, pair)) >= SHORTEST]
    padded = [[rows + (0,) * (LONGEST - len(rows)) for rows in pair] for pair in dict.fromkeys(found)]
    return torch.tensor(padded)


def numbers(sentence: str) -> tuple[int, ...]:
    words = re.findall(r"[a-z]+", sentence.lower())[:LONGEST]
    return tuple(1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words)  # not hash(), which differs between processes
