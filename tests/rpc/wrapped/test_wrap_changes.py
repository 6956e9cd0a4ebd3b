"""What is changed after ``wrap``, and what parts write outside of themselves: as in one process, or refused by name."""

from __future__ import annotations

import abc
import copy
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_wrap import batches, both, drive
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from twins import assert_same_state, train_both

import rdmarpc as rpc
from rdmarpc import wrap


class Config:
    def __init__(self) -> None:
        self.gain, self.shifts = 1.0, [0.0, 1.0]


class Part(nn.Module):
    """Settings of all kinds; it counts, and leaves a loss."""

    temp = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.inner, self.norm = config, nn.Linear(20, 20), nn.BatchNorm1d(20)
        self.temp, self.mode, self.count, self.loss, self.seen = 2.0, "plain", 0, 0.0, []
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("mask", torch.ones(20))

    @property
    def doubled(self) -> float:
        return self.temp * 2

    @doubled.setter
    def doubled(self, value: float) -> None:
        self.temp = value / 2

    def embed(self, x):
        return torch.tanh(self.inner(x)) * self.temp

    def forward(self, x):
        self.count += 1
        y = self.norm(self.inner(x)) / self.temp * self.mask * self.config.gain + self.config.shifts[-1]
        if self.mode == "wide":
            y = torch.cat([y, y], 1)
        elif self.mode == "noting":
            self.seen.append(self.count)
        self.loss = float(self.count) / 7
        return y * 1.0 if self.dropout.p == 0.5 else self.dropout(y)


class Net(nn.Module):
    """``scale`` and ``config`` are read by the outer forward, which stays at the caller."""

    def __init__(self, looking: bool = False) -> None:
        super().__init__()
        self.config, self.scale, self.looking = Config(), 1.5, looking
        self.part, self.body = Part(self.config), nn.Sequential(nn.Linear(20, 20), nn.Tanh())
        self.head, self.wide = nn.Linear(20, 4), nn.Linear(40, 4)

    def encode(self, x):
        return self.part.embed(self.body(x))

    def forward(self, x):
        x = self.part(self.body(x)) * self.scale
        if self.looking and x.sum() > 1e9:
            return x
        return (self.wide if x.shape[1] == 40 else self.head)(x)


PLACEMENT = {"part": "worker1", "body": "worker1", "head": "worker1"}
DATA = batches(3, 6, 20)


def compare(model: nn.Module, twin: nn.Module, steps: int = 2) -> None:
    train_both(model, twin, DATA[:steps])


CHANGES: dict[str, Callable[[Any], None]] = {
    "float": lambda m: setattr(m.part, "temp", 0.5),
    "back": lambda m: setattr(m.part, "temp", 2.0),
    "property": lambda m: setattr(m.part, "doubled", 3.0),
    "inside": lambda m: setattr(m.part.norm, "momentum", 0.7),
    "none": lambda m: setattr(m.part.norm, "momentum", None),
    "text": lambda m: setattr(m.part, "mode", "wide"),
    "text back": lambda m: setattr(m.part, "mode", "plain"),
    "count": lambda m: setattr(m.part, "count", m.part.count + 10),
    "shared object": lambda m: setattr(m.config, "gain", 0.25),
    "shared list": lambda m: m.part.config.shifts.append(0.125),
    "another object": lambda m: setattr(m.part, "config", Config()),
    "its list": lambda m: m.part.config.shifts.append(0.75),
    "tensor": lambda m: setattr(m.part, "mask", torch.arange(20.0)),
    "in place": lambda m: m.part.mask.mul_(0.5),
    "statistics": lambda m: m.part.norm.reset_running_stats(),
    "dropout": lambda m: setattr(m.part.dropout, "p", 0.0),
    "new": lambda m: setattr(m.part, "extra", 3),
    "deleted": lambda m: delattr(m.part, "extra"),
    "frozen": lambda m: m.part.inner.requires_grad_(False),
    "no change": lambda m: m.to("cpu").float(),
    "top": lambda m: setattr(m, "scale", 0.75),
}


