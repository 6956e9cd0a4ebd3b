"""What users do with a model that lies at workers, besides the statements of ``served_statements``."""

from __future__ import annotations

import copy
import io
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from served_statements import STATEMENTS as SERVED
from served_statements import Statement, Trainer, flat, trains
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import rdmarpc as rpc

WORKERS = ["worker0", "worker1", "worker2", "worker3"]
"""Set by programs: where they run, two that have parts, and a spare one."""
SPLIT = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm, nn.GELU, nn.ReLU, nn.Tanh, nn.Sequential, nn.BatchNorm1d)
"""Parts that may get replicas: a batch in, a batch out."""

ELSEWHERE = ("writes_by", "by_numpy_", "writes_data_by", "writes_the_state_by", "shuffles_by", "keeps_an_array", "prints")
"""Statements that are refused, or show places: arrays of what lies at a worker are copies."""
STATEMENTS: dict[str, Statement] = {
    name: function for name, function in SERVED.items() if not any(word in name for word in ELSEWHERE)
}


def statement(function: Statement) -> Statement:
    STATEMENTS[function.__name__] = function
    return function


class Shards:
    """In one process: the forward of a part with replicas."""

    def __init__(self, forward: Callable[..., Any], count: int) -> None:
        self.forward, self.count = forward, count

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.forward(shard) for shard in x.chunk(self.count)])


def placement_of(net: nn.Module, seed: int) -> dict[str, Any]:
    dice = random.Random(seed)
    here, one, two, _ = WORKERS
    places, each = [one, one, two, two, here], list(dict.fromkeys([here, one, two]))
    found: dict[str, Any] = {"": dice.choice(places)} if dice.random() < 0.5 else {}
    for path, part in net.named_modules():
        if path and "parametrizations" not in path and dice.random() < 0.4:
            found[path] = dice.choice(places)
            if isinstance(part, SPLIT) and dice.random() < 0.15:
                found[path] = dice.sample(each, min(dice.randint(2, 3), len(each)))
    return found


