"""Checkpoints, plain ``torch.distributed.checkpoint`` in one process, a worker that is killed and replaced."""

from __future__ import annotations

import copy
import errno
import importlib
import resource
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from beside import assert_same, home
from checkpointed import PLACES, made, plainly, step
from group import Meeting, die, results, run_group
from torch import nn

import rdmarpc as rpc
from rdmarpc import places
from rdmarpc.places import owners


class GivenUp:
    """By Ctrl-C, as it is written."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class Alarm(Exception):
    """What a handler of signals raises."""


class Alarming:
    """An alarm comes as it is saved, or loaded."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __reduce__(self) -> Any:
        if self.when == "saved":
            ring()
        return ring, ()


def ring() -> None:
    signal.raise_signal(signal.SIGALRM)


def alarmed(state: dict[str, Any], place: str) -> None:
    """An exception of the program's own class comes as itself."""

    def handle(*given: Any) -> None:
        raise Alarm("late")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        with pytest.raises(Alarm, match="late"):
            rpc.save_checkpoint({**state, "plain": Alarming("saved")}, place)
        rpc.save_checkpoint({**state, "plain": Alarming("loaded")}, place)
        with pytest.raises(Alarm, match="late"):
            rpc.load_checkpoint({**state, "plain": 1}, place)
    finally:
        signal.signal(signal.SIGALRM, before)


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
    with pytest.raises(KeyboardInterrupt):
        rpc.save_checkpoint({**again, "step": GivenUp()}, place)  # the last one stays
    alarmed(again, str(Path(folder) / "alarm"))
    with pytest.raises(Exception, match=r"nowhere|metadata"):
        rpc.load_checkpoint(again, str(Path(folder) / "nowhere"))
    (Path(folder) / "file").touch()
    with pytest.raises(OSError):
        rpc.save_checkpoint(again, str(Path(folder) / "file" / "below"))
    unscheduled = {"model": again["model"], "optimizer": torch.optim.Adam(again["model"].parameters(), 0.01)}
    rpc.save_checkpoint(unscheduled, str(Path(folder) / "unscheduled"))
    torch.optim.lr_scheduler.StepLR(unscheduled["optimizer"], 2)
    rpc.load_checkpoint(unscheduled, str(Path(folder) / "unscheduled"))
    assert "initial_lr" not in unscheduled["optimizer"].param_groups[0]  # as after torch's ``load_state_dict``
    last = rpc.wrap(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), {"": "worker2"})
    strided = {"model": last, "optimizer": torch.optim.Adam(last.parameters(), fused=True)}
    last(torch.randn(1, 2, 4, 4)).sum().backward()
    strided["optimizer"].step()
    rpc.save_checkpoint(strided, str(Path(folder) / "strided"))
    rpc.load_checkpoint(strided, str(Path(folder) / "strided"))
    assert strided["optimizer"].state[last.weight]["exp_avg"].stride() == last.weight.stride() == (18, 1, 6, 2)
    last.close()
    rpc.load_checkpoint(again, place)
    rpc.wrap(again["model"], PLACES)  # it has its checkpoint still
    assert again["step"] == 3
    assert [step(again) for _ in range(2)] == losses[:2]
    rpc.rpc_async("worker1", die)
    with pytest.raises(rpc.PeerLost, match="worker1"):
        for _ in range(200):
            step(again)
    for wrong in (("worker1", "worker2"), ("worker1", "worker9"), ("worker3", "worker0")):
        with pytest.raises(ValueError):
            again["model"].replace(*wrong)
    again["model"].more = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="more"):
        again["model"].replace("worker1", "worker3")
    assert again["model"].first.layer.weight.place == "worker1"
    del again["model"].more
    again["model"].register_buffer("later", torch.ones(2), persistent=False)
    with pytest.raises(RuntimeError, match="later of 'model' were not there"):
        again["model"].replace("worker1", "worker3")
    del again["model"].later
    back = again["model"].replace("worker1", "worker3")
    assert back is again and again["step"] == 3
    assert all(p.grad is None for p in again["model"].parameters())  # those of the lost worker are lost
    assert [step(again) for _ in range(5)] == losses
    assert_same(again["model"].state_dict(), end)
    assert "worker3" in again["model"].placement_table()
    again["model"].close()


def batch(state: dict[str, Any]) -> torch.Tensor:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
    state["optimizer"].zero_grad()
    loss = state["model"].forward_backward(lambda y: y.pow(2).mean(), x, chunks=3, schedule="zero_bubble")
    state["optimizer"].step()
    state["step"] += 1
    return loss


