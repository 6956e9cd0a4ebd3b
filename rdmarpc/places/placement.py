"""Which part of a model lies where: ``{"encoder.layers.6-11": "worker1/cuda:0"}``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

_RANGE = re.compile(r"(\d+)-(\d+)")
_RANK = re.compile(r"rank:(\d+)")

T = TypeVar("T")
Placement = Mapping[str, str | Sequence[str]]
Where = tuple[str, str]
"""A worker and a device there."""


def resolve(
    net: nn.Module, placement: Placement, workers: Sequence[str], ranked: Callable[[int], str] | None = None
) -> dict[str, list[Where]]:
    """The places of each placed module, by path; ranges taken apart. ``a.0-5`` stands for the numbered children 0 to 5 of
    ``a``; "" for the whole model. Places are ``worker``, ``worker/cuda:1`` or ``rank:1/cuda:1``. A list of several has a
    replica at each. Raises ``ValueError`` for an unknown worker, a device that is none, a path or number that does not
    exist, an empty range, or two entries for one module."""
    found: dict[str, list[Where]] = {}
    source: dict[str, str] = {}
    for key, value in placement.items():
        names = [value] if isinstance(value, str) else list(value)
        places = [_place(key, name, workers, ranked) for name in names]
        if len(set(places)) < len(places) or (not isinstance(value, str) and len(places) < 2):
            listed = ", ".join(map(repr, names)) or "no worker"
            raise ValueError(f"placement gives {key!r} replicas at {listed}: name two workers or more, each once")
        for path in _expand(net, key):
            if path in found:
                raise ValueError(f"placement has two entries for {path!r}: {source[path]!r} and {key!r}")
            found[path], source[path] = places, key
    return found


def deepest(table: Mapping[str, T], path: str) -> T | None:
    """What the deepest entry on a path says; "" is on every path. ``None``: there is none."""
    while path not in table:
        if not path:
            return None
        path = path.rpartition(".")[0]
    return table[path]


def home(places: Mapping[str, list[Where]], path: str) -> Where | None:
    """Where the tensors of a module lie. ``None``: no entry says so."""
    found = deepest(places, path)
    return None if found is None else found[0]


def _place(key: str, value: str, workers: Sequence[str], ranked: Callable[[int], str] | None) -> Where:
    worker, device = (value, "cpu") if value in workers else _split(key, value)
    rank = _RANK.fullmatch(worker)
    if worker not in workers and rank is not None and ranked is not None:
        worker = ranked(int(rank[1]))
    if worker not in workers:
        listed = ", ".join(map(repr, workers))
        raise ValueError(f"placement puts {key!r} on worker {worker!r}, which is not in this group; its workers are {listed}")
    return worker, device


def _split(key: str, value: str) -> tuple[str, str]:
    worker, slash, device = value.partition("/")
    try:
        return worker, str(torch.device(device if slash else "cpu"))
    except RuntimeError:
        raise ValueError(f"placement puts {key!r} on {value!r}: {device!r} is no device") from None


def _expand(net: nn.Module, key: str) -> list[str]:
    """The paths that a key stands for."""
    found = [("", net)]
    for part in key.split(".") if key else ():
        span = _RANGE.fullmatch(part)
        names = [part] if span is None else [str(n) for n in range(int(span[1]), int(span[2]) + 1)]
        if not names:
            raise ValueError(f"placement names {key!r}: the range {part!r} is empty, its first number is the larger one")
        found = [_child(net, key, path, module, name) for path, module in found for name in names]
    return [path for path, _ in found]


def _child(net: nn.Module, key: str, path: str, module: nn.Module, name: str) -> tuple[str, nn.Module]:
    child = dict(module.named_children()).get(name)
    if child is None:
        parts = ", ".join(repr(each) for each, _ in module.named_children()) or "(none)"
        raise ValueError(
            f"placement names part {key!r}, which {type(net).__name__} does not have: there is no {name!r} in "
            f"{repr(path) if path else type(net).__name__}; its parts are {parts}"
        )
    return f"{path}.{name}" if path else name, child
