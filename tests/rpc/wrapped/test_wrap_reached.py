"""Forwards that reach parts by other ways than the model, ask what a trace answers otherwise, or write into inputs; modules
that cannot be copied: as in one process, or refused by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_wrap import drive
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils import _python_dispatch

import rdmarpc as rpc

KEPT: dict[str, Any] = {}
REACHES = r"reaches 'body\.(l\.)?weight', which lives on worker 'worker1', by another way"


class Holder:
    def __init__(self, part: nn.Module) -> None:
        self.part = part

    def __call__(self, x):
        return self.part(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.reach()

    def reach(self) -> None:
        pass

    def middle(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.middle(self.stem(x)))


class ByGlobal(Net):
    def reach(self):
        KEPT["part"] = self.body

    def middle(self, x):
        return KEPT["part"](x)


class ByParameter(Net):
    def reach(self):
        KEPT["weight"] = self.body.weight

    def middle(self, x):
        return nn.functional.linear(x, KEPT["weight"])


class ByClosure(Net):
    def reach(self):
        holder = Holder(self.body)
        self.middle = lambda x: holder(x)


class ByFunction(Net):
    def reach(self):
        body = self.body

        def inner(x):
            return body(x)

        self.middle = lambda x: inner(x)


class ByObject(Net):
    def reach(self):
        self.held = {"parts": [Holder(self.body)]}

    def middle(self, x):
        return self.held["parts"][0](x)


def reached() -> None:
    for kind in (ByGlobal, ByParameter, ByClosure, ByFunction, ByObject):
        for method in ("auto", "export", "eager", "here"):
            torch.manual_seed(1)
            net, x = kind(), torch.randn(4, 8)
            expected = net(x)
            model = rpc.wrap(net, {"body": "worker1"}, capture=method)
            if kind is ByObject and method in ("auto", "export"):  # the capture's own copy of the model finds its own part
                assert torch.equal(model(x), expected)
            else:
                with pytest.raises(rpc.NotSupported, match=REACHES):
                    model(x)
            model.close()


def test_parts_that_a_forward_reaches_by_another_way_are_refused_by_name():
    drive(reached)


def its_own() -> None:
    """The original beside the model, and what it gives as an input of the model, are the user's."""
    net = Net()
    original = net.body
    model = rpc.wrap(net, {"body": "worker1"}, capture="eager")
    model(original(torch.randn(4, 8))).sum().backward()
    assert original.weight.grad is not None
    model.close()


def test_an_input_may_come_from_an_original():
    drive(its_own)


# -- questions

ASKED: dict[str, Callable[[torch.Tensor], Any]] = {
    "vars": lambda x: len(vars(x)),
    "overrides": lambda x: torch.overrides.has_torch_function((x,)),
    "modes": lambda x: _python_dispatch._get_current_dispatch_mode() is not None,
    "depth": lambda x: torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack(),
    "compiling": lambda x: torch.compiler.is_compiling(),
    "exporting": lambda x: torch.compiler.is_exporting(),
}


class Asks(Net):
    what = ""

    def middle(self, x):
        return self.body(x) * (1 + float(ASKED[self.what](x)))


def asked() -> None:
    x = torch.randn(4, 8)
    for what in ASKED:
        net = Asks()
        net.what = what
        expected = net(x)
        for method in ("auto", "export"):
            model = rpc.wrap(net, {"body": "worker1"}, capture=method)
            if method == "export":
                with pytest.raises(rpc.NotSupported, match=r"asks (torch for|for vars\(\))"):
                    model(x)
            else:
                assert torch.equal(model(x), expected), what
                assert model.captured.startswith("fx" if what in ("compiling", "exporting") else "eager"), what
            model.close()


def test_questions_that_a_trace_answers_otherwise_go_to_the_next_method():
    drive(asked)


# -- modules


class Slotted(nn.Linear):
    __slots__ = ("scale",)


class WithSlots(Net):
    def reach(self):
        self.body = Slotted(8, 8)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2

    def right_inverse(self, weight):
        return weight / 2


