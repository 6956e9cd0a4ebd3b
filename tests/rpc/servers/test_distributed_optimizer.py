"""``rdmarpc.optim``: parameters on many workers, against the local optimizer of the same class on the same inputs."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from group import results, run_group
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.gradients.context import current
from rdmarpc.nn import RemoteModule
from rdmarpc.optim import DistributedOptimizer
from rdmarpc.servers.local import LocalOptimizer
from rdmarpc.servers.updates import hyperparameters

OWNERS = ("worker1", "worker2", "worker0")
"""Of parameters 0, 1, 2, 0, ...: worker 0 is the one that steps."""


def parameter(number: int, rows: int = 4) -> torch.Tensor:
    return torch.rand(rows, 4, generator=torch.Generator().manual_seed(number)).requires_grad_()


def fixed(number: int) -> torch.Tensor:
    return parameter(number).requires_grad_(False)


def inputs(number: int) -> torch.Tensor:
    return torch.rand(3, 4, generator=torch.Generator().manual_seed(1000 + number))


def layer(weight: Any, x: torch.Tensor) -> torch.Tensor:
    """``weight``: a tensor, or a reference to one of this worker."""
    weight = weight.local_value() if isinstance(weight, rpc.RRef) else weight
    if weight.shape[0] > 4:
        return F.embedding((x * weight.shape[0]).long()[:, 0], weight, sparse=True)
    return torch.tanh(x @ weight)


class Pair:
    """The same parameters on their owners and here, and two optimizers of one class over them. ``groups``: lists of numbers of
    parameters, with their options."""

    def __init__(self, kind: Any, count: int = 3, rows: int = 4, groups: Any = (), **options: Any) -> None:
        self.here = [parameter(number, rows) for number in range(count)]
        owners = itertools.cycle(OWNERS)
        self.there = [rpc.remote(next(owners), parameter, args=(number, rows)) for number in range(count)]
        self.local = kind(self._grouped(self.here, groups), **options)
        self.distributed = DistributedOptimizer(kind, self._grouped(self.there, groups), **options)
        self.rows = rows
        self._steps = 0

    @staticmethod
    def _grouped(parameters: list[Any], groups: Any) -> list[Any]:
        return [{"params": [parameters[i] for i in members], **options} for members, options in groups] or parameters

    def step(self, *without: int) -> None:
        """One step of both, through all layers but ``without``."""
        self._steps += 1
        used = [number for number in range(len(self.here)) if number not in without]
        with autograd.context() as context_id:
            x = y = inputs(self._steps)
            losses, twins = [], []
            for number in used:
                rref = self.there[number]
                x = rpc.rpc_sync(rref.owner(), layer, args=(rref, x))
                y = layer(self.here[number], y)
                if self.rows > 4:  # an embedding's inputs have no gradient
                    losses.append(x.sum())
                    twins.append(y.sum())
                    x = y = inputs(self._steps)
            autograd.backward(context_id, losses or [x.sum()])
            self.distributed.step(context_id)
        self.local.zero_grad()
        torch.autograd.backward(twins or [y.sum()])
        self.local.step()

    def check(self) -> None:
        """Equal, bit for bit."""
        for rref, here in zip(self.there, self.here):
            assert torch.equal(rref.to_here(), here), rref.owner_name()
        ours, theirs = self.distributed.state_dict(), self.local.state_dict()
        assert same(ours, theirs), (ours, theirs)


def same(a: Any, b: Any) -> bool:
    """Of two state dicts, or parts of them."""
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


# -- every optimizer

EVERY = [
    name
    for name in optim.__all__
    if isinstance(kind := getattr(optim, name), type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"lr": 0.05}, {"lr": 1e-3, "momentum": 1, "weight_decay": 1, "nesterov": True}, {"lr": 0.1, "foreach": True}],
    "Adam": [{"lr": 0.01, "amsgrad": True}, {"lr": 0.01, "fused": True}, {"lr": torch.tensor(0.01)}],
    "AdamW": [{"lr": 0.05, "amsgrad": True}],
    "Adadelta": [{"rho": 0.95}],
    "RMSprop": [{"lr": 0.05, "momentum": 0.5, "centered": True}],
}


def every_optimizer(rank: int) -> int:
    compared = 0
    if rank == 0:
        for name in EVERY:
            if name == "LBFGS":
                continue
            for options in VARIANTS.get(name, [{}]):
                pair = Pair(getattr(optim, name), rows=16 if name == "SparseAdam" else 4, **options)
                for _ in range(4):
                    pair.step()
                pair.check()
                assert not torch.equal(pair.here[0], parameter(0, pair.rows)), name
                compared += 1
    rpc.shutdown()
    return compared


def test_every_optimizer_of_torch_equals_the_local_one():
    assert {"Adam", "SGD", "SparseAdam", "LBFGS"} <= set(EVERY) and rpc.optim.DistributedOptimizer is DistributedOptimizer
    assert results(run_group(every_optimizer, 3))[0] >= len(EVERY) - 1


class Seeded(nn.Linear):
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(4, 4)


def modules(rank: int) -> None:
    """The parameters of remote modules."""
    if rank == 0:
        here = nn.Sequential(Seeded(1), nn.Tanh(), Seeded(2))
        there = [RemoteModule(f"worker{1 + at}", Seeded, (1 + at,)) for at in range(2)]
        local = optim.Adam([{"params": here[0].parameters(), "lr": 0.1}, {"params": here[2].parameters()}], lr=0.01)
        groups = [{"params": there[0].remote_parameters(), "lr": 0.1}, {"params": there[1].remote_parameters()}]
        distributed = DistributedOptimizer(optim.Adam, groups, lr=0.01)
        for step in range(5):
            with autograd.context() as context_id:
                loss = F.mse_loss(there[1](torch.tanh(there[0](inputs(step)))), inputs(step + 1))
                autograd.backward(context_id, [loss])
                distributed.step(context_id)
            local.zero_grad()
            twin = F.mse_loss(here(inputs(step)), inputs(step + 1))
            twin.backward()
            local.step()
            assert torch.equal(loss, twin), step
        assert same(distributed.state_dict(), local.state_dict())
    rpc.shutdown()


def test_parameters_of_remote_modules():
    results(run_group(modules, 3))


# -- parameters without gradients, and .grad


def set_grad(rref: Any, value: float | None) -> None:
    weight = rref.local_value()
    weight.grad = None if value is None else torch.full_like(weight, value)


def grad_of(rref: Any) -> Any:
    return rref.local_value().grad


def step_elsewhere(optimizer: Any, context_id: int) -> None:
    with autograd.context() as other:
        optimizer.step(context_id)
        assert current.context is not None and current.context.number == other


def untouched(rank: int) -> None:
    if rank == 0:
        pair = Pair(optim.SGD, count=6, lr=0.1, momentum=0.9, weight_decay=0.1)
        set_grad_at = [rpc.rpc_sync(rref.owner(), set_grad, args=(rref, 7.0)) for rref in pair.there[:4]]
        assert len(set_grad_at) == 4
        pair.step()
        pair.step(1, 3)  # a momentum and a .grad are there, and weights decay: they must not move
        pair.check()
        pair.step()
        pair.check()
        for number, rref in enumerate(pair.there):
            grad = rpc.rpc_sync(rref.owner(), grad_of, args=(rref,))
            assert grad is None if number >= 4 else bool((grad == 7).all())
        frozen = rpc.remote("worker1", fixed, args=(1,))
        mixed = DistributedOptimizer(optim.Rprop, [pair.there[0], frozen], lr=0.5)
        before = pair.there[0].to_here().clone()
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", layer, args=(pair.there[0], inputs(0))).sum()])
            mixed.step(context_id)
        assert torch.equal(frozen.to_here(), fixed(1)) and not torch.equal(pair.there[0].to_here(), before)
        # From a thread that is in another context, for an owner that has not heard of this one.
        part = DistributedOptimizer(optim.SGD, pair.there[:2], lr=0.5)
        before = [rref.to_here().clone() for rref in pair.there[:2]]
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("worker1", layer, args=(pair.there[0], inputs(0))).sum()])
            with ThreadPoolExecutor(1) as pool:
                pool.submit(step_elsewhere, part, context_id).result(20)
        after = [rref.to_here() for rref in pair.there[:2]]
        assert not torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])
        empty = DistributedOptimizer(optim.SGD, [], lr=0.1)
        with autograd.context() as context_id:
            empty.step(context_id)
        assert empty.state_dict() == {"state": {}, "param_groups": []} and not empty.remote_optimizers
    rpc.shutdown()


def test_parameters_without_gradient_and_every_grad_stay_as_they_are():
    results(run_group(untouched, 3))


# -- groups and schedulers

GROUPS = [([0, 1], {"lr": 0.3}), ([2], {"weight_decay": 0.5}), ([3, 4, 5], {"lr": 0.2, "momentum": 0.8})]
"""Of six parameters: groups with one owner, two and three."""

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 0.9**step] * 3),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.8),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "SWALR": lambda o: SWALR(o, 0.02, 3),
}


def schedule(name: str, pair: Pair) -> None:
    schedulers = [SCHEDULERS[name](optimizer) for optimizer in (pair.distributed, pair.local)]
    for _ in range(5):
        pair.step()
        for scheduler in schedulers:
            scheduler.step(1.0) if name == "ReduceLROnPlateau" else scheduler.step()
    pair.check()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()


def every_scheduler(rank: int) -> None:
    if rank == 0:
        for name in SCHEDULERS:
            schedule(name, Pair(optim.SGD, 6, groups=GROUPS, lr=0.05, momentum=0.9))
        # A rate that is a tensor is filled in place.
        schedule("ExponentialLR", Pair(optim.Adam, lr=torch.tensor(0.1)))
        schedule("OneCycleLR", Pair(optim.AdamW))
    rpc.shutdown()


def test_every_scheduler_of_torch_with_groups():
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= set(SCHEDULERS)
    results(run_group(every_scheduler, 3))


def test_changes_need_nothing_of_those_before_them():
    """In any order, and repeated, they leave what their holder set, in front of what the optimizer has."""
    changes = [{}, {0: {"lr": 0.5, "initial_lr": 1.0}}, {2: {"lr": 0.2, "dampening": 0.1}, 1: {"lr": 9.0}}, {0: {"lr": 0.25}}]
    for order in itertools.permutations(range(4)):
        groups = [{"params": [parameter(0)], "lr": 0.1}, {"params": [parameter(1)], "momentum": 0.5}]
        mine = LocalOptimizer(optim.SGD(groups, lr=0.3), {0: groups[0]["params"], 2: groups[1]["params"]})
        own = {number: hyperparameters(group) for number, group in mine.groups().items()}
        for at in (*order, *order):
            mine.state_dict(pickle.dumps(changes[at]) if changes[at] else b"")
            for number, group in mine.groups().items():
                assert hyperparameters(group) == own[number] | changes[at].get(number, {}), (order, at)
            mine.groups()[2]["momentum"] += 1.0  # its own
            own[2]["momentum"] += 1.0


class Counting(optim.SGD):
    """One that counts in its groups, as some do, and has a second rate of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["count"], group["rate"] = 0, 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            group["rate"] *= 0.5
        super().step()


