"""A worker: its computation is a sleep of the paper's time, then its gradients go to every server and weights come back."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from ..harness.libraries import Client
from ..harness.meeting import meet
from ..harness.turns import Figure

WARM_UP = 2


PLACEMENTS = ("round_robin", "balanced")


def shares(tensors: list[int], servers: int, placement: str = "round_robin") -> list[int]:
    """How many numbers each server keeps: tensors are dealt out round-robin, as in the paper, or balanced, the largest first,
    each to the server that has least, as ``rpc.serve`` does."""
    if placement == "round_robin":
        return [sum(tensors[server::servers]) for server in range(servers)]
    kept = [0] * servers
    for count in sorted(tensors, reverse=True):
        kept[kept.index(min(kept))] += count
    return kept


def drive(client: Client, job: dict[str, Any]) -> list[Figure]:
    """All workers' steps; client 0 answers for all of them: milliseconds a mini-batch with its computation ("step", the median
    over the workers of each one's mean), and of an exchange alone while nobody computes, with a tensor and with 4 bytes."""
    place, rank = Path(job["meeting_place"]), job["rank"]
    parts = [torch.ones(count) for count in shares(job["tensors"], job["servers"], job["placement"]) if count]
    compute_s = job["compute_ms"] / 1e3

    def exchange() -> None:
        calls = [client.start("swapped", part, None, server) for server, part in enumerate(parts)]
        for call, part in zip(calls, parts):
            if len(client.finish(call).view(-1)) != len(part):
                raise RuntimeError("weights of another size came back")

    for _ in range(WARM_UP):
        exchange()
    meet("warm", job)
    start = time.perf_counter()
    for _ in range(job["steps"]):
        time.sleep(compute_s)
        exchange()
    (place / f".step{rank}").write_text(json.dumps(1e3 * (time.perf_counter() - start) / job["steps"]))
    meet("done", job)
    if rank:
        return []
    steps = sorted(json.loads((place / f".step{each}").read_text()) for each in range(job["clients"]))
    figures: list[Figure] = [("step", job["clients"], steps[len(steps) // 2])]
    if job["clients"] == 1:
        tiny = torch.ones(1)
        for case, run in (("exchange", exchange), ("latency", lambda: client.finish(client.start("identity", tiny)))):
            figures.append((case, 1, min(_ms(run) for _ in range(5))))
    return figures


def _ms(run: Any) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)