class Wrapped(Trainer):
    """A model that lies at workers, or the same in one process. ``early``: its optimizer is made before it moves."""

    def __init__(self, place: Any, net: nn.Module, kind: Any, options: Any, keep: Any, early: bool, seed: int) -> None:
        before = kind(net.parameters(), **options) if early else None
        placement = placement_of(net, seed)
        net = place(net, placement)
        super().__init__(net, before or kind(net.parameters(), **options), keep)
        self.placed = hasattr(net, "placement_table")
        self.rows = 4
        self.saved: Any = None
        self.copied = False
        if not self.placed:
            self._split(placement)

    def ends(self) -> None:
        self.keep("model", self.net)
        super().ends()

    def batch(self, number: int = 0) -> torch.Tensor:
        return torch.randn(self.rows, 5, generator=self._generator(number)).to(self.parameters[-1].dtype)

    def classes(self, number: int = 0) -> torch.Tensor:
        return torch.randint(0, 10, (self.rows,), generator=self._generator(number + 1))

    def loss(self, number: int = 0) -> torch.Tensor:
        return criterion(self.net(self.batch(number)), self.classes(number))

    def places(self, placement: dict[str, Any], **options: Any) -> None:
        if self.placed:
            self.net = rpc.wrap(self.net, placement, **options)
        else:
            self._split(placement)

    def goes_home(self) -> None:
        if self.wrapped:
            self.net.close()
        elif not self.placed and not self.copied:
            self._split({})

    @property
    def wrapped(self) -> bool:
        """A copy of a wrapped model is none, though it lies where that lies."""
        return hasattr(self.net, "placement_table")

    def _split(self, placement: dict[str, Any]) -> None:
        """A copy that is placed keeps the replicas of what has no new place."""
        for name, part in self.net.named_modules():
            anew = not self.copied or any(path in ("", name) or name.startswith(f"{path}.") for path in placement)
            if anew and isinstance(part.__dict__.get("forward"), Shards):
                del part.__dict__["forward"]
        self.copied = False
        for path, where in placement.items():
            if isinstance(where, list):
                part = self.net.get_submodule(path)
                part.forward = Shards(part.forward, len(where))

    def in_batches(
        self, loss_fn: Any, chunks: int, schedule: str, x: torch.Tensor, *y: torch.Tensor, net: Any = None
    ) -> torch.Tensor:
        net = self.net if net is None else net
        if self.wrapped:
            return net.forward_backward(loss_fn, x, target=y[0] if y else None, chunks=chunks, schedule=schedule)
        pieces = [piece.detach().requires_grad_(x.requires_grad) for piece in x.chunk(chunks)]
        losses = []
        for piece, *target in zip(pieces, *(each.chunk(chunks) for each in y)):
            loss = loss_fn(net(piece), *target)
            losses.append(loss if len(pieces) == 1 else loss * (len(piece) / len(x)))
        for loss in losses:
            loss.backward()
        if grads := [piece.grad for piece in pieces if piece.grad is not None]:
            x.backward(torch.cat(grads))
        return sum([loss.detach() for loss in losses][1:], losses[0].detach())

    # Checkpoints.

    def saves(self) -> None:
        names = self._names()
        if any(None in group for group in names[1]):
            return
        self.saved = self.net, self.optimizer, names, self._saved(), self._beside()

    def _beside(self) -> dict[str, torch.Tensor]:
        saved = self.net.state_dict()
        return {name: value.detach().cpu().clone() for name, value in self.net.named_buffers() if name not in saved}

    def _saved(self) -> Any:
        if self.placed:
            folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            rpc.save_checkpoint({"model": self.net, "optimizer": self.optimizer, "step": self.seed}, folder.name)
            return folder
        generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
        return copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict(), self.seed, generators))

    @property
    def can_load(self) -> bool:
        """Checkpoints are for this model and optimizer, while they have the same names."""
        if self.saved is None or self.saved[0] is not self.net or self.saved[1] is not self.optimizer:
            return False
        return self.saved[2] == self._names()

    def _names(self) -> tuple[list[str], list[list[str | None]]]:
        names = {id(p): name for name, p in self.net.named_parameters()}
        groups = [[names.get(id(p)) for p in group["params"]] for group in self.optimizer.param_groups]
        return list(self.net.state_dict()), groups

    def loads(self) -> Any:
        if self.placed:
            state = {"model": self.net, "optimizer": self.optimizer, "step": 0}
            rpc.load_checkpoint(state, self.saved[3].name)
            return state["step"]
        model, optimizer, step, generators = copy.deepcopy(self.saved[3])
        self.net.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])
        return step

    def goes_back(self) -> Any:
        """As ``replace`` does."""
        self.net.zero_grad()
        buffers = dict(self.net.named_buffers())
        with torch.no_grad():
            for name, value in self.saved[4].items():
                buffers[name].copy_(value)
        return self.loads()

    def spare(self, lost: str) -> str | None:
        """Who can have what lies at that worker, if one can."""
        workers = self.net._placement.workers if self.can_load and self.wrapped else []
        return next((each for each in WORKERS[1:] if each not in (lost, *workers)), None) if lost in workers else None

    def replaces(self, lost: str) -> None:
        """A worker that was lost in this statement, which did nothing else."""
        spare = self.spare(lost) if self.placed else None
        left = next(each for each in WORKERS[1:] if each != lost)
        WORKERS[:] = [left if each == lost else each for each in WORKERS]
        if spare is not None:
            self.net.replace(lost, spare)
            return
        self._number += 1
        self.keep(f"write {self._number}", None)
        self.goes_back()


def criterion(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.float(), y)


# Places.


@statement
def wraps_again(trainer: Wrapped) -> None:
    outputs = "here" if trainer.share < 0.3 else "there"
    trainer.places(placement_of(trainer.net, trainer.seed), outputs=outputs, chunks=1 + trainer.seed % 3)


@statement
def wraps_as_proposed(trainer: Wrapped) -> None:
    order = {} if trainer.hooks or trainer.share < 0.5 else {"inputs": (trainer.batch(),)}  # a copy is called
    trainer.places(rpc.auto_placement(trainer.net, WORKERS[1:3], **order) if trainer.placed else {})


@statement
def goes_home(trainer: Wrapped) -> None:
    trainer.goes_home()


@statement
def goes_home_and_back(trainer: Wrapped) -> Any:
    trainer.goes_home()
    loss = trains(trainer)
    trainer.places(placement_of(trainer.net, trainer.seed))
    return loss


