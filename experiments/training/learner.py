"""The global network, and what actors compute from a game (Mnih et al., ICML 2016)."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from ..harness.functions import FUNCTIONS

LONGEST, RECENT, DISCOUNT = 200, 20, 0.99
"""Moves of a game at most; games that the mean is taken of; a move's worth for the one before."""


class Policy(nn.Module):
    """Scores of the two moves, and the worth of the state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.move, self.value = nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(state)
        return self.move(hidden), self.value(hidden).squeeze(-1)


class Learner:
    """Owns the global network. Any thread of the server calls it; one gradient at a time is applied, as it comes."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.manual_seed(job["seed"])
        self.policy = Policy(job["width"])
        self._optimizer = torch.optim.Adam(self.policy.parameters(), lr=job["lr"])
        self._goal, self._most = job["goal"], job["most_games"]
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._games, self._stop = 0, 0.0

    def fetch(self) -> Tensor:
        """All parameters, as one vector of their own."""
        with self._lock, torch.no_grad():
            return parameters_to_vector(self.policy.parameters())

    def push(self, given: Tensor) -> Tensor:
        """Gradients as one vector, and behind them the moves of the game. Returns games, mean moves of the last ones, and
        whether to stop: 1 the goal is reached, 2 there were too many games."""
        with self._lock:
            at = 0
            for parameter in self.policy.parameters():
                parameter.grad = given[at : at + parameter.numel()].view_as(parameter).clone()
                at += parameter.numel()
            self._optimizer.step()
            self._recent.append(float(given[-1]))
            self._games += 1
            mean = sum(self._recent) / len(self._recent)
            if not self._stop:
                reached = len(self._recent) == RECENT and mean >= self._goal
                self._stop = 1.0 if reached else 2.0 if self._games >= self._most else 0.0
            return torch.tensor([self._games, mean, self._stop])


_learner: Learner | None = None


def begin(job: dict[str, Any]) -> None:
    """Every process of a turn calls this; the server's learner is the one that counts."""
    global _learner
    _learner = Learner(job)
    FUNCTIONS.update(fetch=fetch, push=push)


def fetch(x: Tensor) -> Tensor:
    assert _learner is not None
    return _learner.fetch()


def push(x: Tensor) -> Tensor:
    assert _learner is not None
    return _learner.push(x)


def gradients(policy: Policy, states: Tensor, moves: Tensor) -> Tensor:
    """Of one game, as one vector. Every move was worth 1."""
    worth, returns = 0.0 if len(moves) < LONGEST else 1.0 / (1 - DISCOUNT), []
    for _ in range(len(moves)):
        worth = 1.0 + DISCOUNT * worth
        returns.append(worth)
    wanted = torch.tensor(returns[::-1]) * (1 - DISCOUNT)
    scores, values = policy(states)
    chosen = torch.distributions.Categorical(logits=scores)
    advantage = wanted - values.detach()
    loss = (-chosen.log_prob(moves) * advantage + (wanted - values) ** 2 - 0.01 * chosen.entropy()).sum()
    found = torch.autograd.grad(loss, list(policy.parameters()))
    norm = torch.stack([each.norm() for each in found]).norm()
    return torch.cat([each.reshape(-1) for each in found]) * min(1.0, 1.0 / float(norm))
