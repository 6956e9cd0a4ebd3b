"""Workers as Ray actors: they call, a model is wrapped over them and trains; one dies, another takes its place from the last
checkpoint, and the losses are those of the model in one process, bit for bit. Ray starts the processes; ``pip install
'rdmarpc[ray]'``.

Actors of one cluster share a job secret (``RDMARPC_SECRET``) and a store. Here that is a file; on several hosts it is
``tcp://HOST:PORT`` of the first actor. The checkpoint's folder must be visible to all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
import time

import ray
import torch
from torch import nn
from torch.nn import functional as F

import rdmarpc as rpc

STEPS, EVERY, KILLED = 20, 4, 10


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(32, 16, generator=generator), torch.randint(4, (32,), generator=generator)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def alone() -> list[float]:
    """The losses of the model in one process."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    return [step(net, optimizer, number) for number in range(STEPS)]


def kill(name: str) -> None:
    """Kill an actor; returns when its process has ended, which ``ray.kill`` does not wait for."""
    call = rpc.rpc_async(name, time.sleep, (60.0,))
    ray.kill(ray.get_actor(name))
    with contextlib.suppress(rpc.PeerLost):
        call.wait()


@ray.remote(num_cpus=0, max_restarts=0)
class Worker:
    def __init__(self, rank: int, meeting: str) -> None:
        torch.set_num_threads(1)
        options = rpc.RpcBackendOptions(init_method=f"file://{meeting}/store")
        rpc.init_rpc(f"worker{rank}", rank=rank, rpc_backend_options=options)

    def ready(self) -> int:
        return os.getpid()

    def call(self, other: str) -> bool:
        return rpc.rpc_sync(other, torch.add, (torch.ones(2), 1)).tolist() == [2.0, 2.0]

    def train(self, folder: str) -> tuple[list[float], list[str]]:
        """The losses, and which workers were lost."""
        model = rpc.wrap(network(), {"2": "worker1"})
        state = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.01), "step": 0}
        losses: list[float] = []
        lost: list[str] = []
        while state["step"] < STEPS:
            number = state["step"]
            if number == KILLED and not lost:
                kill("worker1")
            try:
                losses.append(step(state["model"], state["optimizer"], number))
            except rpc.PeerLost as error:
                lost.append(error.peer)
                state = state["model"].replace(error.peer, "worker2")
                del losses[state["step"] :]
                continue
            state["step"] = number + 1
            if state["step"] % EVERY == 0:
                rpc.save_checkpoint(state, f"{folder}/last")
        state["model"].close()
        return losses, lost

    def leave(self) -> None:
        rpc.shutdown(graceful=False)


def main() -> bool:
    os.environ.setdefault("RDMARPC_SECRET", secrets.token_hex(32))
    given = {"env_vars": {"RDMARPC_SECRET": os.environ["RDMARPC_SECRET"], "PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=given, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as meeting:
            workers = [Worker.options(name=f"worker{rank}").remote(rank, meeting) for rank in range(3)]
            ray.get([worker.ready.remote() for worker in workers], timeout=60)
            calls = ray.get([workers[a].call.remote(f"worker{b}") for a, b in ((0, 1), (1, 2), (2, 0))], timeout=60)
            losses, lost = ray.get(workers[0].train.remote(meeting), timeout=90)
            ray.get([workers[rank].leave.remote() for rank in (0, 2)], timeout=30)
    finally:
        ray.shutdown()
    same = losses == alone()
    print(f"every actor called another: {all(calls)}; lost: {', '.join(lost)}")
    print(f"all {STEPS} losses are those of one process: {same}")
    return same and all(calls) and lost == ["worker1"]


if __name__ == "__main__":
    sys.exit(not main())
