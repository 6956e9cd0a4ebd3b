"""A worker is killed in the middle of training. Another one takes its place, from the last checkpoint, and the losses are
those of a training that nobody disturbed, bit for bit.

The checkpoint has the format of ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time

import torch
from torch import nn
from torch.nn import functional as F

import rdmarpc as rpc

STEPS, EVERY, KILLED = 30, 8, 20
over = threading.Event()


def leave() -> None:
    over.set()


def join(name: str, rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=rpc.RpcBackendOptions(init_method=f"file://{meeting}/store"))


def owner(rank: int, meeting: str) -> None:
    join(f"worker{rank}", rank, meeting)
    over.wait()
    rpc.shutdown(graceful=False)


def train(folder: str, killed: int | None) -> list[float]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 64), nn.Sequential(nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64)), nn.Linear(64, 4))
    model = rpc.wrap(net, {"0": "worker1", "1": "worker2"})
    state = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), 0.01), "step": 0}
    if killed is None:
        rpc.save_checkpoint(state, f"{folder}/start")
    else:
        rpc.load_checkpoint(state, f"{folder}/start")  # the same random numbers
    losses: list[float] = []
    while state["step"] < STEPS:
        number = state["step"]
        if number == killed:
            os.kill(rpc.rpc_sync("worker1", os.getpid), signal.SIGKILL)
            killed = None
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(32, 16, generator=generator), torch.randint(4, (32,), generator=generator)
        try:
            loss = F.cross_entropy(model(x), y)
            state["optimizer"].zero_grad()
            loss.backward()
            state["optimizer"].step()
            losses.append(loss.item())
        except rpc.PeerLost as error:
            state = model.replace(error.peer, "worker3")
            print(f"step {number}: {error.peer} is lost, worker3 goes on from step {state['step']}")
            del losses[state["step"] :]
            continue
        state["step"] = number + 1
        if state["step"] % EVERY == 0:
            rpc.save_checkpoint(state, f"{folder}/last")
    model.close()
    return losses


def main(meeting: str) -> bool:
    spawn = torch.multiprocessing.get_context("spawn")
    owners = [spawn.Process(target=owner, args=(rank, meeting)) for rank in (1, 2, 3)]
    for process in owners:
        process.start()
    join("worker0", 0, meeting)
    for rank in (1, 2, 3):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(RuntimeError):
                rpc.get_worker_info(f"worker{rank}")
                break
            time.sleep(0.05)
    undisturbed, disturbed = train(meeting, None), train(meeting, KILLED)
    for rank in (2, 3):
        with contextlib.suppress(rpc.PeerLost):
            rpc.rpc_sync(f"worker{rank}", leave)
    rpc.shutdown(graceful=False)
    for process in owners:
        process.join()
    print(f"loss of the last step: {undisturbed[-1]} undisturbed, {disturbed[-1]} with a worker killed")
    print(f"all {STEPS} losses are the same bits: {disturbed == undisturbed}")
    return disturbed == undisturbed and owners[0].exitcode == -signal.SIGKILL


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        sys.exit(not main(place))
