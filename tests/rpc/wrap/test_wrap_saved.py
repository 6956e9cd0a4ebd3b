"""Checkpoints that each owner writes and reads, plain ``torch.distributed.checkpoint`` in one process, a worker that is killed
and replaced."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from beside import assert_same, home
from group import Meeting, die, results, run_group
from torch import nn

import rdmarpc as rpc
from rdmarpc import places


class Counted(nn.Module):
    """Has a buffer, a state that is no tensor, and draws random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(width, width), nn.BatchNorm1d(width), 0

    def forward(self, x):
        self.calls += 1
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


def made(placement: dict[str, str] = PLACES) -> dict[str, Any]:
    torch.manual_seed(3)
    model = places.wrap(Net(), placement)
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


def training(folder: str) -> None:
    state, place = made(), str(Path(folder) / "at")
    with pytest.raises(rpc.NotSupported, match="no checkpoint"):
        state["model"].replace("worker1", "worker3")
    for _ in range(3):
        step(state)
    rpc.save_checkpoint({**state, "step": 1}, place)
    rpc.save_checkpoint(state, place)  # takes the place of the other
    assert [path.name for path in Path(folder).glob("at*")] == ["at"]
    saved = copy.deepcopy(home(state["model"].state_dict()))
    losses = [step(state) for _ in range(5)]
    end = home(state["model"].state_dict())
    state["model"].close()
    plainly(place, saved)

    elsewhere = made({"first": "worker2", "last": "worker1"})
    rpc.load_checkpoint(elsewhere, place)
    assert_same(elsewhere["model"].state_dict(), saved)
    elsewhere["model"].close()

    again = made()
    with pytest.raises(ValueError, match="groups"):
        groups = [{"params": [p]} for p in again["model"].parameters()]
        rpc.save_checkpoint({**again, "optimizer": torch.optim.Adam(groups, 0.01)}, str(Path(folder) / "groups"))
        fewer = {"model": again["model"], "optimizer": torch.optim.Adam(groups[:1], 0.01)}
        rpc.load_checkpoint(fewer, str(Path(folder) / "groups"))
    with pytest.raises(ValueError, match="no model in the state has"):
        rpc.save_checkpoint({"optimizer": again["optimizer"]}, str(Path(folder) / "alone"))
    with pytest.raises(Exception, match=r"nowhere|metadata"):
        rpc.load_checkpoint(again, str(Path(folder) / "nowhere"))
    (Path(folder) / "file").touch()
    with pytest.raises(OSError):
        rpc.save_checkpoint(again, str(Path(folder) / "file" / "below"))
    rpc.load_checkpoint(again, place)
    assert again["step"] == 3
    assert [step(again) for _ in range(2)] == losses[:2]
    rpc.rpc_async("worker1", die)
    with pytest.raises(rpc.PeerLost, match="worker1"):
        for _ in range(200):
            step(again)
    for wrong in (("worker1", "worker2"), ("worker1", "worker9"), ("worker3", "worker0")):
        with pytest.raises(ValueError):
            again["model"].replace(*wrong)
    back = again["model"].replace("worker1", "worker3")
    assert back is again and again["step"] == 3
    assert [step(again) for _ in range(5)] == losses
    assert_same(again["model"].state_dict(), end)
    assert "worker3" in again["model"].placement_table()
    again["model"].close()


def large(folder: str) -> None:
    """Nothing is gathered here: what lies at an owner is written by the owner."""
    model = places.wrap(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 8)), {"0": "worker2"})
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 1024)).sum().backward()
    optimizer.step()
    model[0].weight.detach()[0, 0].item()
    before = rpc.rpc_sync("worker2", rpc.counters)["bytes_direct"]
    rpc.save_checkpoint({"model": model, "optimizer": optimizer}, f"{folder}/large")
    rpc.load_checkpoint({"model": model, "optimizer": optimizer}, f"{folder}/large")
    assert rpc.rpc_sync("worker2", rpc.counters)["bytes_direct"] - before < 1 << 20
    model.close()


def scenario(meeting: Meeting) -> None:
    meeting.join()
    meeting.step("joined", 4)
    if meeting.rank:
        meeting.hear("done", timeout=150.0)
        rpc.shutdown(graceful=False)
        return
    with tempfile.TemporaryDirectory() as folder:
        large(folder)
        training(folder)
    meeting.say("done")
    places.close_streams()
    rpc.shutdown(graceful=False)


def test_a_killed_worker_is_replaced_and_training_goes_on_with_the_same_bits():
    outcomes = run_group(scenario, 4, dynamic=True, timeout=250.0)
    results([outcome for rank, outcome in enumerate(outcomes) if rank != 1])
    assert outcomes[1].exit_code == -9
