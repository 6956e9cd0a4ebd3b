"""What crosses, as records, table, file, histogram and picture."""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmarpc import __main__ as cli
from rdmarpc import transfers
from rdmarpc.graph import show
from rdmarpc.graph.fragments import Event, Kind, Move, Operand, Operation, Phase, Recorded
from rdmarpc.graph.show import Crossing, Transfers, WorkerRecord, described, from_json, histogram, shape_text, size, to_json
from rdmarpc.transport import NotSupported

FORWARD, BACKWARD, _ = Phase
PARAMETER = Kind.PARAMETER


def over(storage: int, *shape: int) -> Operand:
    return Operand(storage, shape, tuple(int(np.prod(shape[at + 1 :])) for at in range(len(shape))), "float32")


def fan(rows: int = 5) -> Recorded:
    """``x`` is sent to w1, whose stem's result three workers read; a gradient comes back from one of them."""
    nbytes = 4 * rows * 8
    events: list[Event] = [
        Move("me", "w1", over(-1, rows, 6), 1, 4 * rows * 6, FORWARD, "x"),
        Operation(
            "w1", "aten::addmm", (over(2, 8), over(1, rows, 6), over(3, 6, 8)), (), (over(4, rows, 8),), FORWARD, "stem.0"
        ),
        Operation("w1", "aten::relu_", (over(4, rows, 8),), (0,), (), FORWARD, "stem.1"),
    ]
    for number, worker in enumerate(("w2", "w3", "w4")):
        events.append(Move("w1", worker, over(4, rows, 8), 10 + number, nbytes, FORWARD, "stem"))
        read = (over(10 + number, rows, 8),)
        events.append(Operation(worker, "aten::mul.Tensor", read, (), (over(20 + number, rows, 8),), FORWARD, "ab"[number % 2]))
    events += [
        Operation("w3", "aten::mul.Tensor", (over(21, rows, 8),), (), (over(30, rows, 8),), BACKWARD, "b"),
        Move("w3", "w1", over(30, rows, 8), 31, nbytes, BACKWARD, "stem"),
        Operation("w1", "aten::tanh_backward", (over(31, rows, 8),), (), (over(32, rows, 8),), BACKWARD, "stem.1"),
        Move("me", "w1", over(-1, rows, 6), 33, 4 * rows * 6, BACKWARD, "x"),
    ]  # fmt: skip
    sizes = {1: 120, 4: nbytes, 31: nbytes, 32: nbytes, 33: 120}
    return Recorded("me", tuple(events), sizes, {2: PARAMETER, 3: PARAMETER})


def test_one_tensor_for_three_workers():
    found = described([fan()], {"w1": 100, "me": 8})
    assert [
        f"{c.kind} {c.name} {c.source}>{c.target} {shape_text(c)} {c.nbytes} in {c.allocator} for {c.first} again {c.again}"
        for c in found.crossings
    ] == [
        "input x me>w1 float32[5, 6] 120 in input for stem.0: addmm again 0",
        "activation stem w1>w2 float32[5, 8] 160 in stem.0: addmm for a: mul again 0",
        "activation stem w1>w3 float32[5, 8] 160 in stem.0: addmm for b: mul again 0",
        "activation stem w1>w4 float32[5, 8] 160 in stem.0: addmm for a: mul again 0",
        "gradient stem w3>w1 float32[5, 8] 160 in backward of b: mul for backward of stem.1: tanh_backward again 0",
        "input x me>w1 float32[5, 6] 120 in input for  again 1",
    ]
    assert [c.target for c in found.writes(found.crossings[1])] == ["w2", "w3", "w4"]
    assert found.nbytes == 2 * 120 + 4 * 160 and found.steps == 1
    assert found.workers[1] == WorkerRecord("w1", 100, 400, 480, 160 * 2, ("stem.0", "stem.1"))
    assert found.workers[0] == WorkerRecord("me", 8, 0, 240, 0, ())
    text = str(found)
    assert "6 edges, 880 bytes cross in a training step, 120 of them again" in text and "input (again)" in text
    assert max(map(len, found.table().splitlines())) <= 128


def test_shapes_that_vary_are_dynamic():
    found = described([fan(4), fan(5)], {})
    assert {c.name for c in found.crossings} == {"x", "stem"} and not any(c.static for c in found.crossings)
    assert found.crossings[0].shape == (5, 6) and "(dynamic, again)" in found.table()
    assert all(c.static for c in described([fan(5), fan(5)], {}).crossings)


def test_tensors_of_one_name_are_one_line():
    one = fan()
    events = (*one.events[:4], *one.events[3:4], *one.events[4:])
    found = described([Recorded("me", events)], {})
    assert [(c.name, c.target, c.times, c.again) for c in found.crossings][1] == ("stem", "w2", 2, 1)
    assert "160 x 2" in found.table() and "1 again" in found.table() and found.nbytes == 880 + 160


# -- files


