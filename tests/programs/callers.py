"""A process that judges programs, with its workers: started once for many programs, anew after a crash or a hang."""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import collective_calls
import judge
import mixed_calls
import probes
import served_pairs
from forks import forks
from torch import nn

START_S = 120.0


def identity(net: nn.Module, placement: Mapping[str, str]) -> nn.Module:
    return net


def wrap(net: nn.Module, placement: Mapping[str, str]) -> nn.Module:
    import rdmarpc as rpc

    return rpc.wrap(net, dict(placement))


def remote(net: nn.Module, placement: Mapping[str, str]) -> nn.Module:
    from rdmarpc.places import wrap as moved

    return moved(net, dict(placement))


def graphed(net: nn.Module, placement: Mapping[str, str]) -> nn.Module:
    """For programs of ``drawn_programs.graphed_source``."""
    import rdmarpc as rpc

    found = rpc.wrap(net, dict(placement))
    type(found).graph = staticmethod(rpc.graphed)  # type: ignore[attr-defined]
    return found


def served(net: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """For programs of ``served_programs``."""
    import rdmarpc as rpc

    return rpc.serve(net, **options)


def paired(net: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """For programs of ``served_pairs``."""
    return served_pairs.placed(net, dict(options))


TARGETS: dict[str, tuple[judge.Place, int]] = {
    "identity": (identity, 0),
    "wrap": (wrap, 3),
    "remote": (remote, 3),
    "graphed": (graphed, 3),
    "mixed": (wrap, 2),
    "served": (served, 2),
    "paired": (paired, 3),
    "wrapped": (wrap, 3),
    "replayed": (wrap, 3),
    "distributed": (identity, 2),
    "collective": (identity, 2),
    "tensors": (identity, 2),
}
"""How a model is placed, and how many workers there are. Others are given as ``module:function:workers``."""


def target(name: str) -> tuple[judge.Place, int]:
    if ":" not in name:
        return TARGETS[name]
    module, function, *workers = name.split(":")
    return getattr(importlib.import_module(module), function), int(workers[0]) if workers else 0


Job = tuple[Any, ...]
"""``("text", text)``, ``("mixed", text)``, ``("probe", name, variant)`` or ``("collective", text, size, seed)``."""


def judged(job: Job, place: judge.Place, folder: str) -> judge.Verdict:
    if job[0] == "probe":
        return judge.judged(getattr(probes, job[1]), functools.partial(probes.spread, place, job[2]))
    if job[0] == "collective":
        return collective_calls.judged(*job[1:])
    name = f"drawn_{zlib.crc32(job[1].encode()):08x}"  # a file, for tracebacks, and for pickles that workers read
    (Path(folder) / f"{name}.py").write_text(job[1], encoding="utf-8")
    importlib.invalidate_caches()
    program = importlib.import_module(name).program
    if job[0] == "text":
        return judge.judged(program, place)
    import rdmarpc as rpc

    mixed_calls.rpc = mixed_calls.Alone()
    one = judge.outcome(program, identity)
    mixed_calls.rpc = rpc
    return judge.compared(one, judge.outcome(program, place))


class Callers:
    """Not thread-safe. ``limit``: seconds that a program may take, with its run in one process. ``transport``: of the group."""

    def __init__(self, name: str, limit: float = 60.0, transport: str = "auto") -> None:
        self.name, self.limit, self.transport = name, limit, transport
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._times = 0

    def judge(self, job: Job) -> judge.Verdict:
        if not self._processes:
            self._start()
        callers = range(1)
        if job[0] == "collective":
            callers, job = range(len(self._pipes)), (*job, tempfile.mkdtemp(dir=self._folder.name))
        deadline = time.monotonic() + self.limit
        for rank in callers:
            self._pipes[rank].send((job, self.limit))
        verdicts = []
        for rank in callers:
            try:
                if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                    self._kill()
                    return judge.Verdict("HANG", f"no answer in {self.limit:.0f} s; the caller's stacks are on stderr")
                verdicts.append(self._pipes[rank].recv())
            except (EOFError, OSError):
                self._processes[rank].join(5.0)
                code = self._processes[rank].exitcode
                self._kill()
                return judge.Verdict("CRASH", f"exit code {code}")
        return max(verdicts, key=judge.rank)

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(20.0)
        self._kill()
        self._folder.cleanup()

    def __enter__(self) -> Callers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._times += 1
        size = target(self.name)[1] + 1
        store = str(Path(self._folder.name) / f"store{self._times}")
        for rank in range(size):
            ours, theirs = forks().Pipe()
            args = self.name, rank, size, self._folder.name, store, self.transport, theirs
            process = forks().Process(target=_main, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        if not self._pipes[0].poll(START_S) or self._pipes[0].recv() != "ready":
            self._kill()
            raise TimeoutError("the processes of a target did not start")

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(5.0)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _main(name: str, rank: int, size: int, folder: str, store: str, transport: str, pipe: Connection) -> None:
    import torch

    import rdmarpc as rpc

    mixed_calls.rpc = rpc
    torch.set_num_threads(1)
    sys.path.append(folder)
    sys.dont_write_bytecode = True
    if size > 1:
        options = rpc.RpcBackendOptions(
            init_method=f"file://{store}", rpc_timeout=20, num_worker_threads=4, transport=transport
        )
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    place = target(name)[0]
    gc.freeze()  # else each program's collection walks all that was imported
    if rank == 0:
        pipe.send("ready")
    with suppress(EOFError):
        while (asked := pipe.recv()) is not None:
            job, limit = asked
            faulthandler.dump_traceback_later(0.95 * limit, file=sys.__stderr__)
            pipe.send(judged(job, place, folder))
            faulthandler.cancel_dump_traceback_later()
    if size > 1:
        rpc.shutdown()
