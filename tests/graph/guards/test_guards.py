"""What a trace reads and changes in Python, in one process."""

from __future__ import annotations

import builtins
import contextvars
import gc
import itertools
import random
import time
import types
from collections import OrderedDict

import guard_settings as settings
import numpy as np
import pytest
import torch
from test_capture import specs_of
from torch import nn

from rdmarpc.graph.guards import flags
from rdmarpc.graph.guards.content import Content, Unguardable
from rdmarpc.graph.guards.generators import python_marks
from rdmarpc.graph.guards.snapshot import Snapshot
from rdmarpc.graph.trace.capture import capture, skeleton
from rdmarpc.graph.trace.export import export
from rdmarpc.graph.trace.methods import Uncaptured, capture_by, methods_of
from rdmarpc.graph.trace.record import record
from rdmarpc.graph.trace.watch import Watch, watched
from rdmarpc.transport import NotSupported


def of(value: object) -> object:
    return Content().of(value, "it")


class Slots:
    __slots__ = ("a",)

    def __init__(self, a: object) -> None:
        self.a = a


@pytest.mark.parametrize(
    "one, other",
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ([1, [2]], [1, [3]]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1}, {2}),
        (np.zeros(2), np.zeros(3)),
        (np.float64(1), 1.0),
        (types.SimpleNamespace(a=[1]), types.SimpleNamespace(a=[2])),
        (Slots(1), Slots(2)),
        (torch.ones(1), torch.ones(1)),
        (itertools.repeat, itertools.cycle),
    ],
)
def test_contents_differ(one: object, other: object) -> None:
    assert of(one) == of(one)
    assert of(one) != of(other)


def test_contents_that_come_back_are_equal() -> None:
    circle: list[object] = [float("nan"), -0.0, {"a": (1, "b")}, Slots([np.ones(2)])]
    circle.append(circle)
    other: list[object] = [float("nan"), -0.0, {"a": (1, "b")}, Slots([np.ones(2)])]
    other.append(other)
    assert of(circle) == of(other)


@pytest.mark.parametrize("value", [iter([1]), random.Random(1), np.random.default_rng(1), np.ones(100_000), [0] * 100_000])
def test_what_changes_when_it_is_used_has_no_content(value: object) -> None:
    with pytest.raises(Unguardable):
        of([value])


NOTED: list[object] = []
VARIABLE = contextvars.ContextVar("VARIABLE", default=1)


