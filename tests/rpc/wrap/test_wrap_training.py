"""``wrap``: training over several workers gives the bits of one process, for models of many kinds, placements and devices."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside import assert_same, beside, both, sgd, spread, step, wrap
from group import may_stage
from nets import NETS, data
from torch import nn

import rdmarpc as rpc
from rdmarpc import places

STEADY = ("registrations", "rpc_messages", "bytes_staged")
SIZES = (6, 6, 3, 6, 4, 3)


def trained(name: str, how: str) -> None:
    """Steps over batches of several sizes, with accumulated gradients and an evaluation between them."""
    batches = data(name, SIZES)

    def program(model: Any) -> Any:
        optimizer = sgd(model)
        for number, (x, y) in enumerate(batches):
            yield step(model, optimizer, x, y)
            if number == 2:
                model.eval()
                with torch.no_grad():
                    yield model(x)
                model.train()
            if number == 4:
                F.cross_entropy(model(x), y).backward()  # onto those of the step before
                optimizer.step()

    make = NETS[name].make
    beside(program, make, spread(make(), how))


@pytest.mark.parametrize("how", ["all", "turns", "half"])
@pytest.mark.parametrize("name", NETS)
def test_bits_are_those_of_one_process(drive, name, how):
    drive(trained, name, how)


@pytest.mark.parametrize("name", ["convolutions", "recurrent", "views"])
def test_over_tcp(drive, name):
    drive(trained, name, "turns", transport="tcp")


def steady(name: str) -> None:
    """From the second step of its kind on a step has no RPC message, no registration and no staging copy."""
    [x, y] = data(name, (6,))[0]
    model, _ = both(NETS[name].make, spread(NETS[name].make(), "turns"))
    optimizer = sgd(model)
    for _ in range(3):
        step(model, optimizer, x, y)
    keys = [key for key in STEADY if key != "bytes_staged" or not may_stage()]
    for _ in range(3):  # the group has other things to say now and then, but not in every five steps
        seen = [model.counters(), model.counters()]  # what asking costs
        for _ in range(5):
            step(model, optimizer, x, y).item()
        seen.append(model.counters())
        spent = {key: seen[2][key] - seen[1][key] - (seen[1][key] - seen[0][key]) for key in keys}
        if spent == dict.fromkeys(keys, 0):
            break
    assert spent == dict.fromkeys(keys, 0), spent
    assert seen[2]["bytes_direct"] > seen[1]["bytes_direct"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("name", ["perceptron", "skips", "unet"])
def test_a_steady_step_only_writes(drive, name, transport):
    drive(steady, name, transport=transport)


def told() -> None:
    """The table has what crosses, between whom; counters have sums over all workers, or this one's."""
    model, _ = both(NETS["perceptron"].make, {"0": "worker1", "2": "worker2"})
    [(x, y)] = data("perceptron", (6,))
    optimizer = sgd(model)
    for _ in range(3):
        step(model, optimizer, x, y)
    table = model.placement_table()
    assert all(text in table for text in ("worker0", "worker1", "worker2", "float32[6, 32]", "float32[6, 16]")), table
    assert model.counters(everywhere=False)["bytes_direct"] < model.counters()["bytes_direct"]
    assert model.counters()["steps"] == 3


def test_what_crosses_is_told(drive):
    drive(told)


def small_and_kept() -> None:
    """Results are kept over steps, dropped, and go backward in any order; none is written over."""

    def program(model: Any) -> Any:
        optimizer = sgd(model)
        batches = data("perceptron", (5, 5, 5, 5, 5, 5, 5, 5))
        with torch.no_grad():
            kept = [model(x * scale) for scale, (x, _) in enumerate(batches)]
        losses = [F.cross_entropy(model(x), y) for x, y in batches]
        del losses[2]
        gc.collect()
        for loss in reversed(losses):
            loss.backward()
        optimizer.step()
        yield losses
        yield kept
        yield [model(x) for x, _ in batches]

    beside(program, NETS["perceptron"].make, {"0": "worker1", "4": "worker2"})


def test_kept_and_dropped_results(drive):
    drive(small_and_kept)


