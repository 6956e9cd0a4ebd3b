"""Functions with a backward of their own: a trace has the function as one operation, however the forward came by its ``apply``.

``apply`` is in Python until torch 2.13 and in C since then; every test runs with both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_capture import Twice, check
from torch import nn

from rdmarpc.graph.opaque.functions import followed
from rdmarpc.graph.trace.capture import capture
from rdmarpc.graph.trace.export import export
from rdmarpc.graph.trace.record import record
from rdmarpc.transport import NotSupported

IN_C = torch._C._FunctionBase.__dict__["apply"]
APPLY: Any = torch.autograd.Function.__dict__["apply"]


class Apart(torch.autograd.Function):
    """As ``Twice``, with its context set apart."""

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.by = 3

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.by


class Both(torch.autograd.Function):
    """One result of two has a gradient."""

    @staticmethod
    def forward(ctx, x):
        rest = x * 3
        ctx.mark_non_differentiable(rest)
        return x * 2, rest

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 3


class Written(torch.autograd.Function):
    """It writes into what it is given."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Net(nn.Module):
    def __init__(self, apply: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.apply_it = apply

    def forward(self, x):
        return self.b(self.apply_it(self.a(x)))


def looked_up(x: torch.Tensor) -> torch.Tensor:
    return Twice.apply(x)


def looked_up_apart(x: torch.Tensor) -> torch.Tensor:
    return Apart.apply(x)


@pytest.fixture(params=["python", "c"], autouse=True)
def apply_is_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "c":
        monkeypatch.setattr(torch.autograd.Function, "apply", IN_C)
    elif not isinstance(APPLY, classmethod):
        pytest.skip("this torch has no apply in Python")
    followed.cache_clear()
    yield request.param
    followed.cache_clear()
    now = torch.autograd.Function.__dict__["apply"]
    assert now is (IN_C if request.param == "c" else APPLY), "a trace left its own behind"
    assert "__getattribute__" not in vars(type(torch.autograd.Function))
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


@pytest.mark.parametrize("method", [capture, record])
@pytest.mark.parametrize("apply", [looked_up, looked_up_apart])
def test_looked_up_by_the_forward(method: Any, apply: Callable[[torch.Tensor], torch.Tensor]) -> None:
    graph = check(method, Net(apply), {"a": "w0", "b": "w1"}, torch.randn(3, 8))
    assert "apply()" in [step.label for segment in graph.segments for step in segment.instructions]


@pytest.mark.parametrize("method", [capture, record])
@pytest.mark.parametrize("kind", [Twice, Apart])
def test_looked_up_before(method: Any, kind: Any, apply_is_in: str) -> None:
    net, x = Net(kind.apply), torch.randn(3, 8)
    if apply_is_in == "c" and method is capture and kind is Apart:
        with pytest.raises(NotSupported, match="an apply of Apart that was looked up before"):
            check(method, net, {"a": "w0", "b": "w1"}, x)
    else:
        check(method, net, {"a": "w0", "b": "w1"}, x)


def test_results_of_two_kinds(apply_is_in: str) -> None:
    """Where ``apply`` is in C, a trace would not see that one of them has no gradient."""
    apply = Both.apply
    for chosen in (lambda x: Both.apply(x)[0], lambda x: apply(x)[0]):
        if apply_is_in == "c" and chosen.__closure__:
            with pytest.raises(NotSupported, match="an apply of Both that was looked up before"):
                check(record, Net(chosen), {"a": "w0", "b": "w1"}, torch.randn(3, 8))
        else:
            check(record, Net(chosen), {"a": "w0", "b": "w1"}, torch.randn(3, 8))


@pytest.mark.parametrize("before", [False, True])
def test_one_that_writes_into_its_input(before: bool) -> None:
    apply = Written.apply
    net = Net((lambda x: apply(x)) if before else lambda x: Written.apply(x))
    try:
        check(record, net, {"a": "w0", "b": "w1"}, torch.randn(3, 8))
    except NotSupported as error:
        assert "an apply of Written" in str(error) or "writes into" in str(error), error


@pytest.mark.parametrize("before", [False, True])
def test_an_export_refuses_them(before: bool) -> None:
    with pytest.raises(NotSupported, match="Twice has a backward of its own"):
        check(export, Net(Twice.apply if before else looked_up), {"a": "w0"}, torch.randn(3, 8))


@pytest.mark.parametrize("method", [capture, record, export])
def test_a_torch_that_calls_them_otherwise(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that did not see them would lose their backward: nothing is captured there."""

    @classmethod  # type: ignore[misc]
    def apply(cls: Any, *args: Any) -> Any:
        return IN_C.__get__(None, cls)(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.Function, "apply", apply)
        with pytest.raises(NotSupported, match="calls autograd functions in a way that a trace does not see"):
            check(method, Net(looked_up), {"a": "w0", "b": "w1"}, torch.randn(3, 8))
