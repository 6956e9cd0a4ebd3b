"""A backward in two halves gives the bits of one in one go, or a reason why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zero_bubble_models as models
from torch import nn

from rdmarpc.graph.schedules.halves import SPLIT, Halves, halves, hooks_made

ANCHOR = torch.zeros((), requires_grad=True)


class Arrival(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, tensor, came):
        ctx.came = came
        return tensor[0]

    @staticmethod
    def backward(ctx, grad):
        ctx.came.append(grad.clone())
        return None, None, None


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


OPERATIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], list[tuple[int, ...]]]] = {
    "Addmm": (lambda x, w, b: F.linear(x, w, b), (33, 65), [(17, 65), (17,)]),
    "Mm": (lambda x, w: x @ w, (33, 65), [(65, 129)]),
    "Mv": (lambda x, w: x @ w, (33, 65), [(65,)]),
    "Bmm": (lambda x, w: torch.bmm(x, w), (3, 33, 65), [(3, 65, 17)]),
    "Baddbmm": (lambda x, w, b: torch.baddbmm(b, x, w), (3, 33, 65), [(3, 65, 17), (3, 33, 17)]),
    "Convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1, stride=2), (5, 6, 11, 11), [(9, 6, 3, 3), (9,)]),
    "Add": (lambda x, w: x + w, (33, 65), [(65,)]),
    "Sub": (lambda x, w: x - 2 * w, (33, 65), [(33, 1)]),
    "Mul": (lambda x, w: x * w, (33, 65), [(65,)]),
    "Div": (lambda x, w: x / w, (33, 65), [(65,)]),
    "Cat": (lambda x, w: torch.cat([x, w]), (33, 65), [(4, 65)]),
    "Stack": (lambda x, w: torch.stack([x, w], 1), (33, 65), [(33, 65)]),
    "Where": (lambda x, w: torch.where(x > 0, x, w), (33, 65), [(65,)]),
    "NativeLayerNorm": (lambda x, w, b: F.layer_norm(x, (65,), w, b), (33, 65), [(65,), (65,)]),
    "NativeGroupNorm": (lambda x, w, b: F.group_norm(x, 3, w, b), (5, 6, 11, 11), [(6,), (6,)]),
    "NativeBatchNorm": (
        lambda x, w, b: F.batch_norm(x, torch.zeros(6), torch.ones(6), w, b, training=True),
        (5, 6, 11, 11),
        [(6,), (6,)],
    ),
    "PreluKernel": (lambda x, w: F.prelu(x, w), (5, 6, 11, 11), [(6,)]),
}


def backward(
    forward: Callable[[torch.Tensor], torch.Tensor], parameters: list[Any], shape: tuple[int, ...], split: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Of three micro-batches, both halves of one after all the first halves; the gradients of inputs, and of parameters."""
    drawn = torch.Generator().manual_seed(3)
    came: list[torch.Tensor] = []
    left = []
    for parameter in parameters:
        parameter.grad = None
    for _ in range(3):
        y = forward(Arrival.apply(ANCHOR, [torch.randn(shape, generator=drawn)], came))
        grad = torch.randn(y.shape, generator=drawn)
        if not split:
            torch.autograd.backward([y], [grad])
            continue
        found = halves([y], [grad], ANCHOR)
        assert isinstance(found, Halves), found
        found.inputs(ANCHOR)
        left.append(found)
    for found in left:
        found.parameters()
    return came, [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]


def assert_same(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine) == len(other)
        for a, b in zip(mine, other):
            assert (a is None) == (b is None)
            assert a is None or (torch.equal(a, b) and a.stride() == b.stride())


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("frozen", ["none", "first", "last"])
def test_an_operation_in_halves(name, frozen):
    operation, shape, sizes = OPERATIONS[name]
    torch.manual_seed(0)
    parameters = weights(*sizes)
    if frozen != "none":
        if len(parameters) == 1:
            return
        parameters[0 if frozen == "first" else -1].requires_grad_(False)
    y = operation(Arrival.apply(ANCHOR, [torch.randn(shape)], []), *parameters)
    nodes, seen = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        seen.add(node.name())
        nodes += [target for target, _ in node.next_functions if target is not None]
    assert f"{name}Backward0" in seen & SPLIT
    run = lambda x: operation(x, *parameters)  # noqa: E731
    assert_same(backward(run, parameters, shape, True), backward(run, parameters, shape, False))


