"""Programs chosen to break a model whose tensors lie elsewhere. Each runs over ``VARIANTS`` placements (``spread``).

Each is ``program(place, keep)`` as the drawn ones; ``place(net)`` leaves the placement to the variant.
"""

# ruff: noqa: B023, E731
from __future__ import annotations

import copy
import gc
import inspect
import io
import itertools
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

VARIANTS = 4

NAMES: list[str] = []


def spread(place: Any, variant: int, net: nn.Module, placement: dict[str, str] | None = None) -> nn.Module:
    """All at one worker; the first half, or the last part, at one; in turns at two."""
    parts = [name for name, _ in net.named_children()] or [""]
    ways = [
        {"": "worker1"},
        dict.fromkeys(parts[: (len(parts) + 1) // 2], "worker1"),
        {name: f"worker{1 + n % 2}" for n, name in enumerate(parts)},
        {parts[-1]: "worker1"},
    ]
    return place(net, placement if placement is not None else ways[variant])


def text(name: str) -> str:
    return inspect.getsource(globals()[name])


def probe(program: Callable[..., None]) -> Callable[..., None]:
    NAMES.append(program.__name__)
    return program


class Held(nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        if tensor.requires_grad:
            self.t = nn.Parameter(tensor.detach())
        else:
            self.register_buffer("t", tensor)


def at(place: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [held.t for held in place(nn.ModuleList(Held(t) for t in tensors))]


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), *between, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def attempt(keep: Any, name: str, function: Callable[[], Any]) -> None:
    """An error is noted as any value. Names that begin with "write" say that later values depend on it (``judge.compared``)."""
    try:
        keep(name, function())
    except Exception as error:
        keep(name, error)


def train(net: Any, keep: Any, steps: int = 3, optimizer: Any = None, name: str = "loss") -> None:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(numbers(3, 4, seed=step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        keep(name, loss)


# Memory in common


@probe
def shared_memory(place, keep):
    base = numbers(4, 4)
    a, b = at(place, base, base[1:])
    a.mul_(2)
    keep("b", b)
    b.zero_()
    keep("a", a)


@probe
def flat_parameters(place, keep):
    net, flat = mlp(), numbers(400).requires_grad_()
    start = 0
    for p in net.parameters():
        p.data = flat.detach()[start : start + p.numel()].view_as(p)
        start += p.numel()
    net = place(net)
    train(net, keep)
    keep("flat", flat)


@probe
def tied_across_places(place, keep):
    net = mlp()
    net.extra = nn.Linear(8, 8)
    net[2].weight = net.extra.weight
    net.forward = lambda x: net[4](net.extra(net[3](net[2](net[1](net[0](x))))))
    net = place(net)
    train(net, keep, optimizer=torch.optim.Adam(net.parameters(), foreach=True))


@probe
def view_before_placing(place, keep):
    net = mlp()
    row, whole = net[0].weight.detach()[0], net[4].weight.data
    net = place(net)
    train(net, keep)
    keep("row", row)
    row.zero_(), whole.fill_(0.5)
    keep("result", net(numbers(2, 4)))


@probe
def kept_view_written(place, keep):
    net = place(mlp())
    views = [net[0].weight.detach()[1:], net[4].weight.data.t(), net[2].bias.detach()]
    for n, view in enumerate(views):
        view[0].fill_(n + 0.5)
        train(net, keep, 1)
    keep("views", views)


@probe
def data_swaps(place, keep):
    a, b, c = at(place, numbers(3, 3).requires_grad_(), numbers(3, 3, seed=2), numbers(2))
    plain = numbers(3, 3, seed=3)
    for name, write in {
        "write remote": lambda: setattr(a, "data", b),
        "write plain": lambda: setattr(a, "data", plain * 2),
        "write shape": lambda: setattr(c, "data", numbers(4)),
        "write remote to plain": lambda: setattr(plain, "data", b),
        "write set_": lambda: b.set_(numbers(3, 3, seed=5)) is b,
        "write storage": lambda: plain.set_(b.untyped_storage()) is plain,
    }.items():
        attempt(keep, name, write)
        keep(name, [a, b, c, plain])
    b.mul_(2)
    keep("after", [a, b, plain])


@probe
def swapped_tensors(place, keep):
    net = place(mlp())
    new = nn.Parameter(torch.ones(8, 4))
    optimizer = torch.optim.Adam(net.parameters())
    train(net, keep, 1, optimizer)
    attempt(keep, "write swap", lambda: torch.utils.swap_tensors(net[0].weight, new))
    train(net, keep, 2, optimizer)
    keep("new", new)


@probe
def aliasing_results(place, keep):
    class Alias(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("b", torch.zeros(3))

        def forward(self, x):
            return x, self.w, self.b, x[:1], (x, x)

    net = place(Alias())
    x = numbers(3)
    out = net(x)
    keep("same", [out[0] is x, out[1] is net.w, out[2] is net.b, out[4][0] is out[4][1]])
    out[2].add_(5), out[3].mul_(3)
    with torch.no_grad():
        out[1].sub_(1)
    keep("all", [x, net.w, net.b, out])


@probe
def detach_shares(place, keep):
    a, b = at(place, numbers(3).requires_grad_(), numbers(3, seed=2))
    a.detach().zero_(), b.detach()[1:].fill_(4), b.data[0].copy_(a.data[0])
    keep("both", [a, b, a.data_ptr() != b.data_ptr() if type(a) is torch.Tensor else True])


@probe
def plain_changed_after_use(place, keep):
    a, b = at(place, numbers(64), numbers(64, seed=2))
    plain, array = numbers(64, seed=3), np.ones(64, np.float32)
    shared = torch.from_numpy(array)
    y, z, w = a + plain, b * shared, a * plain.numpy().sum()
    plain.zero_()
    array[:] = 7
    keep("before", [y, z, w])
    keep("after", [a + plain, b * shared])


@probe
def copy_changed_after_use(place, keep):
    a, b = at(place, numbers(64), numbers(64, seed=2))
    copies = [a.cpu().clone(), a.clone(), a + b, torch.empty(64).copy_(b)]
    a.zero_(), b.fill_(1)
    keep("copies", copies)
    c = a + b
    b.mul_(3)
    keep("c", [c, a + b, b])


@probe
def copies(place, keep):
    a, b = at(place, numbers(3, 4), numbers(3, 4, seed=2).double())
    plain = torch.zeros(3, 4, dtype=torch.int32)
    keep("1", [plain.copy_(a * 10), a.copy_(plain), b.copy_(a)])
    a[0].copy_(b[1]), b.t().copy_(torch.ones(4, 1)), plain[:, 1:].copy_(a[:, :1])
    keep("2", [a, b, plain])
    plain += a.int()
    attempt(keep, "into plain", lambda: torch.zeros(3, 4).add_(a).mul_(b.float()))
    attempt(keep, "write overlap", lambda: a[0, 1:].copy_(a[0, :-1]))
    attempt(keep, "too small", lambda: a[:, :2].copy_(b))


# Autograd


@probe
def version_is_checked(place, keep):
    for number, write in enumerate(
        [
            lambda net: net[4].weight.mul_(2),
            lambda net: net[4].weight[0].zero_(),
            lambda net: net[4].weight.data.mul_(2),
            lambda net: net[4].weight.copy_(torch.ones(2, 8)),
            lambda net: nn.init.zeros_(net[4].weight),
            lambda net: torch._foreach_mul_(list(net.parameters()), 2.0),
            lambda net: net[4].weight.detach().add_(1),
        ]
    ):
        net = place(mlp())
        y = net(numbers(3, 4)).pow(2).sum()
        with torch.no_grad():
            write(net)
        attempt(keep, f"write {number}", y.backward)
        keep("gradients", [p.grad for p in net.parameters()])


@probe
def version_after_optimizers(place, keep):
    made = [lambda p, k=k, f=f: k(p, lr=0.1, **f) for k in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad)
            for f in ({"foreach": True}, {"foreach": False}, {"fused": True})]  # fmt: skip
    for number, make in enumerate(made):
        net = place(mlp())
        optimizer = make(net.parameters())
        y = net(numbers(3, 4)).pow(2).sum()
        y.backward(retain_graph=True)
        optimizer.step()
        attempt(keep, f"optimizer {number}", y.backward)
        keep("net", net)


@probe
def version_of_activations(place, keep):
    for number, write in enumerate([lambda h: h.add_(1), lambda h: h[0].zero_(), lambda h: F.relu(h, inplace=True)]):
        net = place(mlp())
        h = net[1](net[0](numbers(3, 4)))
        y = (net[2](h) * h).sum()
        with torch.no_grad():
            write(h)
        attempt(keep, f"write {number}", y.backward)


@probe
def autograd_errors(place, keep):
    a, b = at(place, numbers(3).requires_grad_(), numbers(3, seed=2))
    attempt(keep, "leaf", lambda: a.add_(1))
    attempt(keep, "leaf view", lambda: a[0].zero_())
    y = (a * b).exp().sum()
    y.backward()
    attempt(keep, "twice", y.backward)
    attempt(keep, "no graph", b.sum().backward)
    attempt(keep, "vector", (a * 2).backward)
    attempt(keep, "unused", lambda: torch.autograd.grad((b.clone().requires_grad_() * 2).sum(), a))
    attempt(keep, "shape", lambda: a @ torch.ones(4))
    attempt(keep, "dtype", lambda: a @ torch.ones(3, dtype=torch.float64))
    keep("a", [a, a.grad])


@probe
def hooks_return_others(place, keep):
    net = place(mlp())
    net[0].weight.register_hook(lambda g: torch.ones(8, 4))
    net[4].weight.register_hook(lambda g: g.detach().cpu() * 2)
    net[2].bias.register_hook(lambda g: net[0].bias.detach() * 0.1)
    x = numbers(3, 4).requires_grad_()
    h = net[0](x)
    h.register_hook(lambda g: torch.full((3, 8), 0.25))
    net[1:](h).sum().backward()
    keep("gradients", [x.grad, *[p.grad for p in net.parameters()]])


@probe
def hooks_raise(place, keep):
    net = place(mlp())
    handle = net[2].weight.register_hook(lambda g: 1 / 0)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(2):
        attempt(keep, "raised", lambda: net(numbers(3, 4)).sum().backward())
    keep("gradients", [p.grad for p in net.parameters()])
    handle.remove()
    train(net, keep, 2, optimizer)


@probe
def interrupted(place, keep):
    net = place(mlp(nn.BatchNorm1d(8)))
    optimizer = torch.optim.AdamW(net.parameters())
    for where in (net[3], net[1]):
        handle = where.register_forward_hook(lambda *_: exec("raise KeyboardInterrupt('pressed')"))
        try:
            net(numbers(5, 4)).sum().backward()
        except KeyboardInterrupt as error:
            keep("interrupt", str(error))
        handle.remove()
        train(net, keep, 2, optimizer)


@probe
def gradients_by_hand(place, keep):
    net = place(mlp())
    w = net[0].weight
    for name, value in {
        "plain": torch.ones(8, 4),
        "remote": w.detach() * 2,
        "none": None,
        "view": torch.ones(4, 8).t(),
    }.items():
        attempt(keep, f"write {name}", lambda: setattr(w, "grad", value))
        train(net, keep, 1)
        keep(name, w.grad)
    attempt(keep, "shape", lambda: setattr(w, "grad", torch.ones(3)))
    attempt(keep, "dtype", lambda: setattr(w, "grad", torch.ones(8, 4).double()))
    held = w.grad
    net.zero_grad(set_to_none=False)
    keep("zeroed", [held, held is w.grad])
    net(numbers(3, 4)).sum().backward()
    keep("held", held)


@probe
def expanded_gradients(place, keep):
    torch.manual_seed(0)
    net = place(nn.Sequential(nn.Conv1d(2, 3, 3), nn.Linear(6, 5), nn.Flatten(), nn.Linear(15, 17)))
    x = numbers(4, 2, 8).requires_grad_()
    for loss in (lambda y: y.sum(), lambda y: y.mean(0).sum(), lambda y: y[:, ::2].sum(), lambda y: (y.t() @ y).trace()):
        net.zero_grad()
        loss(net(x)).backward()
        keep("gradients", [x.grad, *[p.grad for p in net.parameters()]])


@probe
def own_functions(place, keep):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, mode):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, w)
            ctx.mark_non_differentiable(sign := x.sign())
            return (x * w, sign) if mode else (x.mul_(1) if not x.requires_grad else x * 1, x.view(-1))

        @staticmethod
        def backward(ctx, g, other):
            x, w = ctx.saved_tensors
            return None if g is None else g * w, None if g is None else (g * x).sum(0), None

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            return g * 3 * ctx.saved_tensors[0] ** 2

    a, b = at(place, numbers(3, 4).requires_grad_(), numbers(4, seed=2).requires_grad_())
    y, sign = Twice.apply(a, b, True)
    keep("gradients", [y, sign, *torch.autograd.grad(y.sum(), (a, b), create_graph=True)])
    attempt(keep, "view", lambda: torch.autograd.grad(Twice.apply(a, b, False)[1].sum(), (a, b), allow_unused=True))
    [g] = torch.autograd.grad(Once.apply(a).sum(), a, create_graph=True)
    attempt(keep, "once", lambda: torch.autograd.grad(g.sum(), a))


@probe
def hidden_writes(place, keep):
    net = place(mlp(nn.BatchNorm1d(8)))
    norm = net[2]
    for reentrant in (True, False):
        x = numbers(6, 4).requires_grad_()
        checkpoint(net, x, use_reentrant=reentrant).sum().backward()
        keep("norm", [norm.running_mean, norm.num_batches_tracked, x.grad])
    F.batch_norm(net[0](x), norm.running_mean, norm.running_var, training=True)
    mean = torch.zeros(8)
    F.batch_norm(net[0](x), mean, torch.ones(8), training=True)
    checkpoint(lambda v: checkpoint(net, v, use_reentrant=False), x, use_reentrant=False).sum().backward()
    keep("all", [norm.running_var, mean, x.grad])


@probe
def second_order(place, keep):
    net = place(mlp())
    x = numbers(5, 4).requires_grad_()
    y = net(x).pow(2).mean()
    [g] = torch.autograd.grad(y, x, create_graph=True)
    (y + g.pow(2).sum()).backward()
    params = {name: p.detach() for name, p in net.named_parameters()}
    f = lambda params: torch.func.functional_call(net, params, (numbers(2, 4),)).pow(2).sum()
    attempt(keep, "jacrev", lambda: torch.func.jacrev(lambda x: net(x))(numbers(2, 4)))
    attempt(keep, "hessian", lambda: torch.func.jacrev(torch.func.grad(f))(params)["0.bias"])
    attempt(keep, "vjp", lambda: torch.func.vjp(f, params)[1](torch.ones(()))[0])
    attempt(keep, "vmap", lambda: torch.vmap(net, randomness="error")(numbers(3, 2, 4)))
    attempt(keep, "plain", lambda: torch.func.functional_call(net, {"0.weight": torch.ones(8, 4)}, (numbers(2, 4),)))


@probe
def forward_mode(place, keep):
    net = place(mlp())
    attempt(keep, "jvp", lambda: torch.func.jvp(lambda x: net(x), (numbers(2, 4),), (torch.ones(2, 4),)))


@probe
def saved_tensors(place, keep):
    net = place(mlp())
    log = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (log.append(t.shape), t.tolist())[1], torch.tensor):
        net(numbers(3, 4)).sum().backward()
    keep("saved", log)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t.fill_(0.5)):
        net(numbers(3, 4)).sum().backward()
    keep("gradients", [p.grad for p in net.parameters()])


@probe
def grad_modes(place, keep):
    net = place(mlp())
    with torch.inference_mode():
        y = net(numbers(3, 4))
    attempt(keep, "inference", lambda: (net[0].weight.sum() * y).sum().backward())
    attempt(keep, "in place", lambda: y.add_(1))
    net[0].requires_grad_(False)
    z = net(numbers(3, 4)).sum()
    net[0].requires_grad_(True)
    z.backward()
    with torch.no_grad(), torch.enable_grad():
        keep("needs", [net(numbers(1, 4)).requires_grad, net[0].weight.detach().requires_grad])
    keep("gradients", [p.grad for p in net.parameters()])


# Values and constants


@probe
def constants(place, keep):
    a, b = at(place, torch.arange(4), numbers(4))
    for c in (
        2,
        2.0,
        True,
        False,
        1,
        1.0,
        0,
        0.0,
        -0.0,
        0.1,
        1j,
        2**40,
        float("inf"),
        float("-inf"),
        float("nan"),
        np.float64(2),
    ):
        attempt(keep, f"{c!r}", lambda: [a * c, b * c, a + c, b + c, b.clone().fill_(c), torch.where(b > 0, b, c)])
        attempt(keep, f"division {c!r}", lambda: [a / c, b / c, b // c, -b + c, torch.full_like(b, c), b == c, b.clamp(min=c)])


@probe
def default_dtype(place, keep):
    a, b = at(place, torch.arange(4), numbers(4))
    torch.set_default_dtype(torch.float64)
    keep("double", [a / 3, a * 0.5, a.mean(dtype=None) if a.is_floating_point() else a.sum(), b * 0.1, a.sqrt(), a + 1j])
    torch.set_default_dtype(torch.float32)
    keep("single", [a / 3, a * 0.5, a.sqrt()])
    torch.set_flush_denormal(True)
    keep("flushed", [b * 1e-39, b / 1e39])
    torch.set_flush_denormal(False)
    keep("denormal", [b * 1e-39])


@probe
def changing_numbers(place, keep):
    a, b = at(place, numbers(4), numbers(4, seed=2))
    for n in range(120):
        a = a * (1 + n / 1000) + n % 7
        b.add_(a, alpha=0.5 / (n + 1)).clamp_(-n - 1.0, 50)
    keep("both", [a, b])


@probe
def zero_dim(place, keep):
    a, b, n = at(place, torch.tensor(1.5, dtype=torch.float64), numbers(3), torch.tensor(2))
    plain = torch.tensor(3.0)
    keep("promoted", [a * b, b * a, plain * b, a * torch.ones(3), n * b, b + n, plain * a, torch.tensor(2j) * b, n / 2])
    keep("python", [float(a), int(n), bool(n), [1, 2, 3][n], list(range(n)), "abc"[:n], f"{a:.2f}", a.item(), round(a.item())])
    attempt(keep, "vector", lambda: float(b))
    attempt(keep, "truth", lambda: bool(b))
    keep("rest", [b[n], b[n].shape, torch.ones(3)[n], a.expand(3), b.sum() + a, n.numpy().tolist() if n.dim() else 0])


@probe
def empty(place, keep):
    a, b = at(place, numbers(0, 3), numbers(3, 0))
    keep(
        "some",
        [a @ b, b @ a, a.sum(), a.mean(), torch.cat([a, numbers(2, 3)]), a[b.sum(1).long()[:0]], a.view(3, 0), a.max(1)[0]],
    )
    attempt(keep, "max", lambda: a.max())
    attempt(keep, "stack", lambda: torch.stack([a, torch.zeros(0, 3)]))


# Operands


@probe
def mixed_operands(place, keep):
    tensors = [numbers(3, 3, seed=n) for n in range(3)]
    placed = at(place, *tensors)
    for pick in itertools.product((0, 1), repeat=3):
        x, y, z = (placed[n] if p else tensors[n].clone() for n, p in enumerate(pick))
        keep(
            str(pick),
            [x + y, torch.addmm(x, y, z), torch.where(x > 0, y, z), torch.lerp(x, y, z), torch.addcmul(x, y, z, value=2)],
        )
        keep(str(pick), [x.clone().add_(y).mul_(z), x.clamp(y, y + z.abs()), torch.stack([x, y, z]), torch.cat([z, x], 1)])
        keep(
            str(pick),
            [torch.einsum("ij,jk,kl", x, y, z), F.linear(x, y, z[0]), torch.maximum(x, z), x @ y, torch.outer(x[0], y[0])],
        )


@probe
def mixed_gradients(place, keep):
    a, b = at(place, numbers(3, 3).requires_grad_(), numbers(3, 3, seed=2).requires_grad_())
    c = numbers(3, 3, seed=3).requires_grad_()
    for _ in range(2):
        y = (a @ c + b.tanh() @ a) * c.sum(0) + torch.cat([a[:1], c[1:]]) + torch.stack([b, c]).prod(0)
        y.sum().backward()
    keep("gradients", [a.grad, b.grad, c.grad])


@probe
def indexing(place, keep):
    a, i, m = at(place, numbers(4, 5), torch.tensor([3, 0, 3]), torch.tensor([True, False, True, True]))
    pi, pm = torch.tensor([3, 0, 3]), torch.tensor([True, False, True, True])
    for index in (
        i,
        pi,
        m,
        pm,
        [0, 2],
        (i, pi),
        (slice(None), i),
        (pm, slice(1, 3)),
        (None, i),
        (..., 1),
        (i[0],),
        (i[:, None], pi),
    ):
        attempt(keep, "read", lambda: a[index])
        attempt(keep, "write", lambda: a.clone().__setitem__(index, 7.5))
        w = a.clone()
        w[index] = a[index] * 2
        keep("written", w)
    keep("plain", [torch.eye(4)[i], torch.eye(4)[m], a.index_select(0, pi), a.gather(1, i[None].expand(4, 3)), a.take(pi)])
    keep(
        "put",
        [a.index_put((i,), torch.ones(()), accumulate=True), a.index_add(0, i, torch.ones(3, 5)), a.index_fill(0, pi, -0.0)],
    )
    attempt(keep, "wrong", lambda: a[:, :, 0])


@probe
def masks(place, keep):
    a, m = at(place, numbers(4, 4), numbers(4, 4, seed=2) > 0)
    pm = numbers(4, 4, seed=3) > 0
    a[pm] = 1.5
    a[m & pm] += 2
    a[~m] *= a[~m]
    keep("a", [a, a.masked_fill(pm, float("nan")), a.masked_scatter(m, torch.arange(16.0)), a.where(pm, 0), a[m], a[pm].sum()])
    p = torch.zeros(4, 4)
    p[m] = 3.0
    p[pm] = a[pm]
    p.masked_fill_(m, a.max())
    keep("p", p)


@probe
def shapes_from_data(place, keep):
    a, b = at(place, torch.tensor([3, 1, 3, 0, 2, 1]), numbers(6))
    keep(
        "all",
        [a.nonzero(), b.masked_select(b > 0), a.unique(return_counts=True), a.bincount(), torch.where(a == 3), a.argwhere()],
    )
    keep(
        "more",
        [
            torch.unique_consecutive(a),
            b[a.unique()],
            b.repeat_interleave(a),
            torch.split(b, a[:3].tolist()[:1] * 2),
            a.tolist(),
        ],
    )
    keep("histogram", [torch.histc(b, 4), torch.nonzero(b > 10), len(b[b > 0]), [int(n) for n in a], torch.combinations(a)])


@probe
def sorting(place, keep):
    a, b = at(place, torch.tensor([2.0, 1.0, 2.0, float("nan"), 1.0, -0.0, 0.0]), torch.tensor([[3, 1, 3], [1, 1, 0]]))
    keep(
        "a",
        [
            a.sort(dim=0, stable=True),
            a.sort(dim=0, descending=True, stable=True),
            a.argsort(dim=0, stable=True),
            a.topk(3),
            a.median(),
            a.max(0),
            a.min(0),
        ],
    )
    keep(
        "b",
        [
            b.sort(dim=1, stable=True),
            b.mode(1),
            b.kthvalue(2, 1),
            b.argmax(1),
            b.cummax(1),
            b.aminmax(),
            torch.searchsorted(b[1], b),
        ],
    )


@probe
def out_arguments(place, keep):
    a, b = at(place, numbers(3, 3), numbers(3, 3, seed=2))
    c, d = torch.empty(3, 3), torch.empty(0)
    attempt(keep, "write plain", lambda: torch.add(a, b, out=c))
    attempt(keep, "write remote", lambda: torch.mul(a, torch.ones(3, 3), out=b))
    attempt(keep, "write slice", lambda: torch.sub(a, 1, out=b[:, :]))
    attempt(keep, "write resized", lambda: torch.mm(a, b, out=d))
    attempt(keep, "several", lambda: torch.max(a, 1, out=(a.new_empty(3), b.new_empty(3, dtype=torch.long))))
    attempt(keep, "write alias", lambda: torch.exp(a, out=a))
    keep("all", [a, b, c, d])


@probe
def views(place, keep):
    a, b = at(place, numbers(4, 6), numbers(4, 6, seed=2))
    v = a.narrow(0, 1, 3).t().reshape(6, 3)[::2].unsqueeze(1)
    v.add_(1)
    (
        a.diagonal().mul_(2),
        a.unfold(1, 2, 2)[..., 0].neg_(),
        a.as_strided((2, 2), (1, 6), 1).fill_(9),
        b.view(2, 12)[:, 3].zero_(),
    )
    b.view(torch.int32)[0, 0] += 1
    keep(
        "all",
        [a, v, b, a.flatten()[3:].view(3, 7), b.T.contiguous(), a.unsqueeze_(0), b.t_(), a.squeeze_(), a.movedim(0, 1), b.mT],
    )
    keep("base", [v._is_view(), v._base is a, a.storage_offset(), v.storage_offset(), v.is_contiguous(), b.stride()])
    for piece in a.chunk(2), *b.split(4):
        (piece[0] if isinstance(piece, tuple) else piece).mul_(-1)
    attempt(keep, "expanded", lambda: a.expand(2, 4, 6).add_(1))
    keep("end", [a, b])


@probe
def view_gradients(place, keep):
    a, b = at(place, numbers(4, 4).requires_grad_(), numbers(4, 4, seed=2))
    x = a * 1
    x[1:3].mul_(b[1:3])
    x[:, 0] = b[:, 0]
    y = x.t()[::2]
    y.add_(a[:2])
    z = torch.zeros(4, 4)
    z[0] = x[0]
    z[1] = a[1] * 2
    (x.sum() + y.pow(2).sum() + z.exp().sum()).backward()
    keep("gradients", [x, y, z, a.grad, b])


@probe
def strided_blas(place, keep):
    a, b, v = at(place, numbers(17, 33), numbers(33, 19, seed=2), numbers(33, seed=3))
    keep(
        "mm",
        [a @ b, a[:, 1:] @ b[1:], a[1:, 3:] @ b[3:, 1:], b.t() @ a.t(), a.t().contiguous().t() @ b, a[::2] @ b[:, ::3], a @ v],
    )
    keep(
        "mv",
        [a[:, 1:] @ v[1:], F.linear(a[1:, 1:], b.t()[:, 1:], v[:19]), a[:, ::2] @ v[::2], v @ b, v[1:].dot(b[1:, 2]), a.sum(0)],
    )
    keep(
        "bmm",
        [
            torch.bmm(a[:16].view(2, 8, 33), b.expand(2, 33, 19)),
            torch.addmm(v[:19], a, b),
            a.var(1),
            a[:, 1:].mean(),
            v[3:].norm(),
        ],
    )


@probe
def complex_views(place, keep):
    a, b = at(place, torch.complex(numbers(3, 3), numbers(3, 3, seed=2)), numbers(3, 3, seed=3))
    c = a.conj()
    keep(
        "conjugates", [c, c @ a, a.mH, c.imag, a.real + b, (c * b).abs(), c.resolve_conj(), torch.view_as_real(a), c.is_conj()]
    )
    a.imag.zero_(), a.real.add_(b), torch.view_as_real(a)[..., 1].fill_(2)
    keep("after", [a, c, a.angle(), c.imag + 1, torch.fft.fft(c)])
    c.mul_(2)
    attempt(keep, "write real", lambda: c.real.copy_(b))
    keep("end", [a, c, c.imag.is_neg()])


@probe
def other_dtypes(place, keep):
    a, b = at(place, numbers(4).half(), numbers(4, seed=2).bfloat16())
    keep(
        "all",
        [
            a + b,
            a * 2,
            a.float() @ b.float(),
            b.to(torch.int8),
            (a > 0) + 1,
            a.double().to(b),
            (a > 0) & (b > 0),
            a.byte() << 2,
        ],
    )
    net = place(mlp())
    for change in (net.double, net.float, net.bfloat16, lambda: net.to(torch.float32)):
        change()
        keep("result", net(numbers(3, 4).to(net[0].weight.dtype)))
    net.type(torch.float64)
    attempt(keep, "mismatch", lambda: net(numbers(3, 4)))


# Python's side


@probe
def python_protocols(place, keep):
    a, b = at(place, numbers(3, 2), torch.arange(3))
    keep(
        "iterated",
        [
            *a,
            [row.sum() for row in a],
            len(a),
            1 in b,
            b.__eq__(None),
            a.tolist(),
            sum(b),
            max(b),
            sorted(b),
            dict(zip("xyz", b)),
        ],
    )
    keep(
        "unpacked",
        [a.shape, a.size(0), a.numel(), a.dim(), a.dtype, a.device, a.is_cpu, a.layout, a.element_size(), a.nbytes, a.ndim],
    )
    keep(
        "kinds",
        [isinstance(a, torch.Tensor), torch.is_tensor(a), a.is_floating_point(), a in [a], hash(a) == hash(a), {a: 1}[a]],
    )
    attempt(keep, "attribute", lambda: a.nothing)
    attempt(keep, "length", lambda: len(a.sum()))
    a.mark = "kept"
    keep("mark", [a.mark, copy.deepcopy(a).mark if hasattr(copy.deepcopy(a), "mark") else None])


@probe
def printed(place, keep):
    net = place(mlp())
    keep("model", str(net))
    keep("values", [f"{net[0].weight.sum():.5f}", str(net[0].weight.detach().tolist()), str(net.state_dict().keys())])
    attempt(keep, "print", lambda: len(str(net[0].weight)) > 10 and "0." in str(net[0].weight))


@probe
def arrays(place, keep):
    a, b = at(place, numbers(3), torch.arange(3))
    attempt(keep, "numpy", lambda: a.numpy().tolist())
    attempt(keep, "asarray", lambda: np.asarray(b).tolist())
    attempt(keep, "cpu", lambda: a.cpu().numpy().tolist() if type(a.cpu()) is torch.Tensor else None)
    attempt(keep, "ufunc", lambda: torch.as_tensor(np.exp(a)))
    attempt(keep, "dlpack", lambda: torch.from_dlpack(a) + 0)
    attempt(keep, "array of dlpack", lambda: np.from_dlpack(b).tolist())
    attempt(
        keep,
        "made",
        lambda: [torch.tensor(a), torch.as_tensor(a), torch.tensor([b[0], b[1]]), a.new_tensor([1]), torch.Tensor(a)],
    )


@probe
def pointers(place, keep):
    a, b = at(place, numbers(4), numbers(4, seed=2))
    attempt(keep, "pointer", lambda: a.data_ptr() != 0)
    attempt(keep, "storage", lambda: a.untyped_storage().nbytes())
    attempt(keep, "bytes", lambda: bytes(a.untyped_storage()) == a.numpy().tobytes())
    attempt(keep, "share", lambda: a.share_memory_() is a)
    attempt(keep, "write resize", lambda: b.resize_(2))
    attempt(keep, "pinned", lambda: b.is_pinned())
    keep("both", [a, b])


@probe
def pickled(place, keep):
    net = place(mlp())
    train(net, keep)
    file = io.BytesIO()
    attempt(keep, "saved", lambda: torch.save(net.state_dict(), file))
    file.seek(0)
    attempt(keep, "loaded", lambda: torch.load(file))
    attempt(keep, "pickle", lambda: pickle.loads(pickle.dumps(net)))
    attempt(keep, "net", lambda: (torch.save(net, file := io.BytesIO()), file.seek(0), torch.load(file, weights_only=False))[2])


@probe
def copied(place, keep):
    net = place(mlp())
    train(net, keep)
    twin, weight = copy.deepcopy((net, net[0].weight))
    keep("same", [twin[0].weight is weight, type(weight) is type(net[0].weight), weight.requires_grad, weight.grad])
    train(twin, keep)
    shallow = copy.copy(net[0])
    keep("results", [net(numbers(2, 4)), twin(numbers(2, 4)), shallow(numbers(2, 4)), shallow.weight is net[0].weight])


@probe
def identities(place, keep):
    net = mlp()
    before, mark = dict(net.named_parameters()), {}
    net[0].weight.note = "user's"
    optimizer = torch.optim.Adam(net.parameters(), foreach=True)
    mark.update(weakref.WeakKeyDictionary({net[0]: 1}))
    net[0].weight.register_hook(lambda g: g * 3)
    net = place(net)
    keep("same", [before[name] is p for name, p in net.named_parameters()])
    keep("note", getattr(net[0].weight, "note", None))
    train(net, keep, 3, optimizer)


@probe
def weakly_referenced(place, keep):
    net = mlp()
    references = [weakref.ref(p) for p in net.parameters()]
    accumulators = [p.view_as(p).grad_fn.next_functions[0][0] for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net = place(net)
    train(net, keep, 3, optimizer)
    keep("alive", [r() is p for r, p in zip(references, net.parameters())] + [len(accumulators)])


@probe
def added_later(place, keep):
    net = place(mlp())
    train(net, keep, 1)
    net.late = nn.Parameter(torch.ones(2))
    net[2].extra = nn.Parameter(torch.full((8,), 0.5))
    net[2].register_buffer("plain", torch.ones(8))
    net[2].forward = lambda x: F.linear(x, net[2].weight, net[2].bias) * net[2].extra + net[2].plain
    net.append(nn.Linear(2, 2))
    net.register_forward_hook(lambda module, args, out: out * module.late)
    train(net, keep)


@probe
def keyword_inputs(place, keep):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, a, *, b=None, scale=1.0):
            return {"y": self.two(torch.relu(self.one(a))) + (0 if b is None else b) * scale, "b": b, "none": None}

    torch.manual_seed(0)
    net = place(Pair())
    a, b = numbers(2, 4).requires_grad_(), numbers(2, 4, seed=2).requires_grad_()
    net(a, b=b, scale=0.5)["y"].sum().backward()
    keep("gradients", [a.grad, b.grad, net(b)["y"]])


@probe
def threads(place, keep):
    net = place(mlp())
    found: dict[int, Any] = {}

    def work(n: int) -> None:
        try:
            for _ in range(4):
                y = net(numbers(3, 4, seed=n)).pow(2).mean()
                found[n] = [y.detach(), *torch.autograd.grad(y, list(net.parameters()))]
        except Exception as error:
            found[n] = error

    running = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(40)
    keep("found", [found.get(n) for n in range(3)])


@probe
def collected(place, keep):
    net = place(mlp())
    for n in range(6):
        knot: list[Any] = [net(numbers(3, 4, seed=n))]
        knot.append(knot)
        big = torch.zeros(2000, 50) + net[0].bias[0]
        del knot, big
        gc.collect()
    train(net, keep)


@probe
def forked(place, keep):
    net = place(mlp())
    train(net, keep, 1)
    y = net(numbers(3, 4))
    if (child := os.fork()) == 0:
        os._exit(0)
    keep("status", os.waitpid(child, 0)[1])
    y.sum().backward()
    train(net, keep)


@probe
def recurrent(place, keep):
    torch.manual_seed(0)
    nets = place(
        nn.ModuleList([nn.LSTM(4, 5, 2, bidirectional=True), nn.GRU(10, 4, batch_first=True), nn.LSTM(4, 6, proj_size=3)])
    )
    x = numbers(5, 2, 4).requires_grad_()
    y, (h, c) = nets[0](x)
    y, _ = nets[0](x, (h.detach() * 0.5, c.detach()))
    z, _ = nets[1](y)
    nets[2].flatten_parameters()
    w, _ = nets[2](z, (torch.zeros(1, 2, 3), torch.zeros(1, 2, 6)))
    w.pow(2).sum().backward()
    with torch.no_grad():
        keep("again", [*nets[2](z), y, h, c])
    keep("gradients", [x.grad, *[p.grad for p in nets.parameters()]])


@probe
def sparse(place, keep):
    torch.manual_seed(0)
    net = place(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.EmbeddingBag(6, 4, sparse=True), nn.Linear(4, 2)))
    optimizers = torch.optim.SparseAdam([net[0].weight, net[1].weight]), torch.optim.SGD(net[2].parameters(), 0.1)
    for _ in range(2):
        out = net[2](net[0](torch.tensor([1, 1, 7])) + net[1](torch.tensor([[0, 1], [1, 2], [3, 3]])))
        out.pow(2).sum().backward()
        keep("gradients", [net[0].weight.grad, net[0].weight.grad.coalesce(), net[1].weight.grad.to_dense()])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    s = torch.eye(9).to_sparse()
    attempt(keep, "product", lambda: torch.sparse.mm(s, net[0].weight))
    attempt(keep, "made", lambda: net[2].weight.detach().to_sparse())
    attempt(keep, "csr", lambda: net[2].weight.detach().to_sparse_csr().to_dense())


@probe
def every_optimizer(place, keep):
    options: list[dict[str, Any]] = [{"foreach": True}, {"foreach": False}, {"fused": True}, {"differentiable": True}, {}]
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "NAdam",
        "RAdam",
        "Adamax",
        "Adadelta",
        "Adagrad",
        "ASGD",
        "Rprop",
        "RMSprop",
        "Adafactor",
    ):
        for option in options:
            try:
                net = place(mlp())
                train(net, keep, 2, getattr(torch.optim, name)(net.parameters(), lr=0.05, **option))
            except (TypeError, RuntimeError) as error:
                keep(name, error)
            keep(name, net)


@probe
def clipped(place, keep):
    net = place(mlp())
    for foreach, norm in itertools.product((None, True, False), (1.0, 2.0, float("inf"))):
        net(numbers(3, 4)).pow(2).sum().backward()
        keep("norm", nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm, foreach=foreach))
    keep("total", nn.utils.get_total_norm([p.grad for p in net.parameters()]))
    keep("many", torch._foreach_norm([p.detach() for p in net.parameters()]))
    torch._foreach_copy_([p.detach() for p in net.parameters()], [torch.full_like(p, 0.5) for p in net.parameters()])
    keep("maximum", torch._foreach_maximum([p.detach() for p in net.parameters()], 0.1))


