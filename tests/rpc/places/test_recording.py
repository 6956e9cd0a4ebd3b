"""What is recorded of what is posted: counts that were made by hand for small models."""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from relative import phases, relative
from standing_group import StandingGroup
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

import rdmarpc as rpc
from rdmarpc import timeline, transfers
from rdmarpc.graph.fragments import Move, Operation, Phase
from rdmarpc.places import device, observing, recording, streams, wrap

FORWARD, BACKWARD, STEP = Phase


@pytest.fixture(scope="module")
def group() -> Iterator[StandingGroup]:
    found = StandingGroup(3)
    yield found
    found.end()


def rows(found: transfers.Transfers) -> list[tuple[Any, ...]]:
    return [(c.name, c.kind, c.source, c.target, c.shape, c.nbytes, c.times, c.allocator) for c in found.crossings]


class Chain(nn.Module):
    """``second`` and ``third`` read what ``first`` makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.second, self.third = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        y = self.first(x)
        return self.second(y) + self.third(y)


def trained(model: Any, optimizer: torch.optim.Optimizer, *sizes: int) -> list[float]:
    losses = []
    for size in sizes:
        loss = model(torch.ones(size, 6)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


PLACES = {"first": "worker1", "second": "worker2", "third": "worker2"}


def chain() -> dict[str, Any]:
    torch.manual_seed(3)
    alone = Chain()
    model = wrap(copy.deepcopy(alone), PLACES)
    found: dict[str, Any] = {"none": (model.transfers(), model.placement_table())}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found["losses"] = trained(model, optimizer, 5, 5, 5)
    found["after"] = observing.observers, len(modules._global_forward_hooks), len(optimizers._global_optimizer_post_hooks)
    found["alone"] = trained(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 5, 5, 5)
    found["two"] = model.transfers()
    with torch.no_grad():
        model(torch.ones(5, 6)).cpu()
    trained(model, optimizer, 7)
    found["forms"] = model.transfers()
    found["tables"] = model.placement_table()
    with torch.no_grad():
        model(torch.ones(5, 6))
    found["last used"] = [each.crossings[0].shape for each in model.transfers()]
    return found


def test_a_chain_of_two_workers(group: StandingGroup):
    found = group.run(chain)
    assert found["none"] == ([], "") and found["after"] == ((), 0, 0)
    assert found["losses"] == found["alone"]
    [step] = found["two"]
    assert rows(step) == [
        ("x", "input", "worker0", "worker1", (5, 6), 120, 1, "input"),
        ("first", "activation", "worker1", "worker2", (5, 8), 160, 1, "first.1: relu"),
        ("first", "gradient", "worker2", "worker1", (5, 8), 160, 1, step.crossings[2].allocator),
        ("x", "input", "worker0", "worker1", (5, 6), 120, 1, "input"),
    ]
    assert step.crossings[2].allocator.startswith("backward of ")
    assert [c.again for c in step.crossings] == [0, 0, 0, 1] and all(c.static for c in step.crossings)
    assert step.crossings[1].first == "second: addmm" and step.crossings[1].last == "backward of second: mm"
    assert step.nbytes == 560 and step.steps == 2 and step.caller == "worker0"
    assert "\n4 edges, 560 bytes cross in a training step, 120 of them again" in step.table()
    workers = {w.name: (w.parameter_bytes, w.bytes_in, w.bytes_out, w.parts) for w in step.workers}
    assert workers["worker1"] == (4 * 56, 400, 160, ("first.0", "first.1"))
    assert workers["worker2"] == (2 * 4 * 36, 160, 160, ("second", "third"))
    assert workers["worker0"] == (0, 0, 240, ())
    _, without, other = found["forms"]
    assert rows(without)[2] == ("add()", "activation", "worker2", "worker0", (5, 4), 80, 1, "add()") and without.nbytes == 360
    assert other.crossings[0].shape == (7, 6) and (len(found["forms"]), other.steps) == (3, 1)
    assert found["tables"] == "\n\n".join(each.table() for each in found["forms"])
    assert found["last used"] == [(5, 6), (7, 6), (5, 6)]


def pieces_and_forms() -> Any:
    model = wrap(Chain(), PLACES)
    model.forward_backward(lambda out: out.sum(), torch.ones(8, 6), chunks=4)
    model.forward_backward(lambda out: out.sum(), torch.ones(8, 6), chunks=4)
    [found] = model.transfers()
    with torch.no_grad():
        for size in range(1, 20):
            model(torch.ones(size, 6))
    return found, len(model.transfers())


def test_micro_batches_are_one_step_and_forms_are_few(group: StandingGroup):
    found, forms = group.run(pieces_and_forms)
    assert [(c.name, c.kind, c.shape, c.times, c.again) for c in found.crossings] == [
        ("x", "input", (2, 6), 4, 0),
        ("first", "activation", (2, 8), 4, 0),
        ("first", "gradient", (2, 8), 4, 0),
        ("x", "input", (2, 6), 4, 4),
    ]
    assert found.nbytes == 4 * (48 + 64 + 64 + 48) and found.histogram()[0].count == 8
    assert forms == 8


class Chosen(nn.Module):
    """Sends as many rows as are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 2)
        nn.init.ones_(self.first.weight)

    def forward(self, x):
        y = self.first(x)
        return self.second(y[y[:, 0] > 0])


