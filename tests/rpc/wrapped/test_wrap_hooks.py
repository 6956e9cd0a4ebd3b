"""Hooks on modules inside of parts that live elsewhere: such a part runs here, with the bits of one process, and it is said."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_wrap import batches, both, drive
from torch import nn
from torch.nn.utils import prune
from twins import train_both

import rdmarpc as rpc

DATA = batches(4, 6, 20)
PLACEMENT = {"part": "worker1", "head": "worker1"}
Notes = list[torch.Tensor]


def kept(value: Any, notes: Notes) -> None:
    if isinstance(value, torch.Tensor):
        notes.append(value.detach().clone())
    elif isinstance(value, dict):
        kept(list(value.values()), notes)
    elif isinstance(value, (list, tuple)):
        for item in value:
            kept(item, notes)


class Part(nn.Module):
    """A module that is called twice, one with statistics, one that is called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Linear(20, 20)
        self.drop = nn.Dropout(0.3)

    def forward(self, x, scale=1.0):
        x = self.norm(self.a(x)) * scale
        return self.b(input=self.drop(torch.tanh(self.a(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.part, self.head = nn.Linear(20, 20), Part(), nn.Sequential(nn.Linear(20, 4), nn.Tanh())

    def forward(self, x):
        return self.head(self.part(torch.relu(self.body(x)), scale=0.5))


class Collecting(Net):
    """Its forward hooks modules of a part while it runs, as transformers does."""

    def forward(self, x):
        seen: list[Any] = []
        handles = [
            self.part.a.register_forward_hook(lambda module, args, output: seen.append(output)),
            self.part.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0])),
            self.head[0].register_forward_hook(lambda module, args, output: output * 2),
        ]
        try:
            y = super().forward(x)
        finally:
            for handle in handles:
                handle.remove()
        assert len(seen) == 3
        return y + sum(tensor.mean(1, keepdim=True) for tensor in seen)


def compare(make: Callable[[], nn.Module], hook: Callable[[Any, Notes], Any], steps: int = 3, **options: Any) -> None:
    """``hook(network, notes)`` after a step without hooks; what it gives is removed before the last step."""
    model, twin = both(make, PLACEMENT, **options)
    notes: list[Notes] = [[], []]
    torch.manual_seed(3)
    train(model, twin, DATA[:1])
    handles = [hook(network, noted) for network, noted in zip((model, twin), notes)]
    train(model, twin, DATA[:steps])
    for network in (model, twin):
        with torch.no_grad():
            network(DATA[0][0])
    assert len(notes[0]) == len(notes[1]), (hook, len(notes[0]), len(notes[1]), model.captured)
    assert all(map(torch.equal, *notes))
    seen = len(notes[0])
    for handle in (handle for found in handles for handle in found or ()):
        handle.remove()
    train(model, twin, DATA[:2])
    assert all(map(torch.equal, *notes))
    assert not handles[0] or len(notes[0]) == len(notes[1]) == seen
    model.close()


def train(model: nn.Module, twin: nn.Module, data: Any) -> None:
    """Random numbers are drawn alike: parts at other workers have generators of their own."""
    model.eval(), twin.eval()
    model.part.norm.train(), twin.part.norm.train()
    train_both(model, twin, data)


def look(network: Any, notes: Notes) -> Any:
    return [network.part.a.register_forward_hook(lambda module, args, output: kept((args, output), notes))]


def change(network: Any, notes: Notes) -> Any:
    return [
        network.part.a.register_forward_hook(lambda module, args, output: output * 2),
        network.part.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        network.part.b.register_forward_hook(lambda module, args, output: torch.relu(output)),
    ]


def by_name(network: Any, notes: Notes) -> Any:
    def before(module, args, kwargs):
        kept((args, kwargs), notes)
        return args, {"input": kwargs["input"] * 3}

    def after(module, args, kwargs, output):
        kept((args, kwargs, output), notes)
        return output - kwargs["input"]

    b = network.part.b
    return [
        b.register_forward_pre_hook(before, with_kwargs=True),
        b.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


def gradients(network: Any, notes: Notes) -> Any:
    def before(module, outputs):
        kept(outputs, notes)
        return (outputs[0] * 0.5,)

    def after(module, inputs, outputs):
        kept((inputs, outputs), notes)
        return (inputs[0] + 1,)

    norm = network.part.norm
    return [norm.register_full_backward_pre_hook(before), norm.register_full_backward_hook(after)]


def old_gradients(network: Any, notes: Notes) -> Any:
    def after(module, inputs, outputs):
        kept((inputs, outputs), notes)

    return [m.register_backward_hook(after) for m in (network.part.norm, network.part, network.head[1])]


def once(network: Any, notes: Notes) -> Any:
    """Removes itself between the two calls of its module."""

    def after(module, args, output):
        kept(output, notes)
        handle.remove()
        network.part.b.register_forward_hook(lambda module, args, output: output * 3)
        return output + 1

    handle = network.part.a.register_forward_hook(after)
    return None


def named(network: Any, notes: Notes) -> Any:
    """By identity, type and weight of the module it is called with."""
    names = {module: name for name, module in network.named_modules()}

    def after(module, args, output):
        assert module is network.get_submodule(names[module])
        assert isinstance(module, (nn.Linear, nn.BatchNorm1d))
        kept((output, module.weight), notes)
        return output + module.weight.sum() * len(names[module])

    return [module.register_forward_hook(after) for module in (network.part.a, network.part.norm, network.head[0])]


def outer_and_inner(network: Any, notes: Notes) -> Any:
    """Around a part, and inside of it."""
    return [
        network.part.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
        network.part.a.register_forward_hook(lambda module, args, output: kept(output, notes)),
        network.part.register_forward_hook(lambda module, args, output: output * 2),
        network.part.register_forward_hook(lambda module, args, output: output + 1, prepend=True),
    ]


HOOKS = [look, change, by_name, gradients, old_gradients, once, named, outer_and_inner]


def all_hooks(make: Callable[[], nn.Module], how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for hook in HOOKS:
            compare(make, hook, 2, capture=how)


@pytest.mark.parametrize("make, how", [(Net, "eager"), (Net, "here"), (Collecting, "eager"), (Collecting, "here")])
def test_hooks_inside_of_parts(make, how):
    drive(partial(all_hooks, make, how), timeout=250.0)


def said() -> None:
    model, _ = both(Net, PLACEMENT)
    x = DATA[0][0]
    model(x).sum().backward()
    assert model.captured == "fx" and model.counters(False)["calls_here"] == 0
    handle = model.part.b.register_forward_hook(lambda module, args, output: None)
    with pytest.warns(UserWarning, match="part 'part' of a wrapped model runs in this process.*hooks on modules inside"):
        model(x).sum().backward()
    assert "'part' here: there are hooks on modules inside of it" in model.captured
    assert model.counters(False)["calls_here"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
        assert model.counters(False)["calls_here"] == 2
        handle.remove()
        model(x).sum().backward()
    assert model.captured == "fx" and model.counters(False)["calls_here"] == 2
    model.close()


def test_it_is_said():
    drive(said)


def tripled(module: nn.Module, args: Any) -> Any:
    return (args[0] * 3,)


def halved(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.tanh() / 2


class Hooked(Net):
    """Parts and modules in them have hooks from before ``wrap``."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self.part, self.part.a, self.head):
            module.register_forward_pre_hook(tripled)
            module.register_forward_hook(halved)


def among_others(network: Any, notes: Notes) -> Any:
    handles = []
    for module in (network.part, network.part.a, network.head):
        for prepend in (False, True):

            def before(module, args, prepend=prepend):
                kept(args, notes)
                return (args[0] + 1 + prepend,)

            def after(module, args, output, prepend=prepend):
                kept((args, output), notes)
                return output + 0.25 + prepend

            handles += [
                module.register_forward_pre_hook(before, prepend=prepend),
                module.register_forward_hook(after, prepend=prepend),
                module.register_forward_hook(after, prepend=prepend),
            ]
    return handles


class Shared(nn.Module):
    """A part that is also a module of another part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.head = nn.Sequential(self.part, nn.Linear(20, 4))

    def forward(self, x):
        return self.head(self.part(x))


def shared(network: Any, notes: Notes) -> Any:
    return [
        network.part.register_forward_hook(lambda module, args, output: kept(output, notes)),
        network.part.register_forward_hook(lambda module, args, output: output * 2),
    ]


def order() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for how in ("auto", "here"):
            compare(Hooked, among_others, 2, capture=how)
            compare(Shared, shared, 2, capture=how)


def test_hooks_among_those_of_before_wrap():
    drive(order)


def tripled_gradient(module: nn.Module, grads: Any) -> Any:
    return (grads[0] * 3,)


def raised_gradient(module: nn.Module, grads: Any) -> Any:
    return (grads[0] + 1e-3,)


class HookedBackward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.part.register_full_backward_pre_hook(tripled_gradient)


def before_by_position() -> None:
    model, twin = both(HookedBackward, PLACEMENT)
    for network in (model, twin):
        network.part.register_full_backward_pre_hook(raised_gradient, True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, twin, DATA)
    model.close()


def test_prepend_may_be_given_by_position():
    drive(before_by_position)


def moved() -> None:
    """Hooks stay when another worker takes over: their order, and those that are given names of arguments, too."""
    model, twin = both(Hooked, {"part": "worker1"}, capture="eager")
    notes: list[Notes] = [[], []]
    for network, noted in zip((model, twin), notes):
        among_others(network, noted)
        by_name(network, noted)
        old_gradients(network, noted)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        train(model, twin, DATA[:1])
        rpc.save_checkpoint({"model": model}, f"{folder}/at")
        model.replace("worker1", "worker2")
        train(model, twin, DATA)
    assert len(notes[0]) == len(notes[1]) and all(map(torch.equal, *notes))
    model.close()


def test_hooks_stay_when_a_worker_is_replaced():
    drive(moved, 3)


class Removable(Hooked):
    """Has the handles of hooks on a part, and on a module inside of it, from before ``wrap``."""

    def __init__(self) -> None:
        super().__init__()
        self.part.drop.p = 0.0  # it draws where the part is
        outer = self.part.register_forward_hook(halved), self.part.a.register_forward_pre_hook(tripled)
        self.handles = [*outer, self.head.register_forward_hook(with_arguments, with_kwargs=True)]


def with_arguments(module: nn.Module, args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
    return output + args[0].mean()


def removed(how: str) -> None:
    def losses(network: Any) -> list[float]:
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        found = []
        for number, (x, y) in enumerate(batches(7, 6, 20)):
            if number in (2, 3, 5):
                network.handles.pop().remove()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(x), y)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    torch.manual_seed(1)
    expected = losses(Removable())
    torch.manual_seed(1)
    model = rpc.wrap(Removable(), PLACEMENT, capture=how)
    assert losses(model) == expected
    model.close()


@pytest.mark.parametrize("how", ["auto", "eager", "here"])
def test_hooks_that_a_part_came_with_are_removed_by_their_handles(how):
    drive(partial(removed, how))


def listed() -> None:
    net = Net()
    nn.utils.weight_norm(net.part.a)
    prune.l1_unstructured(net.head[0], "weight", 0.5)
    model = rpc.wrap(net, PLACEMENT)
    for look in (
        lambda: nn.utils.remove_weight_norm(model.part.a),
        lambda: prune.is_pruned(model),
        lambda: prune.remove(model.head[0], "weight"),
        lambda: model.head[0]._forward_pre_hooks.clear(),
        lambda: list(model.head[0]._forward_pre_hooks),
    ):
        with pytest.raises(rpc.NotSupported, match="it came with hooks, which are not here to be listed"):
            look()
    model(DATA[0][0]).sum().backward()
    model.close()


def test_hooks_that_a_part_came_with_are_not_listed_here():
    drive(listed)


def doubled(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


def of_parameters() -> None:
    net = Net()
    here = net.body.weight.register_hook(doubled)  # it stays
    moving = net.part.a.weight.register_hook(doubled)
    with pytest.raises(rpc.NotSupported, match=r"'part.a.weight' is to move to worker 'worker1', where the hooks on it"):
        rpc.wrap(net, PLACEMENT)
    moving.remove()
    moving = net.head[0].bias.register_post_accumulate_grad_hook(print)
    with pytest.raises(rpc.NotSupported, match=r"'head.0.bias' is to move to worker 'worker1', where the hooks on it"):
        rpc.wrap(net, {"head": ["worker0", "worker1"]})
    moving.remove()
    model = rpc.wrap(net, PLACEMENT)
    found = []
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(3)
        model(DATA[0][0]).sum().backward()
        found.append(model.body.weight.grad.clone())
        here.remove()
    assert torch.equal(found[0], found[1] * 2)
    model.close()


def test_parameters_that_came_with_hooks_do_not_move():
    drive(of_parameters)
