"""What crosses, as records, table, file, histogram and picture."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import random
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rdmarpc import cli, transfers
from rdmarpc.graph.plan.analyze import analyze
from rdmarpc.graph.plan.place import Edge, Placement, control_edges, place
from rdmarpc.graph.show import drawing
from rdmarpc.graph.show.describe import Crossing, Transfers, WorkerRecord, describe, from_json, shape_text, to_json
from rdmarpc.graph.show.tables import histogram, size
from rdmarpc.graph.trace.capture import TensorSpec, capture, skeleton
from rdmarpc.graph.trace.sites import OPERATION, Site, input_names, name_inputs
from rdmarpc.graph.wire.header import HEADER_BYTES
from rdmarpc.transport import NotSupported


def plan(model: nn.Module, placement: dict[str, str], *shapes: tuple[int, ...], **parameters: int) -> Transfers:
    specs = [TensorSpec(shape, torch.float32) for shape in shapes]
    join = lambda *tensors: (tensors, {})  # noqa: E731
    found = capture(skeleton(model), specs, join)
    found.sites = name_inputs(found.sites, input_names(model, join, len(specs)))
    graph = analyze(found, lambda path: placement.get(path.split(".")[0], "me"), "me")
    return describe(place(graph, 3, 2, itertools.count(1)), parameters)


def line(c: Crossing) -> str:
    """All of a crossing but its number and depth, to compare with what a reader expects."""
    uses = f"{c.first} .. {c.last}" if c.first != c.last else str(c.first)
    marks = {"grad": c.needs_gradient, "trigger": c.trigger, "dynamic": not c.static}
    flags = "".join(f" {word}" for word, said in marks.items() if said)
    tensor = f"{c.kind} {c.name} {c.source}>{c.target} {shape_text(c)} {c.nbytes}"
    return f"{tensor} by {c.producer} in {c.allocator} for {uses}{flags}"


class Fan(nn.Module):
    """A skip connection; ``stem`` is read by three workers, and what it gives is the memory of its linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Flatten())
        self.left, self.middle, self.right = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 8)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        y = self.stem(x)
        return self.head(torch.cat([self.left(y), self.middle(y), self.right(y) + y], 1))


