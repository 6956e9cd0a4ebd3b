"""Placements at any depth: what is cut trains as the whole did, and keeps its names."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_capture import NESTED, Gpt, Nested
from test_wrap import STEADY, assert_same_state, batches, both, drive
from torch import nn

import rdmarpc as rpc
from rdmarpc import wrap
from rdmarpc.ground import here


def train_both(model: nn.Module, twin: nn.Module, inputs: list[tuple[torch.Tensor, torch.Tensor]], optimizer: Any) -> None:
    mine, theirs = optimizer(model.parameters()), optimizer(twin.parameters())
    for number, (x, y) in enumerate(inputs):
        losses = []
        for network, stepper in ((model, mine), (twin, theirs)):
            stepper.zero_grad()
            output = network(x)
            losses.append(F.cross_entropy(output.flatten(0, -2), y.flatten()))
            losses[-1].backward()
            stepper.step()
        assert losses[0].item() == losses[1].item(), f"step {number}"
    assert_same_state(model, twin)


def nested() -> None:
    placement = {key: {"w0": "worker1", "w1": "worker2"}[home] for key, home in NESTED.items()}
    model, twin = both(Nested, placement)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in twin.named_modules()]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()]
    train_both(model, twin, batches(6, 8, 8), lambda p: torch.optim.Adam(p, 1e-2))
    early = model.counters()
    train_both(model, twin, batches(3, 8, 8), lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9))
    late = model.counters()
    assert {key: late[key] for key in STEADY if key != "rpc_messages"} == {
        key: early[key] for key in STEADY if key != "rpc_messages"
    }
    for network in (model, twin):
        network.eval()
    x = torch.randn(8, 8)
    with torch.no_grad():
        assert torch.equal(model(x), twin(x))
    assert_same_state(model, twin)
    # State goes both ways, also of a cut module alone.
    other = Nested()
    model.load_state_dict(other.state_dict())
    assert_same_state(model, other)
    assert_same_state(model.blocks[1], other.blocks[1])
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.1.gain"):
        model.load_state_dict({k: v for k, v in other.state_dict().items() if k != "blocks.1.gain"})
    with pytest.raises(RuntimeError, match=r"size mismatch for blocks.1.gain"):
        model.load_state_dict({**other.state_dict(), "blocks.1.gain": torch.zeros(1)})
    # A flag below a cut module counts as well as one above.
    twin.load_state_dict(other.state_dict())
    for network in (model, twin):
        network.train()
        network.norm.eval()
        network.blocks[1].gain.requires_grad_(False)
    train_both(model, twin, batches(2, 8, 8), lambda p: torch.optim.SGD(p, 1e-2))
    model.close()


def transformers() -> None:
    def encoder() -> nn.Module:
        layer = nn.TransformerEncoderLayer(20, 2, 16, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(20, 4))

    # Layers of one encoder at two workers; its norm-free rest stays here.
    model, twin = both(encoder, {"0.layers.0-1": "worker1", "0.layers.2-3": "worker2", "1": "worker2"})
    data = [(torch.randn(3, 5, 20), torch.randint(0, 4, (3, 5))) for _ in range(4)]
    train_both(model, twin, data, lambda p: torch.optim.SGD(p, 0.1))
    assert model.captured.startswith("fx")
    for network in (model, twin):
        network.eval()
    with torch.no_grad():
        assert torch.equal(model(data[0][0]), twin(data[0][0]))
    model.close()
    model, twin = both(Gpt, {"tokens": "worker1", "head": "worker1", "body.layers.0": "worker1", "body": "worker2"})
    assert model.head.weight is model.tokens.weight
    data = [(torch.randint(0, 11, (3, 6)), torch.randint(0, 11, (3, 6))) for _ in range(5)]
    train_both(model, twin, data, lambda p: torch.optim.AdamW(p, 1e-2))
    model.close()


class LanguageModel(nn.Module):
    """State goes in and comes out, as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(11, 8), nn.LSTM(8, 8, 2, batch_first=True), nn.Linear(8, 11)

    def forward(self, tokens, state=None):
        x, state = self.lstm(self.words(tokens), state)
        return self.head(x), state


def language() -> None:
    model, twin = both(LanguageModel, {"words": "worker1", "lstm": "worker2", "head": "worker1"})
    optimizers = [torch.optim.Adam(network.parameters(), 1e-2) for network in (model, twin)]
    states: list[Any] = [None, None]
    for tokens in torch.randint(0, 11, (4, 3, 7)):
        losses = []
        for at, (network, optimizer) in enumerate(zip((model, twin), optimizers)):
            optimizer.zero_grad()
            output, state = network(tokens[:, :-1], states[at])
            states[at] = tuple(part.detach() for part in state)
            losses.append(F.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten()))
            losses[-1].backward()
            optimizer.step()
        assert losses[0].item() == losses[1].item()
    assert model.captured == "fx"
    assert model.counters()["plans"] == 2
    assert_same_state(model, twin)
    model.close()