def chosen() -> list[tuple[Any, ...]]:
    model = wrap(Chosen(), {"first": "worker1", "second": "worker2"})
    for positive in (3, 2):
        model(torch.tensor([[1.0]] * positive + [[-1.0]] * (5 - positive)))
    return [(c.name, c.shape, c.static) for c in model.transfers()[0].crossings]


def called_once() -> tuple[int, int]:
    """What a model that is not called any more has recorded, after other work of some thousand events; of the same work, how
    many copies cross. Nobody looks on any more."""
    teacher = wrap(nn.Linear(6, 4), {"": "worker1"})
    with torch.no_grad():
        targets = teacher(torch.ones(5, 6))
    crossed, rows = 3000, torch.ones(3)
    for _ in range(crossed):
        targets += rows[0]  # a copy of it, and the sum
    found = sum(crossing.times for crossing in teacher.transfers()[0].crossings)
    assert not observing.observers
    return found, crossed


def test_a_model_that_is_called_once_is_not_recorded_for_ever(group: StandingGroup):
    found, crossed = group.run(called_once)
    assert 1 < found < crossed


def test_shapes_that_depend_on_data_are_dynamic(group: StandingGroup):
    assert group.run(chosen) == [("x", (5, 1), True), ("index()", (2, 1), False)]


def block() -> dict[str, Any]:
    """Three steps in a recording; the first layer's parameters lie here, the second one's at worker1."""
    torch.manual_seed(3)
    alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    net = wrap(copy.deepcopy(alone), {"1": "worker1"})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    inputs = torch.ones(2, 4)
    with recording() as seen:
        losses = []
        for _ in range(3):
            loss = net(inputs).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
    found: dict[str, Any] = {"losses": [loss.item() for loss in losses], "steps": seen.steps(), "flow": seen.flow()}
    found["after"] = observing.observers, len(modules._global_forward_hooks), len(optimizers._global_optimizer_post_hooks)
    optimizer, found["alone"] = torch.optim.SGD(alone.parameters(), lr=0.1), []
    for _ in range(3):
        loss = alone(inputs).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found["alone"].append(loss.item())
    found["transfers"] = seen.transfers()
    with recording() as outer, recording() as inner:
        net(inputs)
        assert alone(inputs).sigmoid().requires_grad  # its result is saved for the backward
    found["both"] = len(outer.recorded.events), len(inner.recorded.events)
    with recording() as empty:
        pass
    with pytest.raises(RuntimeError, match="nothing was posted"):
        empty.transfers()
    return found


def test_a_recording_has_what_ran_here_too(group: StandingGroup):
    found = group.run(block)
    assert found["losses"] == found["alone"] and found["after"] == ((), 0, 0)
    assert len(found["steps"]) == 3 and found["both"][0] == found["both"][1] > 0
    second, third = found["steps"][1:]
    assert phases(second) == [FORWARD, BACKWARD, STEP] and relative(second) == relative(third)
    ran = [(e.place, e.short, e.phase, e.path) for e in third.events if isinstance(e, Operation)]
    assert [each for each in ran if each[3] and each[1] in ("addmm", "mm", "sum")] == [
        ("worker0", "addmm", FORWARD, "0"),
        ("worker1", "mm", FORWARD, "1"),
        ("worker1", "mm", BACKWARD, "1"),
        ("worker1", "mm", BACKWARD, "1"),
        ("worker0", "mm", BACKWARD, "0"),
        ("worker1", "sum", BACKWARD, "0"),  # its only operand lies there
    ]
    assert {place for place, name, phase, _ in ran if phase == STEP and "add" in name} == {"worker0", "worker1"}
    assert all(event.phase == STEP for event in third.events[-2:])
    assert [(c.name, c.kind, c.source, c.nbytes, c.again, c.allocator) for c in found["transfers"].crossings] == [
        ("0", "activation", "worker0", 32, 0, "0: addmm"),
        ("0", "activation", "worker0", 32, 1, "0: addmm"),
        ("0", "gradient", "worker1", 32, 0, "backward of 1: mm"),
        ("0.bias", "gradient", "worker1", 16, 0, "backward of 0: sum"),
    ]
    assert sum(isinstance(event, Move) for event in third.events) == 4 and found["transfers"].steps == 3


def peaks() -> tuple[int, int, list[int]]:
    place = device("worker1")
    kept = torch.ones(1000).to(place)
    with recording() as seen:
        a = kept + 1  # 4,000 bytes
        b = a + 1  # 8,000, until here a is read
        c = b[:10] + 1  # 4,000 + 40, and then 40
        c += 1
    flow = seen.flow()
    return flow.peak("worker1"), flow.peak("worker0"), list(flow.alive("worker1"))