def test_a_saved_step_is_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    steps = [described([fan(rows)], {"w1": 7}) for rows in (2, 5)]
    path = tmp_path / "steps.json"
    transfers.save(path, steps)
    assert transfers.load(path) == steps
    assert from_json(to_json(steps)) == steps
    assert from_json(steps[0].to_json()) == steps[:1]
    monkeypatch.setattr(sys, "argv", ["rdmarpc", "graph", str(path), "--draw", str(tmp_path / "out.svg")])
    cli.main()
    shown = capsys.readouterr().out
    assert shown.count(str(steps[0])) == shown.count(str(steps[1])) == 1
    for name in ("out.svg", "out-2.svg"):
        assert "<svg" in (tmp_path / name).read_text()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "rdmarpc transfers", "version": 99, "steps": []}', '{"a": 1}'])
def test_other_files_are_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not the transfers of a model"):
        transfers.load(path)
    monkeypatch.setattr(sys, "argv", ["rdmarpc", "graph", str(path)])
    with pytest.raises(SystemExit, match="rdmarpc graph: these are not"):
        cli.main()
    monkeypatch.setattr(sys, "argv", ["rdmarpc", "graph", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit, match=r"none\.json"):
        cli.main()


# -- histogram


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=200))
def test_histogram_against_numpy(sizes: list[int]):
    found = histogram("activation", sizes)
    bins = [bucket.low for bucket in found.buckets] + [found.buckets[-1].high]
    # numpy's last bin is closed; nothing lies on its end here, which the exact sums below prove.
    counts, _ = np.histogram(sizes, bins)
    sums, _ = np.histogram(sizes, bins, weights=np.array(sizes, dtype=object))
    assert [bucket.count for bucket in found.buckets] == counts.tolist()
    assert [bucket.nbytes for bucket in found.buckets] == sums.tolist()
    assert found.average == pytest.approx(np.mean(sizes))
    assert all(bucket.high == max(1, 2 * bucket.low) for bucket in found.buckets)
    assert found.buckets[0].count > 0 < found.buckets[-1].count


def test_histogram_of_a_step():
    inputs, activations, gradients = described([fan()], {}).histogram()
    assert [(b.low, b.count) for b in activations.buckets] == [(128, 3)]
    assert (inputs.kind, inputs.count, inputs.nbytes, inputs.average) == ("input", 2, 240, 120.0)
    assert (gradients.kind, gradients.count, gradients.nbytes) == ("gradient", 1, 160)
    assert histogram("weight", []).average == 0
    assert [size(n) for n in (0, 1023, 1024, 1536, 1 << 30)] == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "1 GiB"]


# -- picture


def crowd(workers: int, edges: int, seed: int) -> Transfers:
    """Many tensors with long names between workers with long names."""
    draw = random.Random(seed)
    names = [f"machine-{'x' * draw.randrange(40)}-{at}" for at in range(workers)]
    tensors = [f"encoder_layers_{'long' * draw.randrange(12)}_{at}" for at in range(edges)]
    crossings = []
    for number in range(edges):
        source, target = draw.sample(names, 2)
        kind = draw.choice(["activation", "gradient", "weight"])
        count, static = draw.randrange(1 << 20), draw.random() < 0.9
        times, name = draw.randrange(1, 4), draw.choice(tensors)
        crossings.append(Crossing(number, name, kind, source, target, (count, 4), "float32", 16 * count, static, times))
    parts = tuple(f"part.{at}.{'deep.' * draw.randrange(9)}end" for at in range(draw.randrange(12)))
    records = tuple(WorkerRecord(name, 10 ** draw.randrange(10), 1, 1, 1, parts[: draw.randrange(12)]) for name in names)
    return Transfers(names[0], tuple(crossings), records)


def test_bundles_and_fans():
    found = described([fan()], {}).crossings
    assert {arrow: show.label(each) for arrow, each in show.bundles(found).items()} == {
        ("me", "w1", "input"): "input: 2 tensors · 240 B",
        **{("w1", target, "activation"): "activation: stem · 160 B" for target in ("w2", "w3", "w4")},
        ("w3", "w1", "gradient"): "gradient: stem · 160 B",
    }
    assert show.notes(found) == ["activation stem: one source at w1, to w2, w3, w4"]
    varying = described([fan(4), fan()], {}).crossings
    assert show.notes(varying)[1:] == ["dashed: 6 that not every step has in this shape"]


def test_pictures_of_all_sizes(tmp_path: Path):
    for number, (workers, edges) in enumerate([(2, 3), (6, 40), (1, 0)]):
        path = tmp_path / f"{number}.png"
        crowd(workers, edges, number).draw(path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NotSupported, match=r"needs matplotlib(.|\n)*pip install"):
        described([fan()], {}).draw(tmp_path / "out.png")
    assert "bundles" in runpy.run_path(str(show.__file__), run_name="rdmarpc.graph.again")  # nothing at import needs it
