"""A model and its training, for tests of checkpoints: buffers, a state that is no tensor, random numbers, a schedule."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from beside import assert_same
from torch import nn

import rdmarpc as rpc


class Counted(nn.Module):
    """Has buffers, one of which is in no checkpoint, a state that is no tensor, and draws random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(width, width), nn.BatchNorm1d(width), 0
        self.register_buffer("angles", torch.linspace(0.5, 1.5, width), persistent=False)

    def forward(self, x):
        self.calls += 1
        return nn.functional.dropout(torch.relu(self.norm(self.layer(x) * self.angles)), 0.3, self.training)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = Counted(8), Counted(8), nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.last(self.middle(self.first(x)) * self.scale).squeeze(1)


PLACES = {"first": "worker1", "middle": "worker2"}


def made(placement: dict[str, str] = PLACES) -> dict[str, Any]:
    torch.manual_seed(3)
    model = rpc.wrap(Net(), placement)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return {"model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "step": 0}


def step(state: dict[str, Any]) -> float:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(state["step"]))
    state["optimizer"].zero_grad()
    loss = (state["model"](x) + 0.01 * torch.rand(6)).pow(2).mean()
    loss.backward()
    state["optimizer"].step()
    state["schedule"].step()
    state["step"] += 1
    return loss.item()


def plainly(folder: str, expected: Any) -> None:
    """In one process, without us: the model alone, and its optimizer by torch's own functions."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    model, moments = get_state_dict(net, optimizer)
    found = {"model": model, "optimizer": moments, "step": 0}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    set_state_dict(net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    assert found["step"] == 3
    assert_same(net.state_dict(), expected)
    assert len(optimizer.state) == len(list(net.parameters()))
    assert all(entry["step"] == 3 and entry["exp_avg"].abs().sum() for entry in optimizer.state.values())
