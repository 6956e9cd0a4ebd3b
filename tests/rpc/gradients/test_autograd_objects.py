"""Gradients through what is more than dense tensors: containers, objects that compute as they are unpickled, nested tensors,
subclasses. Each against the same functions in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from group import results, run_group
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import rdmarpc as rpc
from rdmarpc import autograd

Call = Callable[..., Any]


class Computed:
    """Holds what it computes when it is unpickled."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.y = x, x.exp()

    def __getstate__(self) -> Tensor:
        return self.x

    def __setstate__(self, x: Tensor) -> None:
        self.__init__(x)  # type: ignore[misc]


class Seen(torch.Tensor):
    """Pickled as a view of another tensor."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _seen, (self.as_subclass(torch.Tensor),)


def _seen(x: Tensor) -> Seen:
    return x.as_subclass(Seen)


class Boxed(torch.Tensor):
    """Holds its data in another tensor."""

    @staticmethod
    def __new__(cls: Any, inner: Tensor, requires_grad: bool = False) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=requires_grad)

    def __init__(self, inner: Tensor, requires_grad: bool = False) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Boxed, lambda boxed: boxed.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, Boxed, function(*args, **kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Boxed, (self.inner, self.requires_grad)


class Box(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Boxed(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Tensor:
        return gradient.inner


class Unbox(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        return x.inner.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Boxed(gradient)


# The functions that are called.


def double(x: Any) -> Any:
    return x * 2


def first(items: Any) -> Any:
    return items[0] * 2


def same_twice(pair: Any) -> Any:
    assert pair[0] is pair[1] and pair[2] is pair[3]
    return pair[0][0] * 2


def holds_itself(items: Any) -> Any:
    inner = items[1]["again"]
    assert inner is items and items[2][0] is items
    return items[0] * inner[0]


def product(computed: Computed) -> tuple[Tensor, Computed]:
    return computed.x * computed.y, Computed(computed.y)


def nested(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor([x[:2], x[2:]])


def jagged(x: Tensor, offsets: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, offsets)


def doubled_values(x: Tensor) -> Tensor:
    return (x * 2).values()


def masked(x: Any) -> Tensor:
    found: Tensor = (x * 2).sum().get_data()
    return found


def unboxed(x: Any) -> Tensor:
    return Unbox.apply(x * 2)


# The programs. Each gives a loss and its leaves.


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def in_containers(call: Call) -> Any:
    weight = nn.Parameter(leaf(4).detach())
    shared, plain = [weight], [3]
    circle: list[Any] = [weight]
    circle += [{"again": circle}, (circle,)]
    x = leaf(4, seed=1)
    of_one: list[Any] = [x]
    of_one.append(of_one)
    found = call(same_twice, (shared, shared, plain, plain)) * call(holds_itself, circle) * call(first, of_one)
    return found.sum(), [weight, x]


def computed(call: Call) -> Any:
    x = leaf(4)
    made, object = call(product, Computed(x * 2))
    return (made * object.x * object.y).sum(), [x]


def seen(call: Call) -> Any:
    x = leaf(4)
    return call(double, (x * 3).as_subclass(Seen)).as_subclass(torch.Tensor).square().sum(), [x]


def of_nested(call: Call) -> Any:
    x, y = leaf(6, 4), nested(leaf(6, 4, seed=1).detach()).requires_grad_()
    rows = [*call(double, call(nested, x)).unbind(), *call(double, y).unbind()]
    return sum(row.square().sum() for row in rows), [x, y]


def of_jagged(call: Call) -> Any:
    x, offsets = leaf(6, 4), torch.tensor([0, 2, 6])
    y = jagged(leaf(6, 4, seed=1).detach(), offsets).detach().requires_grad_()
    here = jagged(x, offsets)
    found = call(double, here).values() * call(doubled_values, here) + call(jagged, x * 3, offsets).values()
    return (found * call(doubled_values, y)).sum(), [x, y]


def of_masks(call: Call) -> Any:
    x = leaf(3)
    return call(masked, torch.masked.as_masked_tensor(x, torch.tensor([True, False, True]))), [x]


def boxed(call: Call) -> Any:
    x = leaf(4)
    return call(unboxed, call(double, Box.apply(x))).sum(), [x]


def unused(call: Call) -> Any:
    """Tensors of which nothing is used that would need a gradient."""
    x = leaf(6, 4)
    call(double, jagged(x, torch.tensor([0, 2, 6])))
    return call(doubled_values, jagged(x.detach(), torch.tensor([0, 2, 6]))).sum() + x.sum(), [x]


PROGRAMS = (in_containers, computed, seen, of_nested, of_jagged, of_masks, boxed, unused)


def rows_of(gradient: Tensor) -> list[Tensor]:
    return list(gradient.unbind()) if gradient.is_nested else [gradient]


def compared(rank: int) -> None:
    if rank == 0:
        for program in PROGRAMS:
            wanted, leaves = program(lambda function, *args: function(*args))
            wanted.backward()
            with autograd.context() as context:
                loss, remote_leaves = program(lambda function, *args: rpc.rpc_sync("worker1", function, args))
                autograd.backward(context, [loss])
                gradients = autograd.get_gradients(context)
            assert torch.equal(loss, wanted), program.__name__
            for one, other in zip(leaves, remote_leaves):
                for row, same in zip(rows_of(one.grad), rows_of(gradients[other])):
                    torch.testing.assert_close(same, row, msg=lambda text, name=program.__name__: f"{name}: {text}")
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_gradients_are_those_of_one_process(device: str) -> None:
    results(run_group(compared, transport=device))
