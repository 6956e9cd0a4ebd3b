"""A model that is changed after ``wrap``, results that are used and kept, errors in the middle of a step, and what else runs
beside: as in one process. Each program runs beside the same in one process, in two placements."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from beside import sgd, step
from net_programs import DATA, PLACEMENTS, Net, Programs, loss_of, plainly
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

program = Programs()


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


program.update({f"fails in {where}": (failing(where), Net) for where in ("forward", "backward", "the loss", "the step")})


@program
def a_shape_that_does_not_fit(net: Any) -> Iterator[Any]:
    yield from plainly(net)
    net.eval()
    with torch.no_grad():
        net(torch.randn(3, 11)).sum().item()  # raises


# -- around it


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


program["a compiled part"] = plainly, compiled


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


program["hooks of before wrap"] = plainly, hooked


def run_one(name: str, how: str) -> None:
    program.run(name, how)


@pytest.mark.parametrize("how", PLACEMENTS)
@pytest.mark.parametrize("name", program)
def test_a_program_is_as_in_one_process(drive, name, how):
    drive(run_one, name, how)
