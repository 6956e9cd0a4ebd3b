"""What users do with steps that are graphed (``rpc.graphed``), and around and between their calls, besides the statements of
``wrapped_statements``.

A step's Python is the same in every call: what it reads are arguments, and what ``docs/graphed.md`` says is looked at.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from mixed_calls import default_dtype, deterministic, double, home
from served_statements import Statement, flat
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from wrapped_statements import STATEMENTS as WRAPPED
from wrapped_statements import Wrapped, criterion, hooks_modules

import rdmarpc as rpc

NOTING = ("hooks_the_end_of_steps", "hooks_modules", "swaps_on_conversion")
"""Statements whose hooks note what Python does; torch swaps no tensor to which there are weak references."""
STATEMENTS: dict[str, Statement] = {name: function for name, function in WRAPPED.items() if name not in NOTING}
KINDS: dict[str, Callable[[Replayed], Callable[..., Any]]] = {}
"""What makes a step."""


def statement(function: Statement) -> Statement:
    STATEMENTS[function.__name__] = function
    return function


def kind(function: Callable[[Replayed], Callable[..., Any]]) -> Callable[[Replayed], Callable[..., Any]]:
    KINDS[function.__name__] = function
    return function


class Replayed(Wrapped):
    """``steps``: what is called, with the kind of it."""

    def __init__(self, place: Any, net: nn.Module, kind: Any, options: Any, keep: Any, early: bool, seed: int) -> None:
        super().__init__(place, net, kind, options, keep, early, seed)
        self.steps: list[tuple[str, Any]] = []
        self.results: list[Any] = []

    def ends(self) -> None:
        self.keep("results", self.results)
        super().ends()

    def graphs(self, name: str) -> None:
        self.steps.append((name, self.graphed(KINDS[name](self))))

    def graphed(self, step: Callable[..., Any]) -> Any:
        if self.placed:
            return rpc.graphed(step, check=self.seed % 4)
        return lambda *args, **kwargs: tree_map_only(torch.Tensor, torch.detach, step(*args, **kwargs))

    def new(self, x: torch.Tensor) -> torch.Tensor:
        """A result that the step leaves elsewhere, too: it is new."""
        return x if self.placed else x.clone()

    @property
    def step(self) -> Any:
        """The one that the statement draws."""
        if not self.steps:
            self.graphs("trains")
        return self.steps[int(self.share * len(self.steps))]

    def arguments(self, name: str, number: int) -> tuple[Any, ...]:
        x, y = self.batch(number), self.classes(number)
        if name == "nested":
            return ({"x": x, "rest": [y, 0.5, ("text", None)]},)
        if name == "goes_on":
            return x, torch.zeros(self.rows, 10, dtype=x.dtype)
        return (x,) if name in ("evaluates", "writes", "computes") else (x, y)

    def calls(self, count: int, make: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> list[Any]:
        name, step = self.step
        return [step(*tree_map_only(torch.Tensor, make, self.arguments(name, n))) for n in range(count)]

    @property
    def count(self) -> int:
        return 1 + self.seed % 6


# Steps.


@kind
def trains(trainer: Replayed) -> Callable[..., Any]:
    net, optimizer, none = trainer.net, trainer.optimizer, trainer.seed % 2 == 0

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad(set_to_none=none)
        loss = criterion(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@kind
def clips(trainer: Replayed) -> Callable[..., Any]:
    net, optimizer = trainer.net, trainer.optimizer
    way = [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_][trainer.seed % 2]

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        out = net(x)
        loss = criterion(out, y)
        loss.backward()
        norm = way(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "norm": norm, "out": [out, out.argmax(1)]}

    return step


@kind
def accumulates(trainer: Replayed) -> Callable[..., Any]:
    net = trainer.net

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = criterion(net(x), y) / 2
        loss.backward()
        return loss, [p.grad * 1 for p in net.parameters() if p.grad is not None]

    return step


@kind
def returns_gradients(trainer: Replayed) -> Callable[..., Any]:
    net, optimizer, new = trainer.net, trainer.optimizer, trainer.new

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        optimizer.step()
        return loss, [new(p.grad) for p in net.parameters() if p.grad is not None]

    return step


@kind
def updates(trainer: Replayed) -> Callable[..., Any]:
    net, optimizer, none = trainer.net, trainer.optimizer, trainer.seed % 2 == 0

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.step()
        optimizer.zero_grad(set_to_none=none)
        return list(net.parameters())[-1:], x

    return step


@kind
def evaluates(trainer: Replayed) -> Callable[..., Any]:
    net = trainer.net

    def step(x: torch.Tensor) -> Any:
        with torch.no_grad():
            out = net(x)
        return out, out.topk(2), out.float().softmax(1)[:, 0]

    return step


@kind
def nested(trainer: Replayed) -> Callable[..., Any]:
    net, optimizer = trainer.net, trainer.optimizer

    def step(given: Any) -> Any:
        optimizer.zero_grad()
        y, scale, (text, nothing) = given["rest"]
        loss = criterion(net(given["x"]), y) * scale
        loss.backward()
        optimizer.step()
        return {"loss": loss, "rest": (text, nothing, given["x"], given["x"][:1].t(), scale)}

    return step


@kind
def halves(trainer: Replayed) -> Callable[..., Any]:
    net, optimizer = trainer.net, trainer.optimizer

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = criterion(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


@kind
def draws(trainer: Replayed) -> Callable[..., Any]:
    """Noise, a mask, and an order of the rows, here and at a worker."""
    net, optimizer = trainer.net, trainer.optimizer
    where = rpc.device("worker1") if trainer.placed else "cpu"

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        noise = torch.randn(x.shape, dtype=x.dtype) * 0.1 + torch.rand(1, dtype=x.dtype)
        mask = torch.ones(x.shape, device=where, dtype=x.dtype)
        optimizer.zero_grad()
        loss = criterion(net((x + noise) * F.dropout(mask, 0.2)), y)
        loss.backward()
        optimizer.step()
        return loss, noise

    return step


@kind
def in_micro_batches(trainer: Replayed) -> Callable[..., Any]:
    chunks, schedule = 1 + trainer.seed % 3, ["gpipe", "1f1b", "zero_bubble"][trainer.seed % 3]
    net, optimizer = trainer.net, trainer.optimizer

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = trainer.in_batches(criterion, chunks, schedule, x, y, net=net)
        optimizer.step()
        return loss

    return step


@kind
def writes(trainer: Replayed) -> Callable[..., Any]:
    """Its argument, parameters and a buffer."""
    net = trainer.net
    if not hasattr(net, "seen"):
        net.register_buffer("seen", torch.zeros(()))

    def step(x: torch.Tensor) -> Any:
        with torch.no_grad():
            x[0].mul_(2)
            for p in net.parameters():
                p.mul_(0.99)
            net.seen += 1
            net.seen.copy_(net.seen * 1.5)
        return x.sum(), net.seen * 1, net.seen

    return step


@kind
def replaces(trainer: Replayed) -> Callable[..., Any]:
    """A buffer by a new one, in every call."""
    net, new = trainer.net, trainer.new
    net.register_buffer("average", torch.zeros(10), persistent=False)
    if trainer.placed and trainer.share < 0.7:
        net.average = net.average.to(rpc.device("worker1"))

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with torch.no_grad():
            net.average = net.average * 0.9 + net(x).float().mean(0) * 0.1
        return new(net.average), y + 1

    return step


@kind
def computes(trainer: Replayed) -> Callable[..., Any]:
    """Without a model."""
    held = trainer.batch(7).to(rpc.device("worker2")) if trainer.placed else trainer.batch(7)

    def step(x: torch.Tensor) -> Any:
        x = x + 1
        there = (x.mT @ x).tanh() + (held.mT @ held)
        held.mul_(0.5).add_(1)
        return there, there[1:, ::2], x, held

    return step


@kind
def goes_on(trainer: Replayed) -> Callable[..., Any]:
    """From what the call before has returned."""
    net = trainer.net

    def step(x: torch.Tensor, state: torch.Tensor) -> Any:
        with torch.no_grad():
            return torch.tanh(net(x) + state)

    return step


@kind
def asks_for_gradients_of_all(trainer: Replayed) -> Callable[..., Any]:
    net = trainer.net

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        wanted = [p for p in net.parameters() if p.requires_grad]
        grads = torch.autograd.grad(criterion(net(x), y), wanted, allow_unused=True, create_graph=False)
        with torch.no_grad():
            for p, grad in zip(wanted, grads):
                if grad is not None:
                    p.sub_(grad, alpha=0.05)
        return flat(grad for grad in grads if grad is not None)

    return step


# Calls.


@statement
def makes_a_step(trainer: Replayed) -> None:
    trainer.graphs(list(KINDS)[int(trainer.share * len(KINDS))])


@statement
def makes_and_calls_a_step(trainer: Replayed) -> Any:
    makes_a_step(trainer)
    trainer.share = 0.999
    return trainer.calls(3 + trainer.count)


@statement
def calls_a_step(trainer: Replayed) -> Any:
    return trainer.calls(trainer.count)


@statement
def calls_it_often(trainer: Replayed) -> Any:
    return trainer.calls(5)


@statement
def calls_all_steps_in_turn(trainer: Replayed) -> Any:
    found = []
    for n in range(4):
        for name, step in trainer.steps:
            found.append(step(*trainer.arguments(name, n)))
    return found


@statement
def calls_in_turn_with_eager_steps(trainer: Replayed) -> Any:
    found = []
    for n in range(4):
        found.append(trainer.calls(1))
        trainer.seed += 1
        found.append(WRAPPED["trains_and_clears_late" if n % 2 else "trains"](trainer))
    return found


@statement
def calls_by_name(trainer: Replayed) -> Any:
    """And in another order."""
    name, step = trainer.step
    if name not in ("trains", "clips", "halves", "accumulates"):
        return None
    found = []
    for n in range(trainer.count):
        x, y = trainer.arguments(name, n)
        found.append(step(y=y, x=x) if n % 2 else step(x, y=y))
    return found


@statement
def calls_with_batches_of_two_sizes(trainer: Replayed) -> Any:
    found, rows = [], trainer.rows
    for n in range(8):
        trainer.rows = rows + n % 2
        found.append(trainer.calls(1))
    trainer.rows = rows
    return found


@statement
def calls_with_arguments_of_all_kinds(trainer: Replayed) -> Any:
    there = rpc.device(f"worker{1 + trainer.seed % 3}") if trainer.placed else "cpu"
    kinds: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.to(there, copy=True),
        lambda x: torch.cat([x, x])[len(x) :],
        lambda x: torch.stack([x, x], 1)[:, 1],
        lambda x: x.t().contiguous().t(),
        lambda x: x[:1].expand(x.shape) if x.dim() and trainer.step[0] != "writes" else x,
        lambda x: torch.cat([x.to(there), x.to(there)])[len(x) :],
        lambda x: torch.stack([x.to(there), x.to(there)], -1)[..., 1],
        lambda x: nn.Parameter(x, requires_grad=False),
    ]
    one, two = kinds[trainer.seed % len(kinds)], kinds[trainer.seed // 8 % len(kinds)]
    found = trainer.calls(4, one)
    return found, trainer.calls(2, two), trainer.calls(2, one)


@statement
def calls_with_one_data_set(trainer: Replayed) -> Any:
    """Slices of it that lie over each other."""
    name, step = trainer.step
    if name not in ("trains", "clips", "evaluates", "accumulates"):
        return None
    data = torch.cat([trainer.batch(n) for n in range(4)])
    data = data.to(rpc.device("worker2")) if trainer.placed and trainer.share < 0.5 else data
    found = []
    for n in range(6):
        rest = trainer.arguments(name, n)[1:]
        found.append(step(data[n : n + trainer.rows], *rest))
    return found


@statement
def calls_with_one_tensor_twice(trainer: Replayed) -> Any:
    step = trainer.graphed(lambda a, b, c: (a.mul_(2) + b, b - c, c[:1]))
    x = trainer.batch()
    x = x.to(rpc.device("worker1")) if trainer.placed else x
    found = []
    for n in range(8):
        y = x.clone()
        found.append(step(y, y, y[1:].sum(0)) if n % 3 else step(y, y[:1], y[1:2]))
    return found


@statement
def calls_with_numbers(trainer: Replayed) -> Any:
    """Constants: each is a form."""
    net = trainer.net

    def compute(x: torch.Tensor, by: Any, flag: bool = False) -> Any:
        out = net(x).detach() * by
        return out + 1 if flag else (out, by)

    step = trainer.graphed(compute)
    found = []
    for n in range(10):
        found.append(step(trainer.batch(n), [2, 2.0, True, 0.5][n // 3], flag=n % 5 == 4))
    return found


@statement
def keeps_results(trainer: Replayed) -> None:
    trainer.results.append(trainer.calls(trainer.count))


@statement
def reads_kept_results(trainer: Replayed) -> Any:
    return trainer.results


@statement
def writes_results(trainer: Replayed) -> Any:
    """A parameter, or an argument, that is returned is that."""
    found = trainer.calls(4)
    if trainer.step[0] == "replaces":  # its result is the buffer where Python runs, and new where it is replayed
        return found
    with torch.no_grad():
        tree_map_only(torch.Tensor, lambda x: x.mul_(2) if x.is_floating_point() else x.add_(1), found[-1])
    return found, trainer.calls(2)


@statement
def computes_with_results(trainer: Replayed) -> Any:
    def go(x: torch.Tensor) -> torch.Tensor:
        leaf = (x * 1.5).requires_grad_() if x.is_floating_point() else x
        if leaf.requires_grad:
            leaf.sum().backward()
            return leaf.grad + x
        return x * 2

    return tree_map_only(torch.Tensor, go, trainer.calls(4)[-1])


@statement
def feeds_results(trainer: Replayed) -> Any:
    """The state of a recurrence."""
    name, step = trainer.step
    if name != "goes_on":
        trainer.graphs("goes_on")
        name, step = trainer.steps[-1]
    state, found = trainer.arguments(name, 0)[1], []
    for n in range(6):
        state = step(trainer.batch(n), state)
        found.append(state.sum())
        if n == 3:
            state.mul_(0.5)
    return found, state


@statement
def calls_without_results(trainer: Replayed) -> None:
    trainer.calls(5)
    gc.collect()


@statement
def calls_in_a_thread(trainer: Replayed) -> Any:
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        found = [threads.submit(trainer.calls, 3).result()]
    found.append(trainer.calls(2))
    return found


@statement
def calls_in_two_threads(trainer: Replayed) -> Any:
    """Steps of no model each, which meet at one worker."""
    x = trainer.batch()

    def run(by: float) -> Any:
        there = torch.full_like(x, by)
        there = there.to(rpc.device("worker1")) if trainer.placed else there

        def step(x: torch.Tensor) -> Any:
            there.mul_(0.5).add_(x)
            return (there * x).sum(), there + 0

        step = trainer.graphed(step)
        return [step(x + n) for n in range(6)]

    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        return list(threads.map(run, (1.0, 3.0)))


def modes(seed: int) -> Any:
    kinds: list[Callable[[], Any]] = [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: default_dtype(torch.float64),
        deterministic,
        torch.enable_grad,
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
        contextlib.nullcontext,
        lambda: torch.autograd.set_multithreading_enabled(False),
        lambda: torch.autograd.graph.save_on_cpu(),
        lambda: torch.random.fork_rng(devices=[]),
        lambda: torch.set_grad_enabled(False),
    ]
    return kinds[seed % len(kinds)]()


EVALUATING = ("evaluates", "writes", "computes", "goes_on", "updates", "replaces")


@statement
def calls_in_a_mode(trainer: Replayed) -> Any:
    """Before, within and behind it."""
    found = [trainer.calls(3)]
    for _ in range(2):
        with modes(trainer.seed):
            if torch.is_grad_enabled() or trainer.step[0] in EVALUATING:
                found.append(trainer.calls(2))
        found.append(trainer.calls(1))
    return found


@statement
def observes_calls(trainer: Replayed) -> Any:
    """With what says what moves, where workers are, and how long it takes."""
    found = [trainer.calls(3)]
    folder = tempfile.TemporaryDirectory()
    ways: list[Callable[[], Any]] = [
        lambda: rpc.timeline.record(f"{folder.name}/line.json"),
        torch.autograd.profiler.profile,
        lambda: torch.profiler.profile(experimental_config=rpc.profiling.all_threads()),
        rpc.recording,
    ]
    with ways[trainer.seed % len(ways)]() if trainer.placed else contextlib.nullcontext():
        found.append(trainer.calls(2))
        if trainer.placed:
            rpc.counters()
            rpc.debug_info()
            rpc.rpc_sync(f"worker{trainer.seed % 4}", rpc.explain)
    return found, trainer.calls(2)


@statement
def calls_workers_between(trainer: Replayed) -> Any:
    """With what a step has returned, and with its model's parameters."""
    found = []
    for n in range(4):
        found.append(trainer.calls(1))
        results = [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)][-2:]
        values = [*results, trainer.one.detach()]
        to = f"worker{(trainer.seed + n) % 4}"
        found.append([rpc.rpc_sync(to, double, (v,)) if trainer.placed else v * 2 for v in values])
        rpc.remote(to, double, (values[0],)).to_here() if trainer.placed else None
    return found


