"""``forward_backward`` and ``prepare``: micro-batches in flight give the bits of one micro-batch after another."""

from __future__ import annotations

import copy
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import wrap_models as models
from called import let_go
from test_wrap import assert_same_state, batches, both, drive
from timing import eventually
from torch import nn

import rdmarpc as rpc
from rdmarpc import wrap
from rdmarpc.ground import here
from rdmarpc.parts import owner as _parts

CHAIN = {"0": "worker1", "2": "worker2", "4": "worker1"}


def one_after_another(
    twin: nn.Module, loss_fn: Callable[..., Any], chunks: int, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """What ``forward_backward`` computes."""
    total: Any = None
    for part, target in zip(x.chunk(chunks), y.chunk(chunks)):
        loss = loss_fn(twin(part.clone()), target.clone())
        loss = loss * (len(part) / len(x)) if chunks > 1 else loss
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    return total


def train(
    model: nn.Module,
    twin: nn.Module,
    data: list[tuple[torch.Tensor, torch.Tensor]],
    chunks: int,
    loss_fn: Callable[..., torch.Tensor] = F.cross_entropy,
    schedule: str = "1f1b",
) -> None:
    mine = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    theirs = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    for number, (x, y) in enumerate(data):
        loss = model.forward_backward(loss_fn, x, target=y, chunks=chunks, schedule=schedule)
        expected = one_after_another(twin, loss_fn, chunks, x, y)
        assert not loss.requires_grad
        assert loss.item() == expected.item(), f"step {number}"
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, twin)


# -- the same bits


def same_bits() -> None:
    for make, placement, shape, classes in (
        (models.mlp, CHAIN, (8, 20), 4),
        (models.Cnn, {"features": "worker1", "middle": "worker2", "classifier": "worker1"}, (8, 1, 8, 8), 10),
        (models.Skip, {"a": "worker1", "b": "worker2", "c": "worker1"}, (8, 20), 4),
        (models.PingPong, {"first": "worker1", "third": "worker2"}, (8, 20), 4),
    ):
        model, twin = both(make, placement)
        train(model, twin, batches(3, *shape, classes=classes), 4)
        if make is models.mlp:
            train(model, twin, batches(3, *shape, classes=classes), 1)
            train(model, twin, batches(2, 10, *shape[1:], classes=classes), 4)  # 3, 3, 3 and 1
            assert model.counters(False)["steps"] == 3 * (4 + 1) + 2 * 4
        model.close()
    for placement in ({"0": "worker1"}, {"2": "worker1"}):  # the second micro-batch begins off the alignment of vectors
        model, twin = both(narrow, placement)
        train(model, twin, batches(3, 5, 6, classes=4), 2)
        model.close()


def narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))


def inputs_and_whole_tensors() -> None:
    torch.manual_seed(0)
    model, twin = both(models.TuplesAndInputs, {"pair": "worker1", "join": "worker2"})
    base = torch.randn(6, 20, requires_grad=True)
    other = base.detach().clone().requires_grad_()
    x, z = base * 2, other * 2  # inputs that come from a graph: their gradients go on into it, once
    y = torch.randn(6, 20)

    def loss_fn(output: dict[str, torch.Tensor]) -> torch.Tensor:
        return output["out"].pow(2).mean() + output["left"].mean()

    loss = model.forward_backward(loss_fn, x, chunks=3, y=y, double=True)
    leaf = z.detach().requires_grad_()
    expected = torch.zeros(())
    for part, also in zip(leaf.chunk(3), y.chunk(3)):
        some = loss_fn(twin(part, y=also, double=True)) * (2 / 6)
        some.backward()
        expected = expected + some.detach()
    z.backward(leaf.grad)
    assert torch.equal(loss, expected)
    assert torch.equal(base.grad, other.grad)
    model.close()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        return self.two(torch.tanh(self.one(x)) * y)