class Mixed(nn.Module):
    """``a`` reads its weight as its own, and the forward reads it by its name, in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

    def forward(self, x):
        for _ in range(2):
            x = F.linear(self.b(self.a(x)), self.a.weight)
        return x


FAN = {"stem": "w1", "left": "w2", "middle": "w3", "right": "w4", "head": "w1"}


def test_sums_in_another_order_are_named():
    found = plan(Mixed(), {"a": "w1", "b": "w2"}, (5, 6))
    assert found.reordered == ("a.weight",)
    assert found.table().endswith("\ngradients not summed in the order of one process: a.weight")
    assert from_json(found.to_json()) == [found]
    assert "in the order of one process" not in plan(Fan(), FAN, (5, 6)).table()


def test_one_tensor_for_three_workers():
    found = plan(Fan(), FAN, (5, 6), w1=100, me=8)
    assert [line(c) for c in found.crossings] == [
        "activation input x me>w1 float32[5, 6] 120 by input x in input x for stem (segment 1)",
        "activation stem w1>w2 float32[5, 8] 160 by stem in stem.0: addmm for left (segment 2) grad",
        "activation stem w1>w3 float32[5, 8] 160 by stem in stem.0: addmm for middle (segment 3) grad",
        "activation stem w1>w4 float32[5, 8] 160 by stem in stem.0: addmm for right (segment 4) .. add() (segment 4) grad",
        "activation middle w3>w2 float32[5, 4] 80 by middle in middle: addmm for cat() (segment 5) grad",
        "activation add() w4>w2 float32[5, 8] 160 by add() in add(): add for cat() (segment 5) grad",
        "activation cat() w2>w1 float32[5, 16] 320 by cat() in cat(): cat for head (segment 6) grad",
        "activation head w1>me float32[5, 2] 40 by head in head: addmm for output (segment 7) grad",
        "gradient head me>w1 float32[5, 2] 40 by backward of the loss in backward of the loss for backward of head (segment 6)",
        "gradient cat() w1>w2 float32[5, 16] 320 by backward of head in backward of head for backward of cat() (segment 5)",
        "gradient add() w2>w4 float32[5, 8] 160 by backward of cat() in backward of cat() for backward of add() (segment 4)",
        "gradient middle w2>w3 float32[5, 4] 80 by backward of cat() in backward of cat() for backward of middle (segment 3)",
        "gradient stem w4>w1 float32[5, 8] 160 by backward of right, add() in backward of right, add()"
        " for backward of stem (segment 1)",
        "gradient stem w3>w1 float32[5, 8] 160 by backward of middle in backward of middle for backward of stem (segment 1)",
        "gradient stem w2>w1 float32[5, 8] 160 by backward of left in backward of left for backward of stem (segment 1)",
    ]
    stem = found.crossings[1]
    assert stem.site == Site(OPERATION, "stem.0", "addmm", 1, "stem")
    assert [c.target for c in found.writes(stem)] == ["w2", "w3", "w4"]
    assert [c.depth for c in found.crossings if c.target == "me"] == [3]
    assert (found.number, found.depth, found.caller) == (3, 2, "me")
    assert found.nbytes == sum(c.nbytes or 0 for c in found.crossings) == 2280
    assert found.slot_bytes == 2 * (2280 + 15 * HEADER_BYTES) + 40 + HEADER_BYTES
    assert [(s.number, s.worker, s.operations, s.backward) for s in found.segments] == [
        (0, "me", (), False),
        (1, "w1", ("stem",), True),
        (2, "w2", ("left",), True),
        (3, "w3", ("middle",), True),
        (4, "w4", ("right", "add()"), True),
        (5, "w2", ("cat()",), True),
        (6, "w1", ("head",), True),
        (7, "me", (), True),
    ]
    head, landing = HEADER_BYTES, 120 + 320 + 40 + 160 + 160 + 160
    assert found.workers[1] == WorkerRecord("w1", 100, 960, 160 * 3 + 40 + 320, 2 * (landing + 6 * head), ("stem", "head"))
    assert found.workers[0] == WorkerRecord("me", 8, 40, 120 + 40, 3 * (40 + head), ())
    text = str(found)
    assert "1/3    stem.0: addmm" in text
    assert "3/3    stem.0: addmm" in text
    assert max(map(len, text.splitlines())) <= 128


class Various(nn.Module):
    """A dict of outputs, some without gradient; an input that two workers read; a part without tensor inputs; frozen parts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 4).requires_grad_(False)
        self.mask = Mask()

    def forward(self, x, scale):
        fixed = self.frozen(x[:, :4]) * self.mask()
        a = F.gelu(self.a(x))
        return {"a": a, "best": a.argmax(1), "b": self.b(x) * scale, "fixed": fixed}


class Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(4, dtype=torch.bool))

    def forward(self):
        return self.ones


def test_dicts_frozen_parts_values_without_gradient_and_triggers():
    found = plan(Various(), {"a": "w1", "b": "w2", "frozen": "w2", "mask": "w1"}, (5, 6), ())
    assert [line(c) for c in found.crossings] == [
        "activation input x me>w2 float32[5, 6] 120 by input x in input x for b (segment 1)",
        "activation input x me>w1 float32[5, 6] 120 by input x in input x for a (segment 2)",
        "activation input scale me>w2 float32[] 4 by input scale in input scale for mul() (segment 1)",
        "activation getitem() me>w2 float32[5, 4] 80 by getitem() in input x for frozen (segment 1)",
        "activation mask w1>w2 bool[4] 4 by mask in buffer mask.ones for mul() (segment 3)",
        "activation mul() w2>me float32[5, 4] 80 by mul() in mul(): mul for output (segment 4)",
        "activation gelu() w1>me float32[5, 4] 80 by gelu() in gelu(): gelu for output (segment 4) grad",
        "activation argmax() w1>me int64[5] 40 by argmax() in argmax(): argmax for output (segment 4)",
        "activation mul() #2 w2>me float32[5, 4] 80 by mul() in mul(): mul for output (segment 4) grad",
        "gradient mul() #2 me>w2 float32[5, 4] 80 by backward of the loss in backward of the loss"
        " for backward of mul() (segment 1)",
        "gradient gelu() me>w1 float32[5, 4] 80 by backward of the loss in backward of the loss"
        " for backward of gelu() (segment 2)",
    ]


