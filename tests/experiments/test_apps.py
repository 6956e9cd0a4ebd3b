"""Bad input to any app is one clear line, whoever notices it; ``experiments.harness.apps``."""

from __future__ import annotations

import sys
from pathlib import Path

import programs
import pytest
from omegaconf import OmegaConf

from rdmarpc.experiments.harness import apps

RDMA = any(Path("/sys/class/infiniband").glob("*"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("train model=vgg", "error: In 'train': Could not find 'model/vgg' Available options in 'model': cnn mlp"),
        ("a3c typo=1", "error: Could not override 'typo'."),
        ("grid sizes=[4", "error: "),
        ("federated gbits=fast", "error: gbits=fast must be a list of numbers from 0 on"),
        ("dlrm device=pigeon", "error: device=pigeon must be one of shm, tcp, verbs, cuda, auto"),
        pytest.param(
            "schedules device=verbs",
            "error: device=verbs: there is no RDMA device",
            marks=pytest.mark.skipif(RDMA, reason="there is one"),
        ),
        ("dlrm cluster=slurm device=tcp", "error: cluster=slurm: this process was not started by srun, with several tasks"),
        ("dlrm cluster=moon", "error: In 'dlrm': Could not find 'cluster/moon'"),
        ("convergence problems=[speech]", "error: problems=['speech'] must be some of images, sequences, sentences"),
        ("paper only=nothing", "error: only=nothing is none of mlsys, rdma, ddp, cuda"),
        ("collectives ranks=[100000]", "error: 100000 worker processes need at least 8000.0 GiB of memory, "),
        ("paper minutes=soon", "error: minutes=soon must be more than 0"),
    ],
)
def test_bad_input_is_one_line(given: str, says: str) -> None:
    name, *overrides = given.split()
    done = programs.run("-m", f"experiments.{name}", *overrides)
    lines = [line for line in done.stdout.splitlines() if line]
    assert done.returncode == 1 and len(lines) == 1 and lines[0].startswith(says), done.stdout


@pytest.mark.parametrize("value", ["tcp://lo", "auto", "shm"])
def test_devices_with_and_without_an_address(value: str) -> None:
    apps.device({"device": value})


@pytest.mark.parametrize(("name", "value"), [("quick", "maybe"), ("json", 1)])
def test_a_switch_is_true_or_false(name: str, value: object) -> None:
    assert apps.plain(OmegaConf.create({name: True, "other": value})) == {name: True, "other": value}
    with pytest.raises(SystemExit, match=f"error: {name}={value} must be true or false"):
        apps.plain(OmegaConf.create({name: value}))


@pytest.mark.parametrize("value", [3, [], [0], ["2"], None])
def test_what_is_no_list_of_numbers(value: object) -> None:
    apps.numbers({"ranks": [1, 2.5]}, 1, "ranks")
    with pytest.raises(SystemExit, match="ranks="):
        apps.numbers({"ranks": value}, 1, "ranks")


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["app"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit, match="error: No space left on device: of the files of this run"):
        apps.start(lambda: Path("/dev/full").write_text("a report") and None)
    with pytest.raises(FileNotFoundError):
        apps.start(lambda: Path("/nowhere/at/all").write_text("a report") and None)