def inputs_of_one_graph() -> None:
    """Its backward runs once, with the gradients of both inputs."""
    model, twin = both(Gated, {"one": "worker1", "two": "worker2"})
    torch.manual_seed(0)
    encoder = nn.Linear(4, 8)
    other, data = copy.deepcopy(encoder), torch.randn(6, 4)
    for chunks in (3, 1):
        x, y = torch.tanh(encoder(data)).chunk(2, 1)
        model.forward_backward(lambda output: output.pow(2).mean(), x, y, chunks=chunks)
        inputs = torch.tanh(other(data)).chunk(2, 1)
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        for pieces in zip(*(leaf.chunk(chunks) for leaf in leaves)):
            (twin(*pieces).pow(2).mean() * (1 / chunks)).backward()
        torch.autograd.backward(inputs, [leaf.grad for leaf in leaves])
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(encoder.parameters(), other.parameters()))
    model.close()


def over_tcp() -> None:
    model, twin = both(models.mlp, CHAIN)
    train(model, twin, batches(4, 10, 20), 4)


def test_over_tcp():
    drive(over_tcp, 3, transport="tcp")


# -- the order


def overlap(count: int = 6) -> None:
    """Worker 2 finishes its first forward when worker 1 has run two, worker 1 its first backward when worker 2 has run its
    second forward: what runs in turns would wait for ever."""
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    net = nn.Sequential(
        models.Logged("one", folder, {("backward", 0): ("two", "forward", 1)}),
        models.Logged("two", folder, {("forward", 0): ("one", "forward", 1)}),
    )
    twin = nn.Sequential(models.Logged("one"), models.Logged("two"))
    twin.load_state_dict(net.state_dict())
    model = wrap(net, {"0": "worker1", "1": "worker2"})

    def slow_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return F.cross_entropy(output, y)

    for worker in ("worker1", "worker2"):
        rpc.rpc_sync(worker, models.take_log)
    train(model, twin, batches(2, 4 * count, 20), count, slow_loss)
    shutil.rmtree(folder)
    for worker, window in (("worker1", 3), ("worker2", 2)):
        log = rpc.rpc_sync(worker, models.take_log)
        for kind in ("forward", "backward"):
            assert [number for _, what, number in log if what == kind] == list(range(2 * count))
        flight = most = 0
        for _, kind, _ in log:
            flight += 1 if kind == "forward" else -1
            most = max(most, flight)
        assert 2 <= most <= window, log
    model.close()


# -- whatever the speed, however few the slots


def jitter_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    time.sleep(random.uniform(0, 0.002))
    return F.cross_entropy(output[:, :4], y)


def staged(model: Any, everywhere: bool = True) -> int:
    """Bytes, of all models so far."""
    return model.counters(everywhere)["bytes_staged"]


def speeds() -> None:
    for delays, depth in (((0.0, 0.005), 1), ((0.005, 0.0), 2)):
        torch.manual_seed(0)
        net = nn.Sequential(*(models.Logged(str(at), delay=delay) for at, delay in enumerate((*delays, *delays))))
        twin = copy.deepcopy(net)
        for part in twin:
            part.delay = 0.0
        # Six levels on two workers, with as few as two slots an edge.
        model = wrap(net, {"0": "worker1", "1": "worker2", "2": "worker1", "3": "worker2"}, depth=depth)
        before = staged(model)
        train(model, twin, batches(2, 16, 20), 8, jitter_loss)
        assert staged(model) == before
        model.close()
    # Parts that keep an input, and a parameter whose gradient is what landed.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 20), models.Positional(), models.Keeping())
    twin = copy.deepcopy(net)
    model = wrap(net, {"0": "worker2", "1": "worker1", "2": "worker2"}, depth=1)
    for _ in range(2):
        train(model, twin, batches(3, 64, 20), 8)
    model.close()


