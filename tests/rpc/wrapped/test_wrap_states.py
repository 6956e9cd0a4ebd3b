"""What takes part in loading and copying parts that live elsewhere does so there; what cannot is refused by name."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_wrap import batches, both, drive
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from twins import assert_same_state, train_both

import rdmarpc as rpc

DATA = batches(3, 6, 20)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gain = nn.Linear(20, 20), nn.Linear(20, 20), 1.0

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) * self.gain


class Net(nn.Module):
    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body, self.part, self.head = nn.Linear(20, 20), part(), nn.Linear(20, 4)

    def forward(self, x):
        return self.head(self.part(torch.relu(self.body(x))))


def from_old_names(state_dict, prefix, *others):
    if prefix + "first.bias" in state_dict:
        state_dict[prefix + "a.bias"] = state_dict.pop(prefix + "first.bias") / 2


def to_old_names(module, state_dict, prefix, metadata):
    state_dict[prefix + "first.bias"] = state_dict.pop(prefix + "a.bias") * 4


def counted(module, keys):
    module.gain *= 3


class Renamed(Part):
    """By hooks of both directions."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(to_old_names)
        self._register_load_state_dict_pre_hook(from_old_names)


class Counted(Part):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(counted)


class Inner(nn.Linear):
    def _load_from_state_dict(self, state_dict, prefix, *others):
        state_dict[prefix + "bias"] = state_dict[prefix + "bias"] / 4
        super()._load_from_state_dict(state_dict, prefix, *others)


class Above(Part):
    """A module changes what the one below loads, which has a method of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Inner(20, 20)

    def _load_from_state_dict(self, state_dict, prefix, *others):
        state_dict[prefix + "a.bias"] = state_dict[prefix + "a.bias"] + 1
        super()._load_from_state_dict(state_dict, prefix, *others)


class Extra(Part):
    def get_extra_state(self):
        return torch.tensor(self.gain * 2)

    def set_extra_state(self, state):
        self.gain = float(state)


class Cut(Extra):
    """Its own parameter lies elsewhere than what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(20))
        self._register_load_state_dict_pre_hook(halved)

    def forward(self, x):
        return super().forward(x) * self.scale


def halved(state_dict, prefix, *others):
    state_dict[prefix + "scale"] = state_dict[prefix + "scale"] / 2


class ByMethod(Cut):
    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)


PLACEMENT = {"part": "worker1", "head": "worker1"}
CUT = {"part": "worker1", "part.a": "worker2"}


def loaded() -> None:
    for kind, placement in [(k, PLACEMENT) for k in (Renamed, Counted, Above, Extra)] + [
        (Cut, CUT),
        (Above, {"part.a": "worker1"}),
    ]:
        model, twin = both(lambda: Net(kind), placement)  # noqa: B023
        train_both(model, twin, DATA)
        for network in (model, twin):
            network.load_state_dict(copy.deepcopy(dict(network.state_dict())))
        assert model.part.gain == twin.part.gain
        train_both(model, twin, DATA)
        parts = [network.part.state_dict() for network in (model, twin)]
        assert list(parts[0]) == list(parts[1])
        for network, state in zip((model, twin), parts):
            network.part.load_state_dict(copy.deepcopy(dict(state)))
            state = {"bias": torch.ones(20), "weight": torch.zeros(20, 20)}
            assert not any(network.part.a.load_state_dict(state))
        train_both(model, twin, DATA)
        for network in (model, twin):
            state = {**network.state_dict(), "part.c.weight": torch.ones(2)}
            state.pop("part.b.weight")
            found = network.load_state_dict(state, strict=False)
            assert found.missing_keys == ["part.b.weight"] and found.unexpected_keys == ["part.c.weight"]
        assert_same_state(model, twin)
        model.close()
    model, _ = both(lambda: Net(ByMethod), CUT)
    with pytest.raises(rpc.NotSupported, match="'part' live on worker 'worker1': ByMethod has a way of its own to load them"):
        model.load_state_dict(model.state_dict())
    with pytest.raises(rpc.NotSupported, match="assign=True"):
        model.part.a.load_state_dict(model.part.a.state_dict(), assign=True)
    model.close()