def counting(rank: int) -> None:
    if rank == 0:
        pair = Pair(Counting, 6, groups=[(members, {}) for members, _ in GROUPS], lr=0.1)
        schedule("ExponentialLR", pair)  # five steps
        assert [group["count"] for group in pair.distributed.state_dict()["param_groups"]] == [5, 5, 5]
        for optimizer in (pair.distributed, pair.local):
            optimizer.param_groups[1]["rate"] = 8.0
        pair.step()
        pair.check()
        group = pair.distributed.state_dict()["param_groups"][1]
        assert (group["count"], group["rate"]) == (6, 4.0)
        pair.distributed.load_state_dict(pair.local.state_dict())
        pair.step()
        pair.check()
    rpc.shutdown()


def test_what_an_optimizer_keeps_in_its_groups_is_its_own():
    results(run_group(counting, 3))


# -- state


def saving(rank: int) -> None:
    if rank == 0:
        first = Pair(optim.Adam, 6, groups=[(members, {"lr": 0.01 * (at + 1)}) for at, (members, _) in enumerate(GROUPS)])
        for _ in range(3):
            first.step(4)
        first.check()
        saved = first.distributed.state_dict()
        assert list(saved["state"]) == [0, 1, 2, 3, 5]
        at_save = [here.detach().clone() for here in first.here]
        first.step()  # what was saved is a copy
        assert saved["state"][0]["step"] == 3
        # Into a local optimizer, and from one with another order of ids and other hyperparameters.
        twin = [here.clone().requires_grad_() for here in at_save]
        local = optim.Adam([{"params": [twin[i] for i in members]} for members, _ in GROUPS], lr=1.0)
        local.load_state_dict(saved)
        for here, weight in zip(first.here, twin):
            weight.grad = here.grad
        local.step()
        assert all(torch.equal(weight, here) for weight, here in zip(twin, first.here))
        renamed = {
            "state": {f"p{index}": entries for index, entries in saved["state"].items()},
            "param_groups": [{**g, "params": [f"p{i}" for i in g["params"]], "eps": 1e-3} for g in saved["param_groups"]],
        }
        first.distributed.load_state_dict(renamed)
        first.local.load_state_dict(renamed)
        last = first.distributed.param_groups[2]
        assert last["eps"] == 1e-3 and last["params"] == first.there[3:]
        first.step()
        first.step(0)
        first.check()
        # In the reverse direction: a fresh pair is given what a local one saved.
        second = Pair(optim.Adam, 6, groups=[(members, {}) for members, _ in GROUPS])
        second.distributed.load_state_dict(first.local.state_dict())
        second.local.load_state_dict(first.local.state_dict())
        for _ in range(2):
            second.step()
        second.check()
        for wrong in (saved["param_groups"][:2], [saved["param_groups"][0]] * 3):
            with pytest.raises(ValueError, match="loaded state dict"):
                second.distributed.load_state_dict({"state": {}, "param_groups": wrong})
        seen: list[Any] = []
        second.distributed.register_state_dict_pre_hook(lambda optimizer: seen.append("saving"))
        second.distributed.register_state_dict_post_hook(lambda optimizer, made: made | {"more": 1})
        second.distributed.register_load_state_dict_pre_hook(lambda optimizer, given: seen.append(given["more"]))
        second.distributed.register_load_state_dict_post_hook(lambda optimizer: seen.append("loaded"))
        second.distributed.load_state_dict(second.distributed.state_dict())
        assert seen == ["saving", 1, "loaded"]
    rpc.shutdown()