def batches(folder: str) -> None:
    """A worker is lost among micro-batches, another one was before, and nobody has asked the others for a value since."""
    state, place = made({"first": "worker2", "middle": "worker3"}), str(Path(folder) / "batches")
    batch(state)
    rpc.save_checkpoint(state, place)
    losses = [batch(state).item() for _ in range(2)]
    rpc.load_checkpoint(state, place)
    rpc.rpc_async("worker3", die)
    for _ in range(2):
        with pytest.raises(rpc.PeerLost, match="worker3"):
            for _ in range(200):
                batch(state)
    state["model"].replace("worker3", "worker4")
    assert [batch(state).item() for _ in range(2)] == losses
    rpc.save_checkpoint(state, place)
    saved = copy.deepcopy(home(state["model"].state_dict()))
    rpc.rpc_async("worker4", die)
    with pytest.raises(rpc.PeerLost, match="worker4"):
        for _ in range(200):
            rpc.save_checkpoint(state, place)
    state["model"].close()
    plainly(place, saved)  # the last one that was complete


@contextmanager
def interrupted(thing: Any, name: str, after: int = 0) -> Iterator[None]:
    """Ctrl-C in the call, or the setting, of this that is behind so many others."""
    original, left = vars(thing)[name], iter([None] * after)

    def call(*args: Any) -> Any:
        if next(left, left) is left:
            raise KeyboardInterrupt
        return (original.fset if isinstance(original, property) else original)(*args)

    setattr(thing, name, property(original.fget, call) if isinstance(original, property) else call)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        setattr(thing, name, original)


def replacing(folder: str) -> None:
    """``replace`` that fails midway can be called again, and what has moved is as in the checkpoint."""
    state, place, module = made(), str(Path(folder) / "at"), importlib.import_module("rdmarpc.places.wrap")
    model: Any = state["model"]
    for _ in range(3):
        step(state)
    rpc.save_checkpoint(state, place)
    angles = model.first.angles.cpu()
    saved = copy.deepcopy(home(model.state_dict()))
    losses = [step(state) for _ in range(5)]

    def lost(worker: str) -> None:
        rpc.rpc_async(worker, die)
        with pytest.raises(rpc.PeerLost, match=worker):
            for _ in range(200):
                step(state)

    def moved() -> int:
        """How many tensors of the lost part have moved, and are what they were."""
        there = {name: tensor for name, tensor in model.named_parameters() if name.startswith("first")}
        there.update((name, tensor) for name, tensor in model.named_buffers() if name.startswith("first"))
        there = {name: tensor for name, tensor in there.items() if tensor.place != "worker1"}
        assert_same(home(there), {name: {**saved, "first.angles": angles}[name] for name in there})
        return len(there)

    lost("worker1")
    groups = [{"params": [p]} for p in model.parameters()]
    state["optimizer"], optimizer = torch.optim.Adam(groups, 0.01), state["optimizer"]
    with pytest.raises(ValueError, match="groups of optimizer 'optimizer'"):
        model.replace("worker1", "worker3")
    state["optimizer"] = optimizer
    with interrupted(module, "fill"):
        model.replace("worker1", "worker3")
    assert moved() == 0
    with interrupted(rpc.RemoteTensor, "data", 3):
        model.replace("worker1", "worker3")
    assert moved() == 3
    with interrupted(rpc.RemoteTensor, "data", 2):
        model.replace("worker1", "worker4")
    assert moved() == 3
    with interrupted(module, "load_checkpoint"):
        model.replace("worker1", "worker4")
    assert moved() == 8 and {tensor.place for tensor in model.first.parameters()} == {"worker4"}
    for wrong in (("worker1", "worker2"), ("worker3", "worker5")):
        with pytest.raises(ValueError):
            model.replace(*wrong)
    with interrupted(module, "restore"):
        model.replace("worker1", "worker4")
    lost("worker2")
    for _ in range(2):
        with pytest.raises(rpc.PeerLost, match="worker2"):
            model.replace("worker1", "worker4")
    assert moved() == 8
    assert model.replace("worker2", "worker3") is state
    assert [step(state) for _ in range(5)] == losses
    with pytest.raises(ValueError):  # that is over
        model.replace("worker1", "worker5")
    model.close()


def test_a_replacement_that_fails_midway_is_called_again():
    outcomes = run_group(partial(scenario, 6, replacing), 6, dynamic=True, timeout=200.0)
    results([outcome for rank, outcome in enumerate(outcomes) if rank not in (1, 2)])
    assert all(outcomes[rank].exit_code == -9 for rank in (1, 2))