class Again(nn.Module):
    """The same two parts twice, and a value that three stages and the caller read."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 4)

    def forward(self, x):
        first = torch.tanh(self.one(x))
        second = torch.tanh(self.two(first))
        third = torch.tanh(self.one(second + first))
        return self.last(torch.tanh(self.two(third * first)) + first)


def interleaved() -> None:
    for stages, delay, depth, chunks in ((4, 0.003, 2, 8), (8, 0.001, 4, 6)):
        torch.manual_seed(0)
        net = nn.Sequential(*(models.Logged(str(at), delay=delay * (at % 2)) for at in range(stages)))
        twin = copy.deepcopy(net)
        for part in twin:
            part.delay = 0.0
        model = wrap(net, {str(at): f"worker{1 + at % 2}" for at in range(stages)}, depth=depth)
        of = {
            need.worker: need for need in model.prepare(batches(1, 16, 20)[0][0], chunks=chunks, schedule="interleaved").memory
        }
        assert of["worker1"].in_flight == min(chunks, stages + 2)
        for worker in ("worker1", "worker2"):
            rpc.rpc_sync(worker, models.take_log)
        before = staged(model)
        for _ in range(8 // stages):
            train(model, twin, batches(2, 16, 20), chunks, jitter_loss, "interleaved")
            if stages == 4:
                train(model, twin, batches(1, 15, 20), chunks, jitter_loss, "interleaved")  # the last one is smaller
        log = rpc.rpc_sync("worker1", models.take_log)
        first = [kind for _, kind, _ in log].index("backward")
        assert stages > 4 or sum(name == "0" for name, _, _ in log[:first]) <= 3  # 1F1B allows five
        assert staged(model) == before
        model.close()
    # Parameters and values that several stages read: their gradients are sums in the order of one process.
    model, twin = both(Again, {"one": "worker1", "two": "worker2"}, depth=4)
    assert model.prepare(batches(1, 12, 20)[0][0], chunks=6, schedule="interleaved").levels > 4
    train(model, twin, batches(3, 12, 20), 6, schedule="interleaved")
    assert model.counters()["sums_reordered"] == 0
    model.close()
    model, _ = both(models.mlp, {"0": "worker1", "2": "worker2"})
    for refused in (
        lambda x: model.prepare(x, chunks=4, schedule="interleaved"),
        lambda x: model.forward_backward(torch.sum, x, chunks=4, schedule="interleaved"),
    ):
        with pytest.raises(rpc.NotSupported, match="do not go round"):
            refused(torch.zeros(8, 20))
    model.close()


class Behind(nn.Module):
    """A stage without gradients behind one of the caller's: no gradient comes to ``one`` and ``two``, though theirs require
    some."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.without, self.last = (nn.Linear(20, 20) for _ in range(4))

    def forward(self, x):
        y = torch.tanh(self.two(torch.tanh(self.one(x))))
        with torch.no_grad():
            y = self.without(y)
        return self.last(y + x)


def behind_no_gradients() -> None:
    model, twin = both(Behind, {"one": "worker1", "without": "worker1"}, timeout=60)
    for schedule in ("1f1b", "zero_bubble"):
        train(model, twin, batches(2, 8, 20), 4, schedule=schedule)
    for x, y in batches(2, 8, 20):
        for network in (model, twin):
            F.cross_entropy(network(x), y).backward()
            torch.optim.SGD(network.parameters(), 0.1).step()
    assert_same_state(model, twin)
    model.close()


