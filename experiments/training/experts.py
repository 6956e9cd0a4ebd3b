"""Experts of a mixture, which one process owns and all workers use: perceptrons on the tokens that are sent to them.

The tokens of each worker are computed apart from those of the others, and gradients are added up in the order of the workers,
so that the results are the same bits whichever way tokens travel and whoever comes first.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn


class Experts:
    """Any thread may call it; a worker's ``forward`` and ``backward`` alternate."""

    def __init__(self, first: int, count: int, width: int, workers: int, lr: float, timeout_s: float) -> None:
        """Experts ``first`` to ``first + count - 1`` of all, ``width`` wide; ``lr`` of SGD."""
        experts = []
        for number in range(first, first + count):
            torch.manual_seed(1000 + number)
            experts.append(nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)))
        self.experts = nn.ModuleList(experts)
        self._workers, self._lr, self._timeout_s = workers, lr, timeout_s
        self._changed = threading.Condition()
        self._begun: dict[int, tuple[Tensor, Tensor]] = {}
        self._given: dict[int, tuple[Tensor, ...]] = {}

    def forward(self, rank: int, tokens: Tensor, counts: list[int]) -> Tensor:
        """``tokens``: (n, width) of worker ``rank``, so many for each expert in turn. Waits until the step before is made."""
        torch.set_num_threads(1)  # OpenMP keeps it by thread: the first product of a new one would use all cores
        with self._changed:
            if not self._changed.wait_for(lambda: rank not in self._given, self._timeout_s):
                raise RuntimeError(f"only {len(self._given)} of {self._workers} workers sent gradients")
        # Copied, because products of matrices may have other bits where their memory is aligned in another way.
        given = tokens.detach().clone().requires_grad_()
        found = torch.cat([expert(part) for expert, part in zip(self.experts, given.split(counts))])
        self._begun[rank] = given, found
        return found.detach()

    def backward(self, rank: int, gradients: Tensor) -> Tensor:
        """``gradients``: of what ``forward`` returned. Returns those of the tokens. A step needs those of all workers."""
        torch.set_num_threads(1)
        given, found = self._begun.pop(rank)
        parameters = list(self.experts.parameters())
        of_tokens, *others = torch.autograd.grad(found, [given, *parameters], gradients.clone())
        with self._changed:
            self._given[rank] = tuple(others)
            if len(self._given) == self._workers:
                self._step(parameters)
                self._changed.notify_all()
        return of_tokens

    @torch.no_grad()
    def _step(self, parameters: list[nn.Parameter]) -> None:
        for number, parameter in enumerate(parameters):
            total = self._given[0][number].clone()
            for rank in range(1, self._workers):
                total += self._given[rank][number]
            parameter.sub_(total, alpha=self._lr / self._workers)
        self._given.clear()