@probe
def drawn_here(place, keep):
    a, b = at(place, torch.zeros(6), torch.zeros(6))
    generator = torch.Generator().manual_seed(7)
    a.copy_(torch.randn(6, generator=generator))
    attempt(keep, "write uniform", lambda: b.uniform_(generator=generator))
    keep("both", [a, b, torch.rand(2), torch.randn(2, generator=generator), generator.get_state()])


@probe
def user_subclasses(place, keep):
    class Marked(nn.Parameter):
        pass

    class Logged(torch.Tensor):
        pass

    net = mlp()
    net[0].weight = Marked(net[0].weight.detach())
    net[2].register_buffer("logged", torch.ones(8).as_subclass(Logged))
    net = place(net)
    keep("kinds", [isinstance(net[0].weight, Marked), isinstance(net[2].logged, Logged)])
    train(net, keep)
    keep("sum", (net[2].logged + net[0].bias.detach()).sum().item())


@probe
def attributes(place, keep):
    net = mlp()
    net[0].table = numbers(8)
    net[2].tables = {"a": numbers(8, seed=2), "b": [torch.ones(8)]}
    net[0].forward = lambda x: F.linear(x, net[0].weight) * net[0].table
    net[2].forward = lambda x: F.linear(x, net[2].weight) + net[2].tables["a"] * net[2].tables["b"][0]
    net = place(net)
    train(net, keep)
    net[0].table.fill_(2)
    net[2].tables["a"] = torch.zeros(8)
    train(net, keep)


