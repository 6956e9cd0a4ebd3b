"""Forwards that compare tensors by identity, where operations give back what they are given: as in one process, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from test_wrap import batches, drive
from torch import nn
from torch.nn import functional as F

import rdmarpc as rpc
from rdmarpc.transport import NotSupported


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.none, self.drop = nn.Identity(), nn.Dropout(0.0).eval()

    def other(self, h):
        return h.float()

    def same(self, y, h):
        return y is h

    def forward(self, x):
        h = self.body(self.stem(x))
        return self.head(h * 2 if self.same(self.other(h), h) else h)


class Contiguous(Net):
    def other(self, h):
        return h.contiguous()


class Nothing(Net):
    def other(self, h):
        return self.none(h)


class Dropped(Net):
    def other(self, h):
        return F.dropout(h, 0.5, training=False)


class InPlace(Net):
    def other(self, h):
        return h.add_(1)


class Another(Net):
    def other(self, h):
        return h.double()


class Number(Net):
    def same(self, y, h):
        return id(y) == id(h)


class Among(Net):
    def same(self, y, h):
        return any(y is each for each in [h, None])


class Key(Net):
    def same(self, y, h):
        return y in {h: 1}


class Unused(Net):
    """The comparison is of what the result does not depend on."""

    def forward(self, x):
        h = self.body(self.stem(x))
        return self.head(h if h.to(torch.float32) is not h else h + 1)


NETS = (Net, Contiguous, Nothing, Dropped, InPlace, Another, Number, Among, Key, Unused)
REFUSED = {("export", "Dropped"): "which an export does otherwise for results of dropout"}


def outcome(kind: type[Net], capture: str) -> str:
    torch.manual_seed(1)
    net = kind()
    twin = copy.deepcopy(net)
    model = rpc.wrap(net, {"body": "worker1"}, capture=capture)
    try:
        same = all(torch.equal(model(x), twin(x)) for x, _ in batches(3, 4, 8))
    except NotSupported as error:
        return str(error)
    finally:
        model.close()
    return "equal" if same else "differs"


def outcomes() -> dict[tuple[str, str], str]:
    return {(how, kind.__name__): outcome(kind, how) for how in ("auto", "export", "eager") for kind in NETS}


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], str]:
    return drive(outcomes, timeout=280, rpc_timeout=60)


@pytest.mark.parametrize("capture", ["auto", "export", "eager"])
@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_one_object_or_two_as_in_one_process(found: dict[tuple[str, str], str], kind: type[Net], capture: str) -> None:
    assert REFUSED.get((capture, kind.__name__), "equal") in found[capture, kind.__name__]
