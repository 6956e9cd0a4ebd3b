"""Who allocated what is sent: exact lists for small models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from rdmarpc.graph.plan.analyze import analyze
from rdmarpc.graph.trace.capture import Propagator, TensorSpec, capture, skeleton
from rdmarpc.graph.trace.sites import CONSTANT, INPUT, OPERATION, Allocations, Site, input_names, name_inputs, place_of

X = TensorSpec((4, 6), torch.float32)


def sites(
    model: nn.Module, placement: dict[str, str], inputs: int = 1, join: Callable[..., Any] = lambda *tensors: (tensors, {})
) -> list[tuple[str, str, str]]:
    """(value, site, received slot) of everything that one segment hands to another."""
    found = capture(skeleton(model), [X] * inputs, join)
    found.sites = name_inputs(found.sites, input_names(model, join, inputs))
    graph = analyze(found, lambda path: placement.get(path.split(".")[0], "me"), "me")
    return [(value.name, str(value.site), value.slot_of) for value in graph.values.values()]


class Aliases(nn.Module):
    """Everything that hands on memory of somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Unflatten(1, (2, 4)), nn.Flatten())
        self.same, self.copy = nn.Identity(), nn.Dropout()
        self.next, self.reader = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.block(x)
        part = self.next(y).view(2, 16).t()[:8]
        return self.same(y), self.copy(part), part, self.reader(F.relu(y)).add_(1)


def test_memory_is_attributed_by_storage():
    assert sites(Aliases(), {"block": "w1", "next": "w2", "reader": "w3", "same": "w3", "copy": "w1"}) == [
        ("input x", "input x", ""),
        ("block", "block.0: addmm", ""),
        ("getitem()", "next: addmm", ""),
        ("same", "block.0: addmm", "block"),
        ("copy", "copy: mul #2", ""),
        ("relu()", "relu(): relu", ""),
        ("add_()", "reader: addmm", ""),
    ]


def test_dropout_hands_its_input_on_in_evaluation():
    found = sites(Aliases().eval(), {"next": "w2", "copy": "w1"})
    assert ("copy", "next: addmm", "getitem()") in found
    assert ("getitem()", "next: addmm", "") in found


class GivesBack(nn.Module):
    """w1 allocates, w2 looks at it, w1 sends on what came back; w3 sends on what it got from both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 6), nn.Flatten(), nn.Identity(), nn.Linear(6, 2)

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))


def test_what_comes_back_lies_in_a_slot_even_at_its_allocator():
    assert sites(GivesBack(), {"a": "w1", "b": "w2", "c": "w1", "d": "w3"}) == [
        ("input x", "input x", ""),
        ("a", "a: addmm", ""),
        ("b", "a: addmm", "a"),
        ("c", "a: addmm", "b"),
        ("d", "d: addmm", ""),
    ]
    assert ("c", "a: addmm", "a") in sites(GivesBack(), {"a": "w1", "b": "w2", "c": "w2", "d": "w3"})
    # All at one worker but the last: then it is that worker's own memory.
    assert sites(GivesBack(), {"a": "w1", "b": "w1", "c": "w1", "d": "w3"})[1] == ("c", "a: addmm", "")


class Gives(nn.Module):
    """Its parameter, its buffer, and an attribute that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("kept", torch.ones(12))
        self.plain = torch.ones(6)

    def forward(self):
        return {"weight": self.weight, "kept": self.kept.view(2, 6)[0], "plain": self.plain[:6]}


class Forwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gives, self.inner, self.out = Gives(), nn.ModuleDict({"same": nn.Identity()}), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, batch, *, mask):
        given = self.gives()
        total = self.out(batch["ids"] + given["weight"]) + given["kept"] * self.scale
        return total, self.out(mask[1]), torch.cat([total, given["plain"][None]])


def test_parameters_buffers_constants_and_inputs_by_name():
    def join(*tensors: Any) -> Any:
        return ({"ids": tensors[0]},), {"mask": (None, tensors[1])}

    assert sites(Forwards(), {"gives": "w1", "out": "w2"}, 2, join) == [
        ("input batch['ids']", "input batch['ids']", ""),
        ("input mask[1]", "input mask[1]", ""),
        ("gives['weight']", "parameter gives.weight", ""),
        ("add()", "add(): add", ""),
        ("scale", "parameter scale", ""),
        ("mul()", "mul(): mul", ""),
        ("add() #2", "add(): add", ""),
        ("out #2", "out: addmm", ""),
        ("getitem() #4", "constant gives", ""),
        ("cat()", "cat(): cat", ""),
    ]


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gives, self.reads = Gives(), nn.Identity()

    def forward(self, x):
        given = self.gives()
        return x, self.reads(given["kept"]), self.reads(given["plain"]), self.reads(x)


