"""What training loops do around a model, in drawn combinations, beside one process; and what runs here, over fetched parts."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_wrap import batches, both, drive
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.optim import lr_scheduler as rates
from torch.optim import swa_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from twins import assert_same_state

import rdmarpc as rpc

STEPS = 4
DATA = batches(STEPS, 6, 10)
PLACEMENT = {"body": "worker1", "norm": "worker1", "tail": "worker2"}


class Net(nn.Module):
    """``chance``: one worker draws random numbers. ``look``: only an eager forward has it. ``inner``: recomputes a part."""

    def __init__(self, chance: float = 0.0, look: bool = False, inner: bool | None = None) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(10, 12), nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Dropout(chance))
        self.norm, self.tail, self.head = nn.BatchNorm1d(12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.look, self.inner = look, inner

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = self.body(x) if self.inner is None else checkpoint(self.body, x, use_reentrant=self.inner)
        if self.look and x.sum() > 1e9:
            return x
        return self.head(torch.relu(self.tail(self.norm(x))))


# -- one thing of each kind makes a loop

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
}

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "none": lambda o: None,
    "StepLR": lambda o: rates.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: rates.MultiStepLR(o, [1, 3]),
    "MultiplicativeLR": lambda o: rates.MultiplicativeLR(o, lambda n: 0.9),
    "LambdaLR": lambda o: rates.LambdaLR(o, lambda n: 1 / (n + 1)),
    "ConstantLR": lambda o: rates.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: rates.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: rates.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: rates.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: rates.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: rates.CyclicLR(o, 0.01, 0.2, step_size_up=2, cycle_momentum="momentum" in o.defaults),
    "OneCycleLR": lambda o: rates.OneCycleLR(o, 0.2, total_steps=STEPS + 1, cycle_momentum="momentum" in o.defaults),
    "ReduceLROnPlateau": lambda o: rates.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: rates.SequentialLR(o, [rates.ConstantLR(o, 0.5, 2), rates.ExponentialLR(o, 0.9)], [2]),
    "ChainedScheduler": lambda o: rates.ChainedScheduler([rates.ConstantLR(o, 0.5, 2), rates.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, anneal_epochs=2),
}


@dataclass
class Side:
    """A network in its loop. ``alone``: in one process."""

    network: Any
    optimizer: Any
    alone: bool
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> list[Any]:
        return list(self.network.parameters())


def loss_of(side: Side, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(side.network(x), y)


def recomputed(reentrant: bool) -> Callable[..., torch.Tensor]:
    def forward(side: Side, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(checkpoint(side.network, x.clone().requires_grad_(), use_reentrant=reentrant), y)

    return forward


def hooked(side: Side, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = side.network(x)
    out.register_hook(lambda grad: grad * 2)
    return F.cross_entropy(out, y)


def of_inputs(side: Side, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Adversarial inputs."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(side, x, y), x)
    return loss_of(side, (x + 0.1 * grad.sign()).detach(), y)


FORWARDS: dict[str, Callable[..., torch.Tensor]] = {
    "plain": loss_of,
    "checkpoint": recomputed(False),
    "checkpoint, reentrant": recomputed(True),
    "hook on the output": hooked,
    "adversarial": of_inputs,
}


def noise(side: Side) -> None:
    source = torch.Generator().manual_seed(5)  # the default one is where dropout draws: here, or at its worker
    for p in side.parameters:
        if p.grad is not None:
            p.grad.add_(torch.randn(p.shape, generator=source) * 0.01)


def by_hand(side: Side) -> None:
    norm = sum(p.grad.norm().item() ** 2 for p in side.parameters if p.grad is not None) ** 0.5
    for p in side.parameters:
        if p.grad is not None:
            p.grad = p.grad / (norm + 1.0)


GRADIENTS: dict[str, Callable[[Side], Any]] = {
    "left": lambda side: None,
    "clipped by norm": lambda side: clip_grad_norm_(side.parameters, 0.1),
    "clipped by value": lambda side: clip_grad_value_(side.parameters, 0.01),
    "noise": noise,
    "by hand": by_hand,
    "one to None": lambda side: setattr(side.parameters[2], "grad", None),
}


def frozen(side: Side, number: int) -> None:
    side.network.body.requires_grad_(number % 2 == 0)
    side.network.head.requires_grad_(number % 3 != 1)


def evaluated(side: Side, number: int) -> None:
    side.network.eval()
    with torch.no_grad():
        side.kept["out"] = side.network(DATA[number][0])
    side.network.train()


def averaged(side: Side, number: int) -> None:
    if "average" not in side.kept:
        side.kept["average"] = swa_utils.AveragedModel(side.network)
    side.kept["average"].update_parameters(side.network)
    if number == STEPS - 1:
        torch.manual_seed(9)  # what draws is here now, and was at its worker
        swa_utils.update_bn([x for x, _ in DATA], side.kept["average"])


def saved(side: Side, number: int) -> None:
    file = io.BytesIO()
    torch.save([side.network.state_dict(), side.optimizer.state_dict()], file)
    if number == 2:
        side.kept["file"] = file.getvalue()
    elif number == 3:
        network, optimizer = torch.load(io.BytesIO(side.kept["file"]))
        side.network.load_state_dict(network)
        side.optimizer.load_state_dict(optimizer)


def as_a_vector(side: Side, number: int) -> None:
    with torch.no_grad():
        vector = parameters_to_vector(side.parameters)
        vector_to_parameters(vector * 0.99, side.parameters)


def initialised(side: Side, number: int) -> None:
    if number == 1:
        torch.manual_seed(7)
        nn.init.xavier_uniform_(side.network.body[0].weight)
        nn.init.zeros_(side.network.tail.bias)


def grouped(side: Side, number: int) -> None:
    if number == 1:
        more = [nn.Parameter(torch.zeros(2))]
        side.optimizer.add_param_group({"params": more, "lr": 0.01})


EVENTS: dict[str, Callable[[Side, int], Any]] = {
    "nothing": lambda side, number: None,
    "frozen": frozen,
    "evaluated": evaluated,
    "averaged": averaged,
    "saved": saved,
    "as a vector": as_a_vector,
    "initialised": initialised,
    "a group added": grouped,
    "clamped": lambda side, number: [p.data.clamp_(-0.3, 0.3) for p in side.parameters],
    "decayed": lambda side, number: [setattr(p, "data", p.data * 0.99) for p in side.parameters],
}
ZEROING = ("before", "before, zeros", "after", "every second", "never", "by hand")
NETS: dict[str, Callable[[], nn.Module]] = {
    "traced": Net,
    "chance": lambda: Net(0.3),
    "eager": lambda: Net(look=True),
    "recomputing": lambda: Net(0.3, inner=False),
    "recomputing, reentrant": lambda: Net(inner=True),
}
CHOICES: list[tuple[Any, ...]] = [
    tuple(NETS),
    tuple(OPTIMIZERS),
    tuple(SCHEDULES),
    tuple(FORWARDS),
    tuple(GRADIENTS),
    tuple(EVENTS),
    ZEROING,
]


def zero(side: Side, how: str, number: int, before: bool) -> None:
    if how == "by hand" and before:
        for p in side.parameters:
            p.grad = None
    elif how.startswith("before") if before else how == "after" or (how == "every second" and number % 2):
        side.optimizer.zero_grad(set_to_none=how != "before, zeros")


def run(side: Side, loop: tuple[str, ...]) -> list[Any]:
    """One loop; what is compared."""
    net, _, schedule, forward, gradients, event, zeroing = loop
    schedule = "none" if event == "a group added" else schedule  # schedules know the groups that there were
    forward = "plain" if net == "recomputing, reentrant" else forward  # torch refuses autograd.grad there
    following = SCHEDULES[schedule](side.optimizer)
    seen: list[Any] = []
    for number, (x, y) in enumerate(DATA):
        torch.manual_seed(number)
        zero(side, zeroing, number, True)
        loss = FORWARDS[forward](side, x, y)
        loss.backward()
        GRADIENTS[gradients](side)
        side.optimizer.step()
        zero(side, zeroing, number, False)
        if following is not None:
            following.step(*([loss.item()] if schedule == "ReduceLROnPlateau" else []))
        EVENTS[event](side, number)
        seen += [loss.detach(), torch.tensor(side.optimizer.param_groups[0]["lr"])]
    if "average" in side.kept:
        seen += side.kept["average"].state_dict().values()
    return [*seen, *([side.kept["out"]] if "out" in side.kept else []), *side.network.state_dict().values()]


def drawn(count: int, seed: int) -> list[tuple[str, ...]]:
    """Loops in which everything comes up as often as everything else of its kind."""
    source = random.Random(seed)
    columns = []
    for choices in CHOICES:
        column = list(choices) * (count // len(choices) + 1)
        source.shuffle(column)
        columns.append(column[:count])
    return list(zip(*columns))


def loops(count: int, seed: int) -> None:
    warnings.simplefilter("ignore")
    for loop in drawn(count, seed):
        placement = {"body": "worker1"} if loop[0] in ("chance", "recomputing") else PLACEMENT
        model, twin = both(NETS[loop[0]], placement)
        sides = [Side(m, OPTIMIZERS[loop[1]](m.parameters()), m is twin) for m in (model, twin)]
        ours, theirs = (run(side, loop) for side in sides)
        wrong = [at for at, (one, other) in enumerate(zip(ours, theirs)) if not torch.equal(one, other)]
        assert not wrong and len(ours) == len(theirs), (loop, wrong, len(ours), model.captured)
        model.close()


def penalty(network: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of inputs and of parameters, and weights in the loss."""
    optimizer.zero_grad()
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(network(x), y)
    found = torch.autograd.grad(loss, [x, *network.parameters()], create_graph=True)
    total = loss + sum(grad.pow(2).sum() for grad in found) + 0.01 * sum(p.pow(2).sum() for p in network.parameters())
    total.backward(retain_graph=True)
    (total * 0.5).backward()
    optimizer.step()
    return total