def scenario(size: int, program: Callable[[str], None], meeting: Meeting) -> None:
    meeting.join()
    meeting.step("joined", size)
    if meeting.rank:
        meeting.hear("done", timeout=150.0)
        rpc.shutdown(graceful=False)
        return
    with tempfile.TemporaryDirectory() as folder:
        program(folder)
    meeting.say("done")
    places.close_streams()
    rpc.shutdown(graceful=False)


def test_threads_find_the_operators_of_checkpoints_made():
    """Several at once would make each several times, and torch would go on with one that is gone."""
    script = "import torch, rdmarpc.places.checkpoint; print(*('default' in vars(vars(torch.ops.rdmarpc)[f'{name}_part']) "
    script += "for name in ('write', 'read')))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.split() == ["True", "True"]


def trainings(folder: str) -> None:
    training(folder)
    batches(folder)


def test_a_killed_worker_is_replaced_and_training_goes_on_with_the_same_bits():
    outcomes = run_group(partial(scenario, 5, trainings), 5, dynamic=True, timeout=250.0)
    results([outcome for rank, outcome in enumerate(outcomes) if rank not in (1, 3, 4)])
    assert all(outcomes[rank].exit_code == -9 for rank in (1, 3, 4))


def saw_nothing(path: object) -> bool:
    raise FileNotFoundError(path)


def close_eyes() -> None:
    """This worker sees no file any more."""
    owners.os = types.SimpleNamespace(path=types.SimpleNamespace(isdir=lambda path: False), stat=saw_nothing)  # type: ignore[assignment]


def limit_files(nbytes: int) -> None:
    """This worker writes no longer files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def owned(folder: str) -> None:
    """What lies at workers is written and read there, in a file for each, and does not come here."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.Linear(512, 512), torch.nn.Linear(512, 64), torch.nn.Linear(64, 4)
    )
    model = rpc.wrap(net, {"0": "worker1", "1": "worker2", "2": "worker2"})
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    state = {"model": model, "optimizer": optimizer}

    def train() -> None:
        model(torch.ones(2, 64)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for at, sees in enumerate((True, False)):
        train()  # what was copied here before is written now
        place = str(Path(folder) / f"at{at}")
        before = model.counters()
        rpc.save_checkpoint(state, place)
        moved = model.counters()["bytes_out"] - before["bytes_out"]
        files = {path.name for path in Path(place).iterdir()}
        assert {"__0_0.distcp", "__1_0.distcp"} <= files and ("__2_0.distcp" in files) is sees
        assert (moved < 100_000) is sees, moved
        saved = copy.deepcopy(home(model.state_dict()))
        moments = copy.deepcopy(home(optimizer.state_dict()))
        train()
        before = model.counters()
        rpc.load_checkpoint(state, place)
        moved = model.counters()["bytes_in"] - before["bytes_in"]
        assert (moved < 100_000) is sees, moved
        assert_same(model.state_dict(), saved)
        assert_same(optimizer.state_dict(), moments)
        alone = {"model": {name: torch.zeros_like(value) for name, value in saved.items()}}
        dcp.load(alone, checkpoint_id=place, no_dist=True)
        assert_same(alone["model"], saved)
        if sees:
            whole, owners._PIECE = owners._PIECE, 1 << 20  # so a worker writes, and reads, its part in several files
            rpc.save_checkpoint(state, place)
            assert len([*Path(place).glob("__*")]) > len(files)
            train()
            rpc.load_checkpoint(state, place)
            assert_same(model.state_dict(), saved)
            owners._PIECE = whole
            rpc.rpc_sync("worker1", limit_files, (4096,))
            with pytest.raises(OSError) as caught:
                rpc.save_checkpoint(state, place)
            rpc.rpc_sync("worker1", limit_files, (resource.RLIM_INFINITY,))
            assert caught.value.errno == errno.EFBIG  # what a full disk is told by, with another number
            rpc.load_checkpoint(state, place)  # the earlier one is as it was
            assert_same(model.state_dict(), saved)
            rpc.rpc_sync("worker2", close_eyes)


def owning(meeting: Meeting) -> None:
    meeting.join(world_size=3)
    if meeting.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            owned(folder)
    rpc.shutdown()


def test_workers_write_and_read_what_lies_there():
    results(run_group(owning, 3, dynamic=True, timeout=120.0))
