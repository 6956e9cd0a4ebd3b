"""Checkpoints of models that lie at workers: the same bits afterwards, in another placement and in one process by plain DCP."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from beside import assert_same, home
from checkpointed import made, plainly, step
from group import results, run_group

import rdmarpc as rpc

OTHERS = {"last": "worker1", "first": "worker2"}


def training(folder: str) -> None:
    state = made()
    for _ in range(3):
        step(state)
    place = str(Path(folder) / "at")
    rpc.save_checkpoint({**state, "step": 1}, place)
    rpc.save_checkpoint(state, place)  # takes the place of the other
    assert [path.name for path in Path(folder).iterdir()] == ["at"]
    saved = home(state["model"].state_dict())
    losses = [step(state) for _ in range(5)]
    end = home(state["model"].state_dict())
    plainly(place, saved)

    again = made(OTHERS)
    step(again)
    rpc.load_checkpoint(again, place)
    assert again["step"] == 3
    assert_same(home(again["model"].state_dict()), saved)
    optimizer, parameters = again["optimizer"], dict(again["model"].named_parameters())
    lies = {name: isinstance(optimizer.state[p]["exp_avg"], rpc.RemoteTensor) for name, p in parameters.items()}
    assert lies == {name: name.partition(".")[0] in OTHERS for name in parameters}
    assert [step(again) for _ in range(5)] == losses
    assert_same(home(again["model"].state_dict()), end)

    generator = torch.Generator().manual_seed(3)
    plain = {"rates": again["schedule"].state_dict(), "rows": [torch.ones(2), 3]}
    rpc.save_checkpoint({**again, "plain": plain, "generator": generator}, place)
    drawn = torch.randn(4, generator=generator)
    later = torch.optim.Adam(again["model"].parameters(), 0.5)  # has no schedule yet: none of what one adds to groups
    bare = {"model": again["model"], "optimizer": later, "plain": {"rows": []}, "generator": generator}
    rpc.load_checkpoint(bare, place)
    assert bare["generator"] is generator
    assert_same(torch.randn(4, generator=generator), drawn)
    assert_same(later.state_dict()["param_groups"], optimizer.state_dict()["param_groups"])
    assert bare["plain"]["rates"] == again["schedule"].state_dict()
    assert_same(bare["plain"]["rows"], [torch.ones(2), 3])

    grouped = [{"params": [*again["model"].parameters()][:2]}, {"params": [*again["model"].parameters()][2:]}]
    grown = {**again, "optimizer": torch.optim.Adam(grouped, 0.01)}
    rpc.save_checkpoint(grown, str(Path(folder) / "groups"))
    shrunk = {"model": again["model"], "optimizer": torch.optim.Adam(grouped[:1], 0.01)}
    step(again)
    moved = home(again["model"].state_dict())
    with pytest.raises(ValueError, match="groups of optimizer 'optimizer' have other parameters than in the checkpoint"):
        rpc.load_checkpoint(shrunk, str(Path(folder) / "groups"))
    assert_same(home(again["model"].state_dict()), moved)  # nothing was loaded
    with pytest.raises(ValueError, match="no model in the state has"):
        rpc.save_checkpoint({"optimizer": optimizer}, str(Path(folder) / "alone"))


def at_driver(rank: int) -> None:
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            training(folder)
    rpc.shutdown()


def test_training_goes_on_with_the_same_bits():
    results(run_group(at_driver, 3, timeout=120.0))