def where_results_lie() -> None:
    """They stay where they were computed, so a loss is, too; ``outputs="here"`` brings them home, with their gradients."""
    batches = data("perceptron", (5, 5))
    placement = {"0": "worker1", "2": "worker1", "4": "worker1"}
    stays, twin = both(NETS["perceptron"].make, placement)
    comes, _ = both(NETS["perceptron"].make, placement, outputs="here")
    for x, y in batches:
        assert isinstance(stays(x), places.RemoteTensor) and isinstance(F.cross_entropy(stays(x), y), places.RemoteTensor)
        out = comes(x)
        assert type(out) is torch.Tensor and out.requires_grad
        out.numpy(force=True)
    assert isinstance(next(stays.parameters()), places.RemoteTensor)
    assert_same([step(each, sgd(each), *batches[0]) for each in (stays, comes)], [step(twin, sgd(twin), *batches[0])] * 2)
    assert_same([stays.state_dict(), comes.state_dict()], [twin.state_dict()] * 2)
    assert all(isinstance(p.grad, places.RemoteTensor) for p in stays.parameters())


def test_results_stay_or_come_home(drive):
    drive(where_results_lie)


class Pair(nn.Module):
    """Two inputs, one by name; structures between its parts, and as its result."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(20, 8), nn.Linear(20, 6), nn.Linear(14, 4)

    def forward(self, x, *, y, double=False):
        made = {"left": (torch.relu(self.left(x)), 3), "right": self.right(y)}
        out = self.out(torch.cat([made["left"][0], made["right"]], 1)) * made["left"][1]
        return {"out": out * 2 if double else out, "left": made["left"], "none": None, "rows": len(x)}


def structures(outputs: str) -> None:
    def program(model: Any) -> Any:
        for number, double in enumerate((False, True, False)):
            x, y = torch.randn(5, 20, requires_grad=True), torch.randn(5, 20, requires_grad=True)
            found = model(x, y=y, double=double)
            yield [type(value).__name__ for value in (found, found["left"], found["rows"])]
            yield found
            (found["out"].sum() + (found["left"][0].pow(2).sum() if number != 1 else 0)).backward()
            yield x.grad, y.grad

    options = {"outputs": outputs} if outputs else {}
    beside(program, Pair, {"left": "worker1", "out": "worker2"}, **options)


@pytest.mark.parametrize("outputs", ["", "here"])
def test_structures_inputs_by_name_and_partial_losses(drive, outputs):
    drive(structures, outputs)


def freed() -> None:
    """What is dropped is freed at the workers: in a loop, when a model is closed, when nobody has it any more."""

    def used() -> int:
        return sum(rpc.rpc_sync(name, rpc.counters)["arena_used"] for name in ("worker1", "worker2"))

    [(x, y)] = data("perceptron", (64,))
    start, marks = used(), []
    model = wrap(NETS["perceptron"].make(), {"0": "worker1", "2": "worker2"})
    optimizer = sgd(model)
    for number in range(120):
        step(model, optimizer, x, y)
        if number % 40 == 39:
            marks.append(used())
    assert marks[2] <= marks[0] + (1 << 20), marks
    model.close()
    model.close()
    del model, optimizer
    for _ in range(30):
        other = places.wrap(nn.Sequential(nn.Linear(512, 512)), {"0": "worker1"})
        other(torch.ones(4, 512)).sum().backward()
    del other
    gc.collect()
    wrap(nn.Sequential(nn.Linear(4, 4)), {"0": "worker1"}).close()  # closes those that nobody has any more
    rpc.rpc_sync("worker1", gc.collect)
    assert used() <= start + (40 << 20), (start, used())  # the regions of two streams stay


def test_memory_is_given_back(drive):
    drive(freed)


class Shown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.features, self.encoder = nn.Linear(4, 8), nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(self.features(x)).mean(1)


def shown() -> None:
    """The programs of the pages, one after another."""
    x, y = torch.randn(2, 3, 4), torch.arange(2)
    names: dict[str, Any] = {"torch": torch, "F": F, "rpc": rpc, "net": Shown(), "data": [(x, y)] * 6}
    for page in ("wrap.md", "graphed.md"):
        text = (Path(__file__).parents[3] / "docs" / page).read_text()
        for program in re.findall(r"```python\n(.*?)```", text, re.S):
            names |= {"x": x, "y": y}
            exec(program.replace("/cuda:0", ""), names)
        model = names["model"]
        names["optimizer"] = sgd(model)
    layers = model.encoder.layers
    found = [each.place for each in (layers[9].linear1.weight, layers[9].linear2.weight, names["loss"])]
    assert found == ["worker1", "worker2", "worker2"]
    assert names["step"].replays


def test_the_programs_of_the_pages_run(drive):
    drive(shown)
