"""A worker of a mixture of experts: a gate of its own sends each token to one expert; experts are somewhere else, and all
workers use all of them (Switch Transformer's routing, without a capacity). The gate and the head are each worker's own."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10


class Way(Protocol):
    """How tokens travel to their owners and back. ``owners``: how many there are. ``at_servers_ms``, ``communication_ms``:
    milliseconds until now, of the owners' computing (the longest of one exchange) and of the rest of all exchanges.
    ``bytes``, ``tensors``: of tokens and gradients that this worker has sent."""

    owners: int
    at_servers_ms: float
    communication_ms: float
    bytes: int
    tensors: int

    def forward(self, tokens: list[Tensor], counts: list[list[int]]) -> list[Tensor]:
        """For each owner the tokens (n, width) for its experts, so many for each in turn; returns what they say of them."""

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        """Of what ``forward`` returned; returns the gradients of the tokens."""


class Worker:
    """Draws tokens and classes, learns to tell the classes."""

    def __init__(self, rank: int, job: dict[str, Any], owners: int) -> None:
        self.owners, self.each, self.batch, self.lr = owners, job["experts"], job["tokens"], job["lr"]
        width = job["width"]
        drawn = torch.Generator().manual_seed(7)
        self.centres = torch.randn(CLASSES, width, generator=drawn)
        torch.manual_seed(50 + rank)
        self.body, self.gate = nn.Linear(width, width), nn.Linear(width, owners * self.each)
        self.head = nn.Linear(width, CLASSES)
        self.parameters = [*self.body.parameters(), *self.gate.parameters(), *self.head.parameters()]
        self.drawn = torch.Generator().manual_seed(100 + rank)

    def step(self, way: Way) -> float:
        """A step of training; returns its loss."""
        classes = torch.randint(CLASSES, (self.batch,), generator=self.drawn)
        noise = torch.randn(self.batch, self.centres.shape[1], generator=self.drawn)
        hidden = torch.relu(self.body(self.centres[classes] + noise))
        worth, chosen = torch.softmax(self.gate(hidden), 1).max(1)
        order = torch.argsort(chosen, stable=True)
        back = torch.argsort(order)
        counts = torch.bincount(chosen, minlength=self.owners * self.each).view(self.owners, self.each).tolist()
        sizes = [sum(each) for each in counts]
        answers = way.forward(list(hidden.detach()[order].split(sizes)), counts)
        said = torch.cat(answers).requires_grad_()
        # The graph is cut at what leaves this process: gradients of the tokens come back from the owners and are added there.
        here, worth_here = hidden.detach().requires_grad_(), worth.detach().requires_grad_()
        loss = F.cross_entropy(self.head(here + worth_here.unsqueeze(1) * said[back]), classes)
        loss.backward()
        assert said.grad is not None and here.grad is not None
        of_tokens = torch.cat(way.backward(list(said.grad.split(sizes))))
        torch.autograd.backward([hidden, worth], [here.grad + of_tokens[back], worth_here.grad])
        with torch.no_grad():
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=self.lr)
                parameter.grad = None
        return float(loss.detach())


def measured(rank: int, way: Way, job: dict[str, Any]) -> tuple[list[tuple[str, int, float]], dict[str, bytes]]:
    """All steps; the first does not count. Figures and what must be the same over every library."""
    worker = Worker(rank, job, way.owners)
    figures: list[tuple[str, int, float]] = []
    losses = []
    for number in range(job["steps"] + 1):
        at_servers, communication, begin = way.at_servers_ms, way.communication_ms, time.perf_counter()
        losses.append(worker.step(way))
        step = 1e3 * (time.perf_counter() - begin)
        at_servers, communication = way.at_servers_ms - at_servers, way.communication_ms - communication
        if number:
            figures += [("step", 0, step), ("at servers", 0, at_servers), ("communication", 0, communication)]
            figures.append(("computation", 0, step - at_servers - communication))
    figures += [("average tensor", 0, way.bytes / way.tensors), ("sent", 0, way.bytes / len(losses))]
    dense = torch.cat([each.detach().reshape(-1) for each in worker.parameters])
    return figures, {"losses of worker 0": torch.tensor(losses).numpy().tobytes(), "dense": dense.numpy().tobytes()}
