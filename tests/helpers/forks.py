"""The process that worker processes of all tests are forked from: there is one in a test run, whoever starts it first."""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path


@functools.cache
def forks() -> ForkServerContext:
    """The context of a server that has imported ``warm``: new processes in milliseconds."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    # The server finds modules by its environment alone.
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([path] if path else [])])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path
    return context


def warm_up() -> None:
    """Return when that server has imported everything."""
    process = forks().Process(target=int)
    process.start()
    process.join()
