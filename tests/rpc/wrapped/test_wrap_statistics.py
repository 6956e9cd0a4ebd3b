"""Norms whose statistics several calls of a forward update, in micro-batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from test_wrap import batches, both, drive
from torch import nn


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.norm(self.a(x))
        return self.head(self.norm(self.b(F.relu(y))) + y)


def statistics_in_order() -> None:
    """The second call of a micro-batch comes before the first one of the next."""
    for placement in ({"norm": "worker1"}, {"b": "worker1"}, {"norm": "worker1", "b": "worker2"}):
        model, twin = both(Twice, placement)
        for x, target in batches(2, 16, 8):
            model.forward_backward(F.cross_entropy, x, target=target, chunks=4)
            for piece in x.split(4):
                twin(piece.clone())
        assert model.captured == "fx"
        state = model.state_dict()
        for name, buffer in twin.named_buffers():
            assert torch.equal(state[name], buffer), (placement, name)
        model.close()


def test_statistics_have_the_order_of_one_process() -> None:
    drive(statistics_in_order, 3)
