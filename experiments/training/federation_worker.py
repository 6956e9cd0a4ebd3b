"""A client of federated learning: local steps, then its model goes to the server, which answers everybody with the mean."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from ..harness import turns
from ..harness.libraries import Client
from ..harness.processes import Launcher
from ..harness.turns import Figure
from . import namespaces

METHODS = {"fedsgd": "FedSGD", "fedavg": "FedAvg"}


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A process from its first line to its last: the network first, if a rate was asked for, then as in every turn."""
    if job["gbits"]:
        server, place = rank >= job["clients"], Path(job["meeting_place"])
        interface, address = namespaces.link(server, rank == 0, place, job["gbits"], job["timeout_s"])
        job |= {"interface": interface, "address": address}
        # torch RPC meets through gloo; both it and TensorPipe would ask for the address of the host's name otherwise.
        os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = interface
    turns.main(rank, job, launcher)


def drive(client: Client, job: dict[str, Any]) -> list[Figure]:
    """Milliseconds that all local steps took with their exchanges: FedSGD exchanges after every step, FedAvg after the last.
    Every mean is checked: client r sends numbers that are r more than those of client 0."""
    clients, steps = job["clients"], job["local_steps"]
    mine = torch.arange(job["parameters"], dtype=torch.float32).remainder_(1024.0).add_(job["rank"])
    wanted = mine - job["rank"] + (clients - 1) / 2

    def exchange() -> None:
        if not torch.equal(client.finish(client.start("averaged", mine)).view(-1), wanted):
            raise RuntimeError("the server's mean is not that of all clients")

    exchange()  # does not count: connects, and shows that all are there
    figures: list[Figure] = []
    for method, exchanges in (("fedsgd", steps), ("fedavg", 1)):
        for _ in range(job["rounds"]):
            start = time.perf_counter()
            for step in range(steps):
                time.sleep(job["compute_ms"] / 1e3)
                if step >= steps - exchanges:
                    exchange()
            figures.append((method, clients, 1e3 * (time.perf_counter() - start)))
    return figures