@statement
def fails_in_a_step(trainer: Replayed) -> Any:
    """By a hook, which is seen; then all goes on."""
    found = [trainer.calls(trainer.count)]
    parts = list(trainer.net.modules())
    hook = parts[int(trainer.share * len(parts))].register_forward_hook(lambda *_: 1 / 0)
    for _ in range(2):
        try:
            trainer.calls(1)
        except ZeroDivisionError:
            found.append("it failed")
    hook.remove()
    return found, trainer.calls(2)


@statement
def fails_by_a_shape(trainer: Replayed) -> Any:
    name, step = trainer.step
    found = [trainer.calls(trainer.count)]
    x, *rest = trainer.arguments(name, 0)
    if isinstance(x, torch.Tensor):
        for _ in range(2):
            try:
                step(torch.cat([x, x], 1)[:, :7], *rest)
            except (RuntimeError, ValueError) as error:
                found.append(type(error).__name__ if name in ("trains", "evaluates") else "it failed")
    return found, trainer.calls(2)


@statement
def changes_modes_in_turn(trainer: Replayed) -> Any:
    found = []
    for n in range(8):
        trainer.net.train(n % 3 > 0)
        found.append(trainer.calls(1))
    trainer.net.train()
    return found


@statement
def changes_between_calls(trainer: Replayed) -> Any:
    """Replays, something that users do, and replays."""
    names = [name for name in STATEMENTS if name not in STEPPING]
    found, seed, share = [trainer.calls(4)], trainer.seed, trainer.share
    for n in range(2):
        trainer.seed, trainer.share = seed + n, (share * (7 + n)) % 1
        found.append(STATEMENTS[names[(seed + n) % len(names)]](trainer))
        trainer.seed, trainer.share = seed, share
        found.append(trainer.calls(2))
    return found


