"""What is captured, and where it runs: the transfer graph executed in one process gives the bits of the model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from rdmarpc.graph.plan.analyze import TransferGraph, analyze
from rdmarpc.graph.plan.program import Machine, fill
from rdmarpc.graph.trace.capture import Capture, TensorSpec, Untraceable, capture, skeleton
from rdmarpc.graph.trace.export import export
from rdmarpc.graph.trace.record import record
from rdmarpc.parts.placing import Places, resolve
from rdmarpc.transport import NotSupported

WORKERS = ("me", "w0", "w1")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.full((8,), 0.5))
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x):
        self.count.add_(1)
        return x + torch.tanh(self.two(F.relu(self.one(x)))) * self.gain + self.shift[:8]


class Nested(nn.Module):
    """A list of blocks in a forward, one of them twice, and a norm between."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.start = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Residual() for _ in range(depth))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))

    def forward(self, x):
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(self.blocks[0](x)))


class Shapes(nn.Module):
    """Python looks at shapes, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.lstm = nn.LSTM(8, 8)

    def forward(self, *tensors, scale: float = 1.0):
        x = tensors[0]
        if x.dim() == 2 and len(x) > 2:
            x = x * scale
        parts = [self.layers[at % 3](row) for at, row in enumerate(x)]
        y = torch.stack(parts)
        y += 1
        y[0] = 0
        with torch.no_grad():
            weight = torch.softmax(y.mean(1), 0)
        z, (h, c) = self.lstm(y.unsqueeze(0) * weight[:, None])
        largest = z.max(2)
        return {"z": z, "state": (h, c), "largest": largest.values, "at": largest.indices, "size": x.shape[0]}


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, *tensors):
        y = torch.stack([self.layer(row) for row in tensors[0]])
        self.calls[0].add_(1)
        y *= 2
        return y.t(), [y.shape[0], {"n": len(tensors)}]


class Views(nn.Module):
    """Writes into a part of a tensor, of which others know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.late = nn.Linear(8, 8), False

    def forward(self, x):
        y = torch.relu(x)
        view = y.view(-1)
        if self.late:
            view.mul_(2)
            return self.layer(y)
        view = view.mul_(2)
        return self.layer(y) + view.sum()


class Twice(torch.autograd.Function):
    """Its backward is not that of its operations."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.b(Twice.apply(self.a(x)))


class Gpt(nn.Module):
    """Tied weights, positions, a causal mask."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 16), nn.Parameter(torch.randn(6, 16) / 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places[: tokens.size(1)]
        mask = torch.triu(torch.full((tokens.size(1), tokens.size(1)), float("-inf")), diagonal=1)
        return self.head(self.norm(self.body(x, mask=mask, is_causal=True)))


