"""Which worker has which part of a model: dotted paths of modules at any depth, each with the name of a worker."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from .transport import NotSupported

_RANGE = re.compile(r"(\d+)-(\d+)")


class Places:
    """A placement of one model. ``homes`` has an entry for every placed module, ranges taken apart; what lies below one
    belongs to it unless it is placed itself, and what lies below none belongs to ``caller``."""

    def __init__(self, homes: Mapping[str, str], caller: str) -> None:
        self.homes, self.caller = dict(homes), caller
        self.placed = functools.cache(self._placed)
        self.whole = functools.cache(self._whole)

    def _placed(self, path: str) -> str | None:
        while path:
            if path in self.homes:
                return self.homes[path]
            path = path.rpartition(".")[0]
        return None

    def owner(self, path: str) -> str:
        """The worker of a module, parameter or buffer."""
        return self.placed(path) or self.caller

    def _whole(self, path: str) -> bool:
        home, below = self.owner(path), path + "."
        return all(worker == home for other, worker in self.homes.items() if other.startswith(below))

    def scope(self, path: str) -> str | None:
        """Where the operations in a module's own forward run; ``None``: where their inputs are."""
        if not path:
            return None
        return self.placed(path) or (self.caller if self.whole(path) else None)


def resolve(net: nn.Module, placement: Mapping[str, str], caller: str, workers: Sequence[str]) -> Places:
    """The places that a placement describes. ``a.0-5`` stands for the numbered children 0 to 5 of ``a``.

    Raises ``ValueError`` for an unknown worker, a path or number that does not exist, an empty range, or two entries for one
    module; ``NotSupported`` for a tensor that would lie on several workers, or that has no shape yet.
    """
    homes: dict[str, str] = {}
    source: dict[str, str] = {}
    for key, worker in placement.items():
        if worker not in workers:
            raise ValueError(
                f"placement puts {key!r} on worker {worker!r}, which is not in this group; its workers are " + _listed(workers)
            )
        for path in _expand(net, key):
            if path in homes:
                raise ValueError(f"placement has two entries for {path!r}: {source[path]!r} and {key!r}")
            homes[path], source[path] = worker, key
    places = Places(homes, caller)
    _check_tensors(net, places)
    return places


def _expand(net: nn.Module, key: str) -> list[str]:
    found = [("", net)]
    for step in key.split("."):
        found = [(join(path, name), child) for path, module in found for name, child in _children(net, key, path, module, step)]
    return [path for path, _ in found]


def _children(net: nn.Module, key: str, path: str, module: nn.Module, step: str) -> Iterator[tuple[str, nn.Module]]:
    known = {name: child for name, child in module._modules.items() if child is not None}
    match = _RANGE.fullmatch(step)
    if step in known or match is None:
        wanted = [step]
    else:
        first, last = int(match[1]), int(match[2])
        if first > last:
            raise ValueError(f"placement names {key!r}: the range {step!r} is empty, its first number is the larger one")
        wanted = [str(number) for number in range(first, last + 1)]
    for name in wanted:
        if name not in known:
            where = f"{path!r}" if path else type(net).__name__
            parts = "top-level parts" if not path else "parts"
            raise ValueError(
                f"placement names part {key!r}, which {type(net).__name__} does not have: there is no {name!r} in {where}; its "
                f"{parts} are {_listed(known) or '(none)'}"
            )
        yield name, known[name]


def _check_tensors(net: nn.Module, places: Places) -> None:
    names: dict[int, list[str]] = {}
    for name, tensor in (*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise NotSupported(f"{name!r} has no shape yet", hint="run the model once before wrap()")
        names.setdefault(id(tensor), []).append(name)
    for shared in names.values():
        homes = [places.owner(name) for name in shared]
        if len(set(homes)) > 1:
            raise NotSupported(
                f"{' and '.join(map(repr, shared))} are one tensor, but their parts go to {' and '.join(map(repr, homes))}",
                hint="place parts that share parameters on the same worker",
            )


def divide(net: nn.Module, places: Places) -> dict[str, dict[str, nn.Module | torch.Tensor]]:
    """What each worker but the caller gets, by path, in the order of ``named_modules``: modules that stay whole, and the
    parameters, buffers and plain tensors that lie in a module which does not."""
    parts: dict[str, dict[str, nn.Module | torch.Tensor]] = {}

    def walk(module: nn.Module, path: str) -> None:
        home = places.owner(path)
        if path and places.whole(path):
            if home != places.caller:
                parts.setdefault(home, {})[path] = module
            return
        if home != places.caller:
            own = parts.setdefault(home, {})
            own.update({join(path, name): tensor for name, tensor in own_tensors(module).items()})
        for name, child in module._modules.items():
            if child is not None:
                walk(child, join(path, name))

    walk(net, "")
    return {worker: own for worker, own in parts.items() if own}


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and tensor attributes of this very module."""
    tables = {**module._parameters, **module._buffers, **vars(module)}
    return {name: tensor for name, tensor in tables.items() if isinstance(tensor, torch.Tensor)}


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _listed(names: object) -> str:
    return ", ".join(map(repr, names))  # type: ignore[call-overload]
