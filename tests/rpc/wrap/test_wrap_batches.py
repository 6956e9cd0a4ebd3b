"""``forward_backward``: micro-batches in flight give the bits of one micro-batch after another, by every schedule."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside import assert_same, batches, both, sgd, wrap
from nets import NETS, data
from torch import nn

import rdmarpc as rpc
from rdmarpc.experiments.training.pipeline_layers import Asleep

SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
Loss = Callable[..., torch.Tensor]


def one_after_another(twin: nn.Module, loss_fn: Loss, chunks: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What ``forward_backward`` is documented to compute."""
    total: Any = None
    for part, target in zip(x.chunk(chunks), y.chunk(chunks)):
        loss = loss_fn(twin(part.clone()), target)
        loss = loss * (len(part) / len(x)) if chunks > 1 else loss
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    return total


def trained(model: Any, twin: nn.Module, given: Any, chunks: int, loss_fn: Loss = F.cross_entropy, **options: Any) -> None:
    optimizers = [sgd(each) for each in (model, twin)]
    for x, y in given:
        loss = model.forward_backward(loss_fn, x, target=y, chunks=chunks, **options)
        assert not loss.requires_grad
        assert_same(loss, one_after_another(twin, loss_fn, chunks, x, y))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model.state_dict(), twin.state_dict())


def kinds(name: str) -> None:
    make = NETS[name].make
    children = [child for child, module in make().named_children() if [*module.parameters()]]
    model, twin = both(make, {child: f"worker{1 + at % 2}" for at, child in enumerate(children)})
    trained(model, twin, data(name, (8, 8, 10)), 4)  # 10: 3, 3, 3 and 1
    trained(model, twin, data(name, (8,)), 1)
    trained(model, twin, data(name, (3,)), 8)  # fewer samples than chunks


@pytest.mark.parametrize("name", ["perceptron", "convolutions", "skips", "spectral", "language"])
def test_bits_are_those_of_one_micro_batch_after_another(drive, name):
    drive(kinds, name)


def over_a_network() -> None:
    model, twin = both(NETS["perceptron"].make, {"0": "worker1", "2": "worker2"})
    trained(model, twin, data("perceptron", (8, 10)), 4)


def test_over_tcp(drive):
    drive(over_a_network, transport="tcp")


