"""What all these programs do: start a process for each rank, and leave what rank 0 found in a file."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch
import torch.multiprocessing as mp


def _rank(rank: int, main: Callable[[int], Any], out: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    found = main(rank)
    if rank == 0:
        torch.save(found, out)


_held: list[socket.socket] = []


def free_port() -> int:
    """One that nobody else is given while this process lives; who asks for it by number may listen there."""
    _held.append(socket.socket())
    _held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held[-1].bind(("127.0.0.1", 0))
    return _held[-1].getsockname()[1]


def start(main: Callable[[int], Any], world: int) -> None:
    """``main(rank)`` in ``world`` processes, whose environment is torchrun's from their start; what it returns at rank 0 goes
    to the file that the command line names."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    processes = []
    for rank in range(world):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        processes.append(mp.get_context("spawn").Process(target=_rank, args=(rank, main, sys.argv[1])))
        processes[-1].start()
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in connection.wait(running):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                for other in running.values():
                    other.kill()
                sys.exit(1)


def implementation() -> str:
    """Whose RPC this process uses: the module that ``init_rpc`` comes from."""
    from torch.distributed import rpc

    return rpc.init_rpc.__module__
