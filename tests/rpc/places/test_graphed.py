"""A step that is posted again without Python does what Python does, or Python runs: beside one process, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from standing_group import StandingGroup
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rdmarpc as rpc
from rdmarpc.places import graphed, observing, streams

HALVES = {"0": "worker1", "2": "worker2"}
Step = Callable[..., Any]


@pytest.fixture(scope="module")
def group() -> Iterator[StandingGroup]:
    found = StandingGroup(3)
    yield found
    found.end()


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *(between or (nn.Tanh(),)), nn.Linear(8, 3))


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def fused(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def trains(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        out = net(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        return loss, out

    return step


def minimizes(loss_of: Callable[..., torch.Tensor]) -> Callable[[nn.Module, torch.optim.Optimizer], Step]:
    """Makes the step that goes down ``loss_of(net, ...)``, which it returns."""

    def make(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(*args: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, *args)
            loss.backward()
            optimizer.step()
            return loss

        return step

    return make


def batches(count: int, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 6, generator=draw), torch.randn(size, 3, generator=draw)) for _ in range(count)]


def home(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


class Pair:
    """A model in one process and one that lies elsewhere, each with a step."""

    def __init__(self, net: nn.Module, optimizer: Any, placement: Any, make: Any = trains, **options: Any) -> None:
        self.alone, self.placed = net, rpc.wrap(copy.deepcopy(net), placement)
        self.one, self.other = optimizer(self.alone.parameters()), optimizer(self.placed.parameters())
        self.step, self.graph = make(self.alone, self.one), rpc.graphed(make(self.placed, self.other), **options)

    def both(self, *args: Any) -> Any:
        """Call both, and compare results, gradients, parameters and buffers. Returns what the graph gave."""
        state = torch.get_rng_state()
        wanted = self.step(*args)
        torch.set_rng_state(state)
        found = self.graph(*args)
        for one, other in zip(torch.utils._pytree.tree_leaves(wanted), torch.utils._pytree.tree_leaves(found)):
            assert torch.equal(home(one), home(other)) if isinstance(one, torch.Tensor) else one == other
        self.same()
        return found

    def same(self) -> None:
        for (name, one), other in zip(self.alone.named_parameters(), self.placed.parameters()):
            assert torch.equal(home(one), home(other)), name
            assert (one.grad is None) == (other.grad is None), name
            assert one.grad is None or torch.equal(home(one.grad), home(other.grad)), f"gradient of {name}"
        for (name, one), other in zip(self.alone.named_buffers(), self.placed.named_buffers()):
            assert torch.equal(home(one), home(other[1])), name

    def end(self, replays: int, runs: int | None = None) -> None:
        assert self.graph.replays == replays, (self.graph.replays, self.graph.runs, self.graph.why)
        assert runs is None or self.graph.runs == runs, (self.graph.runs, self.graph.why)
        self.placed.close()


NETS = {
    "layers": (mlp, momentum, {"": "worker1"}),
    "two places": (mlp, momentum, HALVES),
    "fused": (mlp, fused, HALVES),
    "a layer here": (mlp, momentum, {"2": "worker1"}),
    "the last one here": (mlp, fused, {"0": "worker1"}),
    "dropout": (lambda: mlp(nn.Dropout(0.4), nn.Tanh()), momentum, {"0": "worker1", "3": "worker2"}),
    "batch norm": (lambda: mlp(nn.BatchNorm1d(8), nn.Tanh()), fused, {"": "worker2"}),
    "batch norm here": (lambda: mlp(nn.BatchNorm1d(8), nn.Tanh()), momentum, {"3": "worker1"}),
    "replicas": (mlp, momentum, {"0": ["worker1", "worker2"]}),
    "attention": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.TransformerEncoderLayer(3, 1, 8, 0.1, batch_first=True), nn.Flatten(),
                              nn.Linear(6, 3)), momentum, {"1": "worker1", "3": "worker2"},
    ),
}  # fmt: skip


def like_one_process(name: str) -> None:
    make, optimizer, placement = NETS[name]
    torch.manual_seed(0)
    net = make()
    if name == "replicas":  # shards are summed in their own order: beside the same that runs Python
        net = rpc.wrap(net, placement)
    pair = Pair(net, optimizer, placement)
    for x, y in batches(9):
        pair.both(x, y)
    pair.end(replays=6, runs=3)


@pytest.mark.parametrize("name", NETS)
def test_like_one_process(group, name):
    group.run(like_one_process, name)


def gradients_elsewhere() -> None:
    """A step that adds to gradients, which the program drops, replaces, or lets be."""

    def make(net: nn.Module, optimizer: Any) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.mse_loss(net(x), y)
            loss.backward()
            return loss

        return step

    for placement in (HALVES, {"2": "worker1"}):
        pair = Pair(mlp(), momentum, placement, make)
        for turn, (x, y) in enumerate(batches(40)):
            for net in (pair.alone, pair.placed):
                if turn % 10 in (0, 2, 3, 6):
                    net.zero_grad()
                if turn % 10 == 8:
                    net[2].weight.grad = torch.ones_like(net[2].weight)
            pair.both(x, y)
        assert pair.graph.replays >= 10, (pair.graph.replays, pair.graph.why)
        pair.end(pair.graph.replays)


def test_gradients_elsewhere(group):
    group.run(gradients_elsewhere)


def returned_gradients() -> None:
    """A gradient is one tensor for all forms of a step, also as a result."""

    def make(net: nn.Module, optimizer: Any) -> Step:
        step = trains(net, optimizer)
        return lambda x, y: (step(x, y)[0], net[2].weight.grad, net[0].bias.grad)

    pair = Pair(mlp(), momentum, HALVES, make)
    for turn in range(6):
        for size in (4, 3):
            pair.both(*batches(turn + 1, size)[-1])
    assert pair.graph.replays >= 4, pair.graph.why
    pair.end(pair.graph.replays)


def test_returned_gradients(group):
    group.run(returned_gradients)


def within_each_other() -> None:
    """A graph that is called within another one is Python there."""
    inner = rpc.graphed(lambda x: x.tanh() * 2)
    outer = rpc.graphed(lambda x: inner(x.to(rpc.device("worker1"))) + inner(x.to(rpc.device("worker1")) + 1))
    for x, _ in batches(6):
        assert torch.equal(outer(x).cpu(), x.tanh() * 2 + (x + 1).tanh() * 2)
    assert outer.replays == 4 and inner.replays == 0, (outer.replays, outer.why)


def test_within_each_other(group):
    group.run(within_each_other)


def results_are_new() -> None:
    pair = Pair(mlp(), momentum, HALVES)
    kept, wanted = [], []
    for x, y in batches(8):
        loss, out = pair.both(x, y)
        assert not loss.requires_grad
        kept.append((loss, out))
        wanted.append((home(loss), home(out)))
    assert all(torch.equal(home(a), b) for one, other in zip(kept, wanted) for a, b in zip(one, other))
    pair.end(replays=5)


def test_results_are_new(group):
    group.run(results_are_new)


def results_that_are_left() -> None:
    """Gradients, and an average that is replaced, at a worker and here: as results they stay what they were."""

    def make(net: nn.Module, optimizer: Any) -> Step:
        step = trains(net, optimizer)
        average = [torch.zeros(3)]

        def stepping(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss, out = step(x, y)
            average[0] = average[0] * 0.5 + out.detach().mean(0)
            return loss, net[2].weight.grad, net[0].bias.grad, average[0]

        return stepping

    plain = lambda params: torch.optim.Adam(params, lr=0.01)  # noqa: E731, which asks for values
    for placement, optimizer, replays in (HALVES, momentum, 4), ({"2": "worker1"}, momentum, 4), (HALVES, plain, 0):
        pair = Pair(mlp(), optimizer, placement, make)
        kept, wanted = [], []
        for x, y in batches(12):
            kept.append(pair.both(x, y))
            wanted.append([home(each) for each in kept[-1]])
            for each in (*pair.alone.parameters(), *pair.placed.parameters()):
                each.grad.zero_()
        assert all(torch.equal(home(a), b) for one, other in zip(kept, wanted) for a, b in zip(one, other)), placement
        kept[-1][1].zero_()
        pair.same()
        assert pair.graph.replays >= replays, (pair.graph.replays, pair.graph.runs, pair.graph.why)
        pair.end(pair.graph.replays)


def test_results_that_are_left(group):
    group.run(results_that_are_left)


def gradients_that_are_added_to() -> None:
    """Gradients that were there before a step adds to them, at a worker and here: as results they stay what they were."""
    for asks, replays in (False, 9), (True, 0):

        def make(net: nn.Module, optimizer: Any, asks: bool = asks) -> Step:
            def step(x: torch.Tensor, y: torch.Tensor) -> Any:
                loss = F.mse_loss(net(x), y)
                loss.backward()
                return net[2].weight.grad, net[0].bias.grad, net[2].bias.grad[1:], loss.item() if asks else 0

            return step

        pair = Pair(mlp(), momentum, {"2": "worker1"}, make)
        for each in (*pair.alone.parameters(), *pair.placed.parameters()):
            each.grad = torch.ones_like(each)
        kept, wanted = [], []
        for batch in batches(12):
            kept.append(pair.both(*batch))
            wanted.append([home(each) for each in kept[-1]])
        assert all(torch.equal(home(a), b) for one, other in zip(kept, wanted) for a, b in zip(one[:3], other))
        pair.end(replays)


def test_gradients_that_are_added_to(group):
    group.run(gradients_that_are_added_to)


def results_lie_as_they_did() -> None:
    """Their strides, and what lies over one memory, are those of the step, whether Python runs or not."""
    for place in ("worker1", None):
        held = torch.ones(2) if place is None else torch.ones(2).to(rpc.device(place))
        there = torch.ones(()).to(rpc.device("worker2"))

        def step(x: torch.Tensor, held: torch.Tensor = held, there: torch.Tensor = there) -> Any:
            out = (x * held.sum()).view(4, 6)
            return out, out[:2], out.t()[:, ::2], there * 2

        graph = rpc.graphed(step)
        for n in range(5):
            whole, rows, turned, _ = graph(torch.full((24,), float(n)))
            assert (rows.stride(), turned.stride()) == ((6, 1), (1, 12)), n
            whole.zero_()
            assert not rows.any() and not turned.any(), n
        assert graph.replays == 3, graph.why


def test_results_lie_as_they_did(group):
    group.run(results_lie_as_they_did)


def forms() -> None:
    """Batches of other sizes, evaluation, another mode of torch, a schedule and a number of a module are forms of their own."""

    def make(net: nn.Module, optimizer: Any) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if not net.training:
                return net(x)
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    pair = Pair(mlp(nn.BatchNorm1d(8), nn.Dropout(0.5)), momentum, HALVES | {"2": "worker1", "3": "worker2"}, make)
    for turn in range(12):
        for size in (4, 3):
            pair.both(*batches(turn + 1, size)[-1])
        for each in (pair.alone, pair.placed):
            each.eval()
        with torch.no_grad():
            pair.both(*batches(turn + 1)[-1])
        pair.both(*batches(turn + 1)[-1])
        for each in (pair.alone, pair.placed):
            each.train()
        if turn == 6:
            for optimizer in (pair.one, pair.other):
                optimizer.param_groups[0]["lr"] = 0.03
        if turn == 9:
            for each in (pair.alone, pair.placed):
                next(module for module in each.modules() if isinstance(module, nn.Dropout)).p = 0.25
    replays = pair.graph.replays
    assert replays > 20, (replays, pair.graph.runs, pair.graph.why)
    pair.end(replays)


def test_forms_are_told_apart(group):
    group.run(forms)


def freezes() -> None:
    """Which parameters are trained changes between calls."""
    pair = Pair(mlp(), momentum, HALVES)
    for turn, (x, y) in enumerate(batches(16)):
        for each in (pair.alone, pair.placed):
            each[0].requires_grad_(turn % 8 < 4)
        pair.both(x, y)
    pair.end(replays=8)


def test_a_program_that_freezes_parameters_is_seen(group):
    group.run(freezes)


def accumulates() -> None:
    """Micro-batches, gradients that stay and are added to, and clipping."""

    def make(net: nn.Module, optimizer: Any) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            if isinstance(net, rpc.places.WrappedModel):
                loss = net.forward_backward(F.mse_loss, x, target=y, chunks=2)
            else:
                losses = [F.mse_loss(net(a), b) * 0.5 for a, b in zip(x.chunk(2), y.chunk(2))]
                for each in losses:
                    each.backward()
                loss = losses[0] + losses[1]
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            return loss

        return step

    pair = Pair(mlp(), momentum, HALVES, make)
    for x, y in batches(9):
        pair.both(x, y)
    assert pair.graph.replays >= 4, pair.graph.why
    pair.end(pair.graph.replays)


def test_gradients_accumulate(group):
    group.run(accumulates)


def arguments() -> None:
    """Slices of a data set at a worker, of one here, and constants."""

    def make(net: nn.Module, optimizer: Any) -> Step:
        def step(x: torch.Tensor, scale: float, pair: dict[str, torch.Tensor]) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (net(x[:, :6]) * scale).pow(2).sum() + pair["a"].sum() * 0
            loss.backward()
            optimizer.step()
            pair["a"].mul_(2)
            return loss

        return step

    torch.manual_seed(3)
    pair = Pair(mlp(), momentum, HALVES, make)
    data = torch.randn(40, 7)
    there, ones = data.to(rpc.device("worker1")), torch.ones(2).to(rpc.device("worker2"))
    for turn in range(16):
        scale = 2.0 if turn % 8 == 7 else 0.5
        part = slice(2 * turn, 2 * turn + 2)
        wanted = pair.step(data[part], scale, {"a": torch.ones(2)})
        found = pair.graph(there[part] if turn > 7 else data[part], scale, {"a": ones})
        assert torch.equal(home(wanted), home(found)), turn
        pair.same()
    assert home(ones).tolist() == [2.0**16] * 2
    assert pair.graph.replays >= 6, pair.graph.why
    with pytest.raises(rpc.NotSupported, match="require grad"):
        pair.graph(data[:2].requires_grad_(), 0.5, {"a": ones})
    with pytest.raises(rpc.NotSupported, match="got ndarray"):
        pair.graph(data[:2].detach().numpy(), 0.5, {"a": ones})
    pair.end(pair.graph.replays)


def test_arguments_of_every_kind(group):
    group.run(arguments)


def parameters_among_arguments() -> None:
    """An operation runs where the first parameter lies, so the same step with another kind of tensor is another one."""
    held = torch.ones(3, 4).to(rpc.device("worker1"))
    graph = rpc.graphed(lambda x: (held + 1, x * held)[1], check=3)
    parameter = nn.Parameter(torch.randn(3, 4), requires_grad=False)
    there = nn.Parameter(torch.randn(3, 4), requires_grad=False).to(rpc.device("worker2"))
    for x in (
        torch.randn(3, 4),
        parameter,
        parameter[:],
        torch.randn(3, 4).to(rpc.device("worker2")),
        nn.Parameter(there, False),
    ):
        wanted = x * held
        for _ in range(8):
            found = graph(x)
            assert getattr(found, "place", "here") == getattr(wanted, "place", "here")
            assert torch.equal(home(found), home(wanted))
    assert graph.replays >= 12, graph.why


def test_parameters_among_arguments(group):
    group.run(parameters_among_arguments)


def writes_of_inference_tensors() -> None:
    """An error of torch's, also where Python runs to be captured."""
    with torch.inference_mode():
        counts = [torch.zeros(()), torch.zeros(())]
    graph = rpc.graphed(lambda x: (x * 2, torch._foreach_add_(counts, 1.0))[0])
    for _ in range(3):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            graph(torch.ones(2).to(rpc.device("worker1")))