def ragged_rows() -> None:
    """A nested tensor has no shape: it is told by its number of rows."""
    for layout in (torch.strided, torch.jagged):
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        twin, model = copy.deepcopy(net), wrap(net, {"0": "worker1", "2": "worker2"})
        for count in (1, 3):
            x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(count, 4)], layout=layout)
            with rpc.recording() as seen:
                results = [each(x).to_padded_tensor(0.0) for each in (model, twin)]
            for each in results:
                each.sum().backward()
            assert torch.equal(results[0].cpu(), results[1])
            assert count == 3 or "worker1" in seen.placement_table()  # weights that nobody has written do not cross again
        assert torch.equal(net[0].weight.grad.cpu(), twin[0].weight.grad) and len(model.transfers()) == 1


def test_nested_tensors(group: StandingGroup):
    group.run(ragged_rows)


def test_bytes_alive_by_hand(group: StandingGroup):
    most, here, alive = group.run(peaks)
    assert (most, here) == (8000, 0)
    assert alive == [4000, 8000, 4040, 40]


def files(folder: str) -> transfers.Transfers:
    model = wrap(Chain(), PLACES)
    trained(model, torch.optim.Adam(model.parameters()), 5, 5)
    [found] = model.transfers()
    found.save(f"{folder}/step.json")
    found.draw(f"{folder}/step.png")
    return found


def test_a_step_in_files(group: StandingGroup, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = group.run(files, str(tmp_path))
    assert transfers.load(tmp_path / "step.json") == [found]
    transfers.main([str(tmp_path / "step.json"), "--draw", str(tmp_path / "again.png")])
    assert str(found) in capsys.readouterr().out
    for name in ("step.png", "again.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


# -- explain, timeline


def explained() -> tuple[str, str, str]:
    """What the streams of two workers say of themselves while the first one multiplies and the second waits for that."""
    a = torch.ones(1200, 1200).to(device("worker1"))
    b = (a @ a).to(device("worker2")) + 1  # every form was seen
    b.sum().item()
    limit = time.monotonic() + 60
    while True:
        for _ in range(4):
            c = a @ a
        d = c.to(device("worker2")) + 1
        running, waiting = (rpc.rpc_sync(f"worker{rank}", _streams) for rank in (1, 2))
        caller = rpc.explain()
        d.sum().item()
        if ("at mm" in running and "waits for a copy from worker1" in waiting) or time.monotonic() > limit:
            return running, waiting, caller


def _streams() -> str:
    return "\n".join(line for line in rpc.explain().splitlines() if line.startswith("stream of worker0"))


def test_explain_names_what_a_stream_runs_and_waits_for(group: StandingGroup):
    running, waiting, caller = group.run(explained)
    assert "stream of worker0 at cpu: at mm; " in running
    assert "stream of worker0 at cpu: waits for a copy from worker1; " in waiting
    assert "stream to worker1: " in caller and "stream to worker2: " in caller


def _timed(path: str) -> None:
    _timed_lines.append(timeline.record(path))
    _timed_lines[-1].__enter__()


def _timed_end() -> None:
    _timed_lines.pop().__exit__(None, None, None)


_timed_lines: list[Any] = []


def lines(folder: str) -> bool:
    model = wrap(Chain(), PLACES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, optimizer, 5)
    for stream in streams():  # what was posted has been run before a timeline begins, and before it ends
        stream.synchronize()
    rpc.rpc_sync("worker1", _timed, args=(f"{folder}/worker1",))
    with timeline.record(f"{folder}/worker0.json"):
        trained(model, optimizer, 5)
    for stream in streams():
        stream.synchronize()
    rpc.rpc_sync("worker1", _timed_end)
    return observing.line is None


def test_a_timeline_has_the_streams(group: StandingGroup, tmp_path: Path):
    assert group.run(lines, str(tmp_path))
    trace = json.loads((tmp_path / "worker1" / "timeline.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    spans = [event["name"] for event in trace if event["ph"] == "X" and names[event["tid"]] == "stream of worker0, cpu"]
    # One forward and backward; what goes to the second worker, and what comes back.
    assert spans.count("addmm") == spans.count("relu") == spans.count("threshold_backward") == 1
    assert spans.count("a copy to worker2") == spans.count("a copy from worker2") == 1
    assert spans.index("addmm") < spans.index("a copy to worker2") < spans.index("threshold_backward")
    caller = json.loads((tmp_path / "worker0.json").read_text())["traceEvents"]
    assert [event["name"] for event in caller if event["name"].startswith("wait for worker")] == ["wait for worker2"]


def test_recordings_begin_and_end_in_several_threads():
    def many():
        for _ in range(3000):
            observing.begin(mine := object())
            assert mine in observing.observers
            observing.end(mine)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(many) for _ in range(4)]:
                done.result(timeout=60)
    finally:
        sys.setswitchinterval(interval)
    assert observing.observers == ()