@statement
def moves_all_to_a_worker(trainer: Wrapped) -> None:
    """As on CUDA."""
    if trainer.placed:
        trainer.net.to(rpc.device(WORKERS[1]))


@statement
def moves_a_part(trainer: Wrapped) -> None:
    parts = list(trainer.net.children())
    if trainer.placed and parts:
        parts[int(trainer.share * len(parts))].to(rpc.device(WORKERS[2]))


@statement
def looks_at_what_crosses(trainer: Wrapped) -> None:
    if trainer.wrapped:
        trainer.net.placement_table()
        trainer.net.counters()


# Batches.


@statement
def takes_batches_of_another_size(trainer: Wrapped) -> None:
    trainer.rows = 2 + trainer.seed % 7


@statement
def trains_on_micro_batches(trainer: Wrapped) -> Any:
    schedule = ["gpipe", "1f1b", "zero_bubble"][trainer.seed % 3]
    trainer.optimizer.zero_grad()
    loss = trainer.in_batches(criterion, 1 + int(trainer.share * 5), schedule, trainer.batch(), trainer.classes())
    trainer.optimizer.step()
    return loss


@statement
def accumulates_micro_batches(trainer: Wrapped) -> Any:
    """Inputs with a gradient, too."""
    leaf = trainer.batch().requires_grad_()
    x = leaf * 1.5 if trainer.share < 0.5 else leaf
    schedule = ["gpipe", "1f1b", "zero_bubble"][trainer.seed % 3]
    loss = trainer.in_batches(lambda out: out.float().square().mean(), 1 + int(trainer.share * 4), schedule, x)
    return loss, leaf.grad


@statement
def fails_in_micro_batches(trainer: Wrapped) -> Any:
    calls = []

    def fails(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("a loss")
        return criterion(out, y)

    before = [None if p.grad is None else p.grad.clone() for p in trainer.parameters]
    try:
        trainer.in_batches(fails, 2, "gpipe", trainer.batch(), trainer.classes())
    except KeyError:
        pass
    for parameter, grad in zip(trainer.parameters, before):
        parameter.grad = grad


@statement
def trains_with_a_scaler(trainer: Wrapped) -> Any:
    scaler = trainer.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2))
    dtype = torch.bfloat16 if trainer.share < 0.5 else torch.float16
    with torch.autocast("cpu", dtype):
        loss = trainer.loss()
    trainer.optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(trainer.optimizer)
    nn.utils.clip_grad_norm_(trainer.net.parameters(), 1.0)
    scaler.step(trainer.optimizer)
    scaler.update()
    return loss.detach(), scaler.get_scale()


@statement
def recomputes_the_model(trainer: Wrapped) -> Any:
    x = trainer.batch().requires_grad_()
    out = checkpoint(trainer.net, x, use_reentrant=trainer.share < 0.5)
    out.float().square().mean().backward()
    return out.detach(), x.grad


@statement
def trains_by_lbfgs(trainer: Wrapped) -> Any:
    search = "strong_wolfe" if trainer.share < 0.5 else None
    optimizer = torch.optim.LBFGS(trainer.trained, lr=0.1, max_iter=3, line_search_fn=search)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = trainer.loss()
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


@statement
def trains_by_another_optimizer(trainer: Wrapped) -> Any:
    kinds = [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad]
    trainer.optimizer.zero_grad()
    trainer.optimizer = kinds[trainer.seed % 4](
        trainer.net.parameters(), lr=torch.tensor(0.01) if trainer.seed % 4 == 1 else 0.01
    )
    trainer.kept.pop("schedule", None)
    return trains(trainer)


@statement
def steps_in_the_backward(trainer: Wrapped) -> None:
    """An optimizer for each parameter, in its hook."""
    optimizers = {p: torch.optim.SGD([p], lr=0.01, momentum=0.5) for p in trainer.trained}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in optimizers]
    trainer.loss().backward()
    for hook in hooks:
        hook.remove()


@statement
def packs_what_is_saved(trainer: Wrapped) -> None:
    pack = lambda x: x.detach().cpu().resolve_neg().numpy().copy() if x.dtype in (torch.float32, torch.float64) else x  # noqa: E731
    unpack = lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = trainer.loss()
    loss.backward()


