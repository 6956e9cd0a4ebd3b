"""What the programs compute, whatever carries their tensors; and each of them in one process, as the oracle."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
Tensors = list[Tensor]
STEPS, WORKERS, RATE, MICRO_BATCHES, LONGEST = 4, 2, 0.5, 2, 12


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def batches(worker: int) -> list[Batch]:
    """Those of one worker: (8, 16) inputs and their classes."""
    draw = torch.Generator().manual_seed(worker + 1)
    xs = [torch.randn(8, 16, generator=draw) for _ in range(STEPS)]
    return [(x, x[:, :4].argmax(1)) for x in xs]


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y)


def gradients(model: nn.Module, batch: Batch) -> tuple[float, Tensors]:
    """The loss, and the gradients of this worker's share of the mean over all workers."""
    model.zero_grad()
    loss = loss_of(model(batch[0]), batch[1]) / WORKERS
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


def load(model: nn.Module, weights: Tensors) -> None:
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), weights):
            parameter.copy_(new)


def train(weights: Tensors, worker: int, round_number: int) -> tuple[float, Tensors]:
    """A round of federated averaging at one worker, on its own data: the last loss, and the new weights."""
    model = net()
    load(model, weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for x, y in batches(worker + WORKERS * round_number):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item(), [p.detach() for p in model.parameters()]


def mean(sets: list[Tensors]) -> Tensors:
    return [torch.stack(same).mean(0) for same in zip(*sets)]


class Optimized:
    """Weights that are kept at a server."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def step(self, sets: list[Tensors]) -> Tensors:
        """With the sum of gradients; the new weights."""
        for parameter, *parts in zip(self.model.parameters(), *sets):
            parameter.grad = torch.stack(parts).sum(0)
        self.optimizer.step()
        return [p.detach().clone() for p in self.model.parameters()]


class World:
    """Walk from 8 to 0 or 15 within a dozen moves; 0 is worth more."""

    def __init__(self) -> None:
        self.place = 8

    def state(self) -> Tensor:
        return F.one_hot(torch.tensor(self.place), 16).float()

    def move(self, action: int) -> tuple[float, bool]:
        self.place += -1 if action % 2 else 1
        return (10.0 if self.place == 0 else -0.1), self.place in (0, 15)


class Learner:
    """A policy, its choices, and what they were worth."""

    def __init__(self) -> None:
        self.policy = net()
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.1)
        self.draw = torch.Generator().manual_seed(3)
        self.chosen: Tensors = []
        self.rewards: list[float] = []

    def choose(self, state: Tensor) -> int:
        likely = self.policy(state).log_softmax(0)
        action = int(torch.multinomial(likely.detach().exp(), 1, generator=self.draw))
        self.chosen.append(likely[action])
        return action

    def reward(self, worth: float) -> None:
        self.rewards.append(worth)

    def learn(self) -> float:
        """From one episode; what it was worth."""
        total = sum(self.rewards)
        self.optimizer.zero_grad()
        (-total * torch.stack(self.chosen).sum()).backward()
        self.optimizer.step()
        self.chosen, self.rewards = [], []
        return total


# -- in one process


def parameter_server() -> list[float]:
    server, losses = Optimized(), []
    for step in range(STEPS):
        found = [gradients(server.model, batches(worker)[step]) for worker in range(WORKERS)]
        losses.append(found[0][0])
        server.step([each for _, each in found])
    return losses


def federated() -> list[float]:
    weights, losses = [p.detach() for p in net().parameters()], []
    for number in range(STEPS):
        found = [train(weights, worker, number) for worker in range(WORKERS)]
        losses += [loss for loss, _ in found]
        weights = mean([each for _, each in found])
    return losses


def pipeline() -> list[float]:
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for x, y in batches(0):
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, wanted in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)):
            loss = loss_of(model(part), wanted) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        optimizer.step()
        losses.append(total.item())
    return losses


def reinforcement() -> list[float]:
    learner, worth = Learner(), []
    for _ in range(STEPS * WORKERS):
        world = World()
        for _ in range(LONGEST):
            reward, over = world.move(learner.choose(world.state()))
            learner.reward(reward)
            if over:
                break
        worth.append(learner.learn())
    return worth


PROGRAMS = {each.__name__: each for each in (parameter_server, reinforcement, pipeline, federated)}
