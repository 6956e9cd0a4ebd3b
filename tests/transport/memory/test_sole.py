"""Whoever holds a tensor keeps it as it is, in whatever way this Python and this torch count references."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import pytest
import torch

from rdmarpc.gradients.context import Context
from rdmarpc.transport import open_device
from rdmarpc.transport.memory import sole

REAL = sys.getrefcount
WAYS: dict[str, Callable[[object], int]] = {
    "as it is": REAL,
    "one less, as Python 3.14": lambda value: REAL(value) - 1,
    "two more": lambda value: REAL(value) + 2,
    "all the same, as for what is immortal": lambda value: 1 << 30,
}


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sole, "references", WAYS[request.param])
    monkeypatch.setattr(sole, "KEPT", sole._calibrated(sole._kept))
    monkeypatch.setattr(sole, "PASSED", sole._calibrated(sole._passed))
    monkeypatch.setattr(sole, "STORAGE", sole._calibrated(sole._storage))
    return str(request.param)


def summed(hold: bool) -> tuple[torch.Tensor | None, torch.Tensor, bool]:
    """What a user held, the sum of two gradients, and whether the second was added in place."""
    context = Context(1, 1, itertools.count(1), lambda worker, number: None)
    leaf = torch.zeros(3, requires_grad=True)
    context.accumulate(leaf, torch.ones(3), ours=True)
    held = context.gradients[leaf] if hold else None
    address = context.gradients[leaf].data_ptr()
    context.accumulate(leaf, torch.ones(3), ours=True)
    return held, context.gradients[leaf], context.gradients[leaf].data_ptr() == address


def test_a_gradient_that_somebody_holds_is_not_added_to(way: str) -> None:
    held, total, in_place = summed(hold=True)
    assert held is not None and held.tolist() == [1, 1, 1]
    assert total.tolist() == [2, 2, 2] and not in_place


def test_one_that_nobody_holds_is_added_to_in_place(way: str) -> None:
    _, total, in_place = summed(hold=False)
    assert total.tolist() == [2, 2, 2]
    assert in_place == ("all the same" not in way)


def test_what_somebody_else_sees_is_not_handed_over(way: str) -> None:
    # No calls within the asserts: pytest keeps their arguments. No closures: a cell counts as one more who looks.
    device, counted = open_device("shm"), "all the same" not in way
    try:
        held = device.pool().run(12)
        alone = device.arena.sole_block(held)
        assert (alone is not None) == counted
        for look in (lambda tensor: [tensor], lambda tensor: tensor.view(12), torch.Tensor.untyped_storage):
            other: object = look(held)
            shared = device.arena.sole_block(held)
            assert shared is None
            del other
        del look
        again = device.arena.sole_block(held)
        assert (again is not None) == counted
    finally:
        device.close()


def test_storages_count_their_tensors() -> None:
    value = torch.ones(3)
    assert sole.storage_uses(value.untyped_storage()._cdata) == sole.STORAGE_USES > 0
    view = value[1:]
    assert sole.storage_uses(value.untyped_storage()._cdata) > sole.STORAGE_USES
    del view
    assert sole.storage_uses(value.untyped_storage()._cdata) == sole.STORAGE_USES