class Dropping(nn.Module):
    """Dropout inside a cut module: as a module that stays here, and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"a": nn.Linear(20, 20), "drop": nn.Dropout(0.4), "b": nn.Linear(20, 4)})

    def forward(self, x):
        x = self.body["drop"](self.body["a"](x))
        return self.body["b"](F.dropout(x, 0.3, self.training))


def dropout() -> None:
    model, twin = both(Dropping, {"body": "worker1", "body.drop": "worker0", "body.b": "worker2"})
    for x, _ in batches(3, 8, 20):
        before = torch.get_rng_state()
        ours = model(x)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        theirs = twin(x)
        assert torch.equal(ours, theirs) and torch.equal(torch.get_rng_state(), after)
        ours.sum().backward()
        theirs.sum().backward()
    assert model.counters()["draws_elsewhere"] == 0
    for network in (model, twin):
        network.eval()
    assert torch.equal(model(x), twin(x))
    model.close()


def refusals() -> None:
    net = Nested()
    before = here.current().counters()["rpc_messages"]
    for placement, said in (
        ({"blocks.9": "worker1"}, r"'blocks.9'.*no '9' in 'blocks'.*'0', '1', '2', '3'"),
        ({"blocks.2-7": "worker1"}, r"no '4' in 'blocks'"),
        ({"blocks.3-2": "worker1"}, r"the range '3-2' is empty"),
        ({"blocks.0.one.x": "worker1"}, r"no 'x' in 'blocks.0.one'; its parts are \(none\)"),
        ({"blocks.0-1": "worker1", "blocks.1": "worker2"}, r"two entries for 'blocks.1': 'blocks.0-1' and 'blocks.1'"),
        ({"nose": "worker1"}, r"'nose'.*top-level parts are 'start', 'blocks', 'norm', 'head'"),
        ({"blocks.0": "worker7"}, r"'worker7'"),
    ):
        with pytest.raises(ValueError, match=said):
            wrap(net, placement)
    gpt = Gpt()
    with pytest.raises(rpc.NotSupported, match=r"'tokens.weight' and 'head.weight' are one tensor.*'worker1' and 'worker2'"):
        wrap(gpt, {"tokens": "worker1", "head": "worker2"})
    net.blocks[2].two.weight = net.blocks[0].one.weight
    with pytest.raises(rpc.NotSupported, match=r"'blocks.0.one.weight' and 'blocks.2.two.weight' are one tensor"):
        wrap(net, {"blocks": "worker1", "blocks.2.two": "worker2", "blocks.0.one": "worker1"})
    assert here.current().counters()["rpc_messages"] == before


class Sharing(nn.Module):
    """One parameter in two parts of a worker, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.ModuleList([nn.Linear(20, 20), nn.Linear(20, 20)]), nn.Linear(20, 20)
        self.b.weight = self.a[1].weight
        self.c = nn.ModuleList([self.b, nn.Linear(20, 4)])

    def forward(self, x):
        return self.c[1](self.c[0](torch.relu(self.b(self.a[1](self.a[0](x))))))


def sharing() -> None:
    model, twin = both(Sharing, {"a.1": "worker1", "b": "worker1", "c.0": "worker1", "c.1": "worker2"})
    assert model.c[0] is model.b
    train_both(model, twin, batches(4, 8, 20), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    model.close()


class Stacks(nn.Module):
    """Two stacks over one table, as encoder and decoder have it."""

    class Stack(nn.Module):
        def __init__(self, table: nn.Parameter) -> None:
            super().__init__()
            self.embed, self.layer = nn.Embedding(11, 16, _weight=table), nn.Linear(16, 16)
            self.embed.weight = table

        def forward(self, tokens):
            return torch.tanh(self.layer(self.embed(tokens)))

    def __init__(self) -> None:
        super().__init__()
        table = nn.Parameter(torch.randn(11, 16) / 4)
        self.encoder, self.decoder = self.Stack(table), self.Stack(table)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens):
        return self.head(self.encoder(tokens) * self.decoder(tokens.flip(1)))


def tied() -> None:
    """What shares a tensor goes where it is placed, as whole as it can be."""
    tokens = [(torch.randint(0, 11, (2, 6)), torch.randint(0, 11, (2, 6))) for _ in range(3)]
    for make, placement, moved in (
        (Gpt, {"tokens": "worker1"}, {"head.weight": "worker1"}),
        (Gpt, {"body": "worker2", "head": "worker1"}, {"tokens.weight": "worker1"}),
        (Stacks, {"encoder": "worker1"}, {"decoder.embed.weight": "worker1"}),
        (Stacks, {"encoder": "worker1", "decoder": "worker2"}, {"decoder.embed.weight": "worker1"}),
        (Stacks, {"encoder": "worker1", "decoder.embed": "worker2"}, {"encoder.embed.weight": "worker2"}),
    ):
        with pytest.warns(UserWarning, match="tied weights: "):
            model, twin = both(make, placement)
        named = dict(model.named_parameters(remove_duplicate=False))
        assert {name: named[name].worker for name in moved} == moved
        train_both(model, twin, tokens, lambda p: torch.optim.SGD(p, 0.1))
        model.close()