@statement
def takes_gradients_by_func(trainer: Wrapped) -> Any:
    named = {name: p.detach() for name, p in trainer.net.named_parameters() if p.requires_grad}
    x, y = trainer.batch(), trainer.classes()

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return criterion(torch.func.functional_call(trainer.net, values, (x,)), y)

    return list(torch.func.grad(loss)(named).values())


@statement
def trains_by_func(trainer: Wrapped) -> Any:
    """A functional step, whose results are set."""
    named = {name: p for name, p in trainer.net.named_parameters() if p.requires_grad}
    values = {name: p.detach().clone().requires_grad_() for name, p in named.items()}
    out = torch.func.functional_call(trainer.net, values, (trainer.batch(),))
    grads = torch.autograd.grad(out.float().square().mean(), list(values.values()), allow_unused=True)
    with torch.no_grad():
        for (name, value), grad in zip(values.items(), grads):
            if grad is not None:
                named[name].copy_(value - 0.01 * grad)
    return out.detach()


@statement
def adapts_as_maml(trainer: Wrapped) -> None:
    fast = dict(trainer.net.named_parameters())
    wanted = {name: p for name, p in fast.items() if p.requires_grad}
    inner = criterion(trainer.net(trainer.batch()), trainer.classes())
    grads = torch.autograd.grad(inner, list(wanted.values()), create_graph=True, allow_unused=True)
    for (name, p), grad in zip(wanted.items(), grads):
        fast[name] = p if grad is None else p - 0.1 * grad
    criterion(torch.func.functional_call(trainer.net, fast, (trainer.batch(3),)), trainer.classes(3)).backward()


# Averages.


@statement
def averages_exponentially(trainer: Wrapped) -> Any:
    if "exponential" not in trainer.kept:
        trainer.kept["exponential"] = swa_utils.AveragedModel(
            trainer.net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=trainer.share < 0.5
        )
    averaged = trainer.kept["exponential"]
    averaged.update_parameters(trainer.net)
    if trainer.seed % 3 == 0:
        swa_utils.update_bn([trainer.batch(n) for n in range(2)], averaged)
    averaged.eval()
    return averaged(trainer.batch()).detach(), flat(averaged.state_dict().values())


@statement
def schedules_otherwise(trainer: Wrapped) -> Any:
    kinds: list[Any] = [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=60),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.001, 0.05, cycle_momentum=False),
        lambda o: swa_utils.SWALR(o, swa_lr=0.02, anneal_epochs=3),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ]
    if "otherwise" not in trainer.kept:
        trainer.kept["otherwise"] = kinds[trainer.seed % len(kinds)](trainer.optimizer)
    trainer.kept["otherwise"].step()
    return [float(group["lr"]) for group in trainer.optimizer.param_groups]


# The model changes.