def attributes() -> None:
    for looking in (False, True):
        model, twin = both(lambda looking=looking: Net(looking), PLACEMENT)
        compare(model, twin)
        assert model.captured.startswith("eager" if looking else "fx")
        for name, change in CHANGES.items():
            for network in (model, twin):
                change(network)
            compare(model, twin, 1)
            for attribute in ("temp", "count", "loss", "mode", "doubled"):
                assert getattr(model.part, attribute) == getattr(twin.part, attribute), (name, attribute)
            assert torch.equal(model.part.norm.running_mean, twin.part.norm.running_mean)
            assert torch.equal(model.part.mask + 0, twin.part.mask)
            assert model.part.config.shifts == twin.part.config.shifts
            assert hasattr(model.part, "extra") == hasattr(twin.part, "extra")
        for network in (model, twin):
            network.part.mode = "noting"
        compare(model, twin)
        with pytest.raises(rpc.NotSupported, match=r"'seen' of 'part', which lives on worker 'worker1', is a list"):
            model.part.seen  # noqa: B018
        model.close()


class Adapters(nn.Module):
    """Tables by name, as adapters of peft are kept, and a setting of a torch class that is a list."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ParameterDict({name: nn.Parameter(torch.randn(20, 20)) for name in ("first", "second")})
        self.pool, self.active = nn.MaxPool1d([1]), "first"

    def forward(self, x):
        return self.pool(x @ self.down[self.active]) if self.active in self.down else x


def tables_of_parameters() -> None:
    """A loop freezes and switches what a ``ParameterDict`` at another worker has."""
    model, twin = both(lambda: nn.Sequential(Adapters(), nn.Linear(20, 4)), {"0": "worker1"})
    for active in ("first", "second", "none"):
        for network in (model, twin):
            part: Any = network[0]
            part.active = active
            for name, table in part.down.items():
                table.requires_grad_(name == active)
        compare(model, twin)
        assert list(model[0].down) == list(twin[0].down) and ("first" in model[0].down) and len(model[0].down) == 2
    assert model[0].pool.kernel_size == twin[0].pool.kernel_size == [1]
    model.close()


def settings_keep_their_plans() -> None:
    model, _ = both(Net, PLACEMENT)
    for temp in (1.0, 2.0, 1.0, 2.0):
        model.part.temp = temp
        model(DATA[0][0])
    model.part.norm.eps = 1e-3  # changes no operation
    model(DATA[0][0])
    assert model.counters(False)["plans"] == 2
    model.close()


def parametrized(m: Any) -> None:
    parametrizations.orthogonal(m.part.inner)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "a submodule": lambda m: setattr(m, "head", nn.Linear(20, 4)),
    "a submodule by name": lambda m: m.register_module("part", nn.Linear(20, 4)),
    "in a list": lambda m: m.body.__setitem__(0, nn.Linear(20, 20)),
    "in a part": lambda m: setattr(m.part, "inner", nn.Linear(20, 20)),
    "a new one in a part": lambda m: setattr(m.part, "other", nn.Linear(20, 20)),
    "deleted": lambda m: delattr(m, "part"),
    "deleted in a part": lambda m: delattr(m.part, "inner"),
    "a parameter": lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(4, 20))),
    "a new parameter": lambda m: m.head.register_parameter("gain", nn.Parameter(torch.zeros(4))),
    "a deleted parameter": lambda m: delattr(m.head, "bias"),
    "a buffer": lambda m: m.head.register_buffer("gain", torch.zeros(4)),
    "a state hook": lambda m: m.part.register_state_dict_post_hook(print),
    "a hook on a parameter": lambda m: m.head.weight.register_hook(print),
    "another hook on a parameter": lambda m: m.head.weight.register_post_accumulate_grad_hook(print),
    "forward": lambda m: setattr(m.part, "forward", lambda x: x),
    "class": lambda m: setattr(m.part, "__class__", nn.Linear),
    "parametrized": parametrized,
    "spectral norm": lambda m: spectral_norm(m.head),
    "weight norm": lambda m: weight_norm(m.head),
    "pruned": lambda m: prune.l1_unstructured(m.head, "weight", 0.3),
    "half": lambda m: m.half(),
    "double": lambda m: m.part.double(),
    "generator": lambda m: setattr(m.part, "source", torch.Generator()),
    "a tensor with a graph": lambda m: setattr(m.part, "mask", torch.ones(20, requires_grad=True) * 2),
    "tensors in a list": lambda m: setattr(m.part, "others", [torch.ones(2)]),
}


def augmented() -> None:
    """``module.bias += 1`` sets the module's attribute to what it has already."""

    def change(network: Any) -> None:
        with torch.no_grad():
            network.part.inner.weight += 0.1
            network.head.bias *= 2
            network.part.norm.running_mean += 0.5
        network.part.inner.bias.data *= 0.5
        network.head.weight.data -= 0.01

    model, twin = both(Net, PLACEMENT)
    for _ in range(2):
        compare(model, twin)
        change(model), change(twin)
    compare(model, twin)
    model.close()


