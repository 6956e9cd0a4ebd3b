"""Capture, analysis and placement: no process, no memory."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rdmarpc.graph.plan.analyze import TransferGraph, analyze
from rdmarpc.graph.plan.place import place
from rdmarpc.graph.plan.program import find_function, function_path
from rdmarpc.graph.show.describe import describe
from rdmarpc.graph.trace.capture import TensorSpec, capture, skeleton
from rdmarpc.graph.wire.layout import dense, strides
from rdmarpc.graph.work.command import Command, WorkerError, unpadded
from rdmarpc.graph.servers.updates import numbers_of, read_numbers
from rdmarpc.transport import NotSupported


class Diamond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.start = nn.Embedding(3, 4)

    def forward(self, x):
        y = F.relu(self.a(x))
        z = self.b(y).view(y.size(0), -1)
        return self.c(z + y), y.argmax(1)


def cut(model: nn.Module, shape: tuple[int, ...], placement: dict[str, str], grad: bool = False) -> TransferGraph:
    found = capture(skeleton(model), [TensorSpec(shape, torch.float32, grad)], lambda x: ((x,), {}))
    return analyze(found, lambda path: placement.get(path.split(".")[0], "me"), "me")


def test_segments_and_edges():
    graph = cut(Diamond(), (3, 4), {"a": "w1", "b": "w2", "c": "w1"})
    assert [(s.worker, s.level, s.backward) for s in graph.segments] == [
        ("me", 0, False),  # no gradient comes to its inputs
        ("w1", 1, True),
        ("w2", 2, True),
        ("w1", 3, True),
        ("me", 4, True),
    ]
    table = place(graph, 1, 2, itertools.count(1))
    edges = [(e.value, e.kind, e.source, e.target, e.shape, e.depth) for e in table.edges]
    # ``z + y`` runs where z is, so y crosses once although two operations there use it; sizes do not cross at all.
    assert edges == [
        ("input 0", "activation", "me", "w1", (3, 4), 2),
        ("relu()", "activation", "w1", "w2", (3, 4), 2),
        ("add()", "activation", "w2", "w1", (3, 4), 2),
        ("c", "activation", "w1", "me", (3, 2), 3),
        ("argmax()", "activation", "w1", "me", (3,), 3),
        ("c", "gradient", "me", "w1", (3, 2), 2),
        ("add()", "gradient", "w1", "w2", (3, 4), 2),
        ("relu()", "gradient", "w2", "w1", (3, 4), 2),
    ]
    assert [e.number for e in table.edges] == list(range(1, 9))
    assert "8 edges" in (shown := describe(table).table())
    assert "int64" in shown


def test_gradient_edges_only_where_they_are_needed():
    model = Diamond().requires_grad_(False)
    graph = cut(model, (3, 4), {"a": "w1", "b": "w2"})
    assert not [e for e in place(graph, 1, 2, itertools.count(1)).edges if e.kind == "gradient"]
    assert not any(s.backward for s in graph.segments if s.worker != "me")
    graph = cut(model, (3, 4), {"a": "w1", "b": "w2"}, grad=True)
    assert ("input 0", "w1", "me") in [
        (e.value, e.source, e.target) for e in place(graph, 1, 2, itertools.count(1)).edges if e.kind == "gradient"
    ]


class NoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.layer = Constant(), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + self.bias()


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(4))

    def forward(self):
        return self.value * 2


def test_a_part_without_inputs_is_started_by_a_trigger():
    graph = cut(NoInput(), (3, 4), {"bias": "w1"})
    [trigger] = [value for value in graph.values.values() if value.trigger]
    assert graph.segments[trigger.producer].worker == "me"
    assert [graph.segments[number].worker for number in trigger.consumers] == ["w1"]


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        z = self.b(y)
        y += z
        return y + z.add_(1)


def test_writes_into_shared_values_are_refused():
    with pytest.raises(NotSupported, match=r"writes into a tensor that is used again(.|\n)*x = x \+ y"):
        cut(Writes(), (3, 4), {"a": "w1"})


def test_capture_neither_computes_nor_draws():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    before = torch.get_rng_state()
    cut(model, (8, 4), {"0": "w1"})
    assert torch.equal(before, torch.get_rng_state())
    assert model[0].num_batches_tracked == 0


@pytest.mark.parametrize("function", [torch.relu, torch.cat, F.max_pool2d, F.gelu, torch.nn.functional.linear])
def test_functions_are_found_again(function):
    assert find_function(function_path(function)) is function


def test_lambdas_cannot_travel():
    with pytest.raises(NotSupported, match="cannot be sent"):
        function_path(lambda x: x)


@given(st.lists(st.integers(1, 4), max_size=6), st.randoms())
def test_memory_order(shape, random):
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = torch.arange(torch.Size(shape).numel()).reshape([shape[d] for d in order])
    tensor = tensor.permute([order.index(d) for d in range(len(shape))])
    found = dense(tensor)
    assert found is not None
    view, code = found
    assert view.is_contiguous()
    assert view.data_ptr() == tensor.data_ptr()
    again = torch.as_strided(view, shape, strides(tuple(shape), code))
    assert torch.equal(again, tensor)


def test_gaps_and_overlaps_have_no_order():
    assert dense(torch.zeros(4, 4)[:, :2]) is None
    assert dense(torch.zeros(1).expand(3)) is None
    assert dense(torch.zeros(2, dtype=torch.complex64).conj()) is None
    weight = torch.zeros(8, 1, 3, 3).to(memory_format=torch.channels_last)
    found = dense(weight)
    assert found is not None
    assert strides((8, 1, 3, 3), found[1]) == weight.stride()


@given(st.binary(max_size=200))
def test_command_payloads(payload):
    assert unpadded(Command(1, 2, payload).padded(256).numpy()) == payload


def test_errors_travel():
    class Local(Exception):
        pass

    try:
        raise KeyError("x" * 100_000)
    except KeyError as error:
        blob = WorkerError.of(error, "w7").dump(4096)
    assert len(blob) <= 4096
    raised = WorkerError.load(blob).raised("w7")
    assert isinstance(raised, KeyError) and "'xxx" in str(raised) and "on worker 'w7'" in str(raised.__cause__)
    raised = WorkerError.load(WorkerError.of(Local("odd"), "w7").dump(4096)).raised("w7")
    assert type(raised) is Exception and str(raised) == "odd"
    assert "on worker 'w7'" in str(raised.__cause__) and "Local: odd" in str(raised.__cause__)


def test_optimizer_numbers():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=1, betas=(0.8, 0.9))
    numbers, rest = numbers_of(optimizer.param_groups)
    optimizer.param_groups[0]["lr"] = 3
    others, same = numbers_of(optimizer.param_groups)
    assert rest == same
    assert numbers != others
    twin = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=1)
    read_numbers(twin.param_groups, others)
    assert twin.param_groups[0]["lr"] == 3
    assert twin.param_groups[0]["betas"] == (0.8, 0.9)
    assert twin.param_groups[0]["amsgrad"] is False
    tensors = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.1), foreach=False)
    rate = tensors.param_groups[0]["lr"]
    read_numbers(tensors.param_groups, numbers_of([{**tensors.param_groups[0], "lr": torch.tensor(0.25)}])[0])
    assert rate == 0.25, "the same tensor has the new value"
    with pytest.raises(NotSupported, match="tensor"):
        numbers_of([{"params": [], "lr": torch.ones(2)}])
