"""``schedule="zero_bubble"``: backwards in halves give the bits of one micro-batch after another."""

from __future__ import annotations

import copy
import random
import re
import shutil
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zero_bubble_models as models
from group import dismiss, run_group
from test_wrap import assert_same_state, batches, drive, leave_after_a_loss
from test_wrap_pipeline import left_over, one_after_another, train
from timing import eventually
from torch import nn

import rdmarpc as rpc
from rdmarpc import wrap

DRAWN = 6


def unsplit(model: Any) -> dict[str, int]:
    """Backwards in one go, by reason."""
    found: dict[str, int] = {}
    for key, count in model.counters().items():
        if key.startswith("backwards_unsplit["):
            why = key[:-1].split(": ", 2)[2]
            found[why] = found.get(why, 0) + count
    return found


def drawn(seed: int) -> None:
    dice = random.Random(seed)
    torch.manual_seed(seed)
    net, placement = models.drawn_chain(dice, dice.randint(2, 5), 3)
    twin = copy.deepcopy(net)
    model = wrap(net, placement, depth=dice.choice([1, 2, 4]))
    for chunks in (4, dice.randint(2, 6)):
        train(model, twin, batches(2, 12, models.SIZE), chunks, schedule="zero_bubble")
    reasons = {why for _, why in models.WHOLE.values()} | {"parameters that other segments read too"}
    assert set(unsplit(model)) <= reasons, unsplit(model)
    assert model.counters()["backwards_unsplit"] == sum(unsplit(model).values())
    model.close()


def in_one_go(name: str) -> None:
    """Between two parts that split."""
    make, why = models.WHOLE[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 20), make(), nn.Linear(20, 4))
    twin = copy.deepcopy(net)
    model = wrap(net, {"0": "worker1", "1": "worker2", "2": "worker3"}, depth=4)
    train(model, twin, batches(2, 12, 20), 4, schedule="zero_bubble")
    found = unsplit(model)
    assert sum(found.values()) == model.counters()["backwards_unsplit"] == 8, found
    assert why in found and set(found) <= {why, "hooks that its forward sets"}, found
    assert all("worker2 level 2: 1: " in key for key in model.counters() if key.startswith("backwards_unsplit["))
    model.close()


def tied() -> None:
    """A parameter that two parts of a worker read."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(20, 20) for _ in range(4)))
    net[2].weight = net[0].weight
    twin = copy.deepcopy(net)
    model = wrap(net, {"0": "worker1", "1": "worker2", "2": "worker1"}, depth=4)
    train(model, twin, batches(2, 12, 20), 4, schedule="zero_bubble")
    assert unsplit(model) == {"parameters that other segments read too": 16}
    model.close()


def memory() -> None:
    """No worker holds more micro-batches than the first one does in 1F1B, until the second half; ``prepare`` says how many."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(20, 20) for _ in range(3)))
    model = wrap(copy.deepcopy(net), {"0": "worker1", "1": "worker2", "2": "worker3"}, depth=4)
    x, y = batches(1, 24, 20)[0]
    held = {need.worker: need.in_flight for need in model.prepare(x, chunks=12, schedule="zero_bubble").memory}
    assert held == dict.fromkeys(held, 5)
    assert model.prepare(x, chunks=12).memory[0].in_flight == 5
    train(model, net, [(x, y)] * 2, 12, schedule="zero_bubble")
    train(model, net, [(x, y)] * 2, 12)
    model.close()
    with pytest.raises(ValueError, match="1f1b, interleaved, zero_bubble"):
        model.prepare(x, schedule="zero bubble")


def begins() -> None:
    """Another micro-batch begins before the second half of an earlier one, which here waits for that. There are four levels."""
    folder = tempfile.mkdtemp()
    torch.manual_seed(0)
    net = nn.Sequential(models.Begins(folder), models.Waits(f"{folder}/4"))
    twin = nn.Sequential(nn.Identity(), nn.Sequential(copy.deepcopy(net[1].layer), nn.Tanh()))
    model = wrap(net, {"0": "worker1", "1": "worker2"}, depth=8, timeout=150)
    [(x, y)] = batches(1, 16, 20)
    model.forward_backward(F.cross_entropy, x, target=y, chunks=8, schedule="zero_bubble")
    one_after_another(twin, F.cross_entropy, 8, x, y)
    assert model.counters()["backwards_unsplit"] == 0
    for network in (model, twin):
        torch.optim.SGD(network.parameters(), 0.1).step()
    for (_, mine), (_, other) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert torch.equal(mine, other)
    model.close()
    shutil.rmtree(folder)


def errors() -> None:
    """A second half that fails is named, and leaves nothing behind: what is unfinished does not reach the next batch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Identity(), models.Blasting(), nn.Linear(20, 4))
    twin = copy.deepcopy(net)
    model = wrap(net, {"1": "worker1", "2": "worker2"}, timeout=60)
    mine, theirs = (torch.optim.SGD(network.parameters(), 0.1) for network in (model, twin))
    [(good, y)] = batches(1, 16, 20)
    for at in (0, 6, 14):
        bad = good.clone()
        bad[at, 0] = 300
        model.zero_grad()
        twin.zero_grad()
        with pytest.raises(ZeroDivisionError) as caught:
            model.forward_backward(F.cross_entropy, bad, target=y, chunks=8, schedule="zero_bubble")
        assert re.search(r"(?s)worker1.*weight gradients of worker1 level 1: 1", str(caught.value.__cause__))
        model.zero_grad()
        model.forward_backward(F.cross_entropy, good, target=y, chunks=8, schedule="zero_bubble")
        one_after_another(twin, F.cross_entropy, 8, good, y)
        mine.step()
        theirs.step()
        assert_same_state(model, twin)
        for worker in ("worker1", "worker2"):
            eventually(partial(rpc.rpc_sync, worker, left_over), [0, 0, 0])
    model.close()


@pytest.mark.parametrize("seed", range(DRAWN))
def test_drawn_chains(seed):
    drive(partial(drawn, seed), 4, timeout=250.0)


@pytest.mark.parametrize("name", models.WHOLE)
def test_what_runs_in_one_go_is_counted_by_part_and_reason(name):
    drive(partial(in_one_go, name), 4, timeout=250.0)


@pytest.mark.parametrize("body", [tied, memory, begins, errors])
def test_over_shared_memory(body):
    drive(body, 4, timeout=250.0)


def over_tcp() -> None:
    drawn(1)


def test_over_tcp():
    drive(over_tcp, 4, timeout=250.0, transport="tcp")


# -- a worker that is killed in a second half


def killed(rank: int) -> None:
    if rank == 1:
        rpc.shutdown()  # serves until it is killed
    if rank == 2:
        leave_after_a_loss()
    if rank:
        return
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 20), models.Blasting(), nn.Linear(20, 4))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(20))
        net[0].bias.zero_()
    model = wrap(net, {"1": "worker1", "2": "worker2"}, timeout=60)
    [(x, y)] = batches(1, 16, 20)
    x[6, 0] = 400
    with pytest.raises(rpc.PeerLost, match="worker1"):
        model.forward_backward(F.cross_entropy, x, target=y, chunks=8, schedule="zero_bubble")
    model.close()
    dismiss("worker2")
    with pytest.raises(rpc.PeerLost):
        rpc.shutdown(timeout=20)


def test_a_worker_killed_in_a_second_half():
    outcomes = run_group(killed, 3, timeout=250.0)
    for rank in (0, 2):
        assert not outcomes[rank].error, outcomes[rank].text
    assert outcomes[1].exit_code == -9
