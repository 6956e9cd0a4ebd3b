"""One agent and its observers. An observer asks the agent for an action in every state that it sees; the agent answers each by
itself, or all together when all have asked, and learns from the rewards after each episode. Rank 0 is the agent.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.rpc.functions import async_execution

from .shapes_worker import as_bytes

rpc: Any = None
"""The library's module, once this process has joined its group."""

_GAMMA = 0.99


def name_of(rank: int, job: dict[str, Any]) -> str:
    return f"observer{rank}" if rank else "agent"


class Agent:
    def __init__(self, job: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.count, width = job["processes"] - 1, job["hidden"]
        hidden = [layer for _ in range(job["layers"]) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.policy = nn.Sequential(nn.Linear(job["state"], width), nn.ReLU(), *hidden, nn.Linear(width, job["actions"]))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.dice = [torch.Generator().manual_seed(100 + number) for number in range(self.count)]
        self.taken: list[list[tuple[Tensor, int]]] = [[] for _ in range(self.count)]
        self.lock, self.asked = threading.Lock(), dict[int, tuple[Tensor, Any]]()

    def choose(self, states: Tensor, numbers: list[int]) -> list[int]:
        """An action for each of these observers, and notes of them."""
        with torch.no_grad():
            chances = self.policy(states).softmax(1)
        actions = [int(torch.multinomial(row, 1, generator=self.dice[number])) for row, number in zip(chances, numbers)]
        for number, state, action in zip(numbers, states, actions):
            self.taken[number].append((state, action))
        return actions

    @staticmethod
    def action(agent: Any, number: int, state: Tensor) -> int:
        """For one observer, at once."""
        return agent.local_value().choose(state.unsqueeze(0), [number])[0]

    @staticmethod
    @async_execution
    def action_of_batch(agent: Any, number: int, state: Tensor) -> Any:
        """For one observer, when all have asked."""
        self = agent.local_value()
        future: torch.futures.Future[Any] = torch.futures.Future()
        with self.lock:
            self.asked[number] = state, future
            if len(self.asked) < self.count:
                return future
            asked, self.asked = self.asked, {}
        numbers = list(range(self.count))
        for each, action in zip(numbers, self.choose(torch.stack([asked[each][0] for each in numbers]), numbers)):
            asked[each][1].set_result(action)
        return future

    def learn(self, rewards: list[Tensor]) -> Tensor:
        """One step on what all observers have seen. Returns the loss."""
        loss = torch.tensor(0.0)
        for number, found in enumerate(rewards):
            left = torch.zeros(len(found))
            for at in range(len(found) - 1, -1, -1):
                left[at] = found[at] + (_GAMMA * left[at + 1] if at + 1 < len(found) else 0.0)
            states, actions = torch.stack([state for state, _ in self.taken[number]]), [a for _, a in self.taken[number]]
            scores = self.policy(states).log_softmax(1)[torch.arange(len(actions)), actions]
            loss = loss - (scores * left).sum()
            self.taken[number].clear()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Observer:
    """An environment whose next state and reward are drawn, but depend on the action."""

    def __init__(self, number: int, job: dict[str, Any]) -> None:
        self.number, self.size = number, job["state"]
        self.generator = torch.Generator().manual_seed(number)

    def episode(self, agent: Any, batch: bool, steps: int) -> tuple[Tensor, list[float]]:
        """Rewards, and the milliseconds that each answer took."""
        ask = Agent.action_of_batch if batch else Agent.action
        rewards, latencies = torch.zeros(steps), []
        state = torch.rand(self.size, generator=self.generator)
        for step in range(steps):
            begin = time.perf_counter()
            action = rpc.rpc_sync(agent.owner(), ask, args=(agent, self.number, state))
            latencies.append(1e3 * (time.perf_counter() - begin))
            rewards[step] = state[action]
            state = (state + torch.rand(self.size, generator=self.generator)).remainder(1.0)
        return rewards, latencies


def run(rank: int, job: dict[str, Any]) -> Any:
    if rank:
        return None
    agent, batch = Agent(job), job["case"] == "in batches"
    me = rpc.RRef(agent)
    observers = [rpc.remote(f"observer{r}", Observer, args=(r - 1, job)) for r in range(1, job["processes"])]
    figures: dict[str, list[float]] = {"latency": [], "actions": []}
    results = []
    for episode in range(job["episodes"] + 1):
        begin = time.perf_counter()
        futures = [each.rpc_async(timeout=0).episode(me, batch, job["steps"]) for each in observers]
        found = [future.wait() for future in futures]
        seconds = time.perf_counter() - begin
        if episode:  # the first does not count
            figures["latency"] += [value for _, latencies in found for value in latencies]
            figures["actions"].append(job["steps"] * len(observers) / seconds)
        results += [*(rewards for rewards, _ in found), agent.learn([rewards for rewards, _ in found]).reshape(1)]
    return figures, as_bytes({"rewards and losses": torch.cat(results), **agent.policy.state_dict()})
