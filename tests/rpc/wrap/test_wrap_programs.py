"""Whatever a program of PyTorch does around, with and inside of a wrapped model is as in one process: results, gradients,
state, Python's own state, and what it raises. Each program runs beside the same in one process, in two placements."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from beside import batches, beside, home, sgd, step
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

PLACEMENTS = {"turns": {"stem": "worker1", "body.0": "worker2", "head": "worker1"}, "half": {"body": "worker1"}}
DATA = batches(4, 8, 10)
PROGRAMS: dict[str, tuple[Callable[[Any], Iterator[Any]], Callable[[], nn.Module]]] = {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.again = nn.Linear(16, 16), nn.Linear(16, 16), None

    def inner(self, x):
        return self.two(torch.tanh(self.one(x)))

    def forward(self, x):
        return x + (self.inner(x) if self.again is None else checkpoint(self.inner, x, use_reentrant=self.again))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True))
        self.body, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(16, 4)
        self.gain, self.kept = 1.0, []

    def begin(self) -> None:
        """Before its first step."""

    def middle(self, x):
        for block in self.body:
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.middle(self.stem(x))) * self.gain


def program(found: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    """A program for ``Net``."""
    PROGRAMS[found.__name__] = found, Net
    return found


def forward(kind: type[Net]) -> type[Net]:
    """A net of its own, which is trained for some steps."""
    PROGRAMS[kind.__name__] = plainly, kind
    return kind


def loss_of(net: Any, at: int = 0) -> torch.Tensor:
    return F.cross_entropy(net(DATA[at][0]), DATA[at][1])


def given(net: Any) -> list[torch.Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def plainly(net: Any, change: Callable[[int], Any] = lambda number: None) -> Iterator[Any]:
    net.begin()
    optimizer = sgd(net)
    for number, (x, y) in enumerate(DATA):
        change(number)
        yield step(net, optimizer, x, y)
    yield net.kept


def run(name: str, how: str) -> None:
    warnings.simplefilter("ignore")
    found, make = PROGRAMS[name]
    beside(found, make, PLACEMENTS[how])


# -- gradients


def between(change: Callable[[Any], Any]) -> Callable[[Any], Iterator[Any]]:
    """A loop with that between backward and step."""

    def loop(net: Any) -> Iterator[Any]:
        optimizer = sgd(net)
        for number in range(len(DATA)):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            loss_of(net, number).backward()
            yield change(net)
            optimizer.step()

    return loop


def by_hand(net: Any) -> Any:
    total = sum(g.norm() ** 2 for g in given(net)) ** 0.5
    for g in given(net):
        g.mul_(0.3 / (total + 1e-6))
    return total


def assigned(net: Any) -> None:
    for p in net.parameters():
        p.grad = p.grad * 0.5 if p.dim() > 1 else None


def looked_at(net: Any) -> Any:
    some = given(net)
    return (
        [bool(g.isnan().any()) for g in some],
        [float(g.abs().max()) for g in some],
        [g.detach().cpu().numpy().sum() for g in some],
        torch.cat([g.flatten() for g in some]),
        [g.view(-1)[0].item() for g in some],
        torch.stack([p.detach().abs().mean() for p in net.parameters()]),
        [g.tolist() for g in some],
        [torch.isfinite(g).all() for g in some],
        [tuple(g.shape) for g in some],
        torch.equal(some[0], some[0].clone()),
        max(g.norm() for g in some),
    )


def written(net: Any) -> None:
    parameters = list(net.parameters())
    for p in parameters:
        p.grad.data.clamp_(-0.01, 0.01)
        if p.dim() > 1:
            p.grad[0] = 0.25
            p.grad[:, 1] *= 3
            p.grad.t()[2].add_(0.5)
        with torch.no_grad():
            p.mul_(0.99)
            p.data.add_(p.grad, alpha=-0.1)
            p.add_(torch.ones_like(p), alpha=1e-3)
    with torch.no_grad():
        nn.init.normal_(parameters[0], std=0.1)
        net.body[1].one.weight.copy_(net.body[0].one.weight)
        net.stem[0].bias += 1


def noisy(net: Any) -> None:
    source = torch.Generator().manual_seed(5)
    for g in given(net):
        g.add_(torch.randn(g.shape, generator=source) * 0.01)


clip = torch.nn.utils.clip_grad_norm_
BETWEEN: dict[str, Callable[[Any], Any]] = {
    **{f"clip {kind}": lambda net, kind=kind: clip(net.parameters(), 0.1, norm_type=kind) for kind in (1.0, 2.0, float("inf"))},
    "clip foreach": lambda net: clip(net.parameters(), 0.1, foreach=True, error_if_nonfinite=True),
    "clip one by one": lambda net: clip(net.parameters(), 0.1, foreach=False),
    "clip value": lambda net: torch.nn.utils.clip_grad_value_(net.parameters(), 0.01),
    "total norm": lambda net: torch.nn.utils.get_total_norm(given(net)),
    **{each.__name__: each for each in (by_hand, assigned, looked_at, written, noisy)},
}
PROGRAMS.update({name: (between(change), Net) for name, change in BETWEEN.items()})


@program
def twice_backward(net: Any) -> Iterator[Any]:
    loss = loss_of(net)
    loss.backward(retain_graph=True)
    yield given(net)
    (loss * 0.5).backward()
    loss.backward()  # raises


@program
def gradients_of_parameters(net: Any) -> Iterator[Any]:
    yield torch.autograd.grad(loss_of(net), list(net.parameters()))
    loss = loss_of(net) + 0.01 * sum(p.pow(2).sum() for p in net.parameters())
    loss.backward(inputs=[net.stem[0].weight, net.body[0].one.bias])
    yield loss
    yield [p.grad is None for p in net.parameters()]


@program
def gradient_penalty(net: Any) -> Iterator[Any]:
    optimizer = sgd(net)
    for x, y in DATA:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        loss = F.cross_entropy(net(x), y)
        found = torch.autograd.grad(loss, [x, *net.parameters()], create_graph=True)
        total = loss + sum(grad.pow(2).sum() for grad in found)
        total.backward(retain_graph=True)
        (total * 0.5).backward()
        optimizer.step()
        yield total, x.grad


@program
def hessian_vector_products(net: Any) -> Iterator[Any]:
    parameters = list(net.parameters())
    first = torch.autograd.grad(loss_of(net), parameters, create_graph=True)
    second = torch.autograd.grad(sum((g * g).sum() for g in first), parameters, create_graph=True, allow_unused=True)
    yield second
    yield torch.autograd.grad(sum(h.sum() for h in second if h is not None), parameters, allow_unused=True)


@program
def jacobians(net: Any) -> Iterator[Any]:
    net.eval()
    yield torch.autograd.functional.jacobian(lambda x: net(x).sum(0), DATA[0][0])
    yield torch.autograd.functional.hessian(lambda x: net(x).square().sum(), DATA[0][0][:2])


@program
def maml(net: Any) -> Iterator[Any]:
    fast = dict(net.named_parameters())
    for x, y in DATA[:2]:
        loss = F.cross_entropy(torch.func.functional_call(net, fast, (x,)), y)
        found = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), found)}
    loss = F.cross_entropy(torch.func.functional_call(net, fast, (DATA[2][0],)), DATA[2][1])
    loss.backward()
    yield loss


@program
def transforms(net: Any) -> Iterator[Any]:
    """Of torch.func: per-sample gradients."""
    net.eval()
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(parameters: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(net, parameters, (x[None],)), y[None])

    yield torch.func.grad(lambda x: net(x).square().sum())(DATA[0][0])
    yield torch.func.vmap(net)(DATA[0][0][:, None])
    yield torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, *DATA[0])


@program
def adversarial(net: Any) -> Iterator[Any]:
    x = DATA[0][0].clone().requires_grad_()
    F.cross_entropy(net(x), DATA[0][1]).backward(inputs=[x])
    F.cross_entropy(net((x + 0.1 * x.grad.sign()).detach()), DATA[0][1]).backward()
    yield x.grad


@program
def several_losses(net: Any) -> Iterator[Any]:
    hidden = net.middle(net.stem(DATA[0][0]))
    out = net.head(hidden)
    losses = [F.cross_entropy(out, DATA[0][1]), hidden.pow(2).mean(), net.body[0].one.weight.abs().sum()]
    torch.autograd.backward(losses, retain_graph=True)
    sum(losses[1:]).backward()
    yield losses


@program
def anomalies(net: Any) -> Iterator[Any]:
    with torch.autograd.detect_anomaly(check_nan=True):
        yield from plainly(net)


@program
def modified_before_the_backward(net: Any) -> Iterator[Any]:
    before, after = loss_of(net, 0), loss_of(net, 1)
    after.backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    yield before
    before.backward()  # raises


# -- hooks


def noted(net: Any, hook: Callable[[list[Any]], list[Any]]) -> Iterator[Any]:
    """A step with hooks, and one when they are removed."""
    notes: list[Any] = []
    handles = hook(notes)
    yield from plainly(net)
    for handle in handles:
        handle.remove()
    yield from plainly(net)
    yield notes


@program
def hooks_of_modules(net: Any) -> Iterator[Any]:
    def before(module: Any, args: Any, kwargs: Any) -> Any:
        return (args[0] + 1, *args[1:]), kwargs

    def hook(notes: list[Any]) -> list[Any]:
        return [
            net.body[0].one.register_forward_pre_hook(before, with_kwargs=True),
            net.body[0].two.register_forward_hook(lambda module, args, out: notes.append(home((args, out)))),
            net.stem[1].register_forward_hook(lambda module, args, out: out * 2, prepend=True),
            net.body[1].register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,)),
            net.body[1].one.register_full_backward_hook(lambda module, ins, outs: notes.append(home((ins, outs)))),
            net.register_forward_hook(lambda module, args, out: out + 1, always_call=True),
        ]

    yield from noted(net, hook)


@program
def hooks_of_tensors(net: Any) -> Iterator[Any]:
    weight, bias = net.body[0].one.weight, net.stem[0].bias

    def hook(notes: list[Any]) -> list[Any]:
        return [
            weight.register_hook(lambda grad: grad * 2),
            net.head.weight.register_hook(lambda grad: notes.append(home(grad))),
            bias.register_post_accumulate_grad_hook(lambda p: notes.append(home(p.grad))),
            torch.autograd.graph.register_multi_grad_hook([weight, bias], lambda grads: notes.append(home(grads))),
        ]

    yield from noted(net, hook)
    out = net(DATA[0][0])
    out.register_hook(lambda grad: grad * 3)
    out.retain_grad()
    out.sum().backward()
    yield out.grad


@program
def hooks_of_all_modules(net: Any) -> Iterator[Any]:
    names = {module: name for name, module in net.named_modules()}
    every = nn.modules.module.register_module_forward_hook
    yield from noted(net, lambda notes: [every(lambda m, args, out: notes.append((names.get(m), home(out))))])


@program
def optimizer_in_backward(net: Any) -> Iterator[Any]:
    """A step for each parameter as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in net.parameters()}

    def stepped(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(stepped)
    for number in range(3):
        loss_of(net, number).backward()
    yield loss_of(net)


@program
def saved_tensors(net: Any) -> Iterator[Any]:
    pack = torch.autograd.graph.saved_tensors_hooks(lambda t: (t.double(), t.dtype), lambda kept: kept[0].to(kept[1]))
    with pack:
        loss = loss_of(net)
    loss.backward()
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(net, 1)
    loss.backward()
    yield loss


# -- modes


@program
def checkpoints(net: Any) -> Iterator[Any]:
    for reentrant in (False, True):
        x = DATA[0][0].clone().requires_grad_()
        F.cross_entropy(checkpoint(net, x, use_reentrant=reentrant), DATA[0][1]).backward()
        yield x.grad
        for block in net.body:
            block.again = reentrant
        yield from plainly(net)


@program
def mixed_precision(net: Any) -> Iterator[Any]:
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2), sgd(net)
    for number, (x, y) in enumerate(DATA):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x).float(), y) + net(x * 2).float().square().mean()
        scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        yield clip(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        yield loss, scaler.get_scale()


@program
def without_gradients(net: Any) -> Iterator[Any]:
    for mode in (torch.no_grad, torch.inference_mode):
        net.eval()
        with mode():
            out = net(DATA[0][0])
            yield out, out.requires_grad, out.is_inference()
            out.add_(1)
        net.train()
        yield from plainly(net)
    with torch.no_grad():
        out = net(DATA[0][0])
        with torch.enable_grad():
            loss_of(net).backward()
    yield out, out.requires_grad


@program
def frozen(net: Any) -> Iterator[Any]:
    def change(number: int) -> None:
        net.body[0].requires_grad_(number % 2 == 0)
        net.head.weight.requires_grad = number != 2
        net.stem.train(number % 2 == 1)

    yield from plainly(net, change)
    loss = loss_of(net)
    net.body[1].requires_grad_(False)
    loss.backward()


@program
def operations_changed(net: Any) -> Iterator[Any]:
    class Rounded(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return tree_map_only(torch.Tensor, lambda t: t.bfloat16().to(t.dtype), func(*args, **(kwargs or {})))

    with torch.no_grad(), Rounded():
        yield net(DATA[0][0])


@program
def flags_of_torch(net: Any) -> Iterator[Any]:
    before = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
    try:
        torch.use_deterministic_algorithms(True)
        torch.set_flush_denormal(True)
        with torch.backends.mkldnn.flags(enabled=False):
            yield from plainly(net)
        torch.set_default_dtype(torch.float64)
        yield torch.ones(2) * net(DATA[0][0])[:, :2].double()
        yield net(DATA[0][0] * 1e-40)
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_default_dtype(before[1])
        torch.set_flush_denormal(False)


@program
def threads_of_torch(net: Any) -> Iterator[Any]:
    """Kernels choose the order of sums by how many there are."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for at in range(2):
            loss = loss_of(net, at)
            loss.backward()
            yield loss
    finally:
        torch.set_num_threads(before)


# -- what is changed after ``wrap``


@program
def attributes(net: Any) -> Iterator[Any]:
    def change(number: int) -> None:
        net.gain = 1.0 + number
        net.stem[1].momentum = [0.1, 0.5, None, 0.2][number]
        net.stem[1].eps = 1e-3
        net.body[0].again = None if number % 2 else False
        if number == 2:
            net.stem[1].reset_running_stats()
            net.stem[1].running_mean = torch.arange(16.0)

    yield from plainly(net, change)


@program
def modules_and_parameters(net: Any) -> Iterator[Any]:
    """Replaced, added and deleted: also at other workers, and by what lies here."""

    def change(number: int) -> None:
        torch.manual_seed(number)
        if number == 1:
            net.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
        elif number == 2:
            net.body[0].one.weight = nn.Parameter(torch.randn(16, 16) / 4)
            net.body.append(nn.Tanh())
        elif number == 3:
            del net.body[1]
            net.body[0].register_parameter("extra", nn.Parameter(torch.ones(16)))
            net.body[0].register_forward_hook(lambda module, args, out: out * module.extra)
            net.stem[1].register_buffer("more", torch.zeros(2))

    for number in range(4):
        change(number)
        yield from plainly(net)


@program
def parametrized(net: Any) -> Iterator[Any]:
    parametrizations.weight_norm(net.body[0].one)
    parametrizations.spectral_norm(net.head)
    parametrizations.orthogonal(net.body[1].two)
    yield from plainly(net)
    with parametrize.cached():
        (loss_of(net) + loss_of(net, 1)).backward()
    parametrize.remove_parametrizations(net.body[0].one, "weight")
    prune.l1_unstructured(net.body[0].one, "weight", 0.3)
    prune.random_unstructured(net.stem[0], "bias", 2)
    yield from plainly(net)
    prune.remove(net.body[0].one, "weight")
    yield net.body[0].one.weight


@program
def converted(net: Any) -> Iterator[Any]:
    net.to("cpu").float()
    net.body.double()
    net.middle = lambda x: net.body[1](net.body[0](x.double())).float()
    yield from plainly(net)
    del net.middle
    net.bfloat16()
    yield [p.dtype == torch.bfloat16 for p in net.parameters()], net(DATA[0][0].bfloat16())
    net.float()


@program
def data_and_vectors(net: Any) -> Iterator[Any]:
    for number in range(3):
        yield from plainly(net)
        for p in net.parameters():
            p.data = p.data * 0.99
            p.data.clamp_(-0.3, 0.3)
        with torch.no_grad():
            vector = nn.utils.parameters_to_vector(net.parameters())
            nn.utils.vector_to_parameters(vector * 0.99, net.parameters())
        if number == 1:
            net.apply(lambda m: nn.init.xavier_uniform_(m.weight) if isinstance(m, nn.Linear) else None)
            nn.init.zeros_(net.stem[0].bias)


@program
def averaged(net: Any) -> Iterator[Any]:
    average, shadow = torch.optim.swa_utils.AveragedModel(net), {}
    for _ in range(2):
        yield from plainly(net)
        average.update_parameters(net)
        for name, p in net.named_parameters():
            shadow.setdefault(name, p.detach().clone()).lerp_(p.detach(), 0.1)
    torch.optim.swa_utils.update_bn([x for x, _ in DATA], average)
    yield average.state_dict(), shadow


@program
def copied(net: Any) -> Iterator[Any]:
    """A copy is a model of its own, and trains as one."""
    twin = copy.deepcopy(net)
    yield type(twin).__name__
    yield from plainly(twin)
    yield twin.state_dict()
    with torch.no_grad():
        twin.head.weight.zero_()
    yield from plainly(net)
    optimizer = sgd(net)
    step(net, optimizer, *DATA[0])
    again = copy.deepcopy(optimizer.state_dict())
    step(net, optimizer, *DATA[1])
    optimizer.load_state_dict(again)
    yield step(net, optimizer, *DATA[2])


# -- what a loop does with results


@program
def asked(net: Any) -> Iterator[Any]:
    out = net(DATA[0][0])
    loss = F.cross_entropy(out, DATA[0][1])
    yield (
        loss.item(),
        float(loss),
        f"{loss:.3f}",
        loss > 0.5,
        bool(loss > 0.5),
        (out > 0).tolist(),
        len(out),
        out.shape,
        out.dim(),
    )
    yield out.argmax(1) == DATA[0][1], (out.argmax(1) == DATA[0][1]).float().mean().item()
    yield np.asarray(out.detach().cpu()), [row.sum() for row in out], torch.equal(out, out.clone()), out.isnan().any()
    yield str(out.detach().cpu()), out.device.type, out.dtype, out.is_contiguous(), out.stride(), out.requires_grad, out.is_leaf
    yield (
        isinstance(out, torch.Tensor),
        torch.is_tensor(out),
        out.numel(),
        out.element_size(),
        out.data.max(),
        int(out.argmax()),
    )
    if loss.item() > 0 and not torch.isnan(loss) and loss:
        yield "branched"


@program
def mixed_with_plain_tensors(net: Any) -> Iterator[Any]:
    out, plain = net(DATA[0][0]), torch.randn(8, 4, requires_grad=True)
    index, mask = torch.tensor([0, 2, 2]), torch.arange(8) % 2 == 0
    found = [out + plain, plain * out, torch.cat([plain, out]), out[index], out[mask], torch.where(mask[:, None], out, plain)]
    found += [plain @ out.t(), torch.stack([plain, out]).mean(0), out.masked_fill(mask[:, None], 0.0), out - 3, 2 / (out + 10)]
    found += [
        torch.einsum("ij,kj->ik", plain, out),
        F.mse_loss(out, plain),
        torch.max(out, plain),
        out.index_add(0, index, plain[:3]),
    ]
    yield found
    sum(value.sum() for value in found).backward()
    yield plain.grad
    with torch.no_grad():
        plain.copy_(out)
        into = torch.zeros(8, 4)
        into[:4] = out[:4]
        into.add_(out)
        torch.add(out, 1, out=into)
        yield plain, into, torch.zeros_like(out), out.new_ones(2), torch.full_like(out, 2.0), out.to(torch.float64), out.int()
        out[0] = torch.ones(4)
        out.t_()
        yield out, out.shape


@program
def writes_into_results(net: Any) -> Iterator[Any]:
    x = DATA[0][0].clone()
    out = net(x) * 1
    view = out[:, :2]
    out.mul_(2)
    view.add_(1)
    x.zero_()  # the model has had it
    yield out, view, x
    out.sum().backward()
    hidden = net.stem(DATA[0][0])
    loss = net.head(torch.sigmoid(net.body[0](hidden))).sum()
    hidden.add_(1)
    loss.backward()


@program
def kept_over_steps(net: Any) -> Iterator[Any]:
    """Losses and outputs with their graphs; each goes backward later, or never."""
    optimizer, losses = torch.optim.SGD(net.parameters(), 0.0), []
    for at in range(len(DATA)):
        optimizer.zero_grad()
        losses.append(loss_of(net, at))
        (losses[-1] + losses[0].detach()).backward(retain_graph=True)
    total = torch.stack(losses).mean()
    yield total, losses


# -- errors in the middle of a step, after which training goes on


def failing(where: str) -> Callable[[Any], Iterator[Any]]:
    def loop(net: Any) -> Iterator[Any]:
        def fail(*_: Any) -> None:
            raise KeyError(f"in {where}")

        yield from plainly(net)
        optimizer = sgd(net)
        for number in range(3):
            handle = None
            try:
                optimizer.zero_grad()
                if where == "forward":
                    handle = net.body[1].one.register_forward_hook(fail)
                out = net(DATA[number][0])
                if where == "backward":
                    handle = out.register_hook(fail)
                if where == "the loss":
                    F.cross_entropy(out, torch.tensor([0, 1]))
                out.sum().backward()
                if where == "the step":
                    fail()
            except (KeyError, ValueError) as error:
                yield type(error).__name__, str(error)
            if handle is not None:
                handle.remove()
        yield from plainly(net)

    return loop


PROGRAMS.update({f"fails in {where}": (failing(where), Net) for where in ("forward", "backward", "the loss", "the step")})


@program
def a_shape_that_does_not_fit(net: Any) -> Iterator[Any]:
    yield from plainly(net)
    net.eval()
    with torch.no_grad():
        net(torch.randn(3, 11)).sum().item()  # raises


# -- forwards


@forward
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


@forward
class Remembering(Net):
    """A state that goes from call to call; results of earlier calls."""

    def forward(self, x):
        x = self.middle(self.stem(x))
        if self.kept:
            x = x + 0.5 * self.kept[-1].detach()
        self.kept.append(x)
        return super().forward(DATA[0][0]) + self.head(x)


@forward
class Leaking(Net):
    """Keeps a graph, whose second backward is an error."""

    def forward(self, x):
        self.kept.append(self.stem(x) if not self.kept else self.kept[-1] * 0.5 + self.stem(x))
        return self.head(self.kept[-1])


TABLE: dict[str, Any] = {"factor": 1.0}


@forward
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


@torch.library.custom_op("rdmarpc_wrap_tests::increment", mutates_args={"x"})
def increment(x: torch.Tensor) -> None:
    x.add_(1)


@forward
class Functions(Net):
    """With a backward of their own, that get a part's weight; operators of the user's."""

    def forward(self, x):
        x = Reversed.apply(self.stem(x), self.body[0].one.weight)
        x = Doubled.apply(self.middle(x) * 1)
        increment(x)
        return self.head(x)


@forward
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


@forward
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


@forward
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


@forward
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


@forward
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


@forward
class Subclass(Net):
    """A class of tensors of the user's, of what lies here."""

    def forward(self, x):
        x = x.as_subclass(Tagged)
        self.kept.append(type(x * 2).__name__)
        return super().forward((x * 2).as_subclass(torch.Tensor))


@forward
class Statistics(Net):
    """A norm that is called twice; its buffers are read when it has run."""

    def forward(self, x):
        h = self.stem[1](self.stem[1](self.stem[0](x)) * 2) - self.stem[1].running_mean
        return self.head(self.middle(h))


@program
def several_threads(net: Any) -> Iterator[Any]:
    """They use one model at once: forwards, and backwards of graphs of their own."""
    net.eval()
    found: dict[int, Any] = {}

    def use(first: int) -> None:
        for at in range(first, first + 4):
            x = DATA[at % 4][0].clone().requires_grad_()
            found[at] = net(x), *torch.autograd.grad(net(x).square().sum(), x)

    threads = [threading.Thread(target=use, args=(first,)) for first in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    yield [found[at] for at in sorted(found)], len(found)


@program
def forked_loaders(net: Any) -> Iterator[Any]:
    """A loader's processes are forked beside a model."""
    rows = torch.utils.data.TensorDataset(torch.cat([x for x, _ in DATA]), torch.cat([y for _, y in DATA]))
    optimizer = sgd(net)
    for _ in range(2):
        for x, y in torch.utils.data.DataLoader(rows, 8, num_workers=1, multiprocessing_context="fork"):
            yield step(net, optimizer, x, y)


def compiled() -> nn.Module:
    net = Net()
    net.body[0].compile(backend="eager")
    return net


PROGRAMS["a compiled part"] = plainly, compiled


@program
def compiled_later(net: Any) -> Iterator[Any]:
    yield from plainly(net)
    yield torch.compile(net, backend="eager")(DATA[0][0])


def hooked() -> nn.Module:
    """Hooks, a parametrization and frozen parameters from before ``wrap``."""
    net = Net()
    net.stem.register_forward_pre_hook(functools.partial(_added, 1.0))
    net.body[0].one.register_full_backward_hook(_halved)
    net.head.weight.register_hook(_doubled)
    net.body[1].two.bias.register_post_accumulate_grad_hook(_cleared)
    parametrizations.weight_norm(net.body[1].one)
    net.stem[0].weight.requires_grad_(False)
    return net


def _added(by: float, module: nn.Module, args: Any) -> Any:
    return (args[0] + by,)


def _halved(module: nn.Module, ins: Any, outs: Any) -> Any:
    return (ins[0] * 0.5,)


def _doubled(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


def _cleared(parameter: torch.Tensor) -> None:
    parameter.grad.zero_()


PROGRAMS["hooks of before wrap"] = plainly, hooked


@pytest.mark.parametrize("how", PLACEMENTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_as_in_one_process(drive, name, how):
    drive(run, name, how)
