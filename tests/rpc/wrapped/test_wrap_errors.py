"""What a part raises arrives with the type, text, arguments and attributes that it has in one process."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from test_wrap import drive
from torch import nn

import rdmarpc as rpc


class Several(Exception):
    """Its constructor takes other arguments than it keeps."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__(f"bad value at {row}, {column}")
        self.row, self.column = row, column


class Named(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Holding(RuntimeError):
    """Has what cannot be pickled."""

    def __init__(self, code: int) -> None:
        super().__init__("holds a function")
        self.code, self.function = code, lambda: None


def local() -> Exception:
    class Local(LookupError):
        pass

    return Local("of a local class")


def made(kind: str) -> Exception:
    if kind == "unicode":
        return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    if kind == "file":
        return FileNotFoundError(2, "No such file", "/nowhere")
    of_text = {"value": ValueError, "key": KeyError, "assertion": AssertionError, "attribute": AttributeError}
    if kind in of_text:
        return of_text[kind]("rows: 4")
    others = {"several": Several(1, 2), "named": Named(code=3), "holding": Holding(5), "local": local()}
    return {**others, "bare": NotImplementedError(), "stop": StopIteration(3)}[kind]


KINDS = ["value", "key", "assertion", "attribute", "unicode", "file", "several", "named", "holding", "local", "bare", "stop"]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kind):
        ctx.kind = kind
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise made(ctx.kind)


class Part(nn.Module):
    """Fails in its forward, once set up or before, or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.rows = nn.Linear(8, 8), nn.Embedding(4, 8)
        self.kind, self.when = "", ""

    def forward(self, x):
        x = self.line(x)
        if self.when == "forward" and float(x.detach().sum()) == float(x.detach().sum()):
            raise made(self.kind)
        return Failing.apply(x, self.kind) if self.when == "backward" else x


class Group(Part):
    def forward(self, x):
        raise ExceptionGroup("two", [ValueError("one"), KeyError("other")])  # noqa: F821


class Net(nn.Module):
    part = Part

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(8, 8), type(self).part(), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


class Groups(Net):
    part = Group


class Rows(Net):
    def forward(self, x):
        return self.body.rows(x)


def seen(model: nn.Module, x: torch.Tensor) -> list[Any]:
    try:
        model(x).sum().backward()
    except Exception as error:
        attributes = {name: value for name, value in vars(error).items() if name != "function"}
        more = [getattr(error, name, None) for name in ("errno", "filename", "reason", "value")]
        kind = LookupError if type(error).__name__ == "Local" else type(error)
        return [kind, str(error), repr(error.args), attributes, more, error.__cause__]
    return ["no error"]


def compare(net: Net, kind: str, *inputs: torch.Tensor) -> None:
    model = rpc.wrap(copy.deepcopy(net), {"body": "worker1"})
    try:
        for x in inputs:
            *ours, cause = seen(model, x)
            *theirs, _ = seen(net, x)
            assert ours == theirs, kind
            if theirs:
                assert "on worker 'worker1'" in str(cause) and "Traceback" in str(cause), kind
    finally:
        model.close()


def raised_in_parts() -> None:
    x = torch.ones(2, 8)
    for when in ("forward", "backward"):
        for kind in KINDS:
            if (kind, when) == ("stop", "backward"):
                continue  # which autograd has another text for in each of its threads
            net = Net()
            net.body.kind, net.body.when = kind, when
            compare(net, f"{kind}, {when}", x, x)


def test_what_a_part_raises_is_as_in_one_process():
    drive(raised_in_parts, timeout=280, rpc_timeout=60)


def raised_later() -> None:
    rows = Rows()
    rows.body.rows.weight.requires_grad_(True)
    good, bad = torch.tensor([1, 2]), torch.tensor([1, 9])
    compare(rows, "index", good, good, bad, good)


def test_what_a_step_raises_that_is_set_up_is_as_in_one_process():
    drive(raised_later)


class Counted(nn.Module):
    """Counts, and fails then."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm, self.seen = nn.Linear(8, 8), nn.BatchNorm1d(8), 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        return self.norm(self.line(x))  # which counts a batch of one, and refuses it


class Counts(Net):
    part = Counted

    def forward(self, x, fails=""):
        y = self.body(self.stem(x))
        if fails:
            raise ValueError(fails)
        return self.head(y)


def done_before() -> None:
    """What a forward does before it fails is done as in one process, also where that is not set up yet, or for other shapes."""
    net = Counts()
    for placement in ({"body": "worker1"}, {"head": "worker1"}):
        twin = copy.deepcopy(net)
        model = rpc.wrap(net, placement)
        found: list[list[Any]] = []
        for which in (model, twin):
            said = []
            for rows, wide, fails in ((4, 8, ""), (1, 8, ""), (3, 7, ""), (4, 8, "late"), (5, 8, "too late"), (5, 8, "")):
                try:
                    which(torch.randn(rows, wide, generator=torch.Generator().manual_seed(rows)), fails)
                except (ValueError, RuntimeError) as error:
                    said.append(f"{type(error).__name__}: {error}")
            found.append([said, which.body.seen, *which.state_dict().values()])
        assert found[0][:2] == found[1][:2], placement
        assert len(found[0][0]) == 4
        assert all(map(torch.equal, found[0][2:], found[1][2:])), placement
        model.close()


def test_what_a_forward_does_before_it_fails_is_done():
    drive(done_before, timeout=280, rpc_timeout=60)


def groups() -> None:
    model = rpc.wrap(Groups(), {"body": "worker1"})
    with pytest.raises(Exception, match="two") as caught:
        model(torch.ones(2, 8))
    assert type(caught.value).__name__ == "ExceptionGroup"
    assert [repr(each) for each in caught.value.exceptions] == ["ValueError('one')", "KeyError('other')"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups of exceptions")
def test_groups_of_exceptions_arrive_whole():
    drive(groups)
