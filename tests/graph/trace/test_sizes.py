"""What a trace proves about sizes, and what happens to those that it cannot: no process, no memory."""

from __future__ import annotations

import pytest
import torch
import wrap_models as models
from torch import nn

from rdmarpc.graph.plan.analyze import TransferGraph, analyze
from rdmarpc.graph.plan.place import Edge
from rdmarpc.graph.trace.capture import TensorSpec, capture, skeleton
from rdmarpc.graph.trace.sizes import FREE, Sizes
from rdmarpc.graph.wire.metadata import Metadata, metadata_bytes
from rdmarpc.transport import NotSupported, RemoteAccessError, RemoteRegion


def cut(
    model: nn.Module, shape: tuple[int, ...], sizes: Sizes, placement: dict[str, str], dtype: torch.dtype = torch.float32
) -> TransferGraph:
    found = capture(skeleton(model), [TensorSpec(shape, dtype)], lambda x: ((x,), {}), sizes)
    return analyze(found, lambda path: placement.get(path.split(".")[0], "me"), "me")


def shapes(graph: TransferGraph) -> dict[str, tuple[int, ...]]:
    return {value.name: value.spec.shape for value, _ in graph.crossing()}


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_have_the_length_of_their_input(kind):
    sizes = Sizes({(0, 1)})
    graph = cut(models.Recurrent(kind), (4, 54), sizes, {"first": "w1", "second": "w2"}, torch.int64)
    assert shapes(graph) == {"embedding": (4, FREE, 10), "tanh()": (4, FREE, 12), "mean()": (4, 12)}
    assert all(value.spec.requires_grad for value, _ in graph.crossing())
    for length in (2, 10, 54, 80, 1000):
        assert sizes.hold([(4, length)])
    assert not sizes.hold([(5, 54)])


def test_conditions_that_exclude_sizes():
    class Two(nn.Module):
        def forward(self, x):
            return x.sum(0) if x.size(0) < 10 else x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Two()

        def forward(self, x):
            return self.part(x) * 2

    sizes = Sizes({(0, 0)})
    graph = cut(Model(), (5, 3), sizes, {"part": "w1"})
    assert shapes(graph)["mul()"] == (3,)
    assert sizes.hold([(9, 3)])
    assert not sizes.hold([(10, 3)])
    looped = Sizes({(0, 0)})
    cut(models.Looped(), (5, 6), looped, {"layer": "w1"})
    assert looped.hold([(5, 6)])
    assert not looped.hold([(6, 6)])


def test_equal_sizes_are_not_one_size():
    sizes = Sizes({(0, 0), (0, 1)})
    found = capture(
        skeleton(nn.Sequential(nn.Linear(6, 4))), [TensorSpec((7, 7, 6), torch.float32)], lambda x: ((x,), {}), sizes
    )
    graph = analyze(found, lambda path: "w1", "me")
    assert shapes(graph) == {"input 0": (FREE, FREE, 6), "0": (FREE, FREE, 4)}
    assert sizes.hold([(3, 9, 6)])


def test_sizes_cross_as_numbers_where_they_are_needed():
    placement = {"a": "w1", "b": "w2"}
    assert not [name for name in shapes(cut(models.Sizes(), (3, 5, 6), Sizes(), placement)) if name.endswith(" as a tensor")]
    for sizes in (Sizes({(0, 0), (0, 1)}), Sizes(known=False)):
        graph = cut(models.Sizes(), (3, 5, 6), sizes, placement)
        numbers = {name for name in shapes(graph) if name.endswith(" as a tensor")}
        assert {graph.values[name].spec for name in numbers} == {TensorSpec((), torch.int64)}
        # Taken of ``y`` at w1, used at w2; the caller wants one of z, which is at w2.
        crossings = {
            (graph.segments[graph.values[n].producer].worker, worker)
            for v, worker in graph.crossing()
            for n in [v.name]
            if n in numbers
        }
        assert {("w1", "w2"), ("w2", "me")} <= crossings


def test_what_depends_on_data_is_free_and_the_rest_is_not():
    graph = cut(nn.Sequential(nn.Linear(20, 20), models.Selecting(), nn.Tanh()), (8, 20), Sizes(), {"0": "w1", "1": "w2"})
    assert shapes(graph) == {"input 0": (8, 20), "0": (8, 20), "1": (FREE,)}
    with pytest.raises(NotSupported, match="depends on data"):
        cut(nn.Sequential(models.Counting()), (8, 20), Sizes(), {"0": "w1"})


def test_metadata_have_one_size_for_all_shapes():
    edge = Edge(1, "activation", "x", "a", "b", (FREE, 3, FREE), torch.float32, 2)
    assert not edge.static
    assert edge.nbytes == metadata_bytes(3) == 48 + 3 * 8
    memory = memoryview(bytearray(edge.nbytes))
    source = RemoteRegion(1, 2, 3, 4, 5, 1 << 40)
    for shape in ((0, 3, 1), (1 << 40, 3, 7)):
        Metadata(source, shape).write(memory)
        assert Metadata.read(memory, 3) == (source, shape)
    with pytest.raises(RemoteAccessError):
        Metadata.read(memoryview(bytearray(edge.nbytes)), 3)