def linears(net: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    found = []
    for module in net.modules():
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                found.append((module, name, child))
    return found


def a_linear(trainer: Wrapped) -> tuple[nn.Module, str, nn.Linear] | None:
    found = linears(trainer.net)
    return found[int(trainer.share * len(found))] if found else None


@statement
def exchanges_a_layer(trainer: Wrapped) -> None:
    """For a new one, which the optimizer gets."""
    if (found := a_linear(trainer)) is None:
        return
    module, name, child = found
    torch.manual_seed(trainer.seed)
    made = nn.Linear(child.in_features, child.out_features, bias=trainer.seed % 2 == 0).to(child.weight.dtype)
    setattr(module, name, made)
    trainer.optimizer.add_param_group({"params": list(made.parameters()), "lr": 0.02})
    if trainer.placed and trainer.seed % 3 == 0:
        made.to(rpc.device(WORKERS[2]))


@statement
def exchanges_a_parameter(trainer: Wrapped) -> None:
    if (found := a_linear(trainer)) is not None:
        child = found[2]
        child.weight = nn.Parameter(child.weight.detach() * 0.5)
        trainer.optimizer.add_param_group({"params": [child.weight]})


@statement
def adds_an_adapter(trainer: Wrapped) -> None:
    """LoRA."""
    if (found := a_linear(trainer)) is None:
        return
    module, name, child = found
    torch.manual_seed(trainer.seed)
    child.requires_grad_(False)
    made = Adapted(child)
    setattr(module, name, made)
    trainer.optimizer.add_param_group({"params": [made.down, made.up]})


class Adapted(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Parameter(torch.randn(2, inner.in_features, dtype=inner.weight.dtype) * 0.1)
        self.up = nn.Parameter(torch.zeros(inner.out_features, 2, dtype=inner.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x @ self.down.t() @ self.up.t()


@statement
def ties_two(trainer: Wrapped) -> None:
    found = linears(trainer.net)
    for n, (_, _, first) in enumerate(found):
        for _, _, second in found[n + 1 :]:
            if first.weight.shape == second.weight.shape and first.weight is not second.weight:
                second.weight = first.weight
                return


@statement
def parametrizes(trainer: Wrapped) -> None:
    """The optimizer keeps the old parameter, where torch does."""
    if (found := a_linear(trainer)) is not None:
        [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal][trainer.seed % 3](found[2])
        trainer.optimizer.add_param_group({"params": [p for p in trainer.parameters if not has(trainer.optimizer, p)]})


def has(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    return any(parameter is each for group in optimizer.param_groups for each in group["params"])


@statement
def removes_parametrizations(trainer: Wrapped) -> None:
    for module in list(trainer.net.modules()):
        if parametrize.is_parametrized(module):
            for name in list(module.parametrizations):
                parametrize.remove_parametrizations(module, name, leave_parametrized=trainer.share < 0.5)
    if new := [p for p in trainer.parameters if not has(trainer.optimizer, p)]:
        trainer.optimizer.add_param_group({"params": new})


@statement
def prunes(trainer: Wrapped) -> None:
    if (found := a_linear(trainer)) is not None and found[2].weight.requires_grad:
        child = found[2]
        prune.l1_unstructured(child, "weight", amount=0.3) if trainer.seed % 2 else prune.ln_structured(
            child, "weight", 0.3, 2, 0
        )
        if trainer.seed % 3 == 0:
            prune.remove(child, "weight")
        if new := [p for p in trainer.parameters if not has(trainer.optimizer, p)]:
            trainer.optimizer.add_param_group({"params": new})


@statement
def draws_all_anew(trainer: Wrapped) -> None:
    def init(module: nn.Module) -> None:
        if type(module) is nn.Linear:
            [nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_, nn.init.trunc_normal_][trainer.seed % 4](
                module.weight
            )
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    torch.manual_seed(trainer.seed)
    trainer.net.apply(init)


@statement
def resets_layers(trainer: Wrapped) -> None:
    torch.manual_seed(trainer.seed)
    for module in trainer.net.modules():
        if hasattr(module, "reset_parameters") and not parametrize.is_parametrized(module):
            module.reset_parameters()


@statement
def converts(trainer: Wrapped) -> None:
    """To a wider type, so that steps are still steps."""
    [lambda n: n.double(), lambda n: n.to(torch.float64), lambda n: n.float(), lambda n: n.bfloat16()][trainer.seed % 4](
        trainer.net
    )


@statement
def freezes_a_part(trainer: Wrapped) -> None:
    parts = list(trainer.net.children())
    if parts:
        parts[int(trainer.share * len(parts))].requires_grad_(trainer.seed % 2 == 0)


@statement
def adds_a_buffer(trainer: Wrapped) -> None:
    if not hasattr(trainer.net, "seen"):
        trainer.net.register_buffer("seen", torch.zeros(()))
    trainer.net.seen += 1


@statement
def sets_a_mode(trainer: Wrapped) -> None:
    trainer.net.train(trainer.share < 0.7)


# Hooks.


@statement
def hooks_modules(trainer: Wrapped) -> None:
    parts = list(trainer.net.modules())
    part = parts[int(trainer.share * len(parts))]
    kinds: list[Callable[[], Any]] = [
        lambda: part.register_forward_hook(lambda m, a, out: out * 1.1 if isinstance(out, torch.Tensor) else None),
        lambda: part.register_forward_pre_hook(
            lambda m, a: (a[0] * 1, *a[1:]) if a and isinstance(a[0], torch.Tensor) else None
        ),
        lambda: part.register_full_backward_hook(lambda m, a, b: tuple(None if x is None else x * 2 for x in a)),
        lambda: part.register_full_backward_pre_hook(lambda m, a: tuple(None if x is None else x * 0.5 for x in a)),
        lambda: part.register_forward_hook(
            lambda m, a, k, out: trainer.keep("a call", out if isinstance(out, torch.Tensor) else None), with_kwargs=True
        ),
    ]
    trainer.hooks.append(kinds[trainer.seed % len(kinds)]())


@statement
def hooks_states(trainer: Wrapped) -> None:
    trainer.hooks.append(
        trainer.net.register_state_dict_post_hook(
            lambda m, state, prefix, local: state.update({f"{prefix}more": torch.ones(1)})
        )
        if trainer.share < 0.3
        else trainer.net.register_load_state_dict_pre_hook(lambda m, state, *_: state.pop("more", None))
        if trainer.share < 0.8
        else trainer.net.register_load_state_dict_post_hook(lambda m, keys: trainer.keep("loaded", None))
    )


# States, copies and files.


@statement
def saves_a_checkpoint(trainer: Wrapped) -> None:
    trainer.saves()


@statement
def loads_the_checkpoint(trainer: Wrapped) -> Any:
    return trainer.loads() if trainer.can_load else None


@statement
def replaces_a_worker(trainer: Wrapped) -> Any:
    if not trainer.can_load:
        return None
    workers = trainer.net._placement.workers if trainer.wrapped else []
    spare = [worker for worker in WORKERS[1:] if worker not in workers]
    lost = [worker for worker in WORKERS[1:] if worker in workers]
    if spare and lost:
        return trainer.net.replace(lost[0], spare[0])["step"]
    return trainer.goes_back()


@statement
def goes_on_with_a_copy(trainer: Wrapped) -> None:
    """And a new optimizer: the old one has parameters of the old model."""
    old = trainer.net
    trainer.net, trainer.copied = copy.deepcopy(trainer.net), True
    trainer.hooks.clear()
    for key in ("schedule", "loss", "otherwise", "plateau"):
        trainer.kept.pop(key, None)
    trainer.optimizer = torch.optim.SGD(trainer.net.parameters(), lr=0.05, momentum=0.9)
    if trainer.share < 0.7:
        placement = placement_of(trainer.net, trainer.seed).items()
        trainer.places({path: where for path, where in placement if not isinstance(where, list)})
    del old


@statement
def loads_part_of_a_state(trainer: Wrapped) -> Any:
    state = trainer.net.state_dict()
    part = {name: torch.full_like(value, 0.01) for name, value in list(state.items())[::2]}
    result = trainer.net.load_state_dict(part, strict=False)
    return result.missing_keys, result.unexpected_keys


@statement
def assigns_a_state(trainer: Wrapped) -> None:
    state = {name: value.clone() for name, value in trainer.net.state_dict().items()}
    trainer.net.load_state_dict(state, assign=True)
    trainer.kept.pop("schedule", None)
    trainer.optimizer = torch.optim.Adam(trainer.net.parameters(), lr=0.01)


@statement
def trains_two_at_once(trainer: Wrapped) -> Any:
    """A second thread evaluates a copy meanwhile."""
    twin = copy.deepcopy(trainer.net).eval()
    x = trainer.batch(9)
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        future = threads.submit(lambda: twin(x).detach())
        loss = trains(trainer)
        return loss, future.result()


@statement
def collects_outputs(trainer: Wrapped) -> Any:
    trainer.net.eval()
    outs = []
    with torch.no_grad():
        for n in range(3):
            outs.append(trainer.net(trainer.batch(n)).cpu())
    trainer.net.train()
    found = torch.cat(outs).float()
    return found.argmax(1), found.topk(3).indices, (found.argmax(1) == trainer.classes().repeat(3)).float().mean().item()


# Inputs, outputs, losses.


def given(trainer: Wrapped) -> torch.Tensor:
    """A batch as programs have them: at a worker, strided, a view, of one row."""
    x = trainer.batch()
    kinds: list[Callable[[], torch.Tensor]] = [
        lambda: x.to(rpc.device(WORKERS[1])) if trainer.placed else x,
        lambda: x.to(rpc.device(WORKERS[3]), copy=True) if trainer.placed else x.clone(),
        lambda: x.t().contiguous().t(),
        lambda: torch.cat([x, x])[::2],
        lambda: x[:2].expand(2, 5),
        lambda: x[:1].expand(4, 5),
        lambda: torch.cat([x, x], 1)[:, ::2],
        lambda: nn.Parameter(x),
    ]
    return kinds[trainer.seed % len(kinds)]()


@statement
def takes_inputs_of_all_kinds(trainer: Wrapped) -> Any:
    x = given(trainer)
    out = trainer.net(x)
    loss = out.float().square().mean()
    loss.backward()
    return out.detach(), x.grad


@statement
def takes_another_loss(trainer: Wrapped) -> Any:
    y = trainer.classes()
    losses: list[Callable[[Any], Any]] = [
        lambda out: F.mse_loss(out, F.one_hot(y, 10).to(out.dtype), reduction="sum"),
        lambda out: F.binary_cross_entropy_with_logits(
            out, F.one_hot(y, 10).to(out.dtype), pos_weight=torch.ones(10, dtype=out.dtype)
        ),
        lambda out: F.nll_loss(F.log_softmax(out, 1), y, reduction="none").mean(),
        lambda out: F.multi_margin_loss(out, y),
        lambda out: F.smooth_l1_loss(out, torch.zeros_like(out)),
        lambda out: -out.log_softmax(1).gather(1, y[:, None]).mean(),
        lambda out: out.log_softmax(1)[torch.arange(len(y)), y].neg().sum(),
        lambda out: torch.stack([F.cross_entropy(row[None], c[None]) for row, c in zip(out, y)]).mean(),
        lambda out: F.cosine_embedding_loss(out, out.detach().flip(0), torch.ones(len(y), dtype=out.dtype)),
        lambda out: torch.logsumexp(out, (0, 1)) + torch.linalg.norm(out),
    ]
    loss = losses[trainer.seed % len(losses)](trainer.net(trainer.batch()).float())
    trainer.optimizer.zero_grad()
    loss.backward()
    trainer.optimizer.step()
    return loss.detach()


@statement
def writes_into_an_output(trainer: Wrapped) -> Any:
    out = trainer.net(trainer.batch())
    [
        lambda: out.mul_(2),
        lambda: out[0].zero_(),
        lambda: out.clamp_(min=0),
        lambda: out.__setitem__((slice(None), 1), 3.0),
        lambda: out.t_(),
    ][trainer.seed % 5]()
    out.float().square().mean().backward()
    return out.detach()


@statement
def feeds_outputs_back(trainer: Wrapped) -> Any:
    """Truncated backpropagation through time."""
    state = trainer.kept.get("state of time", torch.zeros(trainer.rows, 5, dtype=trainer.parameters[-1].dtype))
    if len(state) != trainer.rows:
        return None
    out = trainer.net(trainer.batch() + state.to(trainer.parameters[-1].dtype))
    out.float().square().mean().backward()
    trainer.kept["state of time"] = torch.tanh(out[:, :5]).detach()
    return trainer.kept["state of time"]


@statement
def differentiates_inputs(trainer: Wrapped) -> Any:
    x = trainer.batch()[:2]
    was = trainer.net.training
    trainer.net.eval()
    kinds: list[Callable[[], Any]] = [
        lambda: torch.autograd.functional.jacobian(trainer.net, x),
        lambda: torch.autograd.functional.vjp(trainer.net, x, torch.ones(2, 10, dtype=x.dtype))[1],
        lambda: torch.autograd.functional.hvp(lambda v: trainer.net(v).float().square().sum(), x, torch.ones_like(x))[1],
    ]
    found = kinds[trainer.seed % len(kinds)]()
    trainer.net.train(was)
    return found


@statement
def meets_infinity(trainer: Wrapped) -> Any:
    """A step that is left out where gradients are not finite."""
    loss = trainer.loss() * (float("inf") if trainer.share < 0.5 else 1.0)
    trainer.optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.get_total_norm(trainer.gradients)
    if torch.isfinite(norm):
        nn.utils.clip_grads_with_norm_(trainer.parameters, 1.0, norm)
        trainer.optimizer.step()
    else:
        trainer.optimizer.zero_grad()
    return norm


@statement
def wraps_a_function_around(trainer: Wrapped) -> Any:
    x = trainer.batch().requires_grad_()
    out = Reversed.apply(trainer.net(Reversed.apply(x)))
    out.float().square().mean().backward()
    return out.detach(), x.grad


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad * ctx.saved_tensors[0].sign()


@statement
def hooks_many_gradients(trainer: Wrapped) -> Any:
    seen = []
    hook = torch.autograd.graph.register_multi_grad_hook(
        trainer.trained[:3], lambda grads: seen.append([g is None or g.sum().item() for g in grads])
    )
    trainer.loss().backward()
    hook.remove()
    return seen


# Optimizers as objects.


@statement
def clears_the_optimizer(trainer: Wrapped) -> None:
    trainer.optimizer.state.clear()


@statement
def writes_the_optimizer(trainer: Wrapped) -> None:
    for state in trainer.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(0.5)


@statement
def copies_all(trainer: Wrapped) -> Any:
    """The copy trains apart."""
    net, optimizer = copy.deepcopy((trainer.net, trainer.optimizer))
    twin = copy.copy(trainer)
    twin.net, twin.optimizer = net, optimizer
    loss = trains(twin)
    return loss, flat(net.state_dict().values())


@statement
def pickles_the_optimizer(trainer: Wrapped) -> Any:
    file = io.BytesIO()
    torch.save((trainer.net, trainer.optimizer), file)
    file.seek(0)
    net, optimizer = torch.load(file, weights_only=False)
    twin = copy.copy(trainer)
    twin.net, twin.optimizer = net, optimizer
    return trains(twin), flat(net.state_dict().values())


@statement
def makes_groups(trainer: Wrapped) -> Any:
    """Without decay for what has one dimension."""
    few = [p for p in trainer.parameters if p.dim() < 2]
    many = [p for p in trainer.parameters if p.dim() >= 2]
    kinds = [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop]
    groups = [{"params": few, "weight_decay": 0.0}, {"params": many, "lr": 0.02}]
    trainer.optimizer.zero_grad()
    for key in ("schedule", "otherwise", "plateau", "optimizer"):
        trainer.kept.pop(key, None)
    trainer.optimizer = kinds[trainer.seed % 3]([g for g in groups if g["params"]], lr=0.01, weight_decay=0.1)
    return trains(trainer)


# The tree of modules.


@statement
def adds_a_module(trainer: Wrapped) -> None:
    torch.manual_seed(trainer.seed)
    if isinstance(trainer.net, nn.Sequential):
        made = nn.Linear(10, 10).to(trainer.parameters[0].dtype)
        trainer.net.append(made)
        trainer.optimizer.add_param_group({"params": list(made.parameters())})
    elif isinstance(getattr(trainer.net, "blocks", None), nn.ModuleList):
        made = nn.Linear(6, 6).to(trainer.parameters[0].dtype)
        trainer.net.blocks.insert(1, made)
        trainer.optimizer.add_param_group({"params": list(made.parameters())})


@statement
def calls_a_slice(trainer: Wrapped) -> Any:
    if isinstance(trainer.net, nn.Sequential):
        return trainer.net[:2](trainer.batch()).detach()
    return None


@statement
def trains_two_models(trainer: Wrapped) -> Any:
    """A critic of its own takes what the model gives, and shares a layer with it."""
    torch.manual_seed(trainer.seed)
    shared = linears(trainer.net)[-1][2] if linears(trainer.net) else nn.Identity()
    critic = nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 1)).to(trainer.parameters[-1].dtype)
    critic.shared = shared
    if trainer.placed and trainer.share < 0.6:
        critic = rpc.wrap(critic, {"0": WORKERS[3], "2": WORKERS[2]})
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
    out = trainer.net(trainer.batch())
    loss = critic(out.to(next(critic.parameters()).dtype)).float().mean()
    trainer.optimizer.zero_grad()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    trainer.optimizer.step()
    found = flat(critic.state_dict().values())
    return loss.detach(), found


@statement
def swaps_on_conversion(trainer: Wrapped) -> None:
    if trainer.hooks:  # torch never calls those of tensors any more, though it lists them: ``wrap`` gives them back
        return
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        trainer.net.double() if trainer.share < 0.5 else trainer.net.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@statement
def keeps_an_output(trainer: Wrapped) -> None:
    trainer.kept["output"] = trainer.net(trainer.batch())


@statement
def goes_back_from_the_kept_output(trainer: Wrapped) -> Any:
    if "output" not in trainer.kept:
        return None
    out = trainer.kept.pop("output")
    out.float().square().mean().backward()
    return out.detach()


COMMON = [
    "trains",
    "trains",
    "trains_on_micro_batches",
    "trains_and_clears_late",
    "evaluates",
    "saves_a_checkpoint",
    "wraps_again",
]