def test_states_that_modules_load_themselves():
    drive(loaded, 3)


class Versioned(nn.Linear):
    """It takes states of before version 2, which have no metadata, too."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "bias"] = state_dict[prefix + "bias"] * 8
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


class OfVersions(Part):
    def __init__(self) -> None:
        super().__init__()
        self.a = Versioned(20, 20)
        self.b = nn.Sequential(Versioned(20, 20), self.a)


def loaded_by_version() -> None:
    model, twin = both(lambda: Net(OfVersions), PLACEMENT)
    for network in (model, twin):
        network.load_state_dict(dict(copy.deepcopy(network.state_dict())))
        network.load_state_dict(copy.deepcopy(network.state_dict()))
        network.part.load_state_dict(copy.deepcopy(network.part.state_dict()))
        state = copy.deepcopy(network.state_dict())
        state._metadata["part.b.0"]["version"] = 1
        network.load_state_dict(state)
        inner = network.part.b[0]
        inner.load_state_dict(dict(copy.deepcopy(inner.state_dict())))
    assert_same_state(model, twin)
    for network in (model, twin):
        moved = {"moved.weight": torch.ones(20, 20), "moved.bias": torch.ones(20)}
        nn.ModuleDict({"moved": network.part.b[0]}).load_state_dict(moved)
    assert_same_state(model, twin)
    assert twin.part.b[0].bias[0] == 8
    train_both(model, twin, DATA)
    model.close()


def test_states_of_other_versions():
    drive(loaded_by_version)


def doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def copied_with_hooks() -> None:
    model, twin = both(lambda: Net(Hooked), PLACEMENT)
    for network in (model, twin):
        network.part.a.register_forward_hook(doubled)
        network.part.register_forward_pre_hook(lambda module, args: (args[0] + 1,), prepend=True)
        network.head.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 3,), kwargs), with_kwargs=True)
    mine, theirs = copy.deepcopy(model), copy.deepcopy(twin)
    assert type(mine) is type(theirs) and mine.part.a is not model.part.a
    train_both(mine, theirs, DATA)
    with pytest.warns(UserWarning, match="runs in this process"):
        train_both(model, twin, DATA)
    model.close()


class Hooked(Part):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lowered)


def lowered(module: nn.Module, args: Any) -> Any:
    return (args[0].tanh(),)


def test_a_copy_has_the_hooks():
    drive(copied_with_hooks)


class Patched(Net):
    def __init__(self) -> None:
        super().__init__(Part)
        self.part.forward = types.MethodType(stronger, self.part)


def stronger(part: Part, x: torch.Tensor) -> torch.Tensor:
    return Part.forward(part, x) * 2


class Cached(Net):
    """A parametrized weight is computed once for two calls, so its gradient is one sum."""

    def __init__(self) -> None:
        super().__init__(Part)
        parametrizations.orthogonal(self.part.a)
        parametrizations.weight_norm(self.head)

    def forward(self, x):
        with parametrize.cached():
            return super().forward(x) + super().forward(x * 2)


def others() -> None:
    for make in (Patched, Cached):
        for how in ("auto", "eager"):
            model, twin = both(make, PLACEMENT, capture=how)
            train_both(model, twin, DATA)
            model.close()


@pytest.mark.filterwarnings("ignore:.*runs in this process")
def test_a_forward_of_an_instance_and_cached_parametrizations():
    drive(others, timeout=250.0)


def frozen_late() -> None:
    """autograd leaves out what is frozen when its gradient comes."""

    def step(network, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), y)
        network.part.b.requires_grad_(False)
        loss.backward()
        optimizer.step()
        network.part.b.requires_grad_(True)
        return loss

    model, twin = both(lambda: Net(Part), PLACEMENT, capture="here")
    train_both(model, twin, DATA, step=step)
    model.close()
    model, twin = both(lambda: Net(Part), PLACEMENT)
    train_both(model, twin, DATA)
    loss = model(DATA[0][0]).sum()
    model.part.b.requires_grad_(False)
    model(DATA[1][0])
    with pytest.raises(rpc.NotSupported, match=r"'part\.b\.weight'.*frozen after a forward and before its backward"):
        loss.backward()
    del loss
    twin.part.b.requires_grad_(False)
    train_both(model, twin, DATA)
    for network in (model, twin):
        network.part.b.requires_grad_(True)
    train_both(model, twin, DATA)
    model.close()


def test_a_parameter_that_is_frozen_before_the_backward():
    drive(frozen_late)


class Normed(Part):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(20)

    def forward(self, x):
        return self.norm(super().forward(x))


def written_state() -> None:
    model, twin = both(functools.partial(Net, Normed), {"part": "worker1", "body": "worker1"})
    with torch.no_grad():
        for net in (model, twin):  # parameters and buffers themselves, wherever they are
            for tensor in net.state_dict(keep_vars=True).values():
                if tensor.is_floating_point():
                    tensor.mul_(0.9)
    train_both(model, twin, DATA)
    kept = {**model.state_dict()}
    train_both(model, twin, DATA)  # looked at only
    ours, theirs = model.state_dict(), twin.state_dict()
    for state in (ours, theirs):
        state["part.a.weight"].mul_(0.5)
    for forward in (model, lambda x: model.forward_backward(torch.sum, x, chunks=1)):
        with pytest.raises(rpc.NotSupported, match=r"'part.a.weight' was written, but is a copy: .* on 'worker1'"):
            forward(torch.randn(6, 20))
    model.load_state_dict(ours)
    train_both(model, twin, DATA)
    kept["body.weight"].zero_()
    with pytest.raises(rpc.NotSupported, match=r"'body.weight' was written"):
        model(torch.randn(6, 20))
    del kept
    train_both(model, twin, DATA)
    assert_same_state(model, twin)
    model.close()


def test_what_is_written_into_a_state_dict_is_not_lost_silently():
    drive(written_state, 2)


def renamed_state() -> None:
    # What a hook has made of a parameter is a copy, also with keep_vars.
    model, twin = both(functools.partial(Net, Renamed), {"part": "worker1"})
    ours, theirs = model.state_dict(keep_vars=True), twin.state_dict(keep_vars=True)
    assert list(ours) == list(theirs)
    assert torch.equal(ours["part.first.bias"], theirs["part.first.bias"].detach())
    assert ours["part.b.bias"] is model.part.b.bias
    model.close()


def test_keep_vars_of_a_part_that_renames_its_state():
    drive(renamed_state, 2)


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


BADLY: dict[str, dict[str, Any]] = {
    "shapes": {"0.weight": torch.zeros(3, 3), "1.running_mean": torch.zeros(2), "2.bias": torch.zeros(1)},
    "no tensors": {"0.bias": 3, "2.weight": None},
    "a number with a dimension": {"1.num_batches_tracked": torch.tensor([5])},
    "keys below a tensor": {"0.weight.more": torch.zeros(1), "1": torch.zeros(1), "1.other.weight": torch.zeros(1)},
}


def loads(model: nn.Module, state: dict[str, Any], strict: bool) -> str:
    try:
        return str(model.load_state_dict(state, strict=strict))
    except RuntimeError as error:
        return str(error)


def badly() -> None:
    """What does not fit has torch's words, and what fits is loaded."""
    for placement in ({"0": "worker1", "2": "worker2"}, {"1": "worker1"}, {"0-2": "worker1"}):
        model, twin = both(norms, placement)
        for wrong in BADLY.values():
            for strict in (True, False):
                state = {name: value + 1 for name, value in twin.state_dict().items()}
                state = {**state, **wrong}
                assert loads(model, state, strict) == loads(twin, state, strict)
                assert_same_state(model, twin)
        model.close()


def test_states_that_do_not_fit():
    drive(badly, 3)
