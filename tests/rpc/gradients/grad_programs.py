"""Random computations over several workers, and two ways to run them: by calls, and in this process alone.

A program is a tree of bodies. Each belongs to a worker and is a list of steps on variables: operations, leaves of that worker,
hooks, and calls of other bodies. It follows from its seed, so calls only name it. All values are small integers in float64:
sums are exact in whatever order they are made, and both ways of running give the same bits.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

import rdmarpc as rpc
from rdmarpc.gradients.graph import RECEIVED

DEVICE = "cpu"
"""Where leaves are made, in this process."""
SIDE = 3  # variables are matrices of this side, or its rows
_LIMIT = 300  # of the values, so that gradients stay below 2 ** 53
_CALLS = ("sync", "async", "remote", "fetched twice", "fetched there")
_OPS = (
    "add",
    "sub",
    "mul",
    "matmul",
    "relu",
    "transposed",
    "unbind",
    "split",
    "in place",
    "embedding",
    "counted",
    "two",
    "detach",
    "twice",
)


@dataclass
class Body:
    worker: int
    matrix: list[bool]
    """Of each input: a matrix, or a row."""
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    shape: str = "list"
    """What the outputs are returned in."""


@dataclass
class Program:
    seed: int
    bodies: list[Body]
    passes: list[list[int]]
    """The roots of each backward pass: variables of body 0, which are matrices."""
    hurried: bool
    """Whether ``backward`` begins while calls are under way that take no part. (They set no hooks.)"""
    remote_root: int
    """A worker at which the loss of the first pass is made, and to whose reference ``backward`` is then said; or -1."""


class _Maker:
    """Of one body. ``hooks``: whether there are any in the program."""

    def __init__(
        self, bodies: list[Body], rng: random.Random, workers: int, hooks: bool, worker: int, inputs: list[tuple[bool, int]]
    ) -> None:
        self.bodies, self.rng, self.workers, self.hooks = bodies, rng, workers, hooks
        self.body = Body(worker, [matrix for matrix, _ in inputs])
        self.number = len(bodies)
        bodies.append(self.body)
        self.vars = list(inputs)  # (is a matrix, bound of its values); removed from ``usable`` while a call makes it
        self.usable = set(range(len(inputs)))

    def new(self, matrix: bool, bound: int) -> int:
        self.vars.append((matrix, bound))
        self.usable.add(len(self.vars) - 1)
        return len(self.vars) - 1

    def pick(self, matrix: bool | None = None) -> int:
        """Mostly what is recent, else anything: reuse in several places. A leaf if there is none."""
        found = [var for var in sorted(self.usable) if matrix is None or self.vars[var][0] == matrix]
        if not found:
            return self.leaf() if matrix is not False else self.op("unbind")
        return self.rng.choice(found[-3:]) if self.rng.random() < 0.6 else self.rng.choice(found)

    def leaf(self) -> int:
        self.body.steps.append(("leaf", self.rng.randrange(5), self.hooks and self.rng.random() < 0.4))
        return self.new(True, 2)

    def op(self, name: str) -> int:
        rng, steps = self.rng, self.body.steps
        if name in ("add", "sub", "two"):
            a = self.pick()
            b = self.pick(self.vars[a][0])
            bound = self.vars[a][1] + self.vars[b][1]
            if bound > _LIMIT:
                return self.op("relu")
            steps.append((name, a, b))
            first = self.new(self.vars[a][0], bound)
            return first if name != "two" else self.new(self.vars[a][0], self.vars[a][1])
        if name in ("mul", "matmul"):
            a, b = self.pick(True), self.pick(True)
            bound = self.vars[a][1] * self.vars[b][1] * (1 if name == "mul" else SIDE)
            if bound > _LIMIT:
                return self.op("counted")
            steps.append((name, a, b))
            return self.new(True, bound)
        if name in ("relu", "counted", "detach"):
            a = self.pick()
            steps.append((name, a))
            return self.new(*self.vars[a])
        a = self.pick(True)
        bound = self.vars[a][1]
        if name == "unbind":
            steps.append((name, a))
            return [self.new(False, bound) for _ in range(SIDE)][rng.randrange(SIDE)]
        if name == "twice":  # a received row or matrix may come twice in a stack
            rows = [self.pick(False) for _ in range(SIDE - 1)]
            rows.append(rows[0])
            steps.append(("stack", *rows))
            return self.new(True, max(self.vars[row][1] for row in rows))
        if name == "in place" and 2 * bound > _LIMIT:
            return self.op("transposed")
        rows = [rng.randrange(SIDE) for _ in range(SIDE)]
        steps.append((name, a, *(rows if name == "embedding" else ())))
        return self.new(True, 2 * bound if name == "in place" else bound)

    def arguments(self) -> list[int]:
        found = [self.pick() for _ in range(self.rng.choice((0, 1, 1, 2, 2, 3)))]
        if found and self.rng.random() < 0.25:
            found.append(found[0])
        return found

    def inner(self, inputs: list[tuple[bool, int]], depth: int, own: bool) -> tuple[int, list[tuple[bool, int]]]:
        """A body of any worker. ``own``: what it gets is its own, to be changed."""
        worker = self.rng.randrange(self.workers)
        maker = _Maker(self.bodies, self.rng, self.workers, self.hooks, worker, inputs)
        if own and self.rng.random() < 0.3:
            maker.change_inputs()
        maker.make(depth - 1)
        return maker.number, [maker.vars[output] for output in maker.body.outputs]

    def call(self, depth: int, mode: str) -> tuple[tuple[Any, ...], list[tuple[bool, int]]]:
        rng = self.rng
        args = self.arguments()
        flat = rng.random() < 0.5  # arguments side by side, or in a list
        body, outputs = self.inner([self.vars[arg] for arg in args], depth, own=len(args) == 1)
        if mode != "fetched there":
            return ("call", mode, body, tuple(args), flat), outputs * (2 if mode == "fetched twice" else 1)
        args_there = self.arguments()
        inputs = outputs + [self.vars[arg] for arg in args_there]
        there, outputs = self.inner(inputs, depth - 1, own=False)
        return ("relay", body, tuple(args), there, tuple(args_there)), outputs

    def made(self, outputs: list[tuple[bool, int]]) -> list[int]:
        return [self.new(*output) for output in outputs]

    def change_inputs(self) -> None:
        for number, (matrix, bound) in enumerate(self.vars):
            self.body.steps.append(("in place on input", number))
            self.vars[number] = matrix, 2 * bound

    def make(self, depth: int) -> None:
        rng, steps = self.rng, self.body.steps
        pending: list[tuple[int, list[tuple[bool, int]]]] = []
        for _ in range(rng.randint(2, 6) if depth < 3 else rng.randint(5, 12)):
            chance = rng.random()
            if chance < 0.12:
                self.leaf()
            elif chance < 0.24 and self.usable and self.hooks:
                steps.append(("hook", self.pick()))
            elif chance < 0.54 and depth > 0:
                mode = rng.choice(_CALLS)
                step, outputs = self.call(depth, mode)
                steps.append(step)
                if mode == "async" or mode == "remote":
                    pending.append((len(steps) - 1, outputs))
                elif rng.random() < 0.85:  # else nobody uses what came
                    steps.append(("take",))
                    self.made(outputs)
            elif chance < 0.64 and pending:
                at, outputs = pending.pop(rng.randrange(len(pending)))
                steps.append(("wait", at))
                self.made(outputs)
            elif chance < 0.7 and self.usable and depth > 0:
                self.changed_after_sending(depth)
            else:
                self.op(rng.choice(_OPS))
        for at, outputs in pending:
            if rng.random() < 0.6:
                steps.append(("wait", at))
                self.made(outputs)
        if not self.usable:
            self.leaf()
        self.body.outputs = [self.pick() for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        self.body.shape = rng.choice(("list", "tuple", "dict", "bare"))

    def changed_after_sending(self, depth: int) -> None:
        """A tensor is sent, and then changed in place: gradients of the two go their own ways."""
        a = self.pick()
        matrix, bound = self.vars[a]
        if 3 * bound > _LIMIT:
            return
        body, outputs = self.inner([(matrix, bound)], depth, own=True)
        self.body.steps.append(("send and change", a, body))
        self.new(matrix, 3 * bound)
        self.made(outputs)


@lru_cache(64)
def program(seed: int, workers: int) -> Program:
    rng = random.Random(seed)
    bodies: list[Body] = []
    hooks = rng.random() < 0.75
    maker = _Maker(bodies, rng, workers, hooks, seed % workers, [])
    maker.make(3)
    passes = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        passes.append([maker.pick(True) for _ in range(rng.choice((1, 1, 2)))])
    return Program(seed, bodies, passes, not hooks, rng.randrange(workers) if rng.random() < 0.25 else -1)


# -- what a program leaves behind, here


class Table:
    """Of one program in this process: its leaves, how often nodes ran, and what hooks saw."""

    def __init__(self) -> None:
        self.leaves: dict[tuple[int, int], torch.Tensor] = {}
        self.ran: dict[str, int] = defaultdict(int)
        self.saw: dict[str, list[list[float]]] = defaultdict(list)
        self.lock = threading.Lock()

    def leaf(self, seed: int, worker: int, number: int) -> torch.Tensor:
        with self.lock:
            found = self.leaves.get((worker, number))
            if found is None:
                values = random.Random(f"{seed} {worker} {number}")
                numbers = [[values.randint(-2, 2) for _ in range(SIDE)] for _ in range(SIDE)]
                found = torch.tensor(numbers, dtype=torch.float64, device=DEVICE)
                found = torch.nn.Parameter(found) if number == 1 else found.requires_grad_(number != 4)
                self.leaves[worker, number] = found
        return found

    def hook(self, name: str, tensor: torch.Tensor) -> None:
        def note(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None and received:  # another tensor of the same message has one
                return None
            with self.lock:
                self.saw[name].append([] if gradient is None else gradient.flatten().tolist())
            return gradient * 2 if changes and gradient is not None else None

        # Bodies that run at the same time add hooks to a leaf in any order.
        changes = name.endswith("/2") and not tensor.is_leaf
        received = isinstance(tensor.grad_fn, RECEIVED)

        if tensor.requires_grad:
            tensor.register_hook(note)


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, table, name):
        ctx.table, ctx.name = table, name
        return x * 2 - x

    @staticmethod
    def backward(ctx, gradient):
        with ctx.table.lock:
            ctx.table.ran[ctx.name] += 1
        return gradient.clone(), None, None


class Two(torch.autograd.Function):
    """Two inputs and two outputs; the gradients of outputs that are not used come as zeros."""

    @staticmethod
    def forward(ctx, x, y, table, name):
        ctx.table, ctx.name = table, name
        return x + y, x.clone()

    @staticmethod
    def backward(ctx, of_sum, of_copy):
        with ctx.table.lock:
            ctx.table.ran[ctx.name] += 1
        return of_sum + of_copy, of_sum.clone(), None, None


TABLES: dict[int, Table] = defaultdict(Table)
_WORKERS = 3


# -- running one


class _Fetched(list[Any]):
    """What came each time."""


class Run:
    """``table`` is given for a run in this process alone."""

    def __init__(self, seed: int, number: int, table: Table | None = None) -> None:
        self.seed, self.number, self.alone = seed, number, table is not None
        self.table = table if table is not None else TABLES[seed]
        self.body = program(seed, _WORKERS).bodies[number]

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        vars_ = self.vars = list(inputs)
        last: list[torch.Tensor] = []
        begun: dict[int, Any] = {}
        for at, step in enumerate(self.body.steps):
            name = f"{self.number}.{at}"
            match step:
                case "call", "async" | "remote", *_:
                    begun[at] = self._begin(step)
                case "call", *_:
                    last = self._call(step)
                case "relay", body, args, there, args_there:
                    last = self._relay(body, args, there, args_there)
                case ("take",):
                    vars_ += last
                case "wait", start:
                    vars_ += self._end(begun.pop(start))
                case "send and change", var, body:
                    fresh = vars_[var] * 1
                    sent = self._call(("call", "sync", body, (fresh,), True))
                    vars_ += [fresh.mul_(3), *sent]
                case _:
                    self._simple(name, step)
        self.begun = begun
        return vars_

    def finish(self) -> None:
        """Wait for the calls that nobody waited for."""
        for each in self.begun.values():
            self._end(each)

    def _simple(self, name: str, step: tuple[Any, ...]) -> None:
        v = self.vars
        match step:
            case "leaf", number, hooked:
                leaf = self.table.leaf(self.seed, self.body.worker, number)
                if hooked:
                    self.table.hook(name + "/leaf", leaf)
                v.append(leaf)
            case "hook", var:
                self.table.hook(name + "/2" if var % 2 else name, v[var])
            case "in place on input", var:
                v[var].mul_(2)
            case "add", a, b:
                v.append(v[a] + v[b])
            case "sub", a, b:
                v.append(v[a] - v[b])
            case "mul", a, b:
                v.append(v[a] * v[b])
            case "matmul", a, b:
                v.append(v[a] @ v[b])
            case "relu", a:
                v.append(v[a].relu())
            case "transposed", a:
                v.append(v[a].t())
            case "detach", a:
                v.append(v[a].detach().clone())
            case "unbind", a:
                v += v[a].unbind(0)
            case "split", a:
                upper, lower = v[a].split((1, SIDE - 1))
                v.append(torch.cat((lower, upper)))
            case "stack", *rows:
                v.append(torch.stack([v[row] for row in rows]))
            case "in place", a:
                fresh = v[a] * 1
                fresh.view(SIDE, SIDE)[1:, :2].mul_(2)
                v.append(fresh)
            case "embedding", a, *rows:
                v.append(F.embedding(torch.tensor(rows, device=v[a].device), v[a]))
            case "counted", a:
                v.append(Counted.apply(v[a], self.table, name))
            case "two", a, b:
                v += Two.apply(v[a], v[b], self.table, name)
            case _:
                raise AssertionError(step)

    def _given(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        return [arg if isinstance(arg, torch.Tensor) else self.vars[arg] for arg in args]

    def _here(self, body: int, args: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs, alone."""
        run = Run(self.seed, body, self.table)
        found = run.run(by_value(args))
        return [found[output] for output in run.body.outputs]

    def _call(self, step: tuple[Any, ...]) -> list[torch.Tensor]:
        return self._end(self._begin(step))

    def _begin(self, step: tuple[Any, ...]) -> Any:
        _, mode, body, args, flat = step
        given = self._given(args)
        if self.alone:
            outputs = self._here(body, given)
            own = program(self.seed, _WORKERS).bodies[body].worker == self.body.worker
            fetch = list if mode in ("remote", "fetched twice") and own else by_value  # an owner has the value itself
            return fetch(outputs) + fetch(outputs) if mode == "fetched twice" else fetch(outputs)
        to = f"worker{program(self.seed, _WORKERS).bodies[body].worker}"
        sent = (self.seed, body, *given) if flat else (self.seed, body, given)
        if mode == "sync":
            return rpc.rpc_sync(to, perform, sent)
        if mode == "async":
            return rpc.rpc_async(to, perform, sent)
        rref = rpc.remote(to, perform, sent)
        return rref if mode == "remote" else _Fetched([rref.to_here(), rref.to_here()])

    def _end(self, begun: Any) -> list[torch.Tensor]:
        if self.alone:
            return begun
        if isinstance(begun, torch.futures.Future):
            begun = begun.wait()
        elif isinstance(begun, rpc.RRef):
            begun = begun.to_here()
        return unfolded(begun) if not isinstance(begun, _Fetched) else unfolded(begun[0]) + unfolded(begun[1])

    def _relay(self, body: int, args: tuple[Any, ...], there: int, args_there: tuple[Any, ...]) -> list[torch.Tensor]:
        given, given_there = self._given(args), self._given(args_there)
        bodies = program(self.seed, _WORKERS).bodies
        if self.alone:
            outputs = self._here(body, given)
            if bodies[body].worker != bodies[there].worker:
                outputs = by_value(outputs)
            run = Run(self.seed, there, self.table)
            found = run.run(outputs + by_value(given_there))
            return by_value([found[output] for output in run.body.outputs])
        rref = rpc.remote(f"worker{bodies[body].worker}", perform, (self.seed, body, *given))
        to = f"worker{bodies[there].worker}"
        return unfolded(rpc.rpc_sync(to, perform_with, (self.seed, there, rref, given_there)))


def by_value(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a message makes of them."""
    made: dict[int, torch.Tensor] = {}
    return [made.setdefault(id(tensor), tensor.clone()) for tensor in tensors]


def folded(outputs: list[torch.Tensor], shape: str) -> Any:
    if shape == "bare" and len(outputs) == 1:
        return outputs[0]
    if shape == "dict":
        return {"values": outputs, "what": "else"}
    return ("tuple", outputs, None) if shape == "tuple" else outputs


def unfolded(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return value["values"] if isinstance(value, dict) else value[1] if isinstance(value, tuple) else value


def perform(seed: int, number: int, *given: Any) -> Any:
    """One body, on its worker."""
    inputs = given[0] if given and isinstance(given[0], list) else list(given)
    run = Run(seed, number)
    found = run.run(inputs)
    run.finish()
    return folded([found[output] for output in run.body.outputs], run.body.shape)


def perform_with(seed: int, number: int, rref: rpc.RRef, given: list[torch.Tensor]) -> Any:
    return perform(seed, number, unfolded(rref.to_here()) + given)
