"""Experts at servers, reached by calls: every worker calls every server in each exchange, all at once."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from ..harness.functions import FUNCTIONS
from ..harness.libraries import Client
from ..harness.meeting import meet
from ..harness.turns import Figure
from .experts import Experts
from .mixture import measured

NAMES = ["experts_forward", "experts_backward"]
_experts: Experts | None = None


def begin(job: dict[str, Any]) -> None:
    """In every process of a turn; a server makes its experts."""
    global _experts
    number = job["rank"] - job["clients"]
    if number >= 0:
        given = job["width"], job["clients"], job["lr"], job["timeout_s"]
        _experts = Experts(number * job["experts"], job["experts"], *given)


def experts_forward(x: Tensor) -> Tensor:
    """``x``: the worker's rank, tokens for each expert, the tokens. Returns milliseconds that it took, and the
    answers."""
    assert _experts is not None
    begin = time.perf_counter()
    count = len(_experts.experts)
    counts = [int(each) for each in x[1 : 1 + count]]
    return _with_ms(begin, _experts.forward(int(x[0]), x[1 + count :].view(-1, width()), counts))


def experts_backward(x: Tensor) -> Tensor:
    """``x``: the worker's rank, the gradients. Returns milliseconds that it took, and gradients of the tokens."""
    assert _experts is not None
    begin = time.perf_counter()
    return _with_ms(begin, _experts.backward(int(x[0]), x[1:].view(-1, width())))


def width() -> int:
    assert _experts is not None
    size: int = next(_experts.experts.parameters()).shape[1]
    return size


def _with_ms(begin: float, found: Tensor) -> Tensor:
    answer = torch.cat([torch.zeros(1), found.reshape(-1)])
    answer[0] = 1e3 * (time.perf_counter() - begin)
    return answer


FUNCTIONS.update(experts_forward=experts_forward, experts_backward=experts_backward)


class Calls:
    """The way by calls (``mixture.Way``)."""

    def __init__(self, client: Client, job: dict[str, Any]) -> None:
        self.owners, self._client = job["servers"], client
        self._rank, self._width = torch.tensor([float(job["rank"])]), job["width"]
        self.at_servers_ms = self.communication_ms = 0.0
        self.bytes = self.tensors = 0

    def forward(self, tokens: list[Tensor], counts: list[list[int]]) -> list[Tensor]:
        heads = [torch.cat([self._rank, torch.tensor(each, dtype=torch.float32)]) for each in counts]
        return self._all("experts_forward", heads, tokens)

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        return self._all("experts_backward", [self._rank] * self.owners, gradients)

    def _all(self, name: str, heads: list[Tensor], bodies: list[Tensor]) -> list[Tensor]:
        begin = time.perf_counter()
        messages = [torch.cat([head, body.reshape(-1)]) for head, body in zip(heads, bodies)]
        calls = [self._client.start(name, message, None, server) for server, message in enumerate(messages)]
        answers = [self._client.finish(call).view(-1) for call in calls]
        took, served = 1e3 * (time.perf_counter() - begin), max(float(answer[0]) for answer in answers)
        self.at_servers_ms += served
        self.communication_ms += took - served
        self.bytes += sum(4 * body.numel() for body in bodies)
        self.tensors += len(bodies)
        return [answer[1:].view(-1, self._width) for answer in answers]


def drive(client: Client, job: dict[str, Any]) -> tuple[list[Figure], dict[str, bytes]]:
    meet("begun", job)
    return measured(job["rank"], Calls(client, job), job)
