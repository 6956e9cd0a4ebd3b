"""What a parameter server of torch RPC or gRPC does: it keeps some tensors of a model, adds up the gradients of all workers in
their order, takes a step of torch's own optimizer and answers every worker with the weights."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from .steps import LR, added, made


def parts(net: nn.Module, servers: int, placement: str) -> list[list[nn.Parameter]]:
    """The parameters of each server, in the order of the model, placed as ``rpc.serve`` places them."""
    home: dict[nn.Parameter, int] = {}
    load = [0] * servers
    every = list(net.parameters())
    for at, each in enumerate(every if placement == "round_robin" else sorted(every, key=lambda each: -each.nbytes)):
        home[each] = at % servers if placement == "round_robin" else load.index(min(load))
        load[home[each]] += each.nbytes
    return [[each for each in every if home[each] == server] for server in range(servers)]


class Shard:
    """One call at a time of each worker, each in a thread of its own."""

    def __init__(self, weights: list[Tensor], workers: int, timeout_s: float) -> None:
        self.weights = weights
        self._workers, self._timeout_s = workers, timeout_s
        self._optimizer = torch.optim.SGD(weights, lr=LR)
        self._changed = threading.Condition()
        self.given: dict[int, list[Tensor]] = {}
        """The gradients of this step that have come, by worker."""
        self._step = 0

    def exchange(self, worker: int, gradients: list[Tensor]) -> list[Tensor]:
        """Returns the weights after the step that all workers make. All of them get the same tensors: the next step, which
        writes into these, begins when every worker has sent again."""
        with self._changed:
            mine = self._step
            self.given[worker] = gradients
            if len(self.given) == self._workers:
                self._take_step()
                self._changed.notify_all()
            elif not self._changed.wait_for(lambda: self._step > mine, self._timeout_s):
                raise RuntimeError(f"{len(self.given)} of {self._workers} workers sent gradients in {self._timeout_s:g} s")
        return self.weights

    def _take_step(self) -> None:
        total = None
        for worker in range(self._workers):
            total = added(total, self.given[worker])
        for weight, gradient in zip(self.weights, total or []):
            weight.grad = gradient
        self._optimizer.step()
        self.given.clear()
        self._step += 1


def shard(number: int, job: dict[str, Any]) -> Shard:
    """Of server ``number``; the rest of the model is dropped."""
    mine = parts(made(job), job["servers"], job["placement"])[number]
    return Shard([each.detach() for each in mine], job["clients"], job["timeout_s"])
