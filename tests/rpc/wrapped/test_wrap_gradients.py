"""Gradients and values of remote parameters in a training loop: it computes with them what it computes in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_wrap import batches, both, drive
from torch import nn

import rdmarpc as rpc
from rdmarpc import wrap

PLACEMENT = {"a": "worker1", "c": "worker2", "d": "worker1"}


class Net(nn.Module):
    """Parameters of three workers, in turn; one gets no gradient, one is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(20, 16), nn.Linear(16, 16), Scaled(16), nn.Linear(16, 4, bias=False)
        self.e = nn.Linear(4, 4)

    def forward(self, x):
        return self.e(self.d(self.c(torch.tanh(self.b(torch.relu(self.a(x)))))))


class Scaled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(width, width), nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        return self.layer(x) * self.scale


Loop = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor], Any]


def backward(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss.detach()


def clipping(change: Callable[[list[nn.Parameter]], Any]) -> Loop:
    """A step with that between backward and step."""

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = backward(net, optimizer, x, y)
        found = change(list(net.parameters()))
        optimizer.step()
        return loss, found

    return step


def rescaled(parameters: list[nn.Parameter]) -> Any:
    total = sum(p.grad.norm() ** 2 for p in parameters if p.grad is not None) ** 0.5
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(0.3 / (total + 1e-6))
    return total


def assigned(parameters: list[nn.Parameter]) -> Any:
    for p in parameters:
        if p.grad is not None:
            p.grad = p.grad * 0.5
    return [p.grad is None for p in parameters]


def looked_at(parameters: list[nn.Parameter]) -> Any:
    given = [p.grad for p in parameters if p.grad is not None]
    return (
        [bool(g.isnan().any()) for g in given],
        [float(g.abs().max()) for g in given],
        [g.detach().cpu().numpy().sum() for g in given],
        torch.cat([g.flatten() for g in given]),
        [g.view(-1)[0].item() for g in given],
        [p.detach().norm() for p in parameters],
        torch.stack([p.detach().abs().mean() for p in parameters]),
        [g.tolist() for g in given],
        [g.clone() for g in given],
        [torch.isfinite(g).all() for g in given],
        [float(p.data.std()) for p in parameters if p.numel() > 1],
    )


def written(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        if p.grad is None:
            continue
        p.grad.data.clamp_(-0.01, 0.01)
        if p.dim() > 1:
            p.grad[0] = 0.25
            p.grad[:, 1] *= 3
            p.grad.t()[2].add_(0.5)
        with torch.no_grad():
            p.mul_(0.99)
            p.data.add_(p.grad, alpha=-0.1)
            p.add_(torch.ones_like(p), alpha=1e-3)
            p.clamp_(min=-2.0)
    with torch.no_grad():
        nn.init.normal_(parameters[0], std=0.1)
        parameters[6].copy_(parameters[2])


def kept(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    """What is assigned is the same tensor as what it was assigned to: writes to either are writes to both."""
    backward(net, optimizer, x, y)
    grads = [torch.ones_like(p) / 8 for p in net.parameters()]
    datas = [p.detach().clone() * 0.9 for p in net.parameters()]
    for p, grad, data in zip(net.parameters(), grads, datas):
        p.grad, p.data = grad, data
    for grad, data in zip(grads, datas):
        grad.mul_(0.5)
        data.view(-1)[0] = 0.125
    clip(net.parameters(), 0.01)
    first = [grad.clone() for grad in grads], [p.detach().norm() for p in net.parameters()]
    optimizer.step()
    result = first, [data.clone() for data in datas]
    for p, data in zip(net.parameters(), datas):
        p.data = data.clone()
    return result


def noisy(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad += torch.randn_like(p.grad) * 0.01


def accumulated(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad(set_to_none=bool(y[0] % 2))
    for part in range(2):
        (F.cross_entropy(net(x[part::2]), y[part::2]) / 2).backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), 0.02)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    optimizer.step()
    return norm


def averaged() -> Loop:
    shadow: dict[int, torch.Tensor] = {}

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
        backward(net, optimizer, x, y)
        optimizer.step()
        for at, p in enumerate(net.parameters()):
            if at not in shadow:
                shadow[at] = p.detach().clone()
            else:
                shadow[at].lerp_(p.detach(), 0.1)
        return [value.clone() for value in shadow.values()]

    return step


clip = torch.nn.utils.clip_grad_norm_
LOOPS: dict[str, Callable[[], Loop]] = {
    **{
        f"clip {kind}": lambda kind=kind: clipping(lambda ps: clip(ps, 0.1, norm_type=kind))
        for kind in (1.0, 2.0, float("inf"), 0.5)
    },
    "clip foreach": lambda: clipping(lambda ps: clip(ps, 0.1, foreach=True, error_if_nonfinite=True)),
    "clip slow": lambda: clipping(lambda ps: clip(ps, 0.1, foreach=False)),
    "clip one": lambda: clipping(lambda ps: clip(ps[0], 0.1)),
    "value": lambda: clipping(lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.01)),
    "value foreach": lambda: clipping(lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.01, foreach=True)),
    "total": lambda: clipping(lambda ps: torch.nn.utils.get_total_norm([p.grad for p in ps if p.grad is not None])),
    "with norm": lambda: clipping(lambda ps: torch.nn.utils.clip_grads_with_norm_(ps, 0.1, torch.tensor(2.0))),
    "rescaled": lambda: clipping(rescaled),
    "assigned": lambda: clipping(assigned),
    "looked at": lambda: clipping(looked_at),
    "written": lambda: clipping(written),
    "noisy": lambda: clipping(noisy),
    "accumulated": lambda: accumulated,
    "averaged": averaged,
    "kept": lambda: kept,
}


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        alike = type(ours) is torch.Tensor and ours.dtype == theirs.dtype and ours.shape == theirs.shape
        return alike and bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)


