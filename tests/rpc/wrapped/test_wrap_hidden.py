"""What a forward does where no traced operation tells: other names of a tensor, methods and functions kept as attributes,
flags that it switches, what it prints. The same bits and the same Python state as in one process, or refused by name."""

from __future__ import annotations

import contextlib
import contextvars
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_wrap import batches, drive
from torch import nn

import rdmarpc as rpc

SCALE = contextvars.ContextVar("SCALE", default=1.0)
LOCAL = threading.local()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.line(x))


class Net(nn.Module):
    part: Callable[[], nn.Module] = Part
    given = torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(8, 8), type(self).part(), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


class OtherName(Net):
    def forward(self, x):
        x = self.body(self.stem(x)) * 1
        before = x
        x += 1
        return self.head(before)


class OtherView(Net):
    def forward(self, x):
        x = self.body(self.stem(x)) * 1
        row = x.view(-1)
        row *= 2
        return self.head(x)


class OtherProperty(Net):
    def forward(self, x):
        x = self.body(self.stem(x)) * 1
        turned = x.T
        turned -= 1
        return self.head(x)


class Input(Net):
    def forward(self, x):
        x += 1
        return self.head(self.body(self.stem(x)))


class Alone(Net):
    """Nobody else has the tensor, so a trace may have it; numbers are assigned, too."""

    def forward(self, x):
        count = x.shape[0]
        count += 1
        h = self.stem(x)
        h += x
        return self.head(self.body(h)) * count


class Rows(Net):
    def forward(self, x):
        rows = [self.stem(x)]
        same = rows
        rows += [self.body(rows[0])]
        return self.head(sum(same))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Dirty(Net):
    def forward(self, x):
        x = self.body(self.stem(x)) * 1
        Twice.apply(x)
        return self.head(x)


class Given(nn.Module):
    """Gives back what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x


class Same(Net):
    part = Given

    def forward(self, x):
        x = self.stem(x) * 1
        y = self.body(x)
        y += 1
        return self.head(x)


class SameEagerly(Same):
    def forward(self, x):
        x = self.stem(x) * 1
        y = self.body(x)
        assert y is x
        y += float(x.detach().mean() > 1e9) + 1
        return self.head(x)


class View(Given):
    def forward(self, x):
        return x.view(2, -1)


class Viewed(Net):
    part = View

    def forward(self, x):
        x = self.stem(x) * 1
        self.body(x).zero_()
        return self.head(x)


class Data(Net):
    def forward(self, x):
        x = self.body(self.stem(x))
        self.mean.data = 0.9 * self.mean + x.detach().mean(0)
        return self.head(x + self.mean)


class Method(Net):
    """Chooses one of its methods when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen, self.calls = self.twice, 0

    def twice(self, x):
        self.calls += 1
        return self.body(self.body(x)) * self.calls

    def forward(self, x):
        return self.head(self.chosen(self.stem(x)))


class MethodOfPart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.ways = {"body": self.body.forward}

    def forward(self, x):
        x = self.stem(x)
        while float(x.detach().norm()) > 1:
            x = self.ways["body"](x) * 0.5
        return self.head(x)


class Closure(Net):
    def __init__(self) -> None:
        super().__init__()
        body = self.body
        self.run = lambda x: body(x)

    def forward(self, x):
        return self.head(self.run(self.stem(x)))


class Called(Part):
    def __call__(self, x):
        return 2 * super().__call__(x)


class CallOfItsOwn(Net):
    part = Called


class Counting(Part):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        return super().forward(x) * self.seen


class Ignored(Net):
    """Nothing uses the first result, and the second call sees that it happened."""

    part = Counting

    def forward(self, x):
        x = self.stem(x)
        self.body(x)
        return self.head(self.body(x))


class Unused(Net):
    part = Counting

    def forward(self, x):
        x = self.stem(x)
        self.body(x)
        return self.head(x)


class NewBuffer(Part):
    def forward(self, x):
        if not hasattr(self, "most"):
            self.register_buffer("most", torch.zeros(8))
        return super().forward(x) + self.most


class Registers(Net):
    part = NewBuffer


class Switch(Part):
    def forward(self, x):
        self.train(not self.training)
        return super().forward(x)


class Switches(Net):
    part = Switch


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.line(x))


class Midway(Net):
    part = Normed

    def forward(self, x):
        x = self.stem(x)
        self.body.eval()
        x = self.body(x)
        self.body.train()
        return self.head(self.body(x))


class Scaled(Part):
    def forward(self, x):
        return super().forward(x) * SCALE.get()