class ReadTwice(nn.Module):
    """``a`` is read by an operation here and given out too; ``b`` by two parts of one worker in two segments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = *(nn.Linear(4, 4) for _ in range(4)), nn.Bilinear(4, 4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        a = self.a(x)
        b = self.b(a)
        return a, self.scale * a, self.e(self.d(self.c(b)), b)


def test_first_and_last_use():
    found = plan(ReadTwice(), {"a": "w1", "b": "w1", "c": "w2", "d": "w3", "e": "w2"}, (3, 4))
    assert [line(c) for c in found.crossings if c.name in "ab"] == [
        "activation a w1>me float32[3, 4] 48 by a in a: addmm for mul() (segment 2) .. output (segment 6) grad",
        "activation b w1>w2 float32[3, 4] 48 by b in b: addmm for c (segment 3) .. e (segment 5) grad",
        "gradient b w2>w1 float32[3, 4] 48 by backward of c, e in backward of c, e for backward of b (segment 1)",
        "gradient a me>w1 float32[3, 4] 48 by backward of mul(), the loss in backward of mul(), the loss"
        " for backward of a (segment 1)",
    ]


def test_a_trigger_is_in_the_table_and_not_in_the_histogram():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = Mask()

        def forward(self, x):
            return x * self.mask()

    found = plan(Net(), {"mask": "w1"}, (5, 4))
    assert [line(c) for c in found.crossings] == [
        "activation mask w1>me bool[4] 4 by mask in buffer mask.ones for mul() (segment 2)",
        "activation start of mask me>w1 uint8[0] 0 by start in  for mask (segment 1) trigger",
    ]
    assert [(h.kind, h.count, h.nbytes) for h in found.histogram()] == [("activation", 1, 4)]


def test_edges_of_free_shape_and_without_a_graph():
    weight = Edge(2, "weight", "fc.weight", "b", "a", (8, 8), torch.float32, 1)
    served = describe(Placement(1, "a", [weight], None, ["a", "b"]))
    long = Crossing(1, "long", "activation", "a", "b", (None, 8), "float32", None, 2, 2 * 128, False)
    found = dataclasses.replace(served, crossings=(long, *served.crossings))
    assert [line(c) for c in found.crossings] == [
        "activation long a>b float32[?, 8] None by  in  for None dynamic",
        "weight fc.weight b>a float32[8, 8] 256 by  in  for None",
    ]
    assert found.slot_bytes == 256 + 256 + HEADER_BYTES
    assert found.nbytes == 256
    assert "what 1 of free shape have" in str(found)
    assert [h.kind for h in found.histogram()] == ["weight"]
    assert from_json(found.to_json()) == [found]
    control = str(describe(control_edges("me", {"w1": 3}, itertools.count(1))))
    assert "commands" in control
    assert "reports" in control


# -- files


def test_files(tmp_path, capsys, monkeypatch):
    plans = [plan(Fan(), FAN, (size, 6), w1=7) for size in (2, 5)]
    path = tmp_path / "plans.json"
    transfers.save(path, plans)
    assert transfers.load(path) == plans
    assert from_json(to_json(plans)) == plans
    assert from_json(plans[0].to_json()) == plans[:1]
    monkeypatch.setattr(sys, "argv", ["rdmarpc", "graph", str(path), "--draw", str(tmp_path / "out.svg")])
    cli.main()
    shown = capsys.readouterr().out
    assert shown.count(str(plans[0])) == shown.count(str(plans[1])) == 1
    for at, name in enumerate(("out.svg", "out-2.svg")):
        assert "<svg" in (tmp_path / name).read_text(), at


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "rdmarpc transfers", "version": 99, "plans": []}', '{"a": 1}'])
def test_other_files_are_refused(text, tmp_path, monkeypatch):
    path = tmp_path / "plans.json"
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
def test_histogram_against_numpy(sizes):
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


def test_histogram_of_a_plan():
    activations, gradients = plan(Fan(), FAN, (5, 6)).histogram()
    assert [(b.low, b.count) for b in activations.buckets] == [(32, 1), (64, 2), (128, 4), (256, 1)]
    assert (activations.count, activations.nbytes, activations.average) == (8, 1200, 150.0)
    assert (gradients.kind, gradients.count, gradients.nbytes) == ("gradient", 7, 1080)
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
        shape = (count, 4) if static else (None, 4)
        nbytes = 16 * count if static else None
        name = draw.choice(tensors)
        crossings.append(Crossing(number, name, kind, source, target, shape, "float32", nbytes, 2, 8 * count, static))
    parts = tuple(f"part.{at}.{'deep.' * draw.randrange(9)}end" for at in range(draw.randrange(12)))
    records = tuple(WorkerRecord(name, 10 ** draw.randrange(10), 1, 1, 1, parts[: draw.randrange(12)]) for name in names)
    return Transfers(1, names[0], 2, tuple(crossings), records, ())


def overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Rectangles (left, bottom, right, top)."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.parametrize("workers, edges", [(2, 3), (2, 60), (3, 10), (3, 80), (6, 12), (6, 120)])
def test_nothing_in_a_picture_covers_anything_else(workers, edges):
    measure = lambda text, points: 0.62 * points * len(text)  # noqa: E731
    for seed in range(20):
        picture = drawing.arrange(crowd(workers, edges, seed), measure)
        boxes = [(box.left, picture.bottom, box.left + box.width, picture.top) for box in picture.boxes]
        labels, across, upright = [], [], []
        for arrow in picture.arrows:
            x, y = picture.label_at(arrow)
            labels.append((x, y - 2.0, x + measure(arrow.label, drawing.SMALL), y + drawing.SMALL))
            level, edge = picture.lane_y(arrow), picture.top if arrow.rightward else picture.bottom
            across.append((min(arrow.start, arrow.end), level - 0.5, max(arrow.start, arrow.end), level + 0.5, arrow))
            for end in (arrow.start, arrow.end):
                upright.append((end - 0.5, min(level, edge), end + 0.5, max(level, edge)))
        solid = [*boxes, *labels]
        assert not [pair for pair in itertools.combinations(solid, 2) if overlap(*pair)]
        assert not [(text, stroke) for text in labels for stroke in [*across, *upright] if overlap(text, stroke)]
        assert not [pair for pair in itertools.combinations([a[:4] for a in across], 2) if overlap(*pair)]
        ends = [end for arrow in picture.arrows for end in {(arrow.rightward, arrow.end)}]
        assert len(ends) == len(set(ends))  # arrows may leave by one port, they never arrive by one
        for left, low, right, high in solid:
            assert 0 < left < right < picture.width
            assert 0 < low < high < picture.height
        for arrow in picture.arrows:
            for at, end in ((arrow.source, arrow.start), (arrow.target, arrow.end)):
                assert boxes[at][0] < end < boxes[at][2]


def test_bundles_and_fans():
    picture = drawing.arrange(plan(Fan(), FAN, (5, 6)), lambda text, points: points * len(text))
    drawn = {(arrow.source, arrow.target, arrow.kind): arrow for arrow in picture.arrows}
    assert len(drawn) == len(picture.arrows) == 15
    assert len({drawn[1, target, "activation"].start for target in (2, 3, 4)}) == 1
    assert picture.notes == ["stem: one source at w1, 3 writes, to w2, w3, w4"]
    assert drawn[1, 4, "activation"].label == "stem · 160 B"
    near = drawing.arrange(plan(Fan(), {"stem": "w1", "left": "w1"}, (5, 6)), lambda text, points: points * len(text))
    assert {arrow.label for arrow in near.arrows} == {"3 tensors · 360 B", "2 tensors · 480 B", "2 tensors · 240 B"}


def test_pictures_of_all_sizes(tmp_path):
    for number, (workers, edges) in enumerate([(2, 3), (6, 40), (1, 0)]):
        path = tmp_path / f"{number}.png"
        crowd(workers, edges, number).draw(path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NotSupported, match=r"needs matplotlib(.|\n)*pip install"):
        plan(Fan(), FAN, (5, 6)).draw(tmp_path / "out.png")
    importlib.reload(drawing)  # nothing at import needs it