def test_forwarded_state_and_inputs():
    assert sites(Views(), {"gives": "w1", "reads": "w2"}) == [
        ("input x", "input x", ""),
        ("gives['kept']", "buffer gives.kept", ""),
        ("gives['plain']", "constant gives", ""),
        ("reads", "buffer gives.kept", "gives['kept']"),
        ("reads #2", "constant gives", "gives['plain']"),
        ("reads #3", "input x", "input x"),
        ("start of gives", "None", ""),
    ]


class Twice(nn.Module):
    """One module under two names, inside which another one allocates; a recurrent layer gives three tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()))
        self.second = self.first
        self.recurrent = nn.LSTM(6, 3)

    def forward(self, x):
        out, (h, c) = self.recurrent(self.second(self.first(x)))
        return out * 2, h * 2, c * 2


def test_inner_modules_and_the_count_of_allocations():
    assert sites(Twice(), {"first": "w1", "second": "w1", "recurrent": "w3"})[1:] == [
        ("first #2", "first.1.1: sigmoid #3", ""),
        ("mul()", "mul(): mul", ""),
        ("mul() #2", "mul(): mul", ""),
        ("mul() #3", "mul(): mul", ""),
    ]


def test_a_storage_is_known_by_itself_and_not_by_its_address():
    """Storages of a run live as long as its sites: an address that is used again would be somebody else."""
    model = skeleton(nn.Linear(6, 6))
    found = Allocations(model)
    graph = torch.fx.symbolic_trace(nn.Identity()).graph
    mode = next(model.parameters()).fake_mode
    with mode:
        given = torch.empty(4, 6)
        found.note(given, Site(INPUT, "x"))
        with found:
            for node in graph.nodes:
                found.at(node.name, place_of(node))
                made = [torch.empty(4, 6) for _ in range(50)]
                known = [found.of(tensor) for tensor in made]
                assert [(site.instruction, site.count) for site in known if site] == [(node.name, n + 1) for n in range(50)]
                del made
            elsewhere = found.of(given[1:])
    assert elsewhere == Site(INPUT, "x")
    with mode:
        assert found.of(torch.empty(2)) is None
        assert found.of(torch.empty(2).to_sparse()) is None


class Layers(nn.Module):
    """What fake tensors might alias in another way than real ones: convolutions, norms, attention, recurrence, views."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(4), nn.Dropout(), nn.Flatten()
        )
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.recurrent, self.embedding = nn.GRU(8, 4, batch_first=True), nn.Embedding(5, 8)
        self.norm, self.act = nn.LayerNorm(4), nn.Hardtanh(inplace=True)

    def forward(self, x):
        y = self.image(x[:, None]).reshape(4, 2, 8)
        z, h = self.recurrent(self.encoder(y))
        z = self.act(self.norm(z.contiguous()).to(torch.float32)).transpose(1, 2).contiguous()
        return z.expand(2, 4, 4, 2), h.squeeze(0).chunk(2, 1), self.embedding.weight[1:].detach(), F.dropout(y, training=False)


@pytest.mark.parametrize("training", [True, False])
def test_real_tensors_alias_as_the_fake_ones_did(training):
    torch.manual_seed(0)
    model = Layers().train(training)
    shape = TensorSpec((4, 8, 8), torch.float32)
    found = capture(skeleton(model), [shape], lambda x: ((x,), {}))
    again = Propagator(model, found.graph)
    again.propagate([torch.randn(shape.shape)])
    assert again.sites() == found.sites
    tensors = [leaf for value in found.values.values() for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    assert len(found.sites) == len(tensors) > 20


@pytest.mark.parametrize("kind", [OPERATION, CONSTANT])
def test_sites_in_words(kind):
    assert str(Site(kind, "a.b", "mm", 2, "n")) == {OPERATION: "a.b: mm #2", CONSTANT: "constant a.b"}[kind]
