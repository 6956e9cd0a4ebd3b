"""Actor-critic reinforcement learning with several players at once, after A3C (Mnih et al., "Asynchronous Methods for Deep
Reinforcement Learning", ICML 2016): observers play CartPole, each in a world of its own, and ask one agent for every move.

The agent is an object that observers reach through an ``RRef``. It learns from each game as soon as that game is over, while
the others play on with whatever it knows at that moment: nobody waits for anybody.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import deque

import gymnasium
import torch
from torch import nn

import rdmarpc as rpc

LONGEST = 200  # moves a game: the best that can be reached


class Policy(nn.Module):
    """What to do (scores of the two moves), and how long the game will last from here."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh())
        self.move, self.value = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(state)
        return self.move(hidden), self.value(hidden).squeeze(-1)


class Agent:
    """Owns the policy. Every method may run for several observers at once."""

    def __init__(self, goal: float, most_games: int) -> None:
        torch.manual_seed(0)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.01)
        self.goal, self.most_games = goal, most_games
        self.lock = threading.Lock()
        self.lengths: list[int] = []
        self.recent: deque[int] = deque(maxlen=30)

    def choose(self, state: torch.Tensor) -> int:
        with torch.no_grad():
            scores, _ = self.policy(state)
        return int(torch.distributions.Categorical(logits=scores).sample())

    def learn(self, states: torch.Tensor, moves: torch.Tensor) -> bool:
        """From one game, in which every move but the last was worth 1. Whether to play another one."""
        with self.lock:
            length = len(moves)
            worth = [0.0 if length < LONGEST else 100.0]
            for _ in range(length):
                worth.append(1.0 + 0.99 * worth[-1])
            returns = torch.tensor(worth[:0:-1]) / 100
            scores, values = self.policy(states)
            chosen = torch.distributions.Categorical(logits=scores)
            advantage = returns - values.detach()
            loss = (-chosen.log_prob(moves) * advantage + (returns - values) ** 2 - 0.01 * chosen.entropy()).sum()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()
            self.lengths.append(length)
            self.recent.append(length)
            return not self.reached() and len(self.lengths) < self.most_games

    def reached(self) -> bool:
        return len(self.recent) == self.recent.maxlen and self.mean() >= self.goal

    def mean(self) -> float:
        return sum(self.recent) / max(1, len(self.recent))


class Observer:
    """Plays games, and has every move from the agent."""

    def __init__(self, seed: int) -> None:
        self.world, self.seed = gymnasium.make("CartPole-v1"), seed

    def play(self, agent: rpc.RRef[Agent]) -> int:
        """Until the agent has had enough. The number of games."""
        ask, games, more = agent.rpc_sync(), 0, True
        while more:
            state, _ = self.world.reset(seed=self.seed * 100_000 + games)
            states, moves, over = [], [], False
            while not over and len(moves) < LONGEST:
                states.append(torch.from_numpy(state))
                moves.append(ask.choose(states[-1]))
                state, _, over, _, _ = self.world.step(moves[-1])
            more = ask.learn(torch.stack(states), torch.tensor(moves))
            games += 1
        return games


def worker(rank: int, observers: int, goal: float, games: int, meeting: str) -> None:
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=f"file://{meeting}/store")
    name = f"observer{rank - 1}" if rank else "agent"
    rpc.init_rpc(name, rank=rank, world_size=observers + 1, rpc_backend_options=options)
    if rank == 0:
        agent = rpc.RRef(Agent(goal, games))
        players = [rpc.remote(f"observer{number}", Observer, (number,)) for number in range(observers)]
        playing = [player.rpc_async(timeout=0).play(agent) for player in players]
        played = [future.wait() for future in playing]
        lengths = agent.local_value().lengths
        for at in range(0, len(lengths), 50):
            some = lengths[at : at + 50]
            print(f"games {at:4}-{at + len(some) - 1:<4}  mean length {sum(some) / len(some):6.1f}")
        mean, first = agent.local_value().mean(), sum(lengths[:10]) / 10
        print(f"{len(lengths)} games by {observers} observers {played}: from {first:.0f} moves to {mean:.0f} of {LONGEST}")
        rpc.shutdown()
        sys.exit(mean < goal)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--observers", type=int, default=3)
    parser.add_argument("--goal", type=float, default=150, help="mean length of the last 30 games at which to stop")
    parser.add_argument("--games", type=int, default=3000, help="give up after so many")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as meeting:
        arguments = given.observers, given.goal, given.games, meeting
        torch.multiprocessing.spawn(worker, arguments, nprocs=given.observers + 1)
