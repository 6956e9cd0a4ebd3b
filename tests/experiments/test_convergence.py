"""Models that learn through parameter servers, in small; no figure is judged here."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from rdmarpc.experiments import convergence
from rdmarpc.experiments.harness.findings import Findings
from rdmarpc.experiments.harness.functions import function
from rdmarpc.experiments.training import learning_server as server
from rdmarpc.experiments.training import learning_trainer as trainer
from rdmarpc.experiments.training import sentences
from rdmarpc.experiments.training.problems import PROBLEMS

LIBRARIES = ["rdmarpc", "torch_rpc", *(["grpc"] if importlib.util.find_spec("grpc") else [])]


def job(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(convergence.CONF, version_base="1.3"):
        return convergence.checked(compose("convergence", list(overrides)))


def test_all_libraries_take_the_same_steps(tmp_path: Path) -> None:
    """It fails where losses or weights differ."""
    small = [*(f"sequences.{what}" for what in ("width=8", "most_steps=3", "target=1")), "rounds=1", "look_every=2"]
    small += ["device=tcp"]  # torch RPC's shared memory keeps every core busy
    small += ["problems=[sequences]", f"libraries=[{','.join(LIBRARIES)}]"]
    done = programs.run("-m", "experiments.convergence", *small, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 0, done.stdout
    assert not list(tmp_path.glob(".meeting-*"))
    for picture in ("convergence.png", "convergence_steps.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "convergence.json").read_text())
    assert not found["left_out"]
    counts = {(each["case"], each["size"], each["what"]): each["n"] for each in found["samples"]}
    once = [(what, size) for what, sizes in (("loss", (2, 3)), ("held out", (0, 2, 3)), ("ms", (0, 2, 3))) for size in sizes]
    every = [(what, 0) for what in ("step", *convergence.PARTS)]
    assert counts == {
        (f"sequences: {what}", size, library): 2 if (what, size) in every else 1
        for library in LIBRARIES
        for what, size in [*once, *every, ("parameters", 0), ("tensors", 0)]
    }
    assert [row[1] for row in found["tables"][0]["rows"][: len(LIBRARIES)]] == ["rdmarpc", "torch RPC", "gRPC"][
        : len(LIBRARIES)
    ]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in the processes of a turn."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Here:
    """Calls functions in this process, which is every server."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._servers = [server.Server(job) for _ in range(job["servers"])]

    def start(self, name: str, x: Tensor, done: Callable[[], Any] | None = None, number: int = 0) -> Tensor:
        server._server = self._servers[number]
        return function(name)(x)

    def finish(self, call: Tensor) -> Tensor:
        return call


@pytest.mark.parametrize("problem", PROBLEMS)
def test_servers_train_as_one_process_does(
    problem: str, one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_server", None)
    whole = job() | {"problem": problem, "rank": 0, "clients": 1, "servers": 3, "look_every": 3, "timeout_s": 5.0}
    whole |= {"width": 8, "lr": 0.01, "batch": 4, "target": 1.0, "most_steps": 5, "meeting_place": str(tmp_path)}
    found, results = trainer.drive(Here(whole), whole)
    assert {size for case, size, _ in found if case.endswith("held out")} == {0, 3, 5}

    alone = PROBLEMS[problem].make(whole["seed"], 8)
    optimizer = torch.optim.Adam(alone.net.parameters(), lr=0.01)
    drawn, losses = torch.Generator().manual_seed(1000), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = alone.loss(4, drawn)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    theirs = torch.frombuffer(bytearray(results["losses of worker 0"]), dtype=torch.float32)
    torch.testing.assert_close(theirs, torch.tensor(losses), rtol=1e-4, atol=1e-5)
    assert theirs[0] != theirs[-1]


def test_gradients_are_added_up_in_the_order_of_the_ranks() -> None:
    """The same bits, whoever comes first: in float32 these sums depend on the order."""
    assert torch.equal(stepped([0, 1, 2]), stepped([2, 1, 0]))


def stepped(order: list[int]) -> Tensor:
    """The weights after a step of three workers that come in this order."""
    given = {rank: torch.tensor([value, float(rank)]) for rank, value in enumerate((1e8, -1e8, 1.0))}
    one = server.Server({"clients": 3, "lr": 0.5, "timeout_s": 20.0})
    one.begin_with(torch.ones(1))
    with ThreadPoolExecutor(2) as threads:
        for number, rank in enumerate(order[:-1], 1):
            threads.submit(one.exchange, given[rank])
            deadline = time.monotonic() + 20
            while len(one.given) < number:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        return one.exchange(given[order[-1]])


def test_a_worker_that_does_not_come_is_an_error() -> None:
    one = server.Server({"clients": 2, "lr": 0.5, "timeout_s": 0.01})
    one.begin_with(torch.ones(1))
    with pytest.raises(RuntimeError, match=re.escape("1 of 2 workers sent gradients")):
        one.exchange(torch.tensor([1.0, 0.0]))


def test_held_out_sentences_are_not_learned_from() -> None:
    learning = sentences.Sentences(0, 4)
    kept, learned = ({tuple(pair.flatten().tolist()) for pair in each} for each in (learning.kept, learning.pairs))
    assert len(kept) == sentences.HELD_OUT and len(learned) > 500 and not kept & learned


@pytest.mark.parametrize(("communication", "asked"), [(3.0, 1.0), (4.0, 1.3)])
def test_what_is_asked_depends_on_the_share_of_communication(communication: float, asked: float) -> None:
    findings = Findings("", "ms")
    for library, ms in (("rdmarpc", 100.0), ("torch_rpc", 120.0)):
        findings.keep(library, 2 * [("images: to the target", 0, ms)] + [("images: step", 0, 10.0)])
        findings.add("images: communication", 0, library, communication)
    convergence.judge_one(findings, "images")
    [target] = findings.targets
    assert (target["measured"], target["asked"], target["met"]) == (1.2, asked, asked == 1)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("problems=[speech]", "problems=['speech'] must be some of images, sequences, sentences"),
        ("images.target=2", "images.target=2"),
        ("sentences.batch=0", "sentences.batch=0"),
        ("workers=0", "workers=0"),
        ("libraries=[mpi]", "libraries=['mpi']"),
    ],
)
def test_bad_config_is_a_clear_error(override: str, says: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(says)):
        job(override)
