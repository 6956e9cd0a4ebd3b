"""Forwards that ask Python what a tensor is: its class, its attributes, which object. As in one process, or refused."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from typing import Any

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


def _attribute(h: Any) -> bool:
    try:
        h.logits  # noqa: B018
    except AttributeError:
        return True
    return False


def _type_of_a_variable(h: torch.Tensor) -> bool:
    same = h
    return type(same) is torch.Tensor


def _type_of_a_list(h: torch.Tensor) -> bool:
    rows = [h]
    return type(rows) is list and rows.__class__.__name__ == "list"


def _class_of_an_attribute(h: torch.Tensor) -> bool:
    box = types.SimpleNamespace(inner=(1,))
    return box.inner.__class__ is tuple and type(box.inner) is tuple


def _named_after(*args: Any, **kwargs: Any) -> bool:
    """As a decorator that tells of deprecated arguments does it."""
    return f"{args[0].__class__.__name__}.forward" == "Asks.forward" and type(kwargs["rows"][1]) is int


def _class_of_an_argument(*args: Any) -> bool:
    return args[1].__class__ is torch.Tensor


class _Rows(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        return super().__getitem__("real " + key)


def _class_of_an_item(h: torch.Tensor) -> bool:
    rows = _Rows({"h": 1, "real h": h})
    return rows["h"].__class__ is torch.Tensor


_LIBRARY: dict[str, Any] = {"__name__": "transformers.utils.generic"}
exec('def infer_framework_from_repr(x): return str(type(x)).startswith("<class \'torch.")', _LIBRARY)


ASKED: dict[str, Callable[[Any], bool]] = {
    "isinstance": lambda h: isinstance(h, torch.Tensor),
    "is_tensor": lambda h: torch.is_tensor(h),
    "no tuple": lambda h: not isinstance(h, (tuple, list, dict)),
    "callable": callable,
    "hasattr": lambda h: hasattr(h, "logits"),
    "getattr": lambda h: getattr(h, "logits", None) is not None,
    "items": lambda h: hasattr(h, "items"),
    "AttributeError": _attribute,
    "dir": lambda h: "softmax" in dir(h),
    "copy": lambda h: isinstance(copy.copy(h), torch.Tensor),
    "None": lambda h: (h == None) is False,  # noqa: E711
    "max": lambda h: isinstance(torch.max(h, 1), tuple),
    "max.indices": lambda h: hasattr(torch.max(h, 1), "indices") and not hasattr(torch.max(h, 1), "logits"),
    "chunk": lambda h: isinstance(h.chunk(2), tuple),
    "shape": lambda h: isinstance(h.shape, torch.Size),
    "a size": lambda h: isinstance(h.size(0), int),
    "key": lambda h: {4: True}.get(h.shape[0], False),
    "among": lambda h: h.ndim in {2},
    "dim": lambda h: isinstance(h.dim(), int),
    "dtype": lambda h: h.dtype is torch.float32,
    "dtypes": lambda h: h.dtype in {torch.float32},
    "device": lambda h: str(h.device) == "cpu",
    "text": lambda h: f"{h.dtype}" == "torch.float32",
    "name": lambda h: getattr(h, "name", None) is None,
    "proxy": lambda h: isinstance(h, torch.fx.Proxy),
    "type": lambda h: type(h) is torch.Tensor,
    "type of a size": lambda h: type(h.shape[0]) is int,
    "class": lambda h: h.__class__.__name__ == "Tensor",
    "type of a variable": _type_of_a_variable,
    "type of a list": _type_of_a_list,
    "library": lambda h: _LIBRARY["infer_framework_from_repr"](h),
    "class of an attribute": _class_of_an_attribute,
    "class of a tensor attribute": lambda h: types.SimpleNamespace(inner=h).inner.__class__ is torch.Tensor,
    "class of the first argument": lambda h: _named_after(Asks.__new__(Asks), h, rows=[h, 1]),
    "class of another argument": lambda h: _class_of_an_argument(1, h),
    "class of an item": _class_of_an_item,
    "address": lambda h: h.data_ptr() != 0,
}
CLASS = "asks for the class of an object"
UNCAPTURED = {
    "type": CLASS,
    "type of a size": CLASS,
    "class": CLASS,
    "type of a variable": CLASS,
    "class of a tensor attribute": CLASS,
    "class of another argument": CLASS,
    "class of an item": CLASS,
    "address": "asks a tensor for its data_ptr",
}


class Asks(Net):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def same(self, y, h):
        return ASKED[self.name](h)


NETS = (Net, Contiguous, Nothing, Dropped, InPlace, Another, Number, Among, Key, Unused)
REFUSED = {("export", "Dropped"): "which an export does otherwise for results of dropout"}


def outcome(kind: Callable[[], Net], capture: str) -> str:
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


def answers() -> dict[tuple[str, str], str]:
    asked = [*(("fx", name) for name in ASKED), *(("auto", name) for name in UNCAPTURED)]
    return {(how, name): outcome(partial(Asks, name), how) for how, name in asked}


@pytest.fixture(scope="module")
def answered() -> dict[tuple[str, str], str]:
    return drive(answers, timeout=280, rpc_timeout=60)


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_one_process(answered: dict[tuple[str, str], str], name: str) -> None:
    assert UNCAPTURED.get(name, "equal") in answered["fx", name]
    assert answered.get(("auto", name), "equal") == "equal"


def varying(name: str) -> str:
    torch.manual_seed(1)
    net = Asks(name)
    twin = copy.deepcopy(net)
    model = rpc.wrap(net, {"body": "worker1"})
    apart = []
    try:
        for rows in (3, 5, 2, 4):
            with torch.inference_mode(rows == 5):  # what holds for several sizes is found there
                x = torch.randn(rows, 8)
                if not torch.equal(model(x), twin(x)):
                    apart.append(rows)
    finally:
        model.close()
    return f"differs with {apart} rows" if apart else "equal"


VARIED = ("isinstance", "getattr", "shape", "a size", "key", "among", "dim", "text", "type", "type of a size", "address")
"""Those that a size may answer, and some of each other kind."""


def varied() -> dict[str, str]:
    return {name: varying(name) for name in VARIED}


def test_answers_where_sizes_vary() -> None:
    assert drive(varied, timeout=280, rpc_timeout=60) == dict.fromkeys(VARIED, "equal")


@pytest.mark.parametrize("capture", ["auto", "export", "eager"])
@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_one_object_or_two_as_in_one_process(found: dict[tuple[str, str], str], kind: type[Net], capture: str) -> None:
    assert REFUSED.get((capture, kind.__name__), "equal") in found[capture, kind.__name__]
