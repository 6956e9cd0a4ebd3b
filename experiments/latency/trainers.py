"""Trainers, which are a group of gloo's too, and servers, which all trainers get from trainer 0. Ranks: trainers first."""

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..harness.meeting import init_method

_servers: list[Any] = []
_known = threading.Event()


def name_of(rank: int, job: dict[str, Any]) -> str:
    return f"trainer{rank}" if rank < job["trainers"] else f"server{rank - job['trainers']}"


def share(servers: list[Any]) -> None:
    """By trainer 0, once: the references that ``shared`` gives to the others."""
    _servers.extend(servers)
    _known.set()


def shared() -> list[Any]:
    """Called at trainer 0."""
    _known.wait()
    return _servers


def run(rank: int, job: dict[str, Any], train: Callable[[int, dict[str, Any]], Any]) -> Any:
    """``train`` in the group of the trainers; nothing at a server."""
    if rank >= job["trainers"]:
        return None
    dist.init_process_group("gloo", init_method=init_method(rank, job, "trainers"), rank=rank, world_size=job["trainers"])
    try:
        return train(rank, job)
    finally:
        dist.destroy_process_group()
