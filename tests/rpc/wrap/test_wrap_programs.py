"""Whatever a program of PyTorch does around and with a wrapped model is as in one process: results, gradients, state, and what
it raises. Each program runs beside the same in one process, in two placements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside import home, sgd
from net_programs import DATA, PLACEMENTS, Net, Programs, given, loss_of, plainly
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

program = Programs()


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
program.update({name: (between(change), Net) for name, change in BETWEEN.items()})


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
def functions_seen(net: Any) -> Iterator[Any]:
    """A mode sees what the program calls, and a lazy module runs for the first time, while steps are recorded."""

    class Named(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    with Named():
        loss_of(net).backward()
        optimizer.step()
    yield names
    yield nn.LazyLinear(2)(DATA[0][0])


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
        torch.set_default_dtype(before[1])
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # of GPUs, and torch has two sets of names for these
        yield from plainly(net)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
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


def run_one(name: str, how: str) -> None:
    program.run(name, how)


@pytest.mark.parametrize("how", PLACEMENTS)
@pytest.mark.parametrize("name", program)
def test_a_program_is_as_in_one_process(drive, name, how):
    drive(run_one, name, how)
