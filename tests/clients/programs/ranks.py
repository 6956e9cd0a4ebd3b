"""What all these programs do: start a process for each rank, and leave what rank 0 found in a file."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def _rank(rank: int, main: Callable[[int], Any], world: int, port: int, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    found = main(rank)
    if rank == 0:
        torch.save(found, out)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(main: Callable[[int], Any], world: int) -> None:
    """``main(rank)`` in ``world`` processes; what it returns at rank 0 goes to the file that the command line names."""
    mp.spawn(_rank, args=(main, world, free_port(), sys.argv[1]), nprocs=world)


def implementation() -> str:
    """Whose RPC this process uses: the module that ``init_rpc`` comes from."""
    from torch.distributed import rpc

    return rpc.init_rpc.__module__