def test_state_dict_there_and_back():
    results(run_group(saving, 3))


# -- who steps when


class Alone(optim.SGD):
    """Notices when two steps of one worker overlap, or mix gradients."""

    inside = threading.Semaphore(1)
    faults: list[str] = []  # noqa: RUF012

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not Alone.inside.acquire(blocking=False):
            Alone.faults.append("two at once")
        before = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        time.sleep(0.002)
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        if any(not torch.equal(grad, was) or len(grad.unique()) != 1 for grad, was in zip(grads, before)):
            Alone.faults.append(f"mixed: {grads}")
        super().step()
        Alone.inside.release()


def faults_here() -> list[str]:
    return Alone.faults


def times(rref: Any, factor: float) -> torch.Tensor:
    """Its gradient is ``factor`` everywhere."""
    return (rref.local_value() * factor).sum()


def zeros() -> torch.Tensor:
    return torch.zeros(5, requires_grad=True)


def apply(optimizer: Any, rrefs: list[Any], factor: float) -> None:
    with autograd.context() as context_id:
        losses = [rpc.rpc_async(rref.owner(), times, args=(rref, factor)) for rref in rrefs]
        autograd.backward(context_id, [sum(loss.wait() for loss in losses)])
        optimizer.step(context_id)


def train(rrefs: list[Any], factor: float) -> None:
    """A trainer with an optimizer of its own, and three threads."""
    optimizer = DistributedOptimizer(Alone, rrefs, lr=1.0)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                apply(optimizer, rrefs, factor)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failed, failed


