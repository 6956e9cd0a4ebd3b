"""A placement for a model that nobody has placed yet: runs of modules in execution order, as even as they can be."""

from __future__ import annotations

import copy
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .placement import deepest

_PASSES = 8
_FINE = 4
"""A unit is opened while it weighs more than this part of a worker's share."""
_GAIN = 1.05
"""Deeper cuts are worth it if the heaviest worker gets lighter by this factor: they cost edges."""

Weigh = Callable[[Iterable[str]], float]


def auto_placement(
    net: nn.Module,
    workers: Sequence[str],
    *,
    by: str = "bytes",
    inputs: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """A placement for ``wrap`` that cuts ``net`` into at most ``len(workers)`` runs of modules, such that the heaviest weighs
    as little as possible.

    ``by="bytes"``: parameters and buffers. ``by="time"``: seconds of forward and backward, measured here on ``inputs`` and
    ``kwargs`` with a copy of the model (median of 5). With inputs the order is that in which the forward of such a copy calls
    the modules; else that of the registration. Large modules are opened and their children distributed, as long as that makes
    the heaviest run lighter by 5 %; what lies directly in an opened module goes with the first of them. Modules that share
    parameters stay together, where the first of them is.

    The runs are found by dynamic programming over the linear partition problem. Raises ``ValueError`` for no workers, another
    ``by``, ``by="time"`` without inputs, or a tensor for ``inputs``.
    """
    if not workers or isinstance(workers, str):
        raise ValueError(f"auto_placement needs a list of at least one worker, got {workers!r}")
    if by not in ("bytes", "time"):
        raise ValueError(f"by={by!r} is not known; use 'bytes' or 'time'")
    if by == "time" and inputs is None:
        raise ValueError("by='time' measures the modules on inputs: give inputs=")
    if isinstance(inputs, torch.Tensor):
        raise ValueError("inputs= are all arguments of the forward, in a tuple: (x,), not x")
    run = None if inputs is None else _Run(net, inputs, kwargs or {})
    weigh: Weigh = partial(_nbytes, net) if by == "bytes" or run is None else run.seconds
    order = None if run is None else {path: at for at, path in reversed(list(enumerate(run.order)))}
    opened: set[str] = set()
    passes: list[tuple[float, dict[str, str], set[str]]] = []
    for _ in range(_PASSES):
        units, opened = _units(net, opened, order)
        groups = _tied(net, units, opened)
        weights = [weigh(group) for group in groups]
        runs = partition(weights, len(workers))
        homes = {path: worker for worker, part in zip(workers, runs) for group in groups[part] for path in group}
        heaviest = max(sum(weights[part]) for part in runs)
        passes.append((heaviest, {path: homes[path] for path in units if path in homes}, opened))
        share = sum(weights) / len(workers) / _FINE
        heavy = {path for path in units if weigh([path]) > share and net.get_submodule(path)._modules}
        if not heavy or len(workers) == 1:
            break
        opened = opened | heavy
        if any(opened == before for _, _, before in passes):
            break
    least = min(heaviest for heaviest, _, _ in passes)
    _, homes, opened = next(found for found in passes if found[0] <= least * _GAIN)
    return _compact(net, _with_own_tensors(net, homes, opened))


def partition(weights: Sequence[float], count: int) -> list[slice]:
    """Cut a sequence into at most ``count`` contiguous runs with the least possible largest sum; among those, with the least
    sum of squares that the recurrence meets."""
    if not weights:
        return [slice(0, 0)]
    sums = [0.0, *accumulate(weights)]

    @cache
    def best(end: int, count: int) -> tuple[float, float, tuple[int, ...]]:
        """The largest sum, and the sum of squares, of the first ``end`` in so many runs, and where these begin."""
        if count == 1:
            return sums[end], sums[end] ** 2, (0,)

        def cut(begin: int) -> tuple[float, float, tuple[int, ...]]:
            largest, squares, starts = best(begin, count - 1)
            last = sums[end] - sums[begin]
            return max(largest, last), squares + last**2, (*starts, begin)

        # The shortest last run of equals: what weighs nothing goes with what comes before it.
        return min(map(cut, range(end, -1, -1)), key=itemgetter(0, 1))

    starts = best(len(weights), count)[2]
    return [slice(start, end) for start, end in pairwise((*starts, len(weights))) if start < end]


# -- units


def _units(net: nn.Module, opened: set[str], order: Mapping[str, int] | None) -> tuple[list[str], set[str]]:
    """The modules that are distributed, in order, and which ones are open: those of ``opened`` whose forward calls their
    children. ``order``: when each module was called first."""
    if order is None:
        return _frontier(net, opened), opened
    opened = {path for path in opened if any(called.startswith(path + ".") for called in order)}
    # What is never called follows what was registered before it.
    units, keys, at = _frontier(net, opened), {}, -1
    for path in units:
        at = order.get(path, at)
        keys[path] = at
    return sorted(units, key=keys.__getitem__), opened


def _frontier(net: nn.Module, opened: set[str]) -> list[str]:
    found: list[str] = []

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():  # each once
            below = join(path, name)
            if below in opened or (isinstance(child, (nn.ModuleList, nn.ModuleDict)) and child._modules):
                walk(child, below)
            else:
                found.append(below)

    walk(net, "")
    return found


def _tied(net: nn.Module, units: Sequence[str], opened: set[str]) -> list[list[str]]:
    """Units that share a tensor are one group, where the first of them is; what shares one with an opened module is in none."""
    kept = {id(tensor) for path in ("", *opened) for tensor in _tensors(net, path, False)}
    groups: dict[int, list[str]] = {}
    group_of: dict[int, int] = {}
    for at, path in enumerate(units):
        tensors = {id(tensor) for tensor in _tensors(net, path)}
        if tensors & kept:
            continue
        groups[at] = [path]
        for old in sorted({group_of[tensor] for tensor in tensors if tensor in group_of}, reverse=True):
            first, second = min(old, at), max(old, at)
            groups[first] += groups.pop(second)
            group_of.update({tensor: first for tensor, group in group_of.items() if group == second})
            at = first
        group_of.update(dict.fromkeys(tensors, at))
    return [groups[at] for at in sorted(groups)]


def _tensors(net: nn.Module, path: str, recurse: bool = True) -> list[torch.Tensor]:
    """Parameters and buffers. ``recurse``: those of its children, too."""
    module = net.get_submodule(path)
    return [*module.parameters(recurse), *module.buffers(recurse)]


# -- weights


def _nbytes(net: nn.Module, paths: Iterable[str]) -> float:
    tensors = {id(tensor): tensor for path in paths for tensor in _tensors(net, path)}
    return float(sum(tensor.nbytes for tensor in tensors.values()))


class _Run:
    """One forward of a copy: in which ``order`` it called modules (paths), and with what, so that each can be timed again."""

    repeats = 5

    def __init__(self, net: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._net = copy.deepcopy(net)
        self.order: list[str] = []
        self._calls: dict[str, list[tuple[Any, Any]]] = {}
        self._seconds: dict[str, float] = {}
        hooks = []
        for name, module in self._net.named_modules():

            def note(_: nn.Module, args: Any, more: Any, name: str = name) -> None:
                self.order.append(name)
                self._calls.setdefault(name, []).append((args, more))

            hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
        given, more = pytree.tree_map(_fresh, (tuple(inputs), dict(kwargs)))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            self._net(*given, **more)
        for hook in hooks:
            hook.remove()

    def seconds(self, paths: Iterable[str]) -> float:
        return sum(self._one(path) for path in paths)

    def _one(self, path: str) -> float:
        if path not in self._seconds:
            self._seconds[path] = sum(self._measure(self._net.get_submodule(path), *call) for call in self._calls.get(path, []))
        return self._seconds[path]

    def _measure(self, module: nn.Module, args: Any, kwargs: Any) -> float:
        times = []
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            for _ in range(self.repeats + 1):
                given, more = pytree.tree_map(_fresh, (args, kwargs))
                started = perf_counter()
                outputs = [t for t in pytree.tree_leaves(module(*given, **more)) if isinstance(t, torch.Tensor)]
                roots = [t for t in outputs if t.requires_grad]
                if roots:
                    torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
                times.append(perf_counter() - started)
        return statistics.median(times[1:])


def _fresh(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach()
    # No leaf: a module may write into its input in place.
    return leaf.requires_grad_().clone() if leaf.is_floating_point() else leaf.clone()


# -- short keys


def _with_own_tensors(net: nn.Module, homes: dict[str, str], opened: set[str]) -> dict[str, str]:
    """Entries for opened modules that have tensors of their own, unless others share these."""
    uses = Counter(id(t) for path, _ in net.named_modules() for t in _tensors(net, path, False))
    for path in sorted(opened, key=lambda path: path.count(".")):
        tensors = _tensors(net, path, False)
        below = [unit for unit in homes if unit.startswith(path + ".")]
        if tensors and below and all(uses[id(tensor)] == 1 for tensor in tensors):
            entries = list(homes.items())
            entries.insert(list(homes).index(below[0]), (path, homes[below[0]]))
            homes = dict(entries)
    # What lies below an entry goes with it.
    return {unit: worker for unit, worker in homes.items() if deepest(homes, unit.rpartition(".")[0]) != worker}


def _compact(net: nn.Module, homes: dict[str, str]) -> dict[str, str]:
    homes = dict(homes)
    parents = {path.rpartition(".")[0] for path in homes}
    while parent := max((path for path in parents if path), key=lambda path: path.count("."), default=None):
        parents.discard(parent)
        children = [join(parent, name) for name, _ in net.get_submodule(parent).named_children()]
        found = {homes.get(child) for child in children}
        parents.add(parent.rpartition(".")[0])
        if len(found) == 1 and None not in found:
            merged = {(parent if path == children[0] else path): home for path, home in homes.items()}
            homes = {path: home for path, home in merged.items() if path not in children}

    def run(numbered: tuple[int, str]) -> Any:
        """The same for neighbours whose numbers follow each other at one worker."""
        at, path = numbered
        parent, _, name = path.rpartition(".")
        return (parent, homes[path], int(name) - at) if name.isdigit() else at

    short: dict[str, str] = {}
    for _, same in groupby(enumerate(homes), run):
        first, *rest = [path for _, path in same]
        short[f"{first}-{rest[-1].rpartition('.')[2]}" if rest else first] = homes[first]
    return short


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
