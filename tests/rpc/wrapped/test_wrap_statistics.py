"""Norms whose statistics several calls of a forward update, in micro-batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from test_wrap import batches, both, drive
from torch import nn


class Twice(nn.Module):
    def __init__(self, momentum: float | None = 0.1, look: bool = False) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=momentum)
        self.b, self.head, self.look = nn.Linear(8, 8), nn.Linear(8, 4), look

    def forward(self, x):
        y = self.norm(self.a(x))
        if self.look and y.sum() > 1e9:
            return y
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


def averages_in_order() -> None:
    """``momentum=None``: the weight of a micro-batch is one over how many came before, so their order is seen in the bits."""
    placements: list[dict[str, str]] = [
        {"norm": "worker1"},
        {"b": "worker1"},
        {"norm": "worker1", "b": "worker2"},
        {"a": "worker1", "norm": "worker1"},
    ]
    for look in (False, True):
        for placement in placements:
            model, twin = both(lambda: Twice(None, look), placement)  # noqa: B023
            mine, theirs = (torch.optim.SGD(network.parameters(), 0.1) for network in (model, twin))
            for x, target in batches(3, 16, 8):
                mine.zero_grad()
                theirs.zero_grad()
                loss = model.forward_backward(F.cross_entropy, x, target=target, chunks=4)
                losses = []
                for piece, wanted in zip(x.split(4), target.split(4)):
                    losses.append(F.cross_entropy(twin(piece.clone()), wanted))
                    (losses[-1] / 4).backward()
                assert torch.equal(loss, torch.stack(losses).detach().mean()), (look, placement, loss, losses)
                mine.step()
                theirs.step()
            assert model.captured.startswith("eager" if look else "fx"), model.captured
            state = model.state_dict()
            for name, buffer in twin.state_dict().items():
                assert torch.equal(state[name], buffer), (look, placement, name)
            model.close()


def test_cumulative_averages_have_the_order_of_one_process() -> None:
    drive(averages_in_order, 3)