def crowd(rank: int) -> None:
    if rank == 0:
        rrefs = [rpc.remote(f"worker{1 + at % 2}", zeros) for at in range(4)]
        for future in [rpc.rpc_async(f"worker{to}", train, args=(rrefs, 2.0**to)) for to in range(4)]:
            future.wait()
        for rref in rrefs:  # whatever the order: these sums are exact
            assert torch.equal(rref.to_here(), torch.full((5,), -15.0 * (1 + 2 + 4 + 8)))
        for worker in ("worker1", "worker2"):
            assert rpc.rpc_sync(worker, faults_here) == []
    rpc.shutdown()


def test_concurrent_steps_of_a_worker_go_one_after_the_other():
    results(run_group(crowd, 4))


def step_with(optimizer: Any, rrefs: list[Any], rate: float | None) -> None:
    if rate is not None:
        optimizer.param_groups[0]["lr"] = rate
    apply(optimizer, rrefs, 1.0)


def passed_on(rank: int) -> None:
    """An optimizer that was sent to another worker: each holder steps with its own rates, and what it never set is as given."""
    if rank == 0:
        rrefs = [rpc.remote("worker1", zeros), rpc.remote("worker2", zeros)]
        optimizer = DistributedOptimizer(optim.SGD, rrefs, lr=1.0)
        for to, rate in (("worker3", 0.5), ("worker2", None), ("worker1", 0.25)):
            rpc.rpc_sync(to, step_with, args=(optimizer, rrefs, rate))
        apply(optimizer, rrefs, 1.0)
        assert optimizer.param_groups[0]["lr"] == 1.0
        for rref in rrefs:
            assert torch.equal(rref.to_here(), torch.full((5,), -2.75))
    rpc.shutdown()


def test_an_optimizer_may_be_sent_to_others():
    results(run_group(passed_on, 4))


waiting: torch.futures.Future = torch.futures.Future()


@rpc.functions.async_execution
def made_later() -> torch.futures.Future:
    return waiting


def make_now() -> None:
    waiting.set_result(zeros())


def early(rank: int) -> None:
    """An optimizer of a parameter that is still to be made, by the only thread of its owner."""
    if rank == 0:
        rref = rpc.remote("worker1", made_later)
        with ThreadPoolExecutor(1) as pool:
            optimizer = pool.submit(DistributedOptimizer, optim.SGD, [rref], lr=1.0)
            time.sleep(0.3)
            assert not optimizer.done()
            rpc.rpc_sync("worker1", make_now)
            apply(optimizer.result(20), [rref], 1.0)
        assert torch.equal(rref.to_here(), torch.full((5,), -1.0))
    rpc.shutdown()


def test_parameters_that_are_still_to_be_made():
    results(run_group(early, 2, num_worker_threads=1))