def scaled(network: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mixed precision; weights' casts are shared by both forwards."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(network(x).float(), y) + network(x * 2).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(network.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    return loss


class Rounded(TorchDispatchMode):
    """Changes what operations give."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t.bfloat16().to(t.dtype), func(*args, **(kwargs or {})))


def followed(network: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Modes, and hooks, that are to see every operation; derivatives that are no backward of the program's."""
    optimizer.zero_grad()
    with torch.no_grad(), Rounded():
        seen = network(x).sum()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (t.bfloat16() if t.is_floating_point() else t, t.dtype), lambda kept: kept[0].to(kept[1])
    ):
        loss = F.cross_entropy(network(x), y)
    loss.backward()
    optimizer.step()
    network.eval()
    direction = torch.ones_like(x)
    _, forward = torch.func.jvp(network, (x,), (direction,))
    inputs = torch.func.grad(lambda given: network(given).square().sum())(x)
    each = torch.func.vmap(network)(x[:, None])
    network.train()
    return torch.stack([seen, loss, forward.sum(), inputs.sum(), each.sum()])


def fetched() -> None:
    warnings.simplefilter("ignore")
    for step, capture in ((penalty, "here"), (scaled, "here"), (scaled, "auto"), (scaled, "eager"), (followed, "auto")):
        model, twin = both(lambda: Net(0.3), PLACEMENT, capture=capture)
        sides = [(m, torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)) for m in (model, twin)]
        for number, batch in enumerate(DATA):
            losses = []
            for network, optimizer in sides:
                torch.manual_seed(number)
                losses.append(step(network, optimizer, *batch).detach())
            assert torch.equal(*losses), (step, capture, number, losses)
        assert_same_state(model, twin)
        assert model.counters(False)["forwards_here"] >= len(DATA)
        model.close()