def changed() -> None:
    with pytest.raises(rpc.NotSupported, match=r"(?s)'body', a Slotted, keeps 'scale' in __slots__.*hint: keep it as"):
        rpc.wrap(WithSlots(), {"body": "worker1"})
    x = torch.randn(4, 8)
    ways: list[Callable[[nn.Module], Any]] = [
        lambda part: parametrize.register_parametrization(part, "weight", Doubled()),
        parametrizations.weight_norm,
        parametrizations.orthogonal,
    ]
    model = rpc.wrap(Net(), {"body": "worker1"})
    expected = model(x)
    for way in ways:
        with pytest.raises(
            rpc.NotSupported, match=r"(?s)'body' lives on worker 'worker1'.*hint: register or remove.*before wrap"
        ):
            way(model.body)
        assert not parametrize.is_parametrized(model.body) and torch.equal(model(x), expected)
    model.close()
    net = Net()
    parametrize.register_parametrization(net.body, "weight", Doubled())
    model = rpc.wrap(net, {"body": "worker1"})
    with pytest.raises(rpc.NotSupported, match=r"(?s)'body' lives on worker 'worker1'.*hint: register or remove.*before wrap"):
        parametrize.remove_parametrizations(model.body, "weight")
    assert parametrize.is_parametrized(model.body) and torch.equal(model(x), net(x))
    model.close()
    model = rpc.wrap(Net(), {"body": "worker1"}, capture="here")
    given = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(rpc.NotSupported, match=re.escape("torch.func.functional_call takes copy.deepcopy(model)")):
        torch.func.functional_call(model, given, (x,))
    local = copy.deepcopy(model)
    assert torch.equal(torch.func.functional_call(local, dict(local.named_parameters()), (x,)), model(x))
    model.close()


def test_what_modules_cannot_have_from_here_is_refused_with_what_to_do():
    drive(changed)


class Listed(nn.Module):
    """A list of modules is placed as a whole; its items are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8), nn.Tanh()]) for _ in range(2)])
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in range(2)])

    def forward(self, x):
        for (line, act), scale in zip(self.rows, self.scales):
            x = act(line(x)) * scale
        return x


def listed() -> None:
    net, x = Listed(), torch.randn(4, 8)
    for method in ("auto", "here"):
        model = rpc.wrap(copy.deepcopy(net), {"rows.0": "worker1", "scales": "worker1"}, capture=method)
        assert torch.equal(model(x), net(x))
        assert torch.equal(copy.deepcopy(model)(x), net(x))
        model.close()


def test_a_list_of_modules_that_is_placed_as_a_whole_can_be_fetched():
    drive(listed)


# -- writes into inputs


class Scales(Net):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


class Sets(Net):
    def forward(self, x):
        y = super().forward(x.clone())
        x[:, 0] = 1.0
        return y


def loss_of(output, target=None):
    return output.pow(2).mean()


def written(kind: type[Net], width: int) -> None:
    """``width``: an odd one puts the second micro-batch off the alignment, so that it is copied."""
    for method in ("auto", "eager"):
        torch.manual_seed(1)
        net = kind()
        net.stem = nn.Linear(width, 8)
        twin, x = copy.deepcopy(net), torch.randn(2, width)
        theirs = [piece.clone() for piece in x.split(1)]
        for piece in theirs:
            (loss_of(twin(piece)) / 2).backward()
        model = rpc.wrap(net, {"body": "worker1"}, capture=method)
        version = x._version
        model.forward_backward(loss_of, x, target=torch.zeros(2), chunks=2)
        assert torch.equal(x, torch.cat(theirs)) and x._version > version
        for (name, ours), expected in zip(model.named_parameters(), twin.parameters()):
            assert torch.equal(ours.grad.clone(), expected.grad), (kind, method, name)
        model.close()


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("kind", [Scales, Sets])
def test_micro_batches_write_into_inputs_as_one_process_does(kind, width):
    drive(partial(written, kind, width))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight.sum()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight.sum(), (grad * x).sum().expand_as(weight)


class Gives(Net):
    """Its forward gives a part's weight to an autograd function, as adjoint methods do."""

    def forward(self, x):
        return self.head(Scaled.apply(self.body(self.stem(x)), self.body.weight))


def given_to_functions() -> None:
    for how in ("eager", "here"):
        model = rpc.wrap(Gives(), {"body": "worker1"}, capture=how)
        with pytest.raises(rpc.NotSupported, match=r"'body\.weight' .*: the forward gives it to an autograd function"):
            model(torch.randn(2, 8))
        with torch.no_grad():
            model(torch.randn(2, 8))
        model.close()


def test_a_parameter_that_is_given_to_an_autograd_function_is_refused_by_name():
    drive(given_to_functions)