def test_writes_of_inference_tensors(group):
    group.run(writes_of_inference_tensors)


def misaligned() -> None:
    """Slices that cross from worker to worker: a kernel adds up by their addresses."""
    torch.manual_seed(3)
    data, weight = torch.randn(400), torch.randn(320)
    there, held = data.to(rpc.device("worker1")), nn.Parameter(weight).to(rpc.device("worker2"))
    step = rpc.graphed(lambda part: torch.dot(part * 1, held) + torch.mv(part.view(10, 32), held[:32]))
    with torch.no_grad():
        for at in range(24):
            part = data[at : at + 320]
            wanted = torch.dot(part * 1, weight) + torch.mv(part.view(10, 32), weight[:32])
            assert torch.equal(home(step(there[at : at + 320])), wanted), at
    assert step.replays > 18, step.why


def test_slices_that_cross_keep_their_alignment(group):
    group.run(misaligned)


def reads(net: nn.Module, optimizer: Any) -> Step:
    step = trains(net, optimizer)

    def reading(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss, out = step(x, y)
        return loss if loss.item() < 0.3 else out

    return reading


def keeps(net: nn.Module, optimizer: Any) -> Step:
    step, kept = trains(net, optimizer), []

    def keeping(x: torch.Tensor, y: torch.Tensor) -> Any:
        kept.append(step(x, y)[0].detach())
        return kept[-1]

    return keeping


def counts(net: nn.Module, optimizer: Any) -> Step:
    step, calls = trains(net, optimizer), [0]

    def counting(x: torch.Tensor, y: torch.Tensor) -> Any:
        calls[0] += 1
        return step(x * calls[0], y)

    return counting


def branches(net: nn.Module, optimizer: Any) -> Step:
    """By a value of this process's, and by one that is copied here."""
    step = trains(net, optimizer)
    return lambda x, y: step(x * 2, y) if x.sum() > 0 else step(x, y)


def lists(net: nn.Module, optimizer: Any) -> Step:
    step = trains(net, optimizer)

    def listing(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss, out = step(x, y)
        return out if loss.tolist() < 0.4 else loss

    return listing


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


class Rectified(torch.optim.SGD):
    """Counts in its state, as classes of others do, and does something else from the sixth step on."""

    def step(self, closure: Any = None) -> None:
        state = self.state[self.param_groups[0]["params"][0]]
        state["step"] = state.get("step", 0) + 1
        super().step()
        if state["step"] > 5:
            super().step()


class Counting(torch.optim.SGD):
    """The same, with its count in an attribute."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step()
        if self.steps > 5:
            super().step()


def rectified(params: Any) -> torch.optim.Optimizer:
    return Rectified(params, lr=0.1)


def counting(params: Any) -> torch.optim.Optimizer:
    return Counting(params, lr=0.1)


def checkpointed(net: nn.Module, optimizer: Any) -> Step:
    """What a checkpoint computes again draws what was drawn before."""
    inner = nn.Sequential(net, nn.Dropout(0.5))
    return trains(cast(nn.Module, lambda x: checkpoint(inner, x, use_reentrant=False)), optimizer)


def seeded(net: nn.Module, optimizer: Any) -> Step:
    """A generator of its own begins anew in each call."""
    generator, step = torch.Generator(), trains(net, optimizer)
    return lambda x, y: step(x + torch.randn(x.shape, generator=generator.manual_seed(3)), y)


REFUSED = {
    "seeded": (seeded, momentum, "sets the state of random numbers"),
    "checkpoint": (checkpointed, momentum, "sets the state of random numbers"),
    "item": (reads, momentum, "asks what aten::_local_scalar_dense gives"),
    "branch": (branches, momentum, "asks what aten::_local_scalar_dense gives"),
    "list": (lists, momentum, ""),
    "state": (trains, rectified, ""),
    "attribute": (trains, counting, ""),
    "kept": (keeps, momentum, "keeps a tensor of each call"),
    "number": (counts, momentum, "another number"),
    "adam": (trains, adam, "asks what aten::_local_scalar_dense gives"),
}


def python_runs(name: str) -> None:
    make, optimizer, why = REFUSED[name]
    pair = Pair(mlp(), optimizer, HALVES, make)
    for x, y in batches(12):
        pair.both(x, y)
    assert why in pair.graph.why and pair.graph.why in repr(pair.graph), pair.graph.why
    pair.end(replays=0, runs=12)


@pytest.mark.parametrize("name", REFUSED)
def test_python_runs(group, name):
    group.run(python_runs, name)


def replaced() -> None:
    """Tensors of the step are replaced between calls: Python runs, and is captured again."""
    pair = Pair(mlp(), fused, HALVES)

    def calls(count: int) -> None:
        for x, y in batches(count):
            pair.both(x, y)

    calls(6)
    before = pair.graph.runs
    for net in (pair.alone, pair.placed):
        net[0].weight.grad = None
    calls(4)
    assert pair.graph.runs == before + 1
    for optimizer in (pair.one, pair.other):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    calls(5)
    assert before + 2 <= pair.graph.runs <= before + 4
    runs = pair.graph.runs
    pair.alone[2].weight.data, kept = torch.ones(3, 8), pair.placed[2].weight.data
    pair.placed[2].weight.data = torch.ones(3, 8)
    calls(5)
    assert pair.graph.runs > runs and kept.shape == (3, 8)
    with torch.no_grad():
        for net in (pair.alone, pair.placed):
            net[2].weight.mul_(0.5)
            net[0].bias.copy_(torch.arange(8.0))
            net.load_state_dict(copy.deepcopy(net.state_dict()))
    runs = pair.graph.runs
    calls(3)
    assert pair.graph.runs == runs  # written in place: nothing has changed for the graph
    weights = [net[0].weight for net in (pair.alone, pair.placed)]  # which live on
    for net, weight in zip((pair.alone, pair.placed), weights):
        net[0].weight = nn.Parameter(weight.detach().clone() / 2)
    calls(5)
    pair.placed.close()
    calls(5)
    pair.end(pair.graph.replays)


def turns(kept: bool) -> None:
    """Another step replaces gradients of what this one reads: Python runs, and says why, unless they are kept. Where that is so
    in every call it is not captured for ever."""
    reader, read = (rpc.wrap(nn.Linear(4, 4), {"": "worker1"}) for _ in range(2))
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (reader, read)]

    def step(x: torch.Tensor, at: int) -> None:
        optimizers[at].zero_grad(set_to_none=not kept)
        reader(read(x) if at else read(x).detach()).square().mean().backward()
        optimizers[at].step()

    graph = rpc.graphed(lambda x: step(x, 0))
    with mock.patch.object(graphed, "Capture", wraps=graphed.Capture) as captured:
        for _ in range(16):
            graph(torch.ones(2, 4))
            step(torch.ones(2, 4), 1)
    assert captured.call_count <= 10
    assert (graph.replays > 0) is kept and ("were replaced since" in graph.why) is not kept, (graph.why, graph.replays)


def test_replaced_tensors_are_seen(group):
    group.run(replaced)
    group.run(turns, False)
    group.run(turns, True)


def collective_within(backend: str) -> None:
    """A collective of plain tensors in a step is made in every call."""

    def make(net: nn.Module, optimizer: Any) -> Step:
        step = trains(net, optimizer)

        def averaged(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = home(step(x, y)[0])
            dist.all_reduce(loss)
            return loss

        return averaged

    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    pair = Pair(mlp(), fused, HALVES, make)
    for x, y in batches(10):
        pair.both(x, y)
    dist.destroy_process_group()
    assert "collective" in pair.graph.why or "allreduce" in pair.graph.why
    pair.end(replays=0, runs=10)


@pytest.mark.parametrize("backend", ["gloo", "rdmarpc"])
def test_a_collective_within(group, backend):
    group.run(collective_within, backend)


def calls_within() -> None:
    """A step by distributed autograd and optimizer, one that has another worker count, and one that goes element by element."""
    nets = [mlp() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    model = rpc.wrap(nets[1], HALVES)
    theirs = torch.optim.SGD(nets[0].parameters(), 0.1)
    ours = rpc.optim.DistributedOptimizer(torch.optim.SGD, [rpc.RRef(p) for p in model.parameters()], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        with rpc.autograd.context() as context_id:
            loss = model(x).pow(2).mean()
            rpc.autograd.backward(context_id, [loss])
            ours.step(context_id)
        return loss

    def count(x: torch.Tensor) -> torch.Tensor:
        rpc.rpc_sync("worker1", counted.append, (1,))
        return model(x)

    def each(x: torch.Tensor) -> torch.Tensor:
        return model(x.clone().apply_(lambda number: number + 1))

    counts, steps, elements = rpc.graphed(count), rpc.graphed(step), rpc.graphed(each)
    for x, _ in batches(6):
        assert torch.equal(elements(x).cpu(), nets[0](x + 1))
        theirs.zero_grad()
        loss = nets[0](x).pow(2).mean()
        loss.backward()
        theirs.step()
        assert torch.equal(steps(x).cpu(), loss)
        counts(x)
    assert (counts.replays, steps.replays, elements.replays) == (0, 0, 0)
    assert "function of Python" in elements.why and "function of a worker" in counts.why and "distributed autograd" in steps.why
    model.close()


counted: list[int] = []


def test_calls_within(group):
    group.run(calls_within)


def exchanged() -> None:
    """Modules, buffers and states of optimizers take turns, and both live on; hooks come and go."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
            self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
            self.head, self.chain = self.heads[0], nn.ModuleList([nn.Tanh(), nn.GELU()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.body(x)
            for each in self.chain:
                x = each(x)
            return self.head(x)

    def head(net: Any, optimizer: Any, turn: int) -> None:
        net.head = net.heads[turn]

    def order(net: Any, optimizer: Any, turn: int) -> None:
        net.chain[0], net.chain[1] = net.chain[1], net.chain[0]

    def buffer(net: Any, optimizer: Any, turn: int) -> None:
        norm = net.body[1]
        means = norm.__dict__.setdefault("means", [norm.running_mean, norm.running_mean + 1])
        norm.running_mean = means[turn]

    def state(net: Any, optimizer: Any, turn: int) -> None:
        if not (states := net.__dict__.setdefault("states", [])):
            states += [optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())]
        optimizer.load_state_dict(states[turn])

    def clamped(weight: torch.Tensor) -> None:
        weight.grad.clamp_(-0.1, 0.1)

    def halved(optimizer: Any, *given: Any) -> None:
        torch._foreach_mul_([each.grad for each in optimizer.param_groups[0]["params"] if each.grad is not None], 0.5)

    def hooks(net: Any, optimizer: Any, turn: int) -> None:
        if not (handles := net.__dict__.setdefault("handles", [])):
            weight = net.head.weight
            handles += [
                weight.register_hook(lambda grad: grad * 2),
                weight.register_post_accumulate_grad_hook(clamped),
                net.head.register_forward_hook(lambda module, args, out: out * 0.5),
                optimizer.register_step_pre_hook(halved),
            ]
        else:
            handles.pop().remove()

    for exchange in (head, order, buffer, state, hooks):
        pair = Pair(Heads(), momentum, {"body": "worker1", "head": "worker2"})
        for turn, (x, y) in enumerate(batches(20)):
            if turn % 5 == 4:
                exchange(pair.alone, pair.one, turn // 5 % 2)
                exchange(pair.placed, pair.other, turn // 5 % 2)
            pair.both(x, y)
        assert pair.graph.replays >= 5, (exchange.__name__, pair.graph.why)
        pair.end(pair.graph.replays)


def test_exchanged_modules_and_states_are_told_apart(group):
    group.run(exchanged)


def strange() -> None:
    """A step with other numbers in each call, here in a list, is not captured for ever, and is captured when they stay."""
    pair = Pair(mlp(), fused, HALVES)
    groups = [optimizer.param_groups[0] for optimizer in (pair.one, pair.other)]
    for group in groups:
        group["betas"] = [0.9, 0.999]
    for turn, (x, y) in enumerate(batches(30)):
        for group in groups:
            group["betas"][0] = 0.9 - 0.01 * min(turn, 20)
        pair.both(x, y)
    assert "forms in a row were new" in pair.graph.why
    pair.end(replays=7, runs=23)


def test_a_step_of_strange_numbers_is_not_captured_for_ever(group):
    group.run(strange)


def seen_by_autograd() -> None:
    """A graph of a forward is out of date when a replay has written its parameters, and copies of them are made anew."""
    pair = Pair(mlp(), momentum, HALVES)
    for x, y in batches(5):
        pair.both(x, y)
    for net, step in ((pair.alone, pair.step), (pair.placed, pair.graph)):
        loss = net(x).sum()
        first = home(net[2].weight)
        step(x, y)
        assert not torch.equal(first, home(net[2].weight))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    pair.same()
    pair.end(pair.graph.replays)
    for write in (lambda x: x.mul_(2), lambda x: torch._foreach_mul_([x], 2)):
        step = rpc.graphed(lambda x, write=write: (write(x), x + 1)[1])
        for x in (torch.ones(3), torch.ones(3).to(rpc.device("worker1"))):
            for _ in range(5):  # an argument, in calls that run Python and in others
                before = x._version
                step(x)
                assert x._version == before + 1
    with rpc.recording():
        torch._foreach_mul_([plain := torch.ones(3)], 2)
    assert plain._version == 1


def test_seen_by_autograd(group):
    group.run(seen_by_autograd)


def checked() -> None:
    """Python that does something else is found by ``check``."""
    factor = [1.0]

    def make(net: nn.Module, optimizer: Any) -> Step:
        step = trains(net, optimizer)
        return lambda x, y: step(x.mul(factor[0]), y)

    pair = Pair(mlp(), momentum, HALVES, make, check=5)
    for x, y in batches(11):
        pair.both(x, y)
    assert pair.graph.runs == 5 and pair.graph.replays == 6, (pair.graph.runs, pair.graph.why)
    factor[0] = 2.0
    for x, y in batches(3):
        pair.graph(x, y)
    with pytest.raises(RuntimeError, match=r"does something else than what was captured: aten::mul"):
        pair.graph(x, y)
    pair.placed.close()


def test_a_checked_step_that_changes_is_an_error(group):
    group.run(checked)


def checked_beside_others() -> None:
    """What the program does between calls to gradients, and who keeps them, is nothing that the step did."""

    def make(net: nn.Module, optimizer: Any) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = F.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    for change in (False, True):
        pair = Pair(mlp(), momentum, HALVES, make, check=2)
        held: list[Any] = []
        for turn, (x, y) in enumerate(batches(14)):
            pair.both(x, y)
            if turn > 6:
                held.append([each.grad for each in pair.placed.parameters()])
            for net in (pair.alone, pair.placed) if change and turn > 6 else ():
                net.zero_grad()
        pair.end(pair.graph.replays)


def test_checked_beside_others(group):
    group.run(checked_beside_others)


def in_a_thread(body: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(body).result(30)


def checked_in_threads() -> None:
    """Each thread counts nodes of autograd from 0: where another one's forward of that number ran says nothing of ours."""
    there, elsewhere = (torch.ones(6, 6).to(rpc.device(f"worker{n}")) for n in (1, 2))
    weights = (torch.eye(6) * 2).to(rpc.device("worker1")).requires_grad_()

    def others() -> None:
        for _ in range(40):
            (weights * elsewhere).sum()

    def step(y: torch.Tensor) -> torch.Tensor:
        leaf = elsewhere.clone().requires_grad_()
        F.mse_loss(leaf * 2, y).backward()
        return leaf.grad

    def counted(y: torch.Tensor) -> int:
        before = there._handle.stream.operations
        assert torch.equal(home(step(y)), torch.full((6, 6), 8 / 36))
        return there._handle.stream.operations - before

    in_a_thread(others)
    y = torch.zeros(6, 6)
    assert in_a_thread(lambda: counted(y)) == 0
    graph = rpc.graphed(step, check=2)
    for call in (in_a_thread, lambda body: body(), in_a_thread):
        for found in call(lambda: [graph(y) for _ in range(90)]):
            assert torch.equal(home(found), torch.full((6, 6), 8 / 36))
    assert graph.why == "", graph.why


def test_checked_in_threads(group):
    group.run(checked_in_threads)


def backward_in_another_thread() -> None:
    """It finds where the forward ran, too, if it has not run as much itself."""
    there, elsewhere = (torch.ones(6, 6).to(rpc.device(f"worker{n}")) for n in (1, 2))
    streams_there = there._handle.stream, elsewhere._handle.stream
    for source, stream, other in zip((there, elsewhere), streams_there, reversed(streams_there)):
        leaf = source.clone().requires_grad_()
        loss = F.mse_loss(leaf * 2, torch.zeros(6, 6))
        before = other.operations, other.counts["home"], stream.counts["home"]
        in_a_thread(loss.backward)
        assert (other.operations, other.counts["home"], stream.counts["home"]) == before
        assert torch.equal(home(leaf.grad), torch.full((6, 6), 8 / 36))


def test_backward_in_another_thread(group):
    group.run(backward_in_another_thread)


def checked_beside_a_thread() -> None:
    """What another thread copies while a step is captured is not the step's, nor are copies of the step for it."""
    ours, theirs = (torch.full((40, 40), float(n)).to(rpc.device(f"worker{n}")) for n in (1, 2))
    meets, kept = [False], list[Any]()

    def step(x: torch.Tensor) -> torch.Tensor:
        if meets[0]:
            in_a_thread(lambda: kept.append(theirs._handle.copies) or (ours @ theirs, theirs @ ours))
        return (x * ours) @ theirs + theirs @ ours

    x = torch.eye(40).to(rpc.device("worker1"))
    wanted = home(step(x))
    graph = rpc.graphed(step, check=2)
    for turn in range(12):
        meets[0] = turn % 4 == 3 or turn == 2
        assert torch.equal(home(graph(x)), wanted)
    assert graph.replays >= 3 and len(kept) >= 3, (graph.runs, graph.why)
    assert not observing.copied and graph.why == "", graph.why


def test_checked_beside_a_thread(group):
    group.run(checked_beside_a_thread)


def captured_one_at_a_time() -> None:
    """A step that another thread captures meanwhile is not captured."""
    x = torch.ones(4).to(rpc.device("worker1"))
    inner = rpc.graphed(lambda x: x * 3)

    results: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        results.append(in_a_thread(lambda: inner(x)))
        return x * 2

    graph = rpc.graphed(step)
    for _ in range(3):
        assert torch.equal(home(graph(x)), torch.full((4,), 2.0))
    assert all(torch.equal(home(each), torch.full((4,), 3.0)) for each in results)
    assert graph.replays >= 1 and inner.replays == 0, graph.why
    for _ in range(3):
        inner(x)
    assert inner.replays >= 1, inner.why


def test_captured_one_at_a_time(group):
    group.run(captured_one_at_a_time)


def gradients_are_not_held() -> None:
    """A step that reads nothing of a gradient does not keep it: another one, which makes new ones, is the same in each call."""
    pair = Pair(mlp(), momentum, HALVES, check=2)
    evaluates = rpc.graphed(lambda x: pair.placed(x).detach() * 1)
    for x, y in batches(6):
        pair.both(x, y)
    for x, _ in batches(4):
        with torch.no_grad():
            evaluates(x)
    assert evaluates.replays >= 1, (evaluates.runs, evaluates.why)
    for x, y in batches(6):
        pair.both(x, y)
    assert pair.graph.replays >= 4, pair.graph.why
    pair.end(pair.graph.replays)


def test_gradients_are_not_held(group):
    group.run(gradients_are_not_held)


def drawn_again_by_the_program() -> None:
    """The program sets the state of random numbers between calls: the step draws the same again, and that is no fault of it."""
    net, generator = mlp(nn.Dropout(0.4), nn.Tanh()), torch.Generator()
    noisy = lambda net, optimizer: lambda x: net(x + torch.randn(x.shape, generator=generator)).detach()  # noqa: E731
    pair = Pair(net, momentum, {"": "worker1"}, noisy, check=2)
    (x, _), *_ = batches(1)
    for _ in range(8):
        with torch.random.fork_rng(devices=[]):
            state = generator.manual_seed(7).get_state()
            wanted = pair.step(x)
        generator.set_state(state)
        with torch.random.fork_rng(devices=[]):
            assert torch.equal(pair.graph(x).cpu(), wanted)
    pair.end(2)


def test_drawn_again_by_the_program(group):
    group.run(drawn_again_by_the_program)


def beside_first_steps() -> None:
    """First steps of other models, which are recorded until they are called again, here or in another thread, are not in the
    way."""
    teachers = [rpc.wrap(nn.Linear(4, 4), {"": "worker1"}) for _ in range(2)]
    pair = Pair(mlp(), momentum, HALVES)
    teachers[0](torch.ones(2, 4))
    thread = threading.Thread(target=teachers[1], args=(torch.ones(2, 4),))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    for x, y in batches(8):
        pair.both(x, y)
    pair.end(5)


def test_beside_first_steps(group):
    group.run(beside_first_steps)


def wrapped_again() -> None:
    """A model with layers here, of which a graph holds the memory, can be moved."""
    pair = Pair(mlp(), momentum, {"2": "worker1"})
    for placement in (None, {"0": "worker2"}, {"": "worker1"}, {"2": "worker2"}):
        if placement is not None:
            pair.placed.close()
            pair.placed = rpc.wrap(pair.placed, placement)
        for x, y in batches(5):
            pair.both(x, y)
    assert pair.graph.replays >= 8, pair.graph.why
    pair.end(pair.graph.replays)


def test_wrapped_again(group):
    group.run(wrapped_again)


def rates() -> None:
    """A rate that is a tensor is read in every call."""

    def scheduled(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=torch.tensor(0.01), fused=True)

    pair = Pair(mlp(), scheduled, HALVES)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 10) for each in (pair.one, pair.other)]
    for x, y in batches(10):
        pair.both(x, y)
        for schedule in schedules:
            schedule.step()
    assert pair.graph.replays >= 5, (pair.graph.replays, pair.graph.why)
    pair.end(pair.graph.replays)


def test_rates_in_tensors_are_read_in_every_call(group):
    group.run(rates)


def late_errors() -> None:
    """An error in a replay comes late, with the line of the call; then all goes on."""
    table = nn.Embedding(5, 3)

    make = minimizes(lambda net, index: net(index).sum())
    pair = Pair(table, momentum, {"": "worker1"}, make)
    index = torch.arange(4)
    for _ in range(6):
        pair.both(index)
    loss = pair.graph(index + 3)
    with pytest.raises(IndexError) as caught:
        loss.item()
    assert "a graphed step, posted by File" in str(caught.value.__notes__) and "test_graphed.py" in str(caught.value.__notes__)
    with pytest.raises(rpc.RdmaError, match="not computed"):
        loss.item()
    again = Pair(nn.Embedding(5, 3), momentum, {"": "worker1"}, make)
    for _ in range(6):
        again.both(index)
    again.end(replays=3)
    pair.placed.close()


def test_late_errors(group):
    group.run(late_errors)


def nothing_stays() -> None:
    """Memory at the workers does not grow from call to call, and programs are dropped with their graph."""
    pair = Pair(mlp(nn.Dropout(0.2)), fused, HALVES)
    for x, y in batches(8):
        pair.both(x, y)

    def tensors() -> list[int]:
        [stream.synchronize() for stream in streams()]
        return [rpc.rpc_sync(name, tensors_here) for name in ("worker1", "worker2")]

    before = tensors()
    for x, y in batches(100):
        pair.graph(x, y)
    assert max(after - now for after, now in zip(tensors(), before)) <= 20, (before, tensors())  # names wait to be freed
    pair.end(pair.graph.replays)


def nothing_stays_of_calls_that_fail() -> None:
    """An error of worker 2 surfaces where a layer here asks for its value, while worker 1 waits for the backward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layers = nn.Embedding(5, 3), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return (self.layers(index[:, None] / torch.ones(3)).cpu() + self.table(index).cpu()).square().sum()

    pair = Pair(Net(), momentum, {"layers": "worker1", "table": "worker2"}, minimizes(lambda net, index: net(index)))
    index = torch.arange(4)
    for _ in range(6):
        pair.both(index)
    before = rpc.rpc_sync("worker1", tensors_here)
    for _ in range(40):
        with pytest.raises(IndexError):
            pair.graph(index + 3)
    for stream in streams():
        stream.synchronize()
    assert rpc.rpc_sync("worker1", tensors_here) - before <= 20, pair.graph
    for _ in range(3):
        pair.both(index)
    pair.end(pair.graph.replays)


def tensors_here() -> int:
    from rdmarpc.places import runners

    return sum(len(runner.values) for each in runners._runners.values() for runner in each.values())


@pytest.mark.parametrize("body", [nothing_stays, nothing_stays_of_calls_that_fail])
def test_nothing_stays(group, body):
    group.run(body)


def many_words() -> None:
    """A step of more words than one program has, and large tensors between workers."""
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(60) for layer in (nn.Linear(64, 64), nn.Tanh())])
    placement = {f"{index}": f"worker{1 + index // 2 % 2}" for index in range(120)}

    pair = Pair(net, momentum, placement, minimizes(lambda net, x: net(x).square().mean()))
    for turn in range(6):
        pair.both(torch.randn(300, 64, generator=torch.Generator().manual_seed(turn)))
    pair.end(replays=3)


def test_many_words_go_in_several_programs(group):
    group.run(many_words)


def within_autocast() -> None:
    def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(net(x), y)

    pair = Pair(mlp(), momentum, {"2": "worker1"}, minimizes(loss_of))
    for x, y in batches(7):
        pair.both(x, y)
    assert pair.graph.replays >= 3, pair.graph.why
    x, y = batches(1)[0]
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(6):
            pair.both(x, y)
    pair.end(pair.graph.replays)


def test_within_autocast(group):
    group.run(within_autocast)


class Rounded(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.bfloat16().to(out.dtype) if func is torch.ops.aten.addmm.default else out


def within_a_mode() -> None:
    """What a mode of the program changes is changed, whether or not the step was captured before."""
    pair = Pair(mlp(), momentum, {"2": "worker1"})
    for number, (x, y) in enumerate(batches(14)):
        with Rounded() if number < 3 or number > 11 else contextlib.nullcontext():
            pair.both(x, y)
    pair.end(pair.graph.replays, runs=14 - pair.graph.replays)
    assert pair.graph.replays >= 3, pair.graph.why


def test_within_a_mode(group):
    group.run(within_a_mode)


def within_hooks_of_saved_tensors() -> None:
    """What is saved otherwise for the backward is so in calls that are posted again, too."""
    pair = Pair(mlp(), momentum, HALVES)
    halved = torch.autograd.graph.saved_tensors_hooks(lambda x: x.bfloat16(), lambda x: x.float())
    for number, (x, y) in enumerate(batches(24)):
        hooks = halved, torch.autograd.graph.save_on_cpu(), contextlib.nullcontext(), contextlib.nullcontext()
        with hooks[number // 3 % 4]:
            pair.both(x, y)
    pair.end(pair.graph.replays)
    assert pair.graph.replays >= 6, pair.graph.why


def test_within_hooks_of_saved_tensors(group):
    group.run(within_hooks_of_saved_tensors)