def refused() -> None:
    """What cannot be known before the forward: each names what can do it."""
    model, _ = both(Net, PLACEMENT)
    x, y = DATA[0][0].clone().requires_grad_(), DATA[0][1]
    here = 'capture="here"'
    with pytest.raises(rpc.NotSupported, match="create_graph") as error:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert here in error.value.hint
    with pytest.raises(rpc.NotSupported, match="create_graph") as error:
        model(x).sum().backward(create_graph=True)
    assert here in error.value.hint
    with pytest.raises(rpc.NotSupported) as error:
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert here in error.value.hint
    with pytest.raises(rpc.NotSupported) as error:
        (F.cross_entropy(model(x), y) + sum(p.pow(2).sum() for p in model.parameters())).backward()
    assert here in error.value.hint
    for around in (torch.autocast("cpu"), Rounded()):
        out = model(x)
        with around, pytest.raises(rpc.NotSupported, match="backward under") as error:
            out.sum().backward()
        assert here in error.value.hint
    model.close()


def mixed() -> None:
    """One backward through a forward that is captured and one that runs here: right up to rounding, and named; and no name
    where no parameter is in both."""
    warnings.simplefilter("ignore")
    x, y = DATA[0]
    for ours_first in (True, False):
        model, twin = both(Net, PLACEMENT)
        for network in (model, twin):
            forwards = [lambda: network(x), lambda: checkpoint(network, x, use_reentrant=False)]  # noqa: B023
            for number in range(3):
                losses = [F.cross_entropy(forward(), y) for forward in forwards[:: 1 if ours_first else -1]]
                assert network is twin or number or not model.counters(False)["sums_reordered"]
                sum(losses).backward()
        for (name, p), q in zip(model.named_parameters(), twin.parameters()):
            torch.testing.assert_close(p.grad.clone(), q.grad, msg=name)
        remote = sum(1 for name, _ in model.named_parameters() if name.split(".")[0] in PLACEMENT)
        assert model.counters(False)["sums_reordered"] == remote
        model.close()
    model, twin = both(lambda: Net(inner=False), {"body": "worker1", "tail": "worker1"}, capture="eager")
    for network in (model, twin):
        F.cross_entropy(network(x), y).backward()
    assert all(torch.equal(p.grad.clone(), q.grad) for p, q in zip(model.parameters(), twin.parameters()))
    counts = model.counters(False)
    assert counts["sums_reordered"] == 0 and counts["forwards_here"] == 0
    model.close()
    model, twin = both(Net, PLACEMENT)
    model.norm.requires_grad_(False), twin.norm.requires_grad_(False)
    for number in range(3):  # one forward a backward, and then two
        for network in (model, twin):
            sum(F.cross_entropy(network(x * (1 + at)), y) for at in range(1 + (number == 2))).backward()
        assert model.counters(False)["sums_reordered"] == (remote - 2) * (number == 2)
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        assert q.grad is None or torch.allclose(p.grad.clone(), q.grad), name
    model.close()


def everything() -> None:
    loops(17, 3)
    fetched()
    refused()
    mixed()


def test_loops() -> None:
    drive(everything, 3, timeout=250.0)