def test_every_operation_that_is_split_is_tried():
    assert {f"{name}Backward0" for name in OPERATIONS} == SPLIT


@pytest.mark.parametrize("name", [name for name in models.SPLIT if name != "bare"])
def test_parts_in_halves(name):
    torch.manual_seed(0)
    ours = models.SPLIT[name]()
    theirs = copy.deepcopy(ours)
    pair = [
        (*backward(part, list(part.parameters()), (6, models.SIZE), split), list(part.buffers()))
        for part, split in ((ours, True), (theirs, False))
    ]
    assert_same(*pair)


@pytest.mark.parametrize("name", models.WHOLE)
def test_parts_that_run_in_one_go(name):
    make, why = models.WHOLE[name]
    torch.manual_seed(0)
    part = make()
    x = Arrival.apply(ANCHOR, [torch.randn(6, models.SIZE)], [])
    hooks = hooks_made()
    y = part(x)
    if name == "hooking":
        assert hooks != hooks_made()
    else:
        assert halves([y], [torch.ones_like(y)], ANCHOR) == why


def test_what_has_no_parameters_or_no_inputs():
    layer = nn.Linear(4, 4)
    x = Arrival.apply(ANCHOR, [torch.randn(2, 4)], [])
    assert halves([torch.tanh(x)], [torch.ones(2, 4)], ANCHOR) == ""
    y = layer(torch.ones(2, 4))
    later = halves([y], [torch.ones_like(y)], ANCHOR)
    assert isinstance(later, Halves)
    later.inputs(ANCHOR)
    assert layer.weight.grad is None
    later.parameters()
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 2.0))


def test_a_gradient_of_its_own():
    """What a parameter gets is added to in place, and what came may be used elsewhere."""
    shift = nn.Parameter(torch.zeros(3, 4))
    grad = torch.randn(3, 4)
    for _ in range(2):
        y = Arrival.apply(ANCHOR, [torch.randn(3, 4)], []) + shift.unsqueeze(0).squeeze(0)
        found = halves([y], [grad], ANCHOR)
        assert isinstance(found, Halves)
        found.inputs(ANCHOR)
        before = grad.clone()
        found.parameters()
        assert torch.equal(grad, before)
        assert shift.grad.untyped_storage().data_ptr() != grad.untyped_storage().data_ptr()


def test_a_root_beside_the_way():
    """An output that depends on parameters alone, and one that has no gradient of its own to start from."""
    pair = []
    for split in (True, False):
        torch.manual_seed(0)
        layer, table = nn.Linear(4, 4), nn.Parameter(torch.randn(3))
        x = Arrival.apply(ANCHOR, [torch.randn(2, 4)], [])
        roots, grads = [table.exp(), layer(x).sum()], [torch.randn(3), None]
        if split:
            found = halves(roots, grads, ANCHOR)
            assert isinstance(found, Halves)
            found.inputs(ANCHOR)
            assert table.grad is None and layer.weight.grad is None
            found.parameters()
        else:
            torch.autograd.backward(roots, grads)
        pair.append(([table.grad], [layer.weight.grad, layer.bias.grad]))
    assert_same(*pair)


@pytest.mark.parametrize("name", ["hooked", "again", "opaque"])
def test_the_backward_of_a_first_part_waits_only_where_nothing_can_tell(name):
    make, why = models.WHOLE[name]
    torch.manual_seed(0)
    part = make()
    part(torch.randn(6, models.SIZE))  # a forward may set hooks on its parameters
    y = part(torch.randn(6, models.SIZE))
    assert halves([y], [torch.ones_like(y)], ANCHOR) == why


def test_sparse_gradients():
    pair = []
    for split in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True)
        _, (grad,) = backward(lambda x, t=table: x + t(torch.tensor([1, 3, 1])), [table.weight], (3, 4), split)
        assert grad is not None and grad.is_sparse
        pair.append([[grad.to_dense()]])
    assert_same(*pair)


class Keeping(models.Doubling):
    @staticmethod
    def forward(ctx, x):
        ctx.variable = x  # as the node of a leaf has one
        return x * 2


def test_a_function_that_keeps_what_leaves_have_is_opaque():
    layer = nn.Linear(4, 4)
    y = Keeping.apply(layer(Arrival.apply(ANCHOR, [torch.randn(2, 4)], [])))
    assert halves([y], [torch.ones_like(y)], ANCHOR) == "Keeping, whose backward may do anything"