class Chain(nn.Module):
    """Stages that go round the workers; some are called twice, skipped to, without gradients, tied or recurrent."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.kinds = [dice.choice(["linear", "linear", "tanh", "gru", "norm", "again"]) for _ in range(dice.choice([4, 6]))]
        made = {"gru": lambda: nn.GRU(20, 20, batch_first=True), "norm": lambda: nn.LayerNorm(20), "tanh": nn.Tanh}
        self.stages = nn.ModuleList(made.get(kind, lambda: nn.Linear(20, 20))() for kind in self.kinds)
        linears = [stage for stage in self.stages if isinstance(stage, nn.Linear)]
        if len(linears) > 1 and dice.random() < 0.4:
            linears[1].weight = linears[0].weight
        self.skip, self.without, self.head = dice.randrange(len(self.kinds)), dice.random() < 0.3, nn.Linear(20, 4)

    def forward(self, x):
        for at, (kind, stage) in enumerate(zip(self.kinds, self.stages)):
            y = stage(x[:, None])[0][:, 0] if kind == "gru" else stage(x)
            y = torch.tanh(stage(y)) if kind == "again" else y
            x = y + x if at == self.skip else y
        if self.without:
            with torch.no_grad():
                x = x + self.stages[0](x) if self.kinds[0] != "gru" else x
        return self.head(x)


def drawn(seed: int) -> None:
    dice = random.Random(seed)
    torch.manual_seed(seed)
    net = Chain(dice)
    twin = copy.deepcopy(net)
    workers = dice.choice([1, 2])
    placement = {f"stages.{at}": f"worker{1 + at % workers}" for at in range(len(net.stages))}
    if len([*net.parameters()]) < len(net.state_dict()):
        placement = {"stages": "worker1"}  # tied weights lie at one worker
    model = wrap(net, placement)
    for schedule in SCHEDULES:
        trained(model, twin, batches(2, 12, 20), dice.choice([2, 4, 5]), schedule=schedule)


@pytest.mark.parametrize("seed", range(12))
def test_every_schedule_of_drawn_chains(drive, seed):
    drive(drawn, seed)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y, *, scale, table=None):
        return {"out": self.two(torch.tanh(self.one(x)) * y) * scale, "rows": len(x), "table": table}


def inputs() -> None:
    """Tensors of the batch's length are split, all else goes whole; gradients of inputs go on into their graph, once."""
    model, twin = both(Gated, {"one": "worker1", "two": "worker2"})
    torch.manual_seed(0)
    encoders = [nn.Linear(4, 8), nn.Linear(4, 8)]
    encoders[1].load_state_dict(encoders[0].state_dict())
    rows, table, scale = torch.randn(6, 4), torch.randn(5), torch.randn(4, requires_grad=True)
    seen = []

    def loss_fn(found: Any) -> torch.Tensor:
        seen.append((found["rows"], found["table"] is table))
        return found["out"].pow(2).mean()

    for chunks in (3, 1):
        x, y = torch.tanh(encoders[0](rows)).chunk(2, 1)
        loss = model.forward_backward(loss_fn, x, y, chunks=chunks, scale=scale, table=table)
        ours, scale.grad = scale.grad, None
        given = torch.tanh(encoders[1](rows)).chunk(2, 1)
        leaves, total = [tensor.detach().requires_grad_() for tensor in given], 0.0
        for a, b in zip(*(leaf.chunk(chunks) for leaf in leaves)):
            part = twin(a, b, scale=scale)["out"].pow(2).mean() * (1 / chunks)
            part.backward()
            total = total + part.detach()
        torch.autograd.backward(given, [leaf.grad for leaf in leaves])
        assert_same([loss, ours], [total, scale.grad])
        scale.grad = None
        assert seen == [(6 // chunks, True)] * chunks
        seen.clear()
    assert_same(
        *([p.grad for p in (*net.parameters(), *encoder.parameters())] for net, encoder in zip((model, twin), encoders))
    )


def test_inputs_and_their_gradients(drive):
    drive(inputs)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(7, 4)

    def forward(self, x):
        y = self.line(x.mul_(2).clone())
        x[:, 0] = 1.0
        return y


def written() -> None:
    """What the forward writes into its input is written into that of the program; chunks of wrap; kept outputs."""
    model, twin = both(Writes, {"line": "worker1"}, chunks=2)
    x, kept = torch.randn(4, 7), []
    theirs = [piece.clone() for piece in x.split(2)]

    def keeping(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept.append(out)
        return out.square().mean()

    with torch.no_grad():  # which is of no consequence
        model.forward_backward(keeping, x, target=torch.zeros(4))
    for piece in theirs:
        (twin(piece).square().mean() / 2).backward()
    assert len(kept) == 2
    assert_same([x, kept], [torch.cat(theirs), [out.clone() for out in kept]])
    assert_same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_inputs_that_are_written(drive):
    drive(written)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.norm(self.a(x))
        return self.head(self.norm(self.b(F.relu(y))) + y)


def statistics() -> None:
    """A norm that is called twice sees the micro-batches in their order."""
    for placement in ({"norm": "worker1"}, {"norm": "worker1", "b": "worker2"}):
        model, twin = both(Twice, placement)
        trained(model, twin, batches(2, 16, 8), 4)


def test_statistics(drive):
    drive(statistics)


class Stop(Exception):
    pass


def errors() -> None:
    """What the forward, a hook of the backward or the loss raises ends the batch; the next ones are right."""
    model, twin = both(NETS["perceptron"].make, {"0": "worker1", "2": "worker2"})
    [(x, y)], calls = data("perceptron", (16,)), [0]

    def stop(*_: Any) -> None:
        calls[0] += 1
        if calls[0] == 4:
            raise Stop

    def failing(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        stop()
        return F.cross_entropy(out, target)

    for where in ("loss", "forward", "backward"):
        calls[0] = 0
        part = model.get_submodule("2")
        handle = None
        if where == "forward":
            handle = part.register_forward_hook(stop)
        elif where == "backward":
            handle = part.register_full_backward_hook(stop)
        with pytest.raises(Stop):
            schedule = "zero_bubble" if where == "backward" else "gpipe"
            model.forward_backward(failing if where == "loss" else F.cross_entropy, x, target=y, chunks=8, schedule=schedule)
        if handle is not None:
            handle.remove()
        model.zero_grad()
        twin.zero_grad()
        trained(model, twin, [(x, y)], 8)
    for arguments, text in (
        ({"target": y[:5]}, "5 samples"),
        ({"target": y, "chunks": 0}, "chunks"),
        ({"target": y, "chunks": 1 << 17}, "chunks"),
        ({"target": y, "schedule": "dualpipe"}, "gpipe, 1f1b, zero_bubble"),
    ):
        with pytest.raises(ValueError, match=text):
            model.forward_backward(F.cross_entropy, x, **arguments)
    with pytest.raises(ValueError, match="one of shape"):
        model.forward_backward(lambda out, target: out, x, target=y)
    outer = model(x)  # a forward that waits meanwhile
    model.forward_backward(F.cross_entropy, x, target=y, chunks=4)
    outer.sum().backward()


def test_errors(drive):
    drive(errors)


def late(schedule: str) -> None:
    """An index that a worker finds out of range, among messages that run in another order: the error of one process, with its
    line, and gradients of a batch that comes after it are right."""
    make = lambda: nn.Sequential(nn.Embedding(9, 12), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 3))  # noqa: E731
    model, twin = both(make, {"0": "worker1", "1": "worker2", "2": "worker1", "3": "worker2"})
    rows, y = torch.arange(8) % 9, torch.arange(8) % 3
    for bad in (0, 5, 7):
        trained(model, twin, [(rows, y)], 4, schedule=schedule)
        with pytest.raises(IndexError, match="out of range") as caught:
            model.forward_backward(
                F.cross_entropy, rows.index_fill(0, torch.tensor(bad), 9), target=y, chunks=4, schedule=schedule
            ).item()
        assert "posted by File" in "".join(caught.value.__notes__)
        for each in (model, twin):
            each.zero_grad()
    trained(model, twin, [(rows, y)], 4, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_late_errors_among_messages_that_run_in_another_order(drive, schedule):
    drive(late, schedule)


def resting() -> int:
    """Forgets what was the most so far. Returns KiB in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """KiB."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


class Slow(nn.Module):
    def forward(self, x):
        return Asleep.apply(x, 0.004, 0.004)


def held() -> tuple[int, int]:
    """KiB that a worker holds at most, before a slower one, by two schedules. What crosses is small."""
    wide = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 4))
    model = rpc.wrap(nn.Sequential(wide, nn.Linear(4, 1), Slow()), {"0": "worker1", "1": "worker2"})
    rpc.rpc_sync("worker2", Slow().forward, (torch.ones(1),))  # its operator is there now
    x, found = torch.randn(48 * 512, 4), []
    for schedule in ("1f1b", "1f1b", "gpipe"):
        before = rpc.rpc_sync("worker1", resting)
        model.forward_backward(lambda out: out.square().mean(), x, chunks=48, schedule=schedule).item()
        found.append(rpc.rpc_sync("worker1", peak) - before)
    model.close()
    return found[1], found[2]


def test_what_a_worker_holds_by_1f1b_is_bounded(drive):
    bounded, everything = drive(held)
    assert bounded < everything / 2, (bounded, everything)


def posted_again() -> None:
    """A graphed step whose micro-batches run in another order."""
    model, twin = both(NETS["perceptron"].make, {"0": "worker1", "2": "worker2"})
    given = data("perceptron", (8,) * 6)
    step = rpc.graphed(lambda x, y: model.forward_backward(F.cross_entropy, x, target=y, chunks=4, schedule="zero_bubble"))
    for x, y in given:
        assert_same(step(x, y), one_after_another(twin, F.cross_entropy, 4, x, y))
    for each, other in zip(model.parameters(), twin.parameters()):
        assert_same(each.grad, other.grad)


def test_a_graphed_step_of_micro_batches_that_run_in_another_order(drive):
    drive(posted_again)