class Encoded(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(20, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


def two_models() -> None:
    """A module that two models have: its tensors are two from now on, which is said, if one of the models has moved them."""
    moved, stays = {"encoder": "worker1"}, {"head": "worker1"}
    for first, second, said in ((moved, moved, True), (moved, stays, True), (stays, moved, True), (stays, stays, False)):
        encoder = nn.Linear(20, 20)
        one = wrap(Encoded(encoder), first)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            other = wrap(Encoded(encoder), second)
        texts = [str(each.message) for each in found if "they are two tensors from now on" in str(each.message)]
        assert [("'encoder." in text, "'worker1'" in text) for text in texts] == [(True, True)] * said, (first, second)
        one.close(), other.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrap(Encoded(encoder), second).close()
    model = wrap(Encoded(nn.Linear(20, 20)), moved)
    for net, text in ((model, "'the model' is a wrapped model"), (Encoded(model), "'encoder' is a wrapped model")):
        with pytest.raises(rpc.NotSupported, match=f"{text} already"):
            wrap(net, stays)
    with pytest.raises(rpc.NotSupported, match="'encoder' is a part of a wrapped model already"):
        wrap(Encoded(model.encoder), moved)
    model.close()


class Active(nn.Module):
    """A part that was given its activation."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.line, self.act = nn.Linear(20, 20), act

    def forward(self, x):
        return self.act(self.line(x))


class OneActivation(nn.Module):
    """All parts have one activation, which is a module (MONAI's SegResNet)."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.Sequential(nn.Dropout(0.0), nn.Tanh())
        self.act, self.head = act, nn.Linear(20, 4)
        self.a, self.b, self.c = Active(act), Active(act), nn.Sequential(Active(act), nn.Linear(20, 20), act)

    def forward(self, x):
        return self.head(self.act(self.c(self.b(self.a(x)))))


def one_activation() -> None:
    for placement in (
        {"b": "worker1"},
        {"a": "worker1"},
        {"a": "worker1", "b": "worker2"},
        {"b": "worker1", "c.0": "worker2"},
        {"a": "worker1", "c.1": "worker2"},
        {"c": "worker1", "a": "worker2"},
    ):
        model, twin = both(OneActivation, placement)
        train_both(model, twin, batches(3, 8, 20), lambda p: torch.optim.SGD(p, 0.1))
        for network in (model, twin):
            network.eval()
        x = torch.randn(8, 20)
        assert torch.equal(model(x), twin(x)), placement
        model.close()


class Heard(nn.Module):
    """Puts its output into a list that it was given, and calls a part inside of it."""

    def __init__(self, heard: list[torch.Tensor], at: int, inside: nn.Module) -> None:
        super().__init__()
        self.heard, self.at, self.line, self.inside = heard, at, nn.Linear(20, 20), inside

    def forward(self, x):
        self.heard[self.at] = torch.tanh(self.line(x))
        return self.inside(self.heard[self.at])


class Hears(nn.Module):
    """Modules and the model have one list, into which forwards write (the deep supervision of MONAI's DynUNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = [torch.zeros(1)] * 2
        self.body = Heard(self.heard, 0, Heard(self.heard, 1, nn.Linear(20, 20)))
        self.head = nn.Linear(20, 4)

    def forward(self, x):
        return self.head(self.body(x) + self.heard[0] * self.heard[1])


def one_list() -> None:
    for placement in (
        {"head": "worker1"},
        {"body.inside.inside": "worker1"},
        {"body.line": "worker1", "body.inside.line": "worker2"},
    ):
        model, twin = both(Hears, placement)
        train_both(model, twin, batches(3, 8, 20), lambda p: torch.optim.SGD(p, 0.1))
        assert model.heard is model.body.heard is model.body.inside.heard
        assert all(map(torch.equal, model.heard, twin.heard))
        model.close()


class Powers(nn.Module):
    """Its own forward is to run elsewhere, and has powers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 20), nn.Linear(20, 4)

    def forward(self, x):
        y = torch.sigmoid(self.a(x))
        z = (2**y) + y**2 + y**y
        z **= 2
        return self.b(z)


def powers() -> None:
    model, twin = both(Powers, {"a": "worker1", "b": "worker1"})
    train_both(model, twin, batches(3, 8, 20), lambda p: torch.optim.SGD(p, 0.1))
    assert model.captured == "fx"
    model.close()


def everything() -> None:
    for scenario in (refusals, nested, sharing, two_models, tied, dropout, language, transformers):
        torch.manual_seed(0)
        scenario()


def test_nested_placements():
    drive(everything, 3)


def test_parts_that_share_a_module_without_tensors() -> None:
    drive(one_activation, 3)


def test_a_list_that_modules_share() -> None:
    drive(one_list, 3)


def test_powers_between_parts_run_there() -> None:
    drive(powers)
