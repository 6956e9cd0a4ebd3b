"""What becomes of a wrapped model when operations fail, workers die, are stopped or are not to be had, and programs fork."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside import assert_same, batches, both, close_all, forget, sgd, step, wrap
from group import die, dismiss, results, run_group, until_dismissed
from halt import halt
from nets import NETS, data
from torch import nn

import rdmarpc as rpc
from rdmarpc import places
from rdmarpc.calls import agent

MODEL = NETS["perceptron"].make


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Embedding(5, 20), nn.Linear(20, 4)

    def forward(self, ids):
        return self.out(self.rows(ids))


def late() -> None:
    """An error of an operation comes at the next wait at the latest, with its type, its text, and the line that posted it."""
    model, twin = both(Looks, {"rows": "worker1", "out": "worker2"})
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 9])
    assert_same(model(good), twin(good))
    for _ in range(2):
        with pytest.raises(IndexError, match="index out of range") as caught:
            model(bad).sum().item()
        assert os.path.basename(__file__) in "".join(traceback.format_exception(caught.value))
        with torch.no_grad():
            assert_same(model(good), twin(good))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.out(torch.ones(2, 21)).sum().item()
    for _ in range(2):
        assert_same(*(step(each, sgd(each), good, good) for each in (model, twin)))
    huge = torch.randn(1 << 14, 20)
    with pytest.raises((rpc.RdmaError, RuntimeError, MemoryError)):
        model.out.weight.detach().repeat(1 << 30, 1 << 10).sum().item()  # more than there is
    assert torch.isfinite(model.out(huge)).all()


def test_errors_of_operations(drive):
    drive(late)


def hears_of_the_loss() -> str:
    """Whoever survives stays until the caller dismisses it: the other one has to be found gone first."""
    found = threading.Event()
    agent.current().on_peer_lost(lambda worker, error: found.set())
    until_dismissed()
    assert found.wait(20)
    with pytest.raises((rpc.PeerLost, rpc.TransferTimeout)):
        rpc.shutdown(timeout=20)
    return "left"


def losing(how: str, rank: int) -> Any:
    if rank == 1:
        rpc.shutdown()  # serves until it is killed
    if rank:
        return hears_of_the_loss()
    placement: Any = {"0": "worker2", "2": "worker1", "4": "worker2"}
    if how == "replicas":
        placement = {"0": ["worker1", "worker2"]}
    model = wrap(MODEL(), placement)
    optimizer = sgd(model)
    given = batches(200, 8, 20)
    step(model, optimizer, *given[0])
    rpc.rpc_async("worker1", die)
    started = time.monotonic()
    with pytest.raises(rpc.PeerLost, match="worker worker1 is lost: "):  # also where worker 2 tells it
        for x, y in given:
            if how == "batches":
                model.forward_backward(F.cross_entropy, x, target=y, chunks=4).item()
            else:
                step(model, optimizer, x, y).item()
    with pytest.raises(rpc.PeerLost, match="worker1"):
        model(given[0][0]).sum().item()
    if how == "steps":
        with pytest.raises(rpc.PeerLost, match="worker1"):
            model.state_dict()["2.weight"].cpu()
    seconds = time.monotonic() - started
    forget()
    places.close_streams()
    dismiss("worker2")
    with pytest.raises(rpc.PeerLost):
        rpc.shutdown(timeout=20)
    return seconds < 30


@pytest.mark.parametrize("how, device", [("steps", "shm"), ("steps", "tcp"), ("batches", "shm"), ("replicas", "shm")])
def test_a_worker_is_killed_in_mid_step(how, device):
    outcomes = run_group(partial(losing, how), 3, transport=device)
    for outcome in (outcomes[0], outcomes[2]):
        assert not outcome.error, outcome.text
    assert outcomes[0].result is True and outcomes[2].result == "left"
    assert outcomes[1].exit_code == -9


def stopped(rank: int) -> None:
    """A worker that stands still is lost after ``peer_timeout``; one that goes on before is only late."""
    if rank == 0:
        model, twin = both(MODEL, {"0": "worker1", "4": "worker1"})
        optimizers = [sgd(each) for each in (model, twin)]
        pid = rpc.rpc_sync("worker1", os.getpid)
        for number, (x, y) in enumerate(batches(6, 8, 20)):
            halt(pid)
            wake = threading.Timer(0.3, os.kill, (pid, signal.SIGCONT))
            wake.start()
            assert_same(*(step(each, o, x, y) for each, o in zip((model, twin), optimizers)), f"step {number}")
            wake.join()
        halt(pid)
        with pytest.raises((rpc.PeerLost, rpc.TransferTimeout), match="worker1"):
            step(model, optimizers[0], x, y).item()
        os.kill(pid, signal.SIGKILL)
        forget()
        places.close_streams()
        with pytest.raises(rpc.PeerLost):
            rpc.shutdown(timeout=20)
    else:
        rpc.shutdown()


def test_a_worker_is_stopped():
    outcomes = run_group(stopped, 2, peer_timeout=4)
    assert not outcomes[0].error, outcomes[0].text


def crosswise(rank: int) -> None:
    """Two callers, each of which has parts of its model at the other one and at a third worker."""
    if rank < 2:
        torch.manual_seed(rank)
        model, twin = both(MODEL, {"0": f"worker{1 - rank}", "2": "worker2", "4": f"worker{1 - rank}"})
        optimizers = [sgd(each) for each in (model, twin)]
        for x, y in batches(30, 8, 20):
            assert_same(*(step(each, o, x, y) for each, o in zip((model, twin), optimizers)))
        close_all()
        places.close_streams()
    rpc.shutdown()


def test_models_of_several_callers():
    results(run_group(crosswise, 3))


def forked() -> None:
    """A forked child that uses the model gets an error; what it drops is no matter of its parent's."""
    model, twin = both(MODEL, {"0": "worker1", "2": "worker2"})
    [(x, y)] = data("perceptron", (6,))
    optimizers = [sgd(each) for each in (model, twin)]
    for _ in range(3):
        out = model(x)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                del out
                model(x).sum().item()
            except BaseException as error:
                code = 0 if isinstance(error, (rpc.RdmaError, RuntimeError)) else 2
            os._exit(code)
        limit = time.monotonic() + 30
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < limit:
            time.sleep(0.01)
        if ended[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended[0] and os.waitstatus_to_exitcode(ended[1]) == 0, ended
        assert_same(out, twin(x))
        assert_same(*(step(each, o, x, y) for each, o in zip((model, twin), optimizers)))


def test_a_forked_child(drive):
    drive(forked)


def closed() -> None:
    """``close`` brings a model home, where it goes on as it was; what was taken before stays, and other models go on."""
    model, first = both(MODEL, {"0": "worker1", "2": "worker2"})
    other, twin = both(MODEL, {"0": "worker1"})
    [(x, y)] = data("perceptron", (6,))
    optimizers = [sgd(each) for each in (model, first, other, twin)]
    for _ in range(2):
        assert_same(*(step(each, o, x, y) for each, o in zip((model, first), optimizers)))
    kept, state = model(x).detach(), dict(model.state_dict())
    copies = [kept.cpu().clone(), {name: value.cpu().clone() for name, value in state.items()}]
    model.close()
    model.close()
    assert {type(p.data) for p in model.parameters()} == {torch.Tensor}
    assert_same([kept, state], copies)
    for _ in range(3):
        assert_same(*(step(each, o, x, y) for each, o in zip((model, first), optimizers)))
        assert_same(*(step(each, o, x, y) for each, o in zip((other, twin), optimizers[2:])))
    assert_same(model.state_dict(), first.state_dict())
    with torch.inference_mode():
        other.close()
        wrap(other, {"2": "worker2"})
    assert_same(*(step(each, o, x, y) for each, o in zip((other, twin), optimizers[2:])))


def brings_no_gradient() -> None:
    """No descriptor is left, say, where a gradient is to come home."""
    net = nn.Linear(2, 2, bias=False)
    model = rpc.wrap(net, {"": "worker1"})
    model(torch.ones(1, 2)).sum().backward()
    wrapping = sys.modules["rdmarpc.places.wrap"]
    real, wrapping.at_place = wrapping.at_place, refuses
    try:
        model.close()
    finally:
        wrapping.at_place = real
    assert net.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    torch.optim.SGD([net.weight], lr=1.0).step()
    forget()


def refuses(*_: Any) -> None:
    raise rpc.RdmaError("no descriptor is left")


def test_a_gradient_that_cannot_come_home_is_not_dropped(drive):
    drive(brings_no_gradient)


def test_closing(drive):
    drive(closed)


def nobody_closes(rank: int) -> None:
    """A program that ends with models open leaves nothing behind, and no worker waits."""
    if rank == 0:
        model = places.wrap(MODEL(), {"0": "worker1", "2": "worker1"})
        [(x, y)] = data("perceptron", (6,))
        step(model, sgd(model), x, y)
    rpc.shutdown()


def test_a_program_that_ends_with_models_open():
    results(run_group(nobody_closes, 2))
