"""Checkpoints of models that lie at workers: the same bits afterwards, in another placement and in one process by plain DCP."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from group import results, run_group
from torch import nn

import rdmarpc as rpc


class Counted(nn.Module):
    """Has a buffer, a state that is no tensor, and draws random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(width, width), nn.BatchNorm1d(width), 0

    def forward(self, x):
        return nn.functional.dropout(torch.relu(self.norm(self.layer(x))), 0.3, self.training)

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
OTHERS = {"last": "worker1", "first": "worker2"}


def made(placement: dict[str, str] = PLACES) -> dict[str, Any]:
    torch.manual_seed(3)
    model = rpc.wrap(Net(), placement)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}


def step(state: dict[str, Any]) -> float:
    model, optimizer = state["model"], state["optimizer"]
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(state["step"]))
    optimizer.zero_grad()
    loss = (model(x) + 0.01 * torch.rand(6)).pow(2).mean()
    loss.backward()
    optimizer.step()
    state["schedule"].step()
    state["step"] += 1
    return loss.item()


def plainly(folder: str, expected: dict[str, torch.Tensor]) -> None:
    """In one process, without us: the model alone, and its optimizer by torch's own functions."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    model, moments = get_state_dict(net, optimizer)
    found = {"model": model, "optimizer": moments, "step": 0}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    set_state_dict(net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    assert found["step"] == 3
    for key, value in net.state_dict().items():
        assert value == expected[key] if not isinstance(value, torch.Tensor) else torch.equal(value, expected[key]), key
    assert len(optimizer.state) == len(list(net.parameters()))
    assert all(entry["step"] == 3 and entry["exp_avg"].abs().sum() for entry in optimizer.state.values())


def home(model: nn.Module) -> dict[str, Any]:
    found = model.state_dict()
    return {key: value.cpu().clone() if isinstance(value, torch.Tensor) else value for key, value in found.items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in found.items():
        assert value == expected[key] if not isinstance(value, torch.Tensor) else torch.equal(value, expected[key]), key


def training(folder: str) -> None:
    state = made()
    for _ in range(3):
        step(state)
    place = str(Path(folder) / "at")
    rpc.save_checkpoint({**state, "step": 1}, place)
    rpc.save_checkpoint(state, place)  # takes the place of the other
    assert [path.name for path in Path(folder).iterdir()] == ["at"]
    saved = home(state["model"])
    losses = [step(state) for _ in range(5)]
    end = home(state["model"])
    plainly(place, saved)

    again = made(OTHERS)
    step(again)
    rpc.load_checkpoint(again, place)
    assert again["step"] == 3
    assert_same(home(again["model"]), saved)
    optimizer, parameters = again["optimizer"], dict(again["model"].named_parameters())
    lies = {name: isinstance(optimizer.state[p]["exp_avg"], rpc.RemoteTensor) for name, p in parameters.items()}
    assert lies == {name: name.partition(".")[0] in OTHERS for name in parameters}
    assert [step(again) for _ in range(5)] == losses
    assert_same(home(again["model"]), end)

    grouped = [{"params": [*again["model"].parameters()][:2]}, {"params": [*again["model"].parameters()][2:]}]
    grown = {**again, "optimizer": torch.optim.Adam(grouped, 0.01)}
    rpc.save_checkpoint(grown, str(Path(folder) / "groups"))
    shrunk = {"model": again["model"], "optimizer": torch.optim.Adam(grouped[:1], 0.01)}
    with pytest.raises(ValueError, match="fewer groups than in the checkpoint"):
        rpc.load_checkpoint(shrunk, str(Path(folder) / "groups"))
    with pytest.raises(ValueError, match="no model in the state has"):
        rpc.save_checkpoint({"optimizer": optimizer}, str(Path(folder) / "alone"))


def at_driver(rank: int) -> None:
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            training(folder)
    rpc.shutdown()


def test_training_goes_on_with_the_same_bits():
    results(run_group(at_driver, 3, timeout=120.0))
