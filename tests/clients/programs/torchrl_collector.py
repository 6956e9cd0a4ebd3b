"""torchrl's collector over RPC: environments run in processes that it starts, weights go to them between the batches."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from ranks import free_port, implementation
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors.distributed import RPCCollector
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

BATCH, BATCHES = 24, 4


class Spring(EnvBase):
    """A point on a spring, pushed by the action."""

    def __init__(self, start: float = 0.5) -> None:
        super().__init__(device="cpu", batch_size=[])
        self.start = start
        self.observation_spec = Composite(observation=Unbounded((2,)))
        self.action_spec = Bounded(-1.0, 1.0, (1,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        self.state, self.count = torch.tensor([self.start, 0.0]), 0
        return TensorDict({"observation": self.state}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        x, speed = self.state.unbind()
        speed = speed + 0.1 * (tensordict["action"][0] - x)
        self.state, self.count = torch.stack([x + 0.1 * speed, speed]), self.count + 1
        done = torch.tensor([self.count >= 9])
        return TensorDict({"observation": self.state, "reward": -self.state.square().sum(0, keepdim=True), "done": done}, [])

    def _set_seed(self, seed: int | None) -> None:
        pass


def collect() -> dict[str, Any]:
    torch.manual_seed(9)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1), nn.Tanh())
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    collector = RPCCollector(
        [Spring, Spring],  # alike: torchrl stacks what they collect in the order in which it arrives
        policy,
        frames_per_batch=BATCH,
        total_frames=BATCH * BATCHES,
        sync=True,
        launcher="mp",
        tcp_port=str(free_port()),
    )
    optimizer, batches = torch.optim.SGD(net.parameters(), lr=0.1), []
    for batch in collector:
        batches.append({key: batch[key].clone() for key in ("observation", "action", ("next", "reward"), ("next", "done"))})
        loss = (net(batch["observation"].reshape(-1, 2)) + batch["observation"].reshape(-1, 2)[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        collector.update_policy_weights_()
    collector.shutdown()
    return {"batches": batches, "policy": net.state_dict(), "rpc": implementation()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["RCP_IDLE_TIMEOUT"] = "60"
    found = collect()
    torch.save(found, sys.argv[1])
