"""The functions that calls run at a server: each takes a float32 tensor and returns one."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x


def heavy(x: Tensor) -> Tensor:
    """200 operations in place; the result equals the argument, bit for bit, for numbers that may be doubled."""
    for _ in range(100):
        x *= 2
        x /= 2
    return x


def largest(x: Tensor) -> Tensor:
    """A light consumer that looks at every element, as in the paper's micro-benchmark."""
    return x.amax().reshape(1)


def swapped(x: Tensor) -> Tensor:
    """A parameter server that takes gradients and answers with its weights: as many numbers, kept from the first call on."""
    if len(x) not in _kept:
        _kept[len(x)] = torch.zeros_like(x)
    return _kept[len(x)]


_kept: dict[int, Tensor] = {}


class Together:
    """Calls of all clients that wait for each other, as many threads of the server."""

    def __init__(self) -> None:
        self.clients = 1
        self._lock = threading.Condition()
        self._sum: Tensor | None = None
        self._arrived = self._round = 0
        self._mean: Tensor | None = None

    def averaged(self, x: Tensor) -> Tensor:
        with self._lock:
            mine = self._round
            self._sum = x.clone() if self._sum is None else self._sum.add_(x)
            self._arrived += 1
            if self._arrived == self.clients:
                self._mean = self._sum.div_(self.clients)
                self._sum, self._arrived, self._round = None, 0, mine + 1
                self._lock.notify_all()
            elif not self._lock.wait_for(lambda: self._round > mine, TIMEOUT_S):
                raise RuntimeError(f"{self._arrived} of {self.clients} clients came within {TIMEOUT_S:.0f} s")
            assert self._mean is not None
            return self._mean


TIMEOUT_S = 120.0
together = Together()


def averaged(x: Tensor) -> Tensor:
    """The mean over all clients, each of which calls it once a round."""
    return together.averaged(x)


FUNCTIONS: dict[str, Function] = {
    "identity": identity,
    "heavy": heavy,
    "largest": largest,
    "swapped": swapped,
    "averaged": averaged,
}
WRITES = {"heavy", "heavy_script"}
"""Functions that write into their argument."""


def function(name: str) -> Function:
    """By name; names that end with "_script" are compiled to TorchScript, at the first of them."""
    if name.endswith("_script"):
        return getattr(importlib.import_module(f"{__package__}.scripted"), name)
    return FUNCTIONS[name]
