"""Checkpoints, plain ``torch.distributed.checkpoint`` in one process, a worker that is killed and replaced."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
import torch
from beside import assert_same, home
from checkpointed import made, plainly, step
from group import Meeting, die, results, run_group

import rdmarpc as rpc
from rdmarpc import places


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


def scenario(meeting: Meeting) -> None:
    meeting.join()
    meeting.step("joined", 4)
    if meeting.rank:
        meeting.hear("done", timeout=150.0)
        rpc.shutdown(graceful=False)
        return
    with tempfile.TemporaryDirectory() as folder:
        training(folder)
    meeting.say("done")
    places.close_streams()
    rpc.shutdown(graceful=False)


def test_a_killed_worker_is_replaced_and_training_goes_on_with_the_same_bits():
    outcomes = run_group(scenario, 4, dynamic=True, timeout=250.0)
    results([outcome for rank, outcome in enumerate(outcomes) if rank != 1])
    assert outcomes[1].exit_code == -9
