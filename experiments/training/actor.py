"""An actor: fetches the global network, plays one game of CartPole with it, pushes the gradients."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.nn.utils import vector_to_parameters

from ..harness.libraries import Client
from ..harness.meeting import meet
from ..harness.turns import Figure
from .learner import LONGEST, Policy, gradients


def drive(client: Client, job: dict[str, Any]) -> list[Figure]:
    """Games until the server says stop. Of actor 0: milliseconds of a fetch and of an update (medians), milliseconds and games
    of all actors until the goal was reached ("reached"; "gave up" if it was not), and the mean moves then."""
    import gymnasium

    world = gymnasium.make("CartPole-v1")
    torch.manual_seed(1000 * job["seed"] + job["rank"])
    policy = Policy(job["width"])
    nothing = torch.zeros(1)
    meet("ready", job)
    fetches, updates, games = [], [], 0
    begin = time.perf_counter()
    while True:
        start = time.perf_counter()
        vector = client.finish(client.start("fetch", nothing))
        fetches.append(time.perf_counter() - start)
        vector_to_parameters(vector.clone(), policy.parameters())
        given = play(world, policy, seed=100_000 * job["seed"] + 10_000 * job["rank"] + games)
        games += 1
        start = time.perf_counter()
        all_games, mean, stop = client.finish(client.start("push", given)).tolist()
        updates.append(time.perf_counter() - start)
        if stop:
            break
    figures: list[Figure] = [
        ("fetch", job["clients"], 1e3 * statistics.median(fetches)),
        ("update", job["clients"], 1e3 * statistics.median(updates)),
        ("games", job["clients"], all_games),
        ("moves", job["clients"], mean),
        ("reached" if stop == 1 else "gave up", job["clients"], 1e3 * (time.perf_counter() - begin)),
    ]
    return figures


def play(world: Any, policy: Policy, seed: int) -> torch.Tensor:
    """One game: its gradients as one vector, and the number of moves behind them."""
    state, _ = world.reset(seed=seed)
    states: list[torch.Tensor] = []
    moves: list[int] = []
    over = False
    while not over and len(moves) < LONGEST:
        states.append(torch.from_numpy(state))
        with torch.no_grad():
            scores, _ = policy(states[-1])
        moves.append(int(torch.distributions.Categorical(logits=scores).sample()))
        state, _, over, _, _ = world.step(moves[-1])
    found = gradients(policy, torch.stack(states), torch.tensor(moves))
    return torch.cat([found, torch.tensor([float(len(moves))])])