def assert_alike(model: nn.Module, twin: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.detach().clone(), theirs.detach()), name
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or equal(mine.grad.clone(), theirs.grad), name


def both_ways(loop: Callable[[], Loop], make: Callable[[Any], torch.optim.Optimizer], steps: int = 4) -> Any:
    """Train the same model with the same loop, here and over workers; the model over workers, its optimizer and both ends."""
    torch.manual_seed(3)
    net = Net()
    twin = copy.deepcopy(net)
    model = wrap(net, PLACEMENT)
    results = []
    mine, theirs = make(model.parameters()), make(twin.parameters())
    for network, optimizer in ((model, mine), (twin, theirs)):
        torch.manual_seed(4)
        step = loop()
        results.append([step(network, optimizer, x, y) for x, y in batches(steps, 8, 20)])
        torch.manual_seed(5)
    for number, (ours, expected) in enumerate(zip(*results)):
        assert equal(ours, expected), f"step {number}: {ours} {expected}"[:300]
    assert_alike(model, twin)
    return model, twin, mine, theirs


def loops() -> dict[str, str]:
    wrong = {}
    for name, loop in LOOPS.items():
        try:
            model, *_ = both_ways(loop, lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9))
            model.close()
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"[:2000]
    return wrong


def test_what_a_loop_does_with_gradients():
    assert not drive(loops, 3)


def scaled(factor: float) -> Loop:
    """With a GradScaler; a loss that overflows in some steps, which are skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y) * (factor if y[0] % 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), norm, [p.detach().clone() for p in net.parameters()]

    return step


def scaling() -> None:
    for factor in (1.0, float("inf")):
        both_ways(lambda factor=factor: scaled(factor), lambda ps: torch.optim.AdamW(ps, 1e-2), 6)


def hooked(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Hooks of an optimizer look at gradients before the step, and at what is new afterwards."""
    seen: list[Any] = []
    before = optimizer.register_step_pre_hook(lambda *_: seen.append(clip(net.parameters(), 0.05)))
    after = optimizer.register_step_post_hook(
        lambda *_: seen.append([(p.grad is None, p.detach().norm()) for p in net.parameters()])
    )
    backward(net, optimizer, x, y)
    optimizer.step()
    before.remove()
    after.remove()
    return seen