@statement
def sets_the_rate_in_a_tensor(trainer: Replayed) -> None:
    for group in trainer.optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(0.9)
        elif trainer.optimizer.defaults.get("fused"):
            group["lr"] = torch.tensor(float(group["lr"]))


@statement
def schedules_between_calls(trainer: Replayed) -> Any:
    found = []
    for _ in range(5):
        found.append(trainer.calls(1))
        STATEMENTS["schedules"](trainer)
    return found, trainer.calls(3)


@statement
def hooks_layers(trainer: Replayed) -> None:
    trainer.seed -= trainer.seed % 5 == 4
    hooks_modules(trainer)


@statement
def nests_a_step(trainer: Replayed) -> Any:
    inner = trainer.graphed(lambda x: x.tanh() * 2)
    there = rpc.device("worker1") if trainer.placed else "cpu"
    outer = trainer.graphed(lambda x: inner(x.to(there)) + inner(x.to(there) + 1))
    return [outer(trainer.batch(n)) for n in range(5)], inner(trainer.batch())


@statement
def drops_a_step(trainer: Replayed) -> None:
    if trainer.steps:
        del trainer.steps[int(trainer.share * len(trainer.steps))]
        gc.collect()


@statement
def draws_between_calls(trainer: Replayed) -> Any:
    found = []
    for n in range(5):
        found.append((trainer.calls(1), torch.rand(2)))
        if n == trainer.seed % 4:
            torch.manual_seed(trainer.seed)
    return found


@statement
def evaluates_between_calls(trainer: Replayed) -> Any:
    """Copies of parameters at other places are made anew."""
    return [(trainer.calls(1), trainer.evaluated(), flat(trainer.gradients)) for _ in range(5)]


@statement
def keeps_a_graph_over_calls(trainer: Replayed) -> Any:
    """A backward behind calls that wrote parameters says so, as torch does."""
    trainer.calls(3)
    loss = trainer.loss()
    found = trainer.calls(1)
    before = [None if p.grad is None else home(p.grad) for p in trainer.parameters]
    try:
        loss.backward()
    except RuntimeError:
        found.append("modified")
        for p, grad in zip(trainer.parameters, before):
            if grad is not None:
                p.grad.copy_(grad)
            elif p.grad is not None:
                p.grad = None
    return found


STEPPING = [name for name in STATEMENTS if name not in WRAPPED and name not in ("hooks_layers", "sets_the_rate_in_a_tensor")]
COMMON = ["makes_and_calls_a_step", "makes_a_step", "calls_it_often", "calls_a_step", "changes_between_calls", "keeps_results"]
