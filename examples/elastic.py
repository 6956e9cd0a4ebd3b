"""``torchrun --standalone --nproc-per-node=2 --max-restarts=2 examples/elastic.py FOLDER``: a worker dies in the middle of
training, torchrun starts the group again, and training goes on from the last checkpoint. The losses are those of the model in
one process, bit for bit.

``FOLDER`` holds the checkpoint; all workers must see it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import rdmarpc as rpc

STEPS, EVERY, KILLED = 20, 4, 10


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(32, 16, generator=generator), torch.randint(4, (32,), generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    x, y = batch(number)
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


def train(folder: Path) -> list[float]:
    model = rpc.wrap(network(), {"2": "worker1"})
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.01), "step": 0, "losses": []}
    first = not (folder / "last").exists()
    if not first:
        rpc.load_checkpoint(state, folder / "last")
        print(f"goes on from step {state['step']}", flush=True)
    while state["step"] < STEPS:
        if state["step"] == KILLED and first:
            rpc.rpc_sync("worker1", os._exit, (1,))  # PeerLost
        state["losses"].append(step(model, state["optimizer"], state["step"]))
        state["step"] += 1
        if state["step"] % EVERY == 0:
            rpc.save_checkpoint(state, folder / "last")
    model.close()
    return state["losses"]


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer-timeout", type=float, default=10.0, help="seconds until a worker that does not answer is lost")
    return parser.parse_args(given)


def main(given: argparse.Namespace) -> bool:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rpc_backend_options=rpc.RpcBackendOptions(peer_timeout=given.peer_timeout))
    same = True
    if rank == 0:
        same = train(given.folder) == alone()
        print(f"all {STEPS} losses are those of one process: {same}", flush=True)
    rpc.shutdown()
    return same


if __name__ == "__main__":
    sys.exit(not main(arguments(sys.argv[1:])))