def kept_outputs() -> None:
    model, twin = both(models.mlp, CHAIN)
    before = staged(model, False)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keeping(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept.append((output.detach(), output.detach().clone()))
        return F.cross_entropy(output, y)

    for x, y in batches(3, 8, 20):
        model.forward_backward(keeping, x, target=y, chunks=4)
    assert all(torch.equal(output, copied) for output, copied in kept)
    # All but one of the three slots are lent out, the other outputs are copies.
    assert staged(model, False) - before == (len(kept) - 2) * 2 * 4 * 4
    kept.clear()
    model.zero_grad()
    train(model, twin, batches(2, 8, 20), 4)
    assert staged(model, False) - before == 10 * 2 * 4 * 4
    model.close()


def seed() -> None:
    torch.manual_seed(7)


def dropout() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(models.Dropping(), models.Dropping(), nn.Linear(20, 4))
    placement = {"0": "worker1", "1": "worker2"}
    piped, turns = (wrap(copy.deepcopy(net), placement) for _ in range(2))
    for model in (piped, turns):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for worker in ("worker1", "worker2"):
            rpc.rpc_sync(worker, seed)
        for x, y in batches(3, 8, 20):
            if model is piped:
                model.forward_backward(F.cross_entropy, x, target=y, chunks=4)
            else:
                one_after_another(model, F.cross_entropy, 4, x, y)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(piped, turns)
    piped.close()
    turns.close()


# -- errors


def left_over() -> list[int]:
    """Runs, batches, and waiting tasks of the models in this process."""
    [(_, host)] = _parts._table(here.current()).values()
    executor = host.executor
    return [len(executor._runs), len(executor._batches), len(executor._agenda._tasks)]


class Stop(Exception):
    pass


def errors() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 20), models.Failing(), nn.Linear(4, 4))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(20))
        net[0].bias.zero_()
    twin = copy.deepcopy(net)
    model = wrap(net, {"0": "worker1", "1": "worker2", "2": "worker1"}, timeout=20)
    # The first layer stays the identity: it is what tells the second to fail.
    trained = [[p for name, p in network.named_parameters() if name[0] != "0"] for network in (model, twin)]
    mine, theirs = (torch.optim.SGD(parameters, 0.1) for parameters in trained)
    [(good, y)] = batches(1, 16, 20)
    calls = 0

    def failing_loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Stop("the loss fails")
        return F.cross_entropy(output, y)

    model.forward_backward(F.cross_entropy, good, target=y, chunks=8)  # gradients for the first failure to clear
    for code, kind, text in (
        (100, KeyError, "forward of"),
        (200, ZeroDivisionError, "backward of"),
        (0, Stop, "loss"),
    ):
        bad, calls = good.clone(), 0
        bad[6, 0] = code  # the first sample of the fourth micro-batch
        model.zero_grad()
        twin.zero_grad()
        with pytest.raises(kind, match=text) as caught:
            model.forward_backward(F.cross_entropy if code else failing_loss, bad, target=y, chunks=8)
        assert not code or "on worker 'worker2'" in str(caught.value.__cause__)
        # Without another zero_grad: what the failed backward was to clear is cleared by the next one.
        model.forward_backward(F.cross_entropy, good, target=y, chunks=8)
        one_after_another(twin, F.cross_entropy, 8, good, y)
        mine.step()
        theirs.step()
        assert_same_state(model, twin)
        for worker in ("worker1", "worker2"):
            eventually(partial(rpc.rpc_sync, worker, left_over), [0, 0, 0])
    output = model(good[:2])
    with pytest.raises(rpc.RdmaError, match="forward_backward allows none"):
        model.forward_backward(F.cross_entropy, good, target=y, chunks=8)
    model.forward_backward(F.cross_entropy, good, target=y, chunks=4)  # another plan, with no forward pending
    del output

    def nested(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return model(good).sum()

    with pytest.raises(rpc.RdmaError, match="loss function of its own"):
        model.forward_backward(nested, good, target=y, chunks=2)
    for arguments, match in (
        ({"target": y[:5]}, "target has 5 samples, and none"),
        ({"target": y, "chunks": 0}, "chunks"),
        ({"target": y, "chunks": 1 << 16}, "chunks"),
    ):
        with pytest.raises(ValueError, match=match):
            model.forward_backward(F.cross_entropy, good, **arguments)
    with pytest.raises(ValueError, match="one of shape"):
        model.forward_backward(lambda output, y: output, good, target=y)
    model.zero_grad()
    twin.zero_grad()
    model.forward_backward(F.cross_entropy, good, target=y, chunks=2)
    one_after_another(twin, F.cross_entropy, 2, good, y)
    mine.step()
    theirs.step()
    assert_same_state(model, twin)
    model.close()
    few = wrap(models.mlp(), {"0": "worker1"}, plans=1)
    with pytest.raises(rpc.NotSupported, match="plans=1"):
        few.forward_backward(F.cross_entropy, *(batches(1, 9, 20)[0][:1]), target=batches(1, 9, 20)[0][1], chunks=2)
    few.close()
    held = wrap(nn.Sequential(models.Held()), {"0": "worker1"}, timeout=4.0)
    with pytest.raises(rpc.TransferTimeout, match=r"micro-batch 1 of 2 within 4.0 s; worker0 level 2: .* lacks 1 inputs"):
        held.forward_backward(torch.sum, torch.zeros(2, 20), chunks=2)
    rpc.rpc_sync("worker1", let_go, ("forward",))
    held.close()


# -- before the first step


def prepared() -> None:
    model, twin = both(models.mlp, {"0": "worker1", "1": "worker1", "2": "worker2", "3": "worker2"}, depth=3, chunks=4)
    x, y = batches(1, 10, 20)[0]
    plan = model.prepare(x)
    assert (plan.depth, plan.sizes, plan.levels) == (3, [3, 3, 3, 1], 4)
    # 20 -> 32 at worker1 (with its ReLU), 32 -> 16 at worker2 (and tanh), 16 -> 4 here; three samples, and one, of float32.
    into1, into2, back = 20 * 4, 32 * 4, 16 * 4
    header, both_sizes = 64, 3 + 1
    of = {memory.worker: memory for memory in plan.memory}
    assert of["worker1"].parameters == (20 * 32 + 32) * 4
    assert of["worker0"].parameters == (16 * 4 + 4) * 4
    assert of["worker1"].receive == 3 * (both_sizes * (into1 + into2) + 4 * header)  # the input, and the gradient of its output
    assert of["worker1"].send == 3 * (both_sizes * into2 + 2 * header)
    assert of["worker2"].send == 4 * (both_sizes * back + 2 * header) + 3 * (both_sizes * into2 + 2 * header)
    assert [of[f"worker{rank}"].in_flight for rank in range(3)] == [4, 3, 2]
    assert of["worker1"].activations == 3 * 3 * into1
    assert of["worker2"].activations == 2 * 3 * into2
    text = str(plan)
    for piece in ("depth=3 chunks=4 (3 samples, the last one 1), 4 levels", "worker2", f"{of['worker2'].send:,}", "activation"):
        assert piece in text, piece
    before = model.counters()
    assert (before["steps"], before["plans"]) == (0, 2)
    train(model, twin, [(x, y)] * 3, 4)
    after = model.counters()
    assert (after["steps"], after["plans"]) == (12, 2)
    assert after["registrations"] == before["registrations"]
    assert model.prepare(x, chunks=1).sizes == [10]
    model.close()


# -- all over one group of workers


BODIES = (
    same_bits,
    inputs_and_whole_tensors,
    inputs_of_one_graph,
    overlap,
    speeds,
    interleaved,
    behind_no_gradients,
    kept_outputs,
    dropout,
    errors,
    prepared,
)


def tried() -> dict[str, str]:
    """What each of them raised."""
    found = {}
    for body in BODIES:
        try:
            body()
        except Exception:
            found[body.__name__] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def raised() -> dict[str, str]:
    return drive(tried, 3, timeout=280.0)


@pytest.mark.parametrize("body", [body.__name__ for body in BODIES])
def test_over_shared_memory(raised, body):
    assert body not in raised, raised[body]
