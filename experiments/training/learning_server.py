"""A parameter server: it adds up the gradients of all workers, in the order of their ranks, takes a step of Adam and answers
all of them with the weights. So a run has the same bits however the calls travel and whichever comes first."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor

from ..harness.functions import FUNCTIONS

NAMES = ["begin_with", "exchange", "spent"]


class Server:
    """Owns some of the weights, as one vector. Each worker has a thread of the server in ``exchange``, one call at a time."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._workers, self._lr, self._timeout_s = job["clients"], job["lr"], job["timeout_s"]
        self._changed = threading.Condition()
        self.given: dict[int, Tensor] = {}
        """The gradients of this step that have come, by rank."""
        self._step = 0
        self._spent: list[list[float]] = [[] for _ in range(self._workers)]

    def begin_with(self, weights: Tensor) -> Tensor:
        """By one worker, before any ``exchange``."""
        self._weights = weights.clone()
        self._optimizer = torch.optim.Adam([self._weights], lr=self._lr, fused=True)
        return weights[:1]

    def exchange(self, x: Tensor) -> Tensor:
        """``x``: gradients, and the worker's rank behind them. Returns the weights after the step that all of them make.

        Every worker gets the same tensor: the next step, which writes into it, begins when all of them have sent again."""
        arrived = time.perf_counter()
        rank = int(x[-1])
        with self._changed:
            mine = self._step
            self.given[rank] = x[:-1]
            if len(self.given) == self._workers:
                self._take_step()
                self._changed.notify_all()
            elif not self._changed.wait_for(lambda: self._step > mine, self._timeout_s):
                raise RuntimeError(f"{len(self.given)} of {self._workers} workers sent gradients in {self._timeout_s:g} s")
        self._spent[rank].append(1e3 * (time.perf_counter() - arrived))
        return self._weights

    def _take_step(self) -> None:
        total = self.given[0].clone()
        for rank in range(1, self._workers):
            total += self.given[rank]
        self._weights.grad = total.div_(self._workers)
        self._optimizer.step()
        self.given.clear()
        self._step += 1

    def spent(self, x: Tensor) -> Tensor:
        """``x``: a rank. Milliseconds that each of its calls has spent in ``exchange``: waiting for others, and the step."""
        return torch.tensor(self._spent[int(x[0])])


def begin(job: dict[str, Any]) -> None:
    """In every process of a turn; that of a server is called."""
    server = Server(job)
    global _server
    _server = server


_server: Server | None = None


def _here() -> Server:
    assert _server is not None
    return _server


def begin_with(x: Tensor) -> Tensor:
    return _here().begin_with(x)


def exchange(x: Tensor) -> Tensor:
    return _here().exchange(x)


def spent(x: Tensor) -> Tensor:
    return _here().spent(x)


FUNCTIONS.update(begin_with=begin_with, exchange=exchange, spent=spent)
