"""The GPT pipeline as a user starts it, in small; no figure is judged here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from hydra import compose, initialize_config_dir

from rdmarpc.experiments import gpt
from rdmarpc.experiments.training import gpt as model
from rdmarpc.experiments.training import gpt_workers

SMALL = ["models.medium=null", "models.small={width: 8, blocks: 3, heads: 2}", "samples=4", "tokens=5", "vocabulary=11"]


def job(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(gpt.CONF, version_base="1.3"):
        return gpt.checked(compose("gpt", list(overrides)))


def test_every_library_has_the_losses_of_one_process(tmp_path: Path) -> None:
    more = ["stages=[3]", "micro_batches=[2,4]", "rounds=1", "steps=2"]
    done = programs.run("-m", "experiments.gpt", *SMALL, *more, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout
    assert not list(tmp_path.glob(".meeting-*"))
    assert (tmp_path / "gpt.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "gpt.json").read_text())
    counts = {(each["case"], each["size"], each["what"]): each["n"] for each in found["samples"]}
    libraries = ("alone", "rdmarpc", "torch_rpc", "pipelining")
    assert counts == {(f"small, {chunks} micro-batches", 3, each): 2 for chunks in (2, 4) for each in libraries}
    assert not found["left_out"] and len(found["targets"]) == 4


def small(**more: Any) -> dict[str, Any]:
    given = {"width": 8, "blocks": 3, "heads": 2, "tokens": 5, "vocabulary": 11, "samples": 4, "stages": 3}
    return given | {"chunks": 2, "lr": 0.1, "steps": 1} | more


def test_stages_are_the_model() -> None:
    assert [len(stage) for stage in model.stages(small())] == [2, 1, 2]
    x, y = model.batch(small())
    whole = model.Gpt(small())
    through = x
    for stage in model.stages(small()):
        through = stage(through)
    assert torch.equal(whole(x, y), model.loss_of(through, y))
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_a_later_token_changes_nothing_before_it() -> None:
    block, x = model.Block(small()), torch.randn(2, 5, 8)
    other = x.clone()
    other[:, 3:] += 1
    assert torch.equal(block(x)[:, :3], block(other)[:, :3])


def test_other_losses_are_an_error() -> None:
    twin = model.Gpt(small())
    losses = [gpt_workers.run_alone(twin, small(), 0.1), gpt_workers.run_alone(twin, small())]
    gpt_workers.check(small(), losses)
    assert losses[0] != losses[1]
    with pytest.raises(RuntimeError, match="not those of one process"):
        gpt_workers.check(small(), [losses[0], losses[1] * 1.001])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stages=[1]", "stages=[1]"),
        ("micro_batches=[3]", "must divide samples=16"),
        ("models.small.blocks=1", "models.small="),
        ("libraries=[grpc]", "must be some of rdmarpc, torch_rpc, pipelining"),
        ("rounds=0", "rounds=0"),
    ],
)
def test_bad_config_is_a_clear_error(override: str, says: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(says)):
        job(override)