def refused() -> None:
    model, twin = both(Net, PLACEMENT)
    compare(model, twin, 1)
    for name, change in REFUSED.items():
        with pytest.raises(rpc.NotSupported, match="worker1"):
            change(model)
            print(f"{name} was not refused")
    # Nothing is left of the attempts.
    assert repr(model) == repr(model)
    compare(model, twin)
    model.close()


def hooks() -> None:
    """On whole parts they run here, with what the part gets and gives."""
    for looking in (True,):
        model, twin = both(lambda looking=looking: Net(looking), PLACEMENT)
        notes: list[list[Any]] = [[], []]
        for network, noted in zip((model, twin), notes):

            def before(module, args, noted=noted):
                noted.append(args[0].detach().clone())
                return (args[0] * 2,)

            def after(module, args, output, noted=noted):
                noted.append(output.detach().clone())
                return output + 1

            def backward(module, grads, outputs, noted=noted):
                noted.append(outputs[0].clone())
                return (grads[0] * 0.5,)

            handles = [
                network.part.register_forward_pre_hook(before),
                network.part.register_forward_hook(after),
                network.part.register_full_backward_hook(backward),
                network.register_forward_hook(after),
            ]
            network.handles = handles
        compare(model, twin)
        assert len(notes[0]) == len(notes[1]) == 8
        assert all(map(torch.equal, *notes))
        for network in (model, twin):
            for handle in network.handles:
                handle.remove()
        compare(model, twin)
        assert len(notes[0]) == 8
        model.close()


class Rooted(nn.Module):
    """A hook of its own, from before ``wrap``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(20, 20), nn.Linear(20, 4), 0
        self.register_forward_pre_hook(tripled)
        self.register_forward_hook(counted)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Tripled(Rooted):
    """The hook of its own could be traced: it must run once all the same."""

    def __init__(self) -> None:
        super().__init__()
        self._forward_hooks.clear()


def tripled(module, args):
    return (args[0] * 3,)


def counted(module, args, output):
    module.calls += 1
    return output * 2


def hooks_of_the_root() -> None:
    for how in ("auto", "eager"):
        model, twin = both(Rooted, {"a": "worker1"}, capture=how)
        compare(model, twin)
        assert model.calls == twin.calls == 2
        model.close()
    model, twin = both(Tripled, {"a": "worker1"}, capture="export")
    compare(model, twin)
    model.close()


class Kept(abc.ABC):  # noqa: B024
    """As a layer of transformers' cache: abstract, so that its class has empty slots."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.count = 0

    def grow(self, x: torch.Tensor) -> None:
        self.rows = x if self.rows is None else torch.cat([self.rows, x])
        self.count += 1


