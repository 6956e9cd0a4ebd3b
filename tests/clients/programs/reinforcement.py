"""PyTorch's example of reinforcement learning: observers hold environments, one agent chooses for all of them and learns."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.rpc as rpc
from ranks import implementation, start
from torch import nn
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync

OBSERVERS, EPISODES, STEPS = 2, 3, 12


def _call_method(method: Any, rref: RRef, *args: Any) -> Any:
    return method(rref.local_value(), *args)


def _remote_method(method: Any, rref: RRef, *args: Any) -> Any:
    return rpc_sync(rref.owner(), _call_method, args=[method, rref, *args])


class Cart:
    """A pole on a cart, without any package: the state after a push to the left or right."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self) -> torch.Tensor:
        self.state = torch.rand(4, generator=self.generator) * 0.1 - 0.05
        return self.state

    def step(self, action: int) -> tuple[torch.Tensor, float]:
        x, speed, angle, turning = self.state.unbind()
        force = 1.0 if action else -1.0
        self.state = torch.stack([x + 0.1 * speed, speed + 0.1 * force, angle + 0.1 * turning, turning + 0.1 * (angle - force)])
        return self.state, float(1.0 - self.state[2].abs())


class Observer:
    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id
        self.env = Cart(self.id)

    def run_episode(self, agent: RRef) -> None:
        state = self.env.reset()
        for _ in range(STEPS):
            action = _remote_method(Agent.select_action, agent, self.id, state)
            state, reward = self.env.step(action)
            _remote_method(Agent.report_reward, agent, self.id, reward)


class Agent:
    def __init__(self) -> None:
        torch.manual_seed(1)
        ids = range(1, OBSERVERS + 1)
        self.observers = [remote(f"observer{number}", Observer) for number in ids]
        self.rewards: dict[int, list[float]] = {number: [] for number in ids}
        self.saved: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {number: [] for number in ids}
        self.dice = {number: torch.Generator().manual_seed(100 + number) for number in ids}
        self.policy = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.me = RRef(self)

    def select_action(self, number: int, state: torch.Tensor) -> int:
        scores = self.policy(state.unsqueeze(0)).log_softmax(1)
        action = torch.multinomial(scores.detach().exp(), 1, generator=self.dice[number])
        self.saved[number].append((state, action[0]))
        return int(action.item())

    def report_reward(self, number: int, reward: float) -> None:
        self.rewards[number].append(reward)

    def run_episode(self) -> torch.Tensor:
        for future in [rpc_async(o.owner(), _call_method, args=(Observer.run_episode, o, self.me)) for o in self.observers]:
            future.wait()
        total = torch.tensor(0.0)
        self.optimizer.zero_grad()
        for number in sorted(self.rewards):
            left = torch.tensor(self.rewards[number]).flip(0).cumsum(0).flip(0)
            # Computed anew, here: autograd adds up in an order that depends on the threads which ran the forward passes.
            states, actions = (torch.stack(list(part)) for part in zip(*self.saved[number]))
            scores = self.policy(states).log_softmax(1).gather(1, actions).squeeze(1)
            (-(scores * left).sum()).backward()
            total = total + left[0]
            self.rewards[number], self.saved[number] = [], []
        self.optimizer.step()
        return total


def main(rank: int) -> dict[str, Any] | None:
    rpc.init_rpc("agent" if rank == 0 else f"observer{rank}", rank=rank, world_size=1 + OBSERVERS)
    found = None
    if rank == 0:
        agent = Agent()
        rewards = [agent.run_episode() for _ in range(EPISODES)]
        found = {"rewards": rewards, "policy": agent.policy.state_dict(), "rpc": implementation()}
    rpc.shutdown()
    return found


if __name__ == "__main__":
    start(main, 1 + OBSERVERS)
