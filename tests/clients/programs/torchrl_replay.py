"""torchrl's replay buffer at another worker: one worker fills it, another samples from it and learns."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.rpc as rpc
from ranks import implementation, start
from tensordict import TensorDict
from torch import nn
from torchrl.data.replay_buffers import LazyTensorStorage, RandomSampler, RemoteTensorDictReplayBuffer
from torchrl.data.replay_buffers.writers import RoundRobinWriter

ROUNDS, BATCH = 6, 32


class Buffer(RemoteTensorDictReplayBuffer):
    def __init__(self, capacity: int) -> None:
        torch.manual_seed(7)
        super().__init__(
            storage=LazyTensorStorage(capacity), sampler=RandomSampler(), writer=RoundRobinWriter(), batch_size=BATCH
        )


def collect(buffer: rpc.RRef, number: int) -> torch.Tensor:
    """Some transitions for the buffer, by its class's method as torchrl's own example calls it."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(64, 8, generator=generator)
    data = TensorDict({"x": x, "y": x.sum(1, keepdim=True), "nested": {"number": torch.full((64,), number)}}, batch_size=[64])
    return rpc.rpc_sync(buffer.owner(), Buffer.extend, args=(buffer, data))


def train(buffer: rpc.RRef) -> dict[str, Any]:
    torch.manual_seed(8)
    net = nn.Linear(8, 1)
    optimizer, losses, batches, places = torch.optim.SGD(net.parameters(), lr=0.01), [], [], []
    for number in range(ROUNDS):
        places.append(rpc.rpc_sync("collector", collect, args=(buffer, number)))
        batch = rpc.rpc_sync(buffer.owner(), Buffer.sample, args=(buffer, BATCH))
        loss = (net(batch["x"]) - batch["y"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        batches.append(batch.to_dict())
    size = buffer.rpc_sync().__len__()
    return {
        "losses": losses,
        "batches": batches,
        "places": places,
        "size": size,
        "net": net.state_dict(),
        "rpc": implementation(),
    }


def main(rank: int) -> dict[str, Any] | None:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=60)
    rpc.init_rpc(["trainer", "buffer", "collector"][rank], rank=rank, world_size=3, rpc_backend_options=options)
    found = train(rpc.remote("buffer", Buffer, args=(200,))) if rank == 0 else None
    rpc.shutdown()
    return found


if __name__ == "__main__":
    start(main, 3)
