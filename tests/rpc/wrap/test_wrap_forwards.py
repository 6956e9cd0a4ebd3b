"""Whatever the forward of a wrapped model does is as in one process: control flow, Python's state, functions, writes, modes.
Each net is trained beside the same in one process, in two placements."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from beside import assert_same, wrap
from net_programs import DATA, PLACEMENTS, Net, Programs
from torch import nn

import rdmarpc as rpc
from rdmarpc.places import at_place, stream_to

program = Programs()


@program.net
class Branching(Net):
    """By values, by random numbers of Python and numpy, until a value says enough; it counts, prints and keeps."""

    def forward(self, x):
        x = self.stem(x)
        for _ in range(1 + int(x.detach().abs().sum()) % 3):
            x = self.middle(x)
        if random.random() < 0.5 or np.random.rand() < 0.5:
            x = self.body[0](x)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            print("rows", len(x), f"{float(x.mean()):.4f}")
        self.kept.append((said.getvalue(), x.shape))
        self.gain *= 1.1
        return self.head(x if x.mean() > 0 else -x) * self.gain


@program.net
class Remembering(Net):
    """A state that goes from call to call; results of earlier calls."""

    def forward(self, x):
        x = self.middle(self.stem(x))
        if self.kept:
            x = x + 0.5 * self.kept[-1].detach()
        self.kept.append(x)
        return super().forward(DATA[0][0]) + self.head(x)


@program.net
class Leaking(Net):
    """Keeps a graph, whose second backward is an error."""

    def forward(self, x):
        self.kept.append(self.stem(x) if not self.kept else self.kept[-1] * 0.5 + self.stem(x))
        return self.head(self.kept[-1])


TABLE: dict[str, Any] = {"factor": 1.0}


@program.net
class Elsewhere(Net):
    """Reads and changes globals, attributes of classes and objects that parts have in common."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.stem.common = self.common = {"n": [1.0]}

    def begin(self) -> None:
        TABLE.update(factor=1.0, seen=torch.zeros(16))
        type(self).calls = 0

    def forward(self, x):
        type(self).calls += 1
        TABLE["factor"] *= 0.9
        x = self.middle(self.stem(x)) * TABLE["factor"] / self.calls
        TABLE["seen"] = TABLE["seen"] * 0.5 + x.detach().mean(0)
        self.stem.common["n"].append(self.common["n"][-1] + 1)
        self.kept.append(len(self.common["n"]))
        return self.head(x + TABLE["seen"]) * self.common["n"][-1]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return -0.5 * grad * weight.sum(), (grad * x).sum().expand_as(weight)


class Doubled(torch.autograd.Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x.mul_(2))
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


@program.net
class Functions(Net):
    """With a backward of their own, that get a part's weight."""

    def forward(self, x):
        x = Reversed.apply(self.stem(x), self.body[0].one.weight)
        x = Doubled.apply(self.middle(x) * 1)
        return self.head(x)


@program.net
class Momentum(Net):
    """Writes into parameters and buffers, by every way, in its forward; a state that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.seen = torch.zeros(16), nn.Buffer(torch.zeros(16))

    def forward(self, x):
        with torch.no_grad():
            for key, query in zip(self.body[1].parameters(), self.body[0].parameters()):
                key.mul_(0.9).add_(query, alpha=0.1)
            self.head.bias.data = self.head.bias.data * 0.9
            self.head.weight.div_(self.head.weight.norm())
        hidden = self.stem(x)
        self.state = self.state * 0.5 + hidden.detach().mean(0)
        self.seen = self.seen * 0.9 + self.state
        self.stem[1].running_mean.add_(0.1)
        with torch.no_grad():
            nearest = torch.cdist(hidden, self.body[0].one.weight).argmin(1)
            hidden = hidden + self.body[1](hidden) * nearest[:, None]
        return self.head(self.body[0](hidden + self.state + self.seen))


@program.net
class Named(Net):
    """Reads weights by their names, several times, besides the modules that have them; one tensor is given twice."""

    def forward(self, x):
        h = self.stem(x)
        for _ in range(2):
            h = F.linear(self.body[0](h), self.body[0].one.weight) + self.body[0].one(h) * self.body[0].one.bias
        h = torch.sin(h) + torch.cos(h) * h
        weight = self.body[1].one.weight * h.mean()
        h = torch.func.functional_call(self.body[1].one, {"weight": weight}, (h,)) + h
        return self.head(h)


@program.net
class Flags(Net):
    """Switches modes of its parts, of torch and of its parameters while it runs; hooks for its duration."""

    def forward(self, x):
        seen: list[Any] = []
        self.stem.eval()
        with torch.no_grad():
            fixed = self.stem(x)
        self.stem.train(self.training)
        self.body[0].requires_grad_(False)
        handle = self.body[0].two.register_forward_hook(lambda module, args, out: seen.append(out))
        h = self.middle(self.stem(x)) + fixed
        handle.remove()
        self.body[0].requires_grad_(True)
        with torch.inference_mode():
            still = self.body[1](h).clone()
        with torch.autocast("cpu", torch.bfloat16):
            h = h + self.body[1].one(h).float() * still.mean().item()
        return self.head(h) + sum(value.mean() for value in seen)


@program.net
class Given(Net):
    """Parts that give back what they are given, or a view of it; writes into that; one object or two."""

    def __init__(self) -> None:
        super().__init__()
        self.same, self.view = nn.Identity(), nn.Flatten(0)

    def forward(self, x):
        x = self.stem(x.clone()) * 1
        y = self.same(x)
        y += 1
        self.view(x)[:3].zero_()
        self.kept.append((y is x, y.shape))
        return self.head(torch.tanh(y)) + x.mean()


@program.net
class Sparse(Net):
    """Sparse tensors, and sparse gradients of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)
        self.rows = nn.Embedding(16, 16, sparse=True)

    def forward(self, x):
        graph = torch.eye(8).roll(1, 0).to_sparse()
        h = self.middle(self.stem(x))
        return self.head(torch.sparse.mm(graph, h) + self.rows(x.argmax(1)))