class Writing(nn.Module):
    """Writes into what it is given, in one of many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(20, 20), how

    def forward(self, x, notes):
        y = self.layer(x)
        if self.how == "list":
            notes.append(3)
        elif self.how == "tensors":
            notes.append(y.mean())
        elif self.how == "dict":
            notes["n"] = 1
        elif self.how == "nested":
            notes["inner"][0].append(1)
        elif self.how == "layer":
            notes.grow(y)
        elif self.how == "moved":
            notes["b"] = notes.pop("a")
        elif self.how == "object":
            notes.n = 1
        return y


class Gives(nn.Module):
    def __init__(self, how: str, looking: bool) -> None:
        super().__init__()
        self.part, self.how, self.looking = Writing(how), how, looking

    def forward(self, x):
        notes: Any = {"dict": {}, "nested": {"inner": [[0]]}, "object": types.SimpleNamespace(n=0), "moved": {"a": [1]}}.get(
            self.how, []
        )
        notes = Kept() if self.how == "layer" else notes
        y = self.part(x, notes)
        if self.looking and y.sum() > 1e9:
            return y
        if self.how == "object":
            return y * notes.n
        if self.how == "layer":
            return notes.rows * notes.count
        if self.how == "moved":
            return y * notes["b"][0]
        if self.how == "tensors":
            return y * notes[0]
        return y * (len(notes) if self.how != "nested" else len(notes["inner"][0]))


def arguments() -> None:
    for how in ("list", "tensors", "dict", "nested", "object", "layer", "moved"):
        for looking in (False, True):
            model, twin = both(lambda: Gives(how, looking), {"part": "worker1"})  # noqa: B023
            x = torch.randn(2, 20)
            try:
                result = model(x)
            except rpc.NotSupported as error:
                assert not looking or how not in ("layer", "moved"), error
                assert "'part'" in str(error), error
                assert "'notes'" in str(error), error
            else:
                assert torch.equal(result, twin(x)), (how, looking)
            model.close()


def the_object() -> None:
    model, twin = both(Net, PLACEMENT)
    assert isinstance(model, Net)
    assert isinstance(model.part, Part)
    assert isinstance(model.body, nn.Sequential)
    assert isinstance(model.body[0], nn.Linear)
    assert len(model.body) == 2
    assert model.config.gain == 1.0
    x = DATA[0][0]
    for _ in range(3):
        ours, theirs = model.encode(x), twin.encode(x)
        assert torch.equal(ours, theirs)
    ours.sum().backward()
    theirs.sum().backward()
    assert torch.equal(model.body(x), twin.body(x))
    for network in (model, twin):
        for parameter in network.parameters():
            parameter.grad = None
    compare(model, twin)
    assert next(model.parameters()).device == torch.device("cpu")
    for make in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        plain = make(model)
        assert type(plain) is Net
        assert type(plain.part) is Part
        assert plain.part.count == twin.part.count
        assert_same_state(plain, twin)
        assert [type(p) for p in plain.parameters()] == [nn.Parameter] * len(list(twin.parameters()))
        again = copy.deepcopy(twin)
        compare(plain, again)
    assert copy.deepcopy(model.part).count == twin.part.count
    compare(model, twin)
    handle = nn.modules.module.register_module_forward_hook(lambda *found: None)
    with pytest.raises(rpc.NotSupported, match="hooks for all modules"):
        model(x)
    handle.remove()
    assert inspect.signature(model.forward) == inspect.signature(twin.forward)
    run = model.forward
    model.forward = lambda x: run(x) * 2
    assert torch.equal(model(x), twin(x) * 2)
    del model.forward
    assert torch.equal(model(x), twin(x))
    average = [torch.optim.swa_utils.AveragedModel(network, use_buffers=False) for network in (model, twin)]
    assert_same_state(*average)
    model.close()


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.5), nn.Linear(20, 20))
        self.b = nn.Sequential(nn.Linear(20, 20), nn.Dropout(0.3), nn.Linear(20, 4))

    def forward(self, x):
        return self.b(self.a(x))


def losses_of(network: nn.Module, seed: int) -> list[float]:
    torch.manual_seed(seed)
    found = []
    for x, y in DATA:
        loss = F.cross_entropy(network(x), y)
        loss.backward()
        found.append(loss.item())
    return found


def seeds() -> None:
    torch.manual_seed(3)
    model, twin = both(Random, {"a": "worker1"})
    first = losses_of(model, 7)
    assert losses_of(model, 7) == first
    assert losses_of(model, 8) != first
    other = wrap(copy.deepcopy(twin), {"a": "worker1"})
    assert losses_of(other, 7) == first
    for network in (model, twin):
        network.b[1].p = 0.0
    assert losses_of(model, 7) == losses_of(twin, 7)  # only one worker draws
    model(DATA[0][0])
    before = model.counters(False)["rpc_messages"]
    model(DATA[0][0])
    assert model.counters(False)["rpc_messages"] == before
    other.close()
    model.close()


def everything() -> None:
    for scenario in (
        attributes,
        tables_of_parameters,
        settings_keep_their_plans,
        augmented,
        refused,
        hooks,
        hooks_of_the_root,
        arguments,
        the_object,
        seeds,
    ):
        torch.manual_seed(0)
        scenario()


def test_changes() -> None:
    drive(everything, 2, timeout=250.0)


def test_wrap_leaves_the_original() -> None:
    drive(original)


def original() -> None:
    net = Net()
    model = wrap(net, PLACEMENT)
    assert type(net) is Net
    assert type(net.part) is Part
    model.close()
