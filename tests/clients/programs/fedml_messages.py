"""Federated averaging over FedML's communication by RPC (``trpc``): clients train, the server averages."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from ranks import free_port, implementation
from torch import nn

CLIENTS, ROUNDS = 2, 3


def without_its_platform() -> None:
    """FedML's packages import its whole platform (object stores, dashboards, ...) before the module that is asked for.
    Here they are packages without code of their own: the communication is imported as it is, and nothing else."""
    root = importlib.util.find_spec("fedml")
    assert root is not None and root.submodule_search_locations is not None
    folder = Path(next(iter(root.submodule_search_locations)))
    for name in ("fedml", "fedml.core", "fedml.core.distributed", "fedml.core.distributed.communication", "fedml.core.mlops"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package


without_its_platform()

from fedml.core.distributed.communication.message import Message  # noqa: E402
from fedml.core.distributed.communication.observer import Observer  # noqa: E402
from fedml.core.distributed.communication.trpc.trpc_comm_manager import TRPCCommManager  # noqa: E402


def net() -> nn.Module:
    torch.manual_seed(12)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


class Part(Observer):
    """The server (rank 0) or a client."""

    def __init__(self, rank: int, folder: str) -> None:
        self.rank, self.net, self.round, self.models, self.found = rank, net(), 0, {}, []
        args = types.SimpleNamespace(enable_cuda_rpc=False)
        self.manager = TRPCCommManager(f"{folder}/master.csv", rank, 1 + CLIENTS, args)
        self.manager.add_observer(self)

    def send(self, to: int, kind: int) -> None:
        message = Message(kind, self.rank, to)
        message.add_params("model", {name: value.clone() for name, value in self.net.state_dict().items()})
        self.manager.send_message(message)

    def receive_message(self, kind: Any, message: Message) -> None:
        if str(kind) == "0":
            if self.rank == 0:
                self.ask()
        elif str(kind) == "1":
            self.net.load_state_dict(message.get("model"))
            self.train()
            self.send(0, 2)
        elif str(kind) == "2":
            self.models[message.get_sender_id()] = message.get("model")
            if len(self.models) == CLIENTS:
                self.average()
        else:
            self.manager.is_running = False

    def ask(self) -> None:
        for client in range(1, CLIENTS + 1):
            self.send(client, 1 if self.round < ROUNDS else 3)
        self.manager.is_running = self.round < ROUNDS

    def train(self) -> None:
        generator = torch.Generator().manual_seed(self.rank * 100 + self.round)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for _ in range(4):
            loss = self.net(torch.randn(16, 8, generator=generator)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.round += 1

    def average(self) -> None:
        first, *others = [self.models[client] for client in sorted(self.models)]
        mean = {name: sum((model[name] for model in others), value) / CLIENTS for name, value in first.items()}
        self.net.load_state_dict(mean)
        self.found.append(mean)
        self.models, self.round = {}, self.round + 1
        self.ask()


def main(rank: int, folder: str, out: str) -> None:
    from torch.distributed import rpc

    torch.set_num_threads(1)
    part = Part(rank, folder)
    part.manager._notify_connection_ready()
    part.manager.message_handling_subroutine()
    rpc.shutdown()  # the manager's own way to stop ends RPC while the others still answer
    if rank == 0:
        torch.save({"rounds": part.found, "rpc": implementation()}, out)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        Path(place, "master.csv").write_text(f"address,port\n127.0.0.1,{free_port()}\n")
        os.environ["WANDB_MODE"] = "disabled"
        mp.spawn(main, args=(place, sys.argv[1]), nprocs=1 + CLIENTS)