class Tagged(torch.Tensor):
    """Results of operations on one are such ones, too."""


@program.net
class Subclass(Net):
    """A class of tensors of the user's, of what lies here."""

    def forward(self, x):
        x = x.as_subclass(Tagged)
        self.kept.append(type(x * 2).__name__)
        return super().forward((x * 2).as_subclass(torch.Tensor))


@program.net
class Statistics(Net):
    """A norm that is called twice; its buffers are read when it has run."""

    def forward(self, x):
        h = self.stem[1](self.stem[1](self.stem[0](x)) * 2) - self.stem[1].running_mean
        return self.head(self.middle(h))


def run_one(name: str, how: str) -> None:
    program.run(name, how)


@pytest.mark.parametrize("how", PLACEMENTS)
@pytest.mark.parametrize("name", program)
def test_a_forward_is_as_in_one_process(drive, name, how):
    drive(run_one, name, how)


@torch.library.custom_op("rdmarpc_wrap_tests::increment", mutates_args={"x"})
def increment(x: torch.Tensor) -> None:
    x.add_(1)


def an_operator() -> None:
    """Of the user's, in Python: it runs here, over tensors that lie there; the worker need not know it."""
    x, model = torch.randn(3, 4), wrap(nn.Sequential(nn.Linear(4, 4)), {"0": "worker1"})
    with torch.no_grad():
        out = model(x)
        before = out.cpu()
        increment(out)
        assert torch.equal(out.cpu(), before + 1)


def test_an_operator_of_the_users(drive):
    drive(an_operator)


def register() -> None:
    """Two operators as a library in C++ registers them: no tag says that the size of the one's results depends on values."""
    library = torch.library.Library("rdmarpc_native_tests", "FRAGMENT")
    for name, kernel in {"above": lambda x, least: (x > least).nonzero(), "doubled": lambda x: x * 2}.items():
        library.define(f"{name}(Tensor x{', float least' if name == 'above' else ''}) -> Tensor")
        library.impl(name, kernel, "CPU")
        torch.library._impls.discard(f"rdmarpc_native_tests/{name}/CPU")
    library.impl("doubled", torch.empty_like, "Meta")
    kept.append(library)


kept: list[torch.library.Library] = []


def native_operators() -> None:
    register()
    rpc.rpc_sync("worker1", register)
    ours = torch.ops.rdmarpc_native_tests
    for number in range(3):  # twelve numbers each time, of which another count is above zero
        x = torch.linspace(-1.0, number, 12)
        there = at_place(x, stream_to("worker1"))  # ``rpc.device`` would change how later tests' modules are converted
        assert torch.equal(ours.above(there, 0.0).cpu(), ours.above(x, 0.0))
        assert torch.equal(ours.doubled(there).cpu(), ours.doubled(x))
    stream = there._handle.stream
    before = stream.counts["questions"]
    ours.doubled(there)
    assert stream.counts["questions"] == before, "its kernel without values says what comes out"
    other = at_place(x, stream_to("worker2"))
    with pytest.raises(rpc.NotSupported, match="no operator rdmarpc_native_tests::doubled"):
        ours.doubled(other)


def test_operators_of_a_library_in_another_language(drive):
    drive(native_operators)


def compiled_here() -> None:
    """A part that torch has compiled to run here gets gradients from a worker."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3))
    alone, placed = copy.deepcopy(net), wrap(net, {"1": "worker1"})
    firsts = [torch.compile(each[0], backend="aot_eager") for each in (alone, placed)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (alone, placed)]
    for _ in range(3):
        x, losses = torch.randn(4, 6), []
        for first, each, optimizer in zip(firsts, (alone, placed), optimizers):
            optimizer.zero_grad()
            losses.append(each[1](first(x)).pow(2).sum())
            losses[-1].backward()
            optimizer.step()
        assert_same(*(loss.detach() for loss in losses))
        assert_same(*([p.grad for p in each.parameters()] for each in (alone, placed)))


def test_compiled_here(drive):
    drive(compiled_here)


def compiled_whole() -> None:
    """``torch.compile`` of a wrapped model warns of nothing that the program has not done, and what crosses is seen."""
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x, tables = torch.randn(4, 6), []
    for change in (lambda model: model, lambda model: torch.compile(model, backend="eager")):
        placed = wrap(copy.deepcopy(net), {"2": "worker1"})
        model = change(placed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(4):
                model(x).sum().backward()
        tables.append(placed.placement_table())
        model(x + 1)
        placed.close()
    assert tables[0] == tables[1], tables
    model = torch.compile(wrap(net, {"2": "worker1"}), backend="eager")
    model(x)
    with (
        nn.modules.module.register_module_forward_hook(lambda module, args, out: None),
        pytest.warns(UserWarning, match="global hooks"),
    ):
        model(x)


def test_compiled_whole(drive):
    drive(compiled_whole)