class Context(Net):
    part = Scaled

    def forward(self, x):
        token = SCALE.set(3.0)
        try:
            return self.head(self.body(self.stem(x)))
        finally:
            SCALE.reset(token)


class OfThread(Part):
    def forward(self, x):
        return super().forward(x) * getattr(LOCAL, "scale", 1.0)


class Thread(Net):
    part = OfThread

    def forward(self, x):
        LOCAL.scale = 4.0
        try:
            return self.head(self.body(self.stem(x)))
        finally:
            del LOCAL.scale


class Prints(Net):
    def forward(self, x):
        x = self.body(self.stem(x))
        print("rows", len(x))
        return self.head(x)


class Marked(torch.Tensor):
    """Results of operations on one are such ones, too."""


class MarkedInput(Net):
    def forward(self, x):
        return super().forward(x.as_subclass(Marked))


class Marks(Part):
    def forward(self, x):
        return super().forward(x).as_subclass(Marked)


class MarkedResult(Net):
    part = Marks


class GivenMarked(Net):
    given = Marked


class Unmarked(GivenMarked):
    def forward(self, x):
        return super().forward(x.as_subclass(torch.Tensor))


class Inferred(Net):
    """What it computes in inference mode has no gradient."""

    def forward(self, x):
        x = self.stem(x)
        with torch.inference_mode():
            y = self.body(x)
        return self.head(y.clone() + x)


class InferredHere(Net):
    def forward(self, x):
        x = self.body(self.stem(x))
        with torch.inference_mode():
            y = torch.sin(x)
        return self.head(y.clone() + x)


EQUAL = "equal"
CASES: dict[type[Net], str] = {
    OtherName: EQUAL,
    OtherView: EQUAL,
    OtherProperty: EQUAL,
    Input: EQUAL,
    Alone: EQUAL,
    Rows: EQUAL,
    Inferred: EQUAL,
    InferredHere: EQUAL,
    Dirty: EQUAL,
    Same: EQUAL,
    SameEagerly: EQUAL,
    Viewed: "part 'body' gives a view of what it is given, and the forward writes into one of them",
    Data: EQUAL,
    Method: EQUAL,
    MethodOfPart: EQUAL,
    Closure: "attribute 'run' of Closure is a function that keeps 'body', a Part of the model before wrap()",
    CallOfItsOwn: EQUAL,
    Ignored: EQUAL,
    Unused: EQUAL,
    Registers: "part 'body' registers or drops 'most' when it is called",
    Switches: "part 'body' switches between train() and eval() when it is called",
    Midway: EQUAL,
    Context: EQUAL,
    Thread: EQUAL,
    Prints: EQUAL,
    MarkedInput: "part 'body' is given 'x': a Marked would arrive as a plain tensor",
    MarkedResult: "part 'body' gives a Marked, which would arrive as a plain tensor",
    GivenMarked: "part 'body' is given 'x': a Marked would arrive as a plain tensor",
    Unmarked: EQUAL,
}


def trained(model: Any, kind: type[torch.Tensor]) -> list[Any]:
    """All that one can see of three steps: inputs afterwards, results, gradients of inputs, text, and the state."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[Any] = []
    for x, _ in batches(3, 4, 8):
        x = x.as_subclass(kind)
        optimizer.zero_grad()
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            result = model(x)
        result.pow(2).mean().backward()
        optimizer.step()
        seen += [x, type(result), result.detach(), said.getvalue(), getattr(model.body, "seen", 0), getattr(model, "calls", 0)]
    return [*seen, list(model.state_dict()), *model.state_dict().values()]


def outcome(kind: type[Net]) -> str:
    torch.manual_seed(1)
    twin = kind()
    torch.manual_seed(1)
    net = kind()  # a copy of the twin would keep functions of the twin
    try:
        model = rpc.wrap(net, {"body": "worker1"})
        try:
            ours = trained(model, kind.given)
        finally:
            model.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    theirs = trained(twin, kind.given)
    apart = [
        at for at, (a, b) in enumerate(zip(ours, theirs)) if not (torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b)
    ]
    return f"differs at {apart} of {len(theirs)}: {ours[apart[0]]} for {theirs[apart[0]]}" if apart else EQUAL


def outcomes() -> dict[str, str]:
    return {kind.__name__: outcome(kind) for kind in CASES}


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return drive(outcomes, timeout=280, rpc_timeout=60)


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_what_no_operation_tells_is_as_in_one_process_or_refused(found: dict[str, str], kind: type[Net]) -> None:
    wanted = CASES[kind]
    assert found[kind.__name__] == EQUAL if wanted == EQUAL else wanted in found[kind.__name__]