def specs_of(tensors: list[torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]


def cut(found: Capture, places: Places) -> TransferGraph:
    return analyze(found, places.owner, "me", places.scope)


def run_here(graph: TransferGraph, net: nn.Module, tensors: list[torch.Tensor]) -> Any:
    """All segments, in this process, against the real modules."""

    def attribute(path: str) -> Any:
        found: Any = net
        for name in path.split("."):
            found = getattr(found, name)
        return found

    machine = Machine(net.get_submodule, lambda path: graph.constants[path] if path in graph.constants else attribute(path))
    store = dict(zip(graph.inputs, tensors))
    for segment in graph.segments:
        env = {name: store[name] for name in segment.inputs if not graph.values[name].trigger} | (
            store if not segment.number else {}
        )
        machine.run(segment.instructions, env, lambda name, tensor: None)
        store.update(env)
    return fill(graph.output, store)


def same(ours: Any, theirs: Any) -> None:
    mine, tree = pytree.tree_flatten(ours)
    expected, other = pytree.tree_flatten(theirs)
    assert tree == other
    for a, b in zip(mine, expected):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


def check(
    method: Callable[..., Capture], net: nn.Module, placement: dict[str, str], *inputs: torch.Tensor, **kwargs: Any
) -> TransferGraph:
    """The graph gives the outputs, gradients and buffers of the model, in training and in evaluation."""
    places = resolve(net, placement, "me", WORKERS)
    graph = None
    for training in (False, True):
        net.train(training)
        twin = copy.deepcopy(net)
        found = method(skeleton(net), specs_of(list(inputs)), lambda *t: (t, kwargs), whole=places.whole)
        graph = cut(found, places)
        for _ in range(2):
            torch.manual_seed(3)
            ours = run_here(graph, net, list(inputs))
            torch.manual_seed(3)
            theirs = twin(*inputs, **kwargs)
            same(ours, theirs)
            for result in (ours, theirs):
                roots = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
                torch.autograd.backward(roots, [torch.ones_like(t) * 0.5 for t in roots])
        for (name, mine), other in zip(net.named_parameters(), twin.parameters()):
            assert (mine.grad is None) == (other.grad is None), name
            assert mine.grad is None or torch.equal(mine.grad, other.grad), name
        for (name, mine), other in zip(net.named_buffers(), twin.buffers()):
            assert torch.equal(mine, other), name
        net.zero_grad()
    assert graph is not None
    return graph


NESTED = {"start": "w0", "blocks.0-1": "w0", "blocks.1.two": "w1", "blocks.2-3": "w1", "head.0": "w1"}


@pytest.mark.parametrize("method", [capture, record])
def test_modules_are_traced_through_where_they_are_cut(method):
    torch.manual_seed(0)
    graph = check(method, Nested(), NESTED, torch.randn(5, 8))
    steps = {step.target: segment.worker for segment in graph.segments for step in segment.instructions}
    # Whole modules are one operation; what is cut runs where it is placed, and its parameters are read there.
    assert steps["blocks.0"] == "w0"
    assert steps["blocks.2"] == "w1"
    assert steps["blocks.1.two"] == "w1"
    assert steps["blocks.1.gain"] == "w0"
    assert "blocks.1" not in steps
    assert steps["head.0"] == "w1"
    assert steps["norm"] == "me"


def test_shapes_are_known_when_the_forward_is_recorded():
    torch.manual_seed(0)
    net, x = Shapes(), torch.randn(4, 8, requires_grad=True)
    places = resolve(net, {"layers.1": "w0", "lstm": "w1"}, "me", WORKERS)
    with pytest.raises(Untraceable):
        capture(skeleton(net), specs_of([x]), lambda *t: (t, {}), whole=places.whole)
    check(record, net, {"layers.1": "w0", "lstm": "w1"}, x, scale=2.0)
    check(record, Counting(), {"layer": "w0"}, x)


def test_an_export_runs_where_the_modules_are():
    torch.manual_seed(0)
    net = Nested()
    net.head.append(nn.Dropout(0.3))
    graph = check(export, net, NESTED, torch.randn(5, 8))
    at = {worker: [] for worker in WORKERS}
    for segment in graph.segments:
        at[segment.worker] += [step.target.removeprefix("torch:ops.aten.") for step in segment.instructions]
    # ``start``, block 0 twice, half of block 1; its other half and two blocks; the norm and what is left of the head.
    assert at["w0"].count("linear.default") == 1 + 2 * 2 + 1
    assert at["w1"].count("linear.default") == 1 + 2 * 2 + 1
    assert at["me"].count("linear.default") == 1
    assert {"batch_norm.default", "dropout.default", "add_.Tensor"} <= set(at["me"])
    assert not [name for name in at["w0"] + at["w1"] if name.startswith("batch_norm")]


def test_an_export_of_what_asks_for_shapes():
    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)
    check(export, Shapes(), {"layers.1": "w0", "lstm": "w1"}, x, scale=2.0)
    check(export, Counting(), {"layer": "w0"}, x)
    with pytest.raises(NotSupported, match="Twice has a backward of its own"):
        check(export, Custom(), {"a": "w0"}, torch.randn(3, 8))


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = Counted(), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


def test_forwards_that_set_attributes_are_refused():
    for method in (capture, record, export):
        net = Remembering()
        shape = skeleton(net)
        for _ in range(2):
            with pytest.raises(NotSupported, match="attribute 'calls'"):
                method(shape, [TensorSpec((2, 8), torch.float32)], lambda x: ((x,), {}))
            assert shape.calls == 0
    # Inside of a whole part only an export would not see it.
    net = nn.Sequential(Counted(), nn.Linear(8, 8))
    check(capture, net, {"0": "w0"}, torch.randn(2, 8))
    with pytest.raises(NotSupported, match="forward of 0 sets its attribute 'calls'"):
        check(export, net, {"0": "w0"}, torch.randn(2, 8))


@pytest.mark.parametrize("method", [capture, record, export])
@pytest.mark.parametrize("late", [False, True])
def test_writes_through_views_are_refused(method, late):
    net = Views()
    net.late = late
    with pytest.raises(NotSupported, match=r"used again(.|\n)*x = x \+ y"):
        check(method, net, {"layer": "w0"}, torch.randn(3, 8))


@pytest.mark.parametrize("method", [capture, record])
def test_functions_with_a_backward_of_their_own(method):
    check(method, Custom(), {"a": "w0", "b": "w1"}, torch.randn(3, 8))


@pytest.mark.parametrize("method", [export, record])
def test_a_transformer_with_tied_weights(method):
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (3, 6))
    graph = check(method, Gpt(), {"tokens": "w0", "head": "w0", "body.layers.0": "w0", "body.layers.1": "w1"}, tokens)
    targets = [step.target for segment in graph.segments for step in segment.instructions]
    if method is record:
        assert {"body.layers.0", "body.layers.1"} <= set(targets)


class Rows(nn.Module):
    def forward(self, x):
        return torch.stack([row + 1 for row in x.unbind()])


def test_what_a_capture_does_grows_as_the_graph() -> None:
    def calls(rows: int) -> int:
        made = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal made
            made += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            captured = record(skeleton(Rows()), [TensorSpec((rows, 4), torch.float32)], lambda x: ((x,), {}))
        finally:
            sys.setprofile(before)
        assert len(captured.graph.nodes) > 2 * rows
        return made

    calls(4)  # what is made once
    first, second, third = calls(20), calls(40), calls(80)
    assert third - second < 2.5 * (second - first)