def of_inputs(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Any:
    """``torch.autograd.grad`` and ``backward(inputs=)`` leave parameters' gradients as they are."""
    x.requires_grad_()
    given = torch.autograd.grad(F.cross_entropy(net(x), y), [x, next(p for n, p in net.named_parameters() if n == "b.weight")])
    backward(net, optimizer, x.detach(), y)
    F.cross_entropy(net(x), y).backward(inputs=[x])
    adversarial = (x + 0.1 * x.grad.sign()).detach()
    F.cross_entropy(net(adversarial), y).backward()
    optimizer.step()
    return given, adversarial


def refusals() -> None:
    torch.manual_seed(3)
    model = wrap(Net(), PLACEMENT)
    [(x, y)] = batches(1, 8, 20)
    x.requires_grad_()
    remote = model.a.weight

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    for what, attempt in {
        "its gradient|autograd would not know": lambda: loss() + remote.norm(),
        "autograd would not know of it": lambda: torch.autograd.grad(loss(), list(model.parameters())),
        "create_graph": lambda: torch.autograd.grad(loss(), x, create_graph=True),
        "create_graph=True": lambda: loss().backward(create_graph=True),
        "backward cannot run": lambda: torch.autograd.backward(loss(), inputs=[remote]),
        "cannot change its shape": lambda: model.d.weight.detach().t_(),
    }.items():
        with pytest.raises(rpc.NotSupported, match=what):
            attempt()
        model.zero_grad()
    for wrong in (torch.zeros(2), torch.zeros(16, 20, dtype=torch.float64)):
        with pytest.raises(RuntimeError, match="assigned grad"):
            remote.grad = wrong
    with torch.no_grad(), pytest.raises(RuntimeError, match="broadcast"):
        remote.add_(torch.zeros(3, 3))
    first = loss()
    first.backward(retain_graph=True)
    with pytest.raises(rpc.NotSupported, match="second time"):
        first.backward()


def messages() -> None:
    """From its second step on a loop costs one message to each worker for what it reads, one for what it writes; a loop that
    does neither costs none."""
    torch.manual_seed(3)
    model = wrap(Net(), PLACEMENT)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loops = [(0, None), (4, clip), (2, lambda ps, _: rescale_nothing(list(ps)))]
    for expected, change in loops:
        for number, (x, y) in enumerate(batches(4, 8, 20)):
            before = model.counters(False)["rpc_messages"]
            backward(model, optimizer, x, y)
            if change is not None:
                change(model.parameters(), 0.1)
            optimizer.step()
            spent = model.counters(False)["rpc_messages"] - before
            assert number < 2 or spent == expected, (expected, spent, number)


def rescale_nothing(parameters: list[nn.Parameter]) -> Any:
    return sum(float(p.grad.norm()) + float(p.detach().norm()) for p in parameters if p.grad is not None)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.calls = nn.Linear(20, 20), nn.Linear(20, 20), 0

    def forward(self, x):
        self.calls += 1
        return self.one(x) if self.calls % 2 else self.two(x)


def taking_turns() -> None:
    """What was read in an earlier step and is no gradient any more is no error when it is brought along."""
    model, twin = both(lambda: nn.Sequential(Sometimes(), nn.Linear(20, 4)), {"0": "worker2", "1": "worker1"}, capture="eager")
    for x, y in batches(5, 8, 20):
        found = []
        for network in (model, twin):
            network.zero_grad()
            F.cross_entropy(network(x), y).backward()
            found.append([float(p.grad.norm()) for p in reversed(list(network.parameters())) if p.grad is not None])
        assert found[0] == found[1]
    model.close()


def rest() -> None:
    scaling()
    taking_turns()
    make = lambda parameters: torch.optim.Adam(parameters, 1e-2)  # noqa: E731
    both_ways(lambda: hooked, make)
    both_ways(lambda: of_inputs, make)
    refusals()
    messages()


def test_scaling_hooks_inputs_and_what_is_refused():
    drive(rest, 3)
