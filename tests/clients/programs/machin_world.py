"""machin's distributed world: RPC groups with paired values, services and barriers, a distributed buffer, and the servers of
A3C (gradients) and Ape-X (models)."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

for absent in ("broadcast_multigpu", "all_reduce_multigpu", "reduce_multigpu", "all_gather_multigpu"):
    if not hasattr(dist, absent):  # machin 0.4.2 takes their docstrings; torch has dropped them
        setattr(dist, absent, None)
warnings.filterwarnings("ignore")

from machin.frame.buffers.buffer_d import DistributedBuffer  # noqa: E402
from machin.parallel.distributed import World  # noqa: E402
from machin.parallel.server import PushPullModelServerImpl  # noqa: E402
from ranks import free_port, implementation, start  # noqa: E402, F401
from torch import nn  # noqa: E402

NAMES = ["first", "second", "third"]


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def transition(number: int) -> dict[str, Any]:
    state = torch.full((1, 4), float(number))
    parts = {"state": {"s": state}, "action": {"a": state[:, :1]}, "next_state": {"s": state + 1}}
    return {**parts, "reward": float(number), "terminal": False}


def main(rank: int) -> dict[str, Any] | None:
    import os

    port = int(os.environ["MASTER_PORT"])
    addresses = {"dist_init_method": f"tcp://127.0.0.1:{port}", "rpc_init_method": f"tcp://127.0.0.1:{port + 1}"}
    world = World(name=NAMES[rank], rank=rank, world_size=3, rpc_timeout=60, **addresses)
    group = world.create_rpc_group("group", NAMES)
    collective = world.create_collective_group([0, 1, 2])

    group.pair(f"value/{rank}", torch.full((3,), float(rank)))
    group.register(f"twice/{rank}", twice)
    buffer = DistributedBuffer("buffer", group, 100)
    for number in range(5 * (rank + 1)):
        buffer.append(transition(number))
    if rank == 0:
        PushPullModelServerImpl("models", group)
    group.barrier()

    found: dict[str, Any] = {}
    if rank == 0:
        found["paired"] = [group.get_paired(f"value/{r}").to_here() for r in range(3)]
        found["services"] = [group.registered_sync(f"twice/{r}", (torch.ones(2) * r,)) for r in range(3)]
        found["later"] = [group.registered_async(f"twice/{r}", (torch.ones(2) * r,)).wait() for r in range(3)]
        found["remote"] = [group.registered_remote(f"twice/{r}", (torch.ones(2) * r,)).to_here() for r in range(3)]
        found["called"] = [group.rpc_sync(name, twice, args=(torch.arange(3),)) for name in NAMES]
        found["size"] = buffer.all_size()
        size, batch = buffer.sample_batch(30, sample_method="all")
        found["batch"] = [size, batch[0]["s"].sort(0)[0], batch[2]["s" if isinstance(batch[2], dict) else ...].sort(0)[0]]
        try:
            group.registered_sync("nothing")
        except KeyError as error:
            found["error"] = str(error)
    group.barrier()

    servers = group.get_paired("models").to_here()
    torch.manual_seed(13)
    model = nn.Linear(4, 2)
    pushed, pulled = [], []
    for turn in range(3):
        if turn == rank:
            with torch.no_grad():
                model.weight.add_(rank + 1)
            pushed.append(servers.push(model))
        group.barrier()
        pulled.append(servers.pull(model))
        group.barrier()
    sums = torch.ones(3) * rank
    collective.all_reduce(sums)
    found.update(pushed=pushed, pulled=pulled, model=model.state_dict(), sums=sums, rpc=implementation())
    group.barrier()
    world.stop()
    return found


if __name__ == "__main__":
    start(main, 3)
