"""On which device each value is, worked out on tensors without data: needs no GPU, the devices are only named."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from rdmarpc.graph.plan.analyze import TransferGraph, analyze
from rdmarpc.graph.plan.located import Located
from rdmarpc.graph.plan.place import place
from rdmarpc.graph.trace.capture import TensorSpec, capture, skeleton
from rdmarpc.graph.trace.devices import Devices, named
from rdmarpc.parts.placing import resolve
from rdmarpc.transport import NotSupported
from rdmarpc.transport.gpu.driver import kind

TYPE = kind() or "cuda"
CPU, ONE, TWO = torch.device("cpu"), torch.device(TYPE, 0), torch.device(TYPE, 1)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        y = self.a(x)
        return self.c(self.b(y) + y)


class Saying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)
        self.register_buffer("shift", torch.zeros(6))

    def forward(self, x):
        at = torch.arange(x.shape[1], device=x.device)
        x = self.a(x * 2) * torch.ones(6)
        return self.b(x.to("cpu").cpu() + at), self.shift + 1


def located(net: nn.Module, placement: dict[str, str], at: torch.device) -> TransferGraph:
    """The graph for an input of 3 x 6 on device ``at``."""
    places = resolve(net, {key: value.replace("gpu", TYPE) for key, value in placement.items()}, "me", ["me", "w1", "w2"])
    devices = Devices(net, places.device)
    found = capture(skeleton(net), [TensorSpec((3, 6), torch.float32)], lambda x: ((x,), {}), whole=places.whole)
    return analyze(found, places.owner, "me", places.scope, Located(devices, [(CPU, at)]))


def edges(graph: TransferGraph) -> set[tuple[str, str, str, str]]:
    return {
        (e.value, f"{e.source}:{e.origin}", f"{e.target}:{e.device}", e.kind)
        for e in place(graph, 1, 2, itertools.count(1)).edges
    }


def steps(graph: TransferGraph, worker: str) -> list[tuple[str, Any, Any]]:
    return [(s.target, s.args[1:], s.kwargs) for seg in graph.segments if seg.worker == worker for s in seg.instructions]


def test_what_lands_where():
    one, two = named(ONE), named(TWO)
    graph = located(Chain(), {"a": "w1/gpu:0", "b": "w2/gpu:1", "c": "w1/gpu:0"}, CPU)
    assert edges(graph) == {
        ("input 0", "me:", f"w1:{one}", "activation"),
        ("a", f"w1:{one}", f"w2:{two}", "activation"),
        ("add()", f"w2:{two}", f"w1:{one}", "activation"),
        ("c", f"w1:{one}", "me:", "activation"),
        ("c", "me:", f"w1:{one}", "gradient"),
        ("add()", f"w1:{one}", f"w2:{two}", "gradient"),
        ("a", f"w2:{two}", f"w1:{one}", "gradient"),
    }
    # On a GPU the caller's input is sent from there, and there the result comes back.
    graph = located(Chain(), {"a": "w1/gpu:0", "b": "w2/gpu:1", "c": "w1/gpu:0"}, TWO)
    assert {("input 0", f"me:{two}", f"w1:{one}", "activation"), ("c", f"w1:{one}", f"me:{two}", "activation")} < edges(graph)
    assert not any(step[0] == "to" for worker in ("me", "w1", "w2") for step in steps(graph, worker))
    # Without devices nothing changes.
    assert all(edge[1].endswith(":") and edge[2].endswith(":") for edge in edges(located(Chain(), {"a": "w1"}, CPU)))


def test_two_devices_of_one_worker():
    graph = located(Chain(), {"a": "w1/gpu:0", "b": "w1/gpu:1", "c": "w1/gpu:0"}, CPU)
    # ``y`` is moved once for both that read it there.
    assert [step[1] for step in steps(graph, "w1") if step[0] == "to"] == [(TWO,), (ONE,)]
    assert graph.values["c"].device == named(ONE)


def test_devices_that_the_forward_names():
    graph = located(Saying(), {"a": "w1/gpu:1", "b": "w1/gpu:1"}, ONE)
    # ``at`` is made by the caller, beside its input; what runs behind ``a`` follows that.
    assert ("torch:arange", (), {"device": ONE}) in steps(graph, "me")
    assert ("torch:ones", (), {"device": TWO}) not in steps(graph, "me")
    there = [step for step in steps(graph, "w1") if step[0] == "to"]
    assert there == [("to", (TWO,), {}), ("to", (TWO,), {})]
    assert graph.values["arange()"].landing == {"w1": named(TWO)}
    assert graph.values["b"].landing == {"me": named(ONE)}


def test_what_stays_at_the_caller_is_moved_to():
    graph = located(Chain(), {"b": "w1/gpu:0", "a": "me/gpu:1"}, CPU)
    moves = [step for step in steps(graph, "me") if step[0] == "to"]
    assert moves[0] == ("to", (TWO,), {})  # the input, in front of ``a``


def test_inputs_of_a_model_on_a_gpu():
    class Fake:
        def __init__(self, device: torch.device) -> None:
            self.device, self.is_cpu = device, device.type == "cpu"

    devices = Devices.__new__(Devices)
    devices._own = {"a.weight": ONE, "b.weight": ONE}
    take = lambda *at: devices.taken([Fake(device) for device in at])  # type: ignore[misc]  # noqa: E731
    assert take(ONE, ONE) == [ONE, ONE]
    assert take(CPU, CPU) == [ONE, ONE]  # whoever calls it need not know
    assert take(TWO, CPU) == [ONE, CPU]  # lengths
    devices._own["b.weight"] = TWO
    assert devices.single() is None
    assert take(ONE, CPU) == [ONE, CPU]
    assert devices.own("b") == TWO


def test_how_devices_are_named():
    net = Chain()
    workers = ["me", "w1", "w2"]
    places = resolve(net, {"a": f"w1/{TYPE}", "b": "rank:2/cpu", "c": "w2"}, "me", workers, workers.__getitem__)
    assert places.homes == {"a": "w1", "b": "w2", "c": "w2"}
    assert places.devices == {"a": ONE, "b": CPU}
    assert places.device("a.weight") == ONE
    for where in ("w1/", "w1/nonsense", "w1/meta", "w9/cpu", "rank:2"):
        with pytest.raises(ValueError, match="placement puts 'a' on"):
            resolve(net, {"a": where}, "me", workers)
    nested = nn.Sequential(Chain(), Chain())
    places = resolve(nested, {"0": "w1/cpu", "0.a": f"w1/{TYPE}:1", "1": "w1", "1.a": "w1"}, "me", workers)
    assert [places.whole(path) for path in ("0", "0.a", "0.b", "1")] == [False, True, True, True]
    nested[1].a.weight = nested[1].b.weight
    with pytest.raises(NotSupported, match="are one tensor"):
        resolve(nested, {"1.b": "w1", "1.a": "w1/cpu"}, "me", workers)