class Reads(nn.Module):
    """``lin`` is whole; the rest is read, or only there."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.read, self.unread, self.cfg = nn.Linear(4, 4), 2.0, 3.0, types.SimpleNamespace(deep=[1])
        self.lin.register_forward_hook(note)

    def forward(self, x):
        return self.lin(x) * self.read * self.cfg.deep[0] * settings.Knobs.turn * VARIABLE.get() * getattr(self, "late", 1)


def note(module, args, output):
    NOTED.append(output)


@pytest.mark.parametrize("method", [capture, record, export])
def test_what_was_read_is_known_and_what_was_left_is_gone(method) -> None:
    net = Reads()
    if method is capture:
        net.lin._forward_hooks.clear()
    whole = bool
    shape = skeleton(net)
    make = lambda: method(shape, specs_of([torch.ones(2, 4)]), lambda *t: (t, {}), whole=whole)  # noqa: E731
    if method is export:
        with pytest.raises(NotSupported, match="global 'NOTED'"):
            watched(make, shape, whole)
    else:
        found = watched(make, shape, whole)
        read = {root.label for root in found.roots(net)}
        for name in (
            "attribute 'read'",
            "attribute 'cfg'",
            "attribute 'late'",
            "global 'settings'",
            "'turn' of",
            "global 'VARIABLE'",
        ):
            assert any(label.startswith(name) for label in read), name
        assert not any("unread" in label for label in read)
    assert not NOTED


class Draws(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.lin, self.how = nn.Linear(4, 4), how

    def forward(self, x):
        if self.how == "random":
            return self.lin(x) * random.random()
        if self.how == "numpy":
            return self.lin(x) * np.random.rand()
        if self.how == "generator":
            return self.lin(x) + torch.rand(4, generator=torch.Generator().manual_seed(1))
        x.register_hook(print)
        return self.lin(x)


@pytest.mark.parametrize("how, why", [("random", "Python's random"), ("numpy", "numpy.random"), ("hook", "hook")])
def test_what_a_trace_would_freeze_is_refused(how: str, why: str) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist()
    x = [torch.ones(2, 4, requires_grad=True)]
    with pytest.raises(Uncaptured, match=f"fx: .*{why}"):
        capture_by(methods_of("fx"), skeleton(Draws(how)), specs_of(x), lambda *t: (t, {}), bool)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


def test_noise_becomes_an_operation() -> None:
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn(2, 4)

    found, _ = capture_by(methods_of("fx"), skeleton(Noise()), specs_of([torch.ones(2, 4)]), lambda *t: (t, {}), bool)
    assert "randn" in [getattr(node.target, "__name__", "") for node in found.graph.nodes]
    assert not found.constants


class Collecting(nn.Module):
    def forward(self, x):
        gc.collect()
        return x * 2


def test_what_the_garbage_collector_calls_is_none_of_the_forwards() -> None:
    def timed(phase: str, info: object) -> None:
        time.perf_counter()

    gc.callbacks.append(timed)
    try:
        found, refused = capture_by(
            methods_of("fx"), skeleton(Collecting()), specs_of([torch.ones(2)]), lambda *given: (given, {}), lambda path: True
        )
    finally:
        gc.callbacks.remove(timed)
    assert (found.how, refused) == ("fx", [])
    assert gc.isenabled()


@pytest.mark.parametrize("draw", [random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn])
def test_a_generator_has_another_mark_after_every_draw(draw):
    """Of two normal numbers one is kept, so the second draw leaves the generator where it stands."""
    marks = [python_marks()]
    for _ in range(1300):
        draw()
        marks.append(python_marks())
    assert all(before != after for before, after in itertools.pairwise(marks))
    assert python_marks() == marks[-1]


def test_containers_are_as_they_were() -> None:
    """Also an ``OrderedDict``, and one that other threads read; the names of Python itself are none of a forward's."""
    ordered, plain, names = OrderedDict(a=1, b=2, c=3), {"a": 1, "b": 2}, vars(builtins)
    kept = Snapshot()
    for value in (ordered, plain, {"builtins": names}):
        kept.add(value, "it")
    ordered.move_to_end("a")
    del ordered["b"]
    plain.update(a=3, c=4)
    names["_a_name"] = 1
    kept.restore()
    assert names.pop("_a_name") == 1
    assert list(ordered.items()) == [("a", 1), ("b", 2), ("c", 3)] and dict(ordered) == {"a": 1, "b": 2, "c": 3}
    assert list(plain.items()) == [("a", 1), ("b", 2)]


def test_what_a_trace_has_changed_is_put_back_when_looking_at_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("dictionary changed size during iteration")

    net = nn.Linear(2, 2)
    net.seen = []  # type: ignore[assignment]
    monkeypatch.setattr(Watch, "_look", fails)
    state = random.getstate()
    with pytest.raises(RuntimeError, match="changed size"), Watch(net, lambda path: True).running():
        net.seen.append(random.random())  # type: ignore[operator]
    assert net.seen == [] and random.getstate() == state


class Answers:
    """Has an attribute of every name, as the stand-ins of libraries for others that are not installed."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args: None


def test_an_object_that_answers_to_every_name_is_no_array() -> None:
    one, other = Answers(), Answers()
    one.size, other.size = 1, 2
    assert Content().of(one, "one") != Content().of(other, "other")
    kept, inside = Snapshot(), np.arange(3)
    one.inside = inside
    kept.add(one, "one")
    inside[0] = 7
    kept.restore()
    assert inside[0] == 0


def test_this_torch_has_all_functions_that_read_and_set_flags() -> None:
    """Where one is missing, that flag is not looked at."""
    native = [name for pair in flags.NATIVE.values() for name in pair]
    assert not [name for name in (*native, *flags.PRECISIONS) if not hasattr(torch._C, name)]