@probe
def strange_kinds(place, keep):
    a, b = at(place, numbers(2, 3), numbers(3, seed=2))
    attempt(keep, "nested", lambda: torch.nested.nested_tensor([a[0], b]).sum().item())
    attempt(keep, "jagged", lambda: torch.nested.as_nested_tensor([a[0], b], layout=torch.jagged).values())
    attempt(keep, "quantized", lambda: torch.quantize_per_tensor(a, 0.1, 0, torch.qint8).dequantize())
    attempt(keep, "mkldnn", lambda: a.to_mkldnn().to_dense())
    attempt(keep, "meta", lambda: [a.to("meta").shape, torch.empty_like(a, device="meta").device.type])
    attempt(keep, "named", lambda: a.rename("x", "y").sum("x"))
    attempt(keep, "traced", lambda: torch.jit.trace(lambda t: t * b, (numbers(3),))(numbers(3)))


@probe
def lazy_module(place, keep):
    torch.manual_seed(0)
    net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 2))
    net = place(net)
    train(net, keep)


@probe
def late_error(place, keep):
    torch.manual_seed(0)
    net = place(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)))
    keep("good", net(torch.tensor([1, 2])))
    keep("bad", net(torch.tensor([1, 5])))


@probe
def late_error_then_on(place, keep):
    torch.manual_seed(0)
    net = place(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    try:
        keep("bad", torch.linalg.cholesky(-net[0].weight @ net[0].weight.t()).sum().item())
    except RuntimeError:
        keep("caught", True)
    train(net, keep)


@probe
def functional_states(place, keep):
    net = place(mlp(nn.BatchNorm1d(8)))
    params, buffers = dict(net.named_parameters()), dict(net.named_buffers())
    y = torch.func.functional_call(net, (params, buffers), (numbers(5, 4),))
    stacked = torch.func.stack_module_state([mlp(), mlp()])[0]
    keep("stacked", {name: t + 1 for name, t in stacked.items()})
    mine = {name: torch.zeros_like(b) if b.dim() else b.clone() for name, b in buffers.items()}
    y = y + torch.func.functional_call(net, {**params, **mine}, (numbers(5, 4),))
    y.sum().backward()
    keep("buffers", [buffers, mine])
    keep("net", net)
