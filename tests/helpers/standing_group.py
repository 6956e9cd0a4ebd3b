"""Workers that stay from test to test: a test runs a function at worker 0, the others serve. A group in which one died or hung
is ended, and the next test gets a new one."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beside
from forks import forks
from lasting import lasting

_JOIN_S = 10.0


class StandingGroup:
    """``size`` workers; ``options`` go to ``RpcBackendOptions``. Starts with the first ``run``. One thread at a time."""

    def __init__(self, size: int = 3, **options: Any) -> None:
        self._size, self._options = size, options
        self._processes: list[Any] = []
        self._folder: Any = None

    def run(self, body: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Any:
        """What ``body(*args)`` returns at worker 0; ``AssertionError`` with the traceback there if it raises, or takes longer
        than ``timeout`` seconds."""
        if not self._processes:
            self._start()
        self._pipe.send((body, args))
        if not self._pipe.poll(timeout):
            self.end()
            raise AssertionError(f"{body} has not ended within {timeout} s")
        try:
            good, value, sound = self._pipe.recv()
        except EOFError:
            good, value, sound = False, f"worker 0 has died in {body}", False
        if not sound:
            self.end()
        assert good, value
        return value

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        place = str(Path(self._folder.name) / "store")
        self._pipe, theirs = forks().Pipe()
        for rank in range(self._size):
            given = (rank, self._size, place, self._options, theirs if rank == 0 else None)
            process = forks().Process(target=_work, args=given, daemon=True)
            process.start()
            lasting.add(process.pid)
            self._processes.append(process)
        theirs.close()

    def end(self) -> None:
        """Idempotent. Worker 0 leaves when its pipe is closed; who does not end is killed."""
        if self._processes:
            self._pipe.close()
        limit = time.monotonic() + _JOIN_S
        for process in self._processes:
            process.join(max(0.1, limit - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(_JOIN_S)
            lasting.discard(process.pid)
        self._processes = []
        if self._folder is not None:
            self._folder.cleanup()


def _work(rank: int, size: int, place: str, options: dict[str, Any], pipe: Any) -> None:
    import torch

    import rdmarpc as rpc
    from rdmarpc import places

    torch.set_num_threads(1)
    os.environ.update(options.pop("environment", {}))
    plan = rpc.RpcBackendOptions(**{"init_method": f"file://{place}", "rpc_timeout": 30, **options})
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=plan)
    try:
        while pipe is not None:
            body, args = pipe.recv()
            pipe.send(_outcome(body, args))
    except EOFError:  # the tests are over
        places.close_streams()
    rpc.shutdown()


def _outcome(body: Callable[..., Any], args: Any) -> tuple[bool, Any, bool]:
    """Whether it returned, its value or traceback, and whether the group can be used again."""
    try:
        value = body(*args)
        pickle.dumps(value)
        good = True
    except BaseException:
        good, value = False, traceback.format_exc()
    try:
        beside.close_all()
    except BaseException:
        return False, f"{value}\nclosing its models: {traceback.format_exc()}", False
    return good, value, True
