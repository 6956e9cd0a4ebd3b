"""Optimizers of a served model that are not as torch's are, or whose groups a program edits: as in one process, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from group import results, run_group
from test_served import assert_same, on_workers
from torch import nn

import rdmarpc as rpc

SERVERS = ["worker1", "worker2"]
Change = Callable[[int, nn.Module, Any], None]


class Clipping(torch.optim.Optimizer):
    """It has an argument that is in no group."""

    def __init__(self, params: Any, lr: float = 0.1, most: float = 1.0) -> None:
        self.most = most
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.clamp(-self.most, self.most), alpha=-group["lr"])


class Clearing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.zero_grad()


class Halving(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad * 0.5
        super().step()


class Decaying(torch.optim.SGD):
    """It writes into gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad.add_(p.detach(), alpha=0.1)
        super().step()


class Keeping(torch.optim.Optimizer):
    """It keeps gradients, and no copies of them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + self.state[p].get("last", 0), alpha=-group["lr"])
                self.state[p]["last"] = p.grad


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(5, 4, generator=generator)
    return F.cross_entropy(model(x), torch.randint(0, 3, (5,), generator=generator))


def step(model: nn.Module, optimizer: Any, number: int) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, number)
    loss.backward()
    optimizer.step()
    return loss.item()


def as_alone(kind: Any, change: Change = lambda *_: None, servers: list[str] = SERVERS[:1], **given: Any) -> None:
    """Five steps with it are those of one process; ``change(number, model, optimizer)`` is called after each."""
    twin = net()
    model = rpc.serve(net(), servers, kind, **given)
    try:
        alone = kind(twin.parameters(), **given)
        for number in range(5):
            assert step(model, model.optimizer, number) == step(twin, alone, number), (kind.__name__, number)
            change(number, model, model.optimizer), change(number, twin, alone)
        assert_same(model.state_dict(), twin.state_dict())
    finally:
        model.close()


# -- members of groups


def one_less(number: int, model: nn.Module, optimizer: Any) -> None:
    if number == 1:
        del optimizer.param_groups[0]["params"][0]


def there_and_back(number: int, model: nn.Module, optimizer: Any) -> None:
    everything = list(model.parameters())
    if number == 0:
        optimizer.param_groups[0]["params"] = everything[2:]
    if number == 2:
        optimizer.param_groups[0]["params"].extend(everything[:2])


def parted(number: int, model: nn.Module, optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    if number == 1:
        members = group["params"]
        optimizer.param_groups[:] = [{**group, "params": members[:2], "lr": 0.3}, {**group, "params": members[2:]}]
    if number == 2:
        del optimizer.param_groups[0]


def exchanged(number: int, model: nn.Module, optimizer: Any) -> None:
    if number == 0:
        optimizer.param_groups[0]["params"] = list(model.parameters())[:1]
    if number == 2:
        optimizer.param_groups[0]["params"] = list(model.parameters())[3:]


def like_alone(rank: int) -> None:
    as_alone(Clipping, lr=0.5, most=0.01)
    for kind in (Clearing, Halving, Keeping):
        as_alone(kind, lr=0.1)
    for change in (one_less, there_and_back, parted, exchanged):
        for servers in (SERVERS[:1], SERVERS):
            as_alone(torch.optim.SGD, change, servers, lr=0.1, momentum=0.9)


def add_up(model: nn.Module, optimizer: Any, clear: Callable[[Any, int], None]) -> list[Any]:
    """Steps whose gradients are added to what the step before has left."""
    found: list[Any] = []
    for number in range(6):
        clear(optimizer, number)
        loss_of(model, number).backward()
        optimizer.step()
        if number % 2:
            found += [None if p.grad is None else p.grad.clone() for p in optimizer.param_groups[0]["params"]]
    return found


def leaves_of_gradients(rank: int) -> None:
    """What a step drops, replaces or writes into is so here, too, when somebody looks at it or adds to it."""
    nesterov = {"momentum": 0.9, "nesterov": True, "foreach": True}
    kinds: list[tuple[Any, list[str], Any]] = [(kind, SERVERS[:1], {}) for kind in (Clearing, Halving, Decaying)]
    for kind, servers, given in [*kinds, (torch.optim.SGD, SERVERS, nesterov)]:
        for clear in (lambda o, n: None, lambda o, n: o.zero_grad(n < 3) if n % 3 == 0 else None):
            twin = net()
            model = rpc.serve(net(), servers, kind, lr=0.1, **given)
            ours = add_up(model, model.optimizer, clear)
            theirs = add_up(twin, kind(twin.parameters(), lr=0.1, **given), clear)
            for mine, other in zip(ours, theirs, strict=True):
                assert (mine is None and other is None) or torch.equal(mine, other), kind.__name__
            assert_same(model.state_dict(), twin.state_dict())
            model.close()


def leaves_of_sums(rank: int) -> None:
    """Of several workers' gradients there is one at the server, of which no worker's is a part."""

    def model_of(kind: Any) -> Any:
        return rpc.serve(net(), ["worker2"], kind, lr=0.1, workers=["worker0", "worker1"], timeout=20, name=kind.__name__)

    model, twin = model_of(Clearing), net()
    add_up(model, model.optimizer, lambda o, n: None)
    alone = Clearing(twin.parameters(), lr=0.1)
    for number in range(6):
        for _ in range(2):
            loss_of(twin, number).backward()
        alone.step()
    assert_same(model.state_dict(), twin.state_dict())
    model.close()
    model = model_of(Decaying)
    add_up(model, model.optimizer, lambda o, n: o.zero_grad(n % 2 == 0))
    with pytest.raises(rpc.NotSupported, match="Decaying has changed gradients, which are sums"):
        add_up(model, model.optimizer, lambda o, n: None)
    model.close()


def refused(rank: int) -> None:

    with pytest.raises(rpc.NotSupported, match="'most' of a served Clipping was set after it was made"):
        model = rpc.serve(net(), SERVERS[:1], Clipping, most=0.01)
        step(model, model.optimizer, 0)
        model.optimizer.most = 5.0  # type: ignore[attr-defined]
        step(model, model.optimizer, 1)
    model.close()
    model = rpc.serve(net(), SERVERS[:1], Counting, lr=0.1)
    with pytest.raises(rpc.NotSupported, match="a step of Counting changes its groups"):
        step(model, model.optimizer, 0)
        model.pull()
    model.close()
    model = rpc.serve(net(), SERVERS[:1], torch.optim.Adam, lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(rpc.NotSupported, match="fused optimizer scales gradients"):
        scaler.step(model.optimizer)
    model.close()


def other_default(rank: int) -> None:
    """NAdam has a product in the default dtype."""
    model = rpc.serve(net(), SERVERS, torch.optim.NAdam)
    step(model, model.optimizer, 0)
    torch.set_default_dtype(torch.float64)
    with pytest.raises(rpc.NotSupported, match=r"NAdam counts in torch.float64 where the model is, and in torch.float32 at"):
        model.optimizer.step()
    with pytest.raises(rpc.NotSupported, match=r"NAdam counts in torch.float64"):
        model.new_optimizer(torch.optim.NAdam)
    torch.set_default_dtype(torch.bfloat16)
    model.optimizer.step()
    model.close()


def differently(rank: int) -> None:
    model = rpc.serve(net(), ["worker2"], torch.optim.SGD, lr=0.1, workers=["worker0", "worker1"], timeout=20)
    step(model, model.optimizer, 0)
    if rank == 0:
        del model.optimizer.param_groups[0]["params"][0]
    with pytest.raises(rpc.NotSupported, match="of different parameters"):
        step(model, model.optimizer, 1)
        model.pull()
    model.close()


SCENARIOS = [(like_alone, 1), (leaves_of_gradients, 1), (leaves_of_sums, 2), (refused, 1), (other_default, 1), (differently, 2)]


@pytest.mark.parametrize("scenario, workers", SCENARIOS)
def test_an_optimizer_steps_as_in_one_process_or_is_refused(scenario: Any, workers: int) -> None:
    results(run_group(partial(on_workers, scenario, workers), 3, transport="shm"))
