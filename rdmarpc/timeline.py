"""A timeline of one run, for Perfetto (ui.perfetto.dev) or chrome://tracing: both sides of every call, joined by arrows.

    RpcBackendOptions(timeline="folder")     or RDMARPC_TIMELINE=folder: the whole run, of all workers, in one file
    with timeline.record("mine.json"): ...   this process, while the block runs
    rdmarpc timeline merge FILES -o OUT      several files, one for each process, in one

A graceful shutdown gathers: rank 0 asks the others for their timelines and writes ``folder/timeline.json`` (or the file, if the
name ends in ``.json``). A worker whose timeline could not be gathered writes its own, ``folder/NAME.json``
(``file.NAME.json``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from .calls import agent as _agent
from .calls.agent import Agent
from .functions import async_execution
from .tools import events
from .transport import RdmaError, host_id

_GATHER_TIMEOUT_S = 60.0


class Timeline(events.Calls):
    """What one worker records, from construction to ``stop``. Thread-safe. Keeps the last 300,000 facts, those of some 60,000
    calls (100 MB); how many were dropped before them is in the file (``otherData``)."""

    def __init__(self, agent: Agent, path: str | os.PathLike[str]) -> None:
        if agent.post.observer is not None:
            raise RuntimeError("a timeline is being recorded already")
        super().__init__(agent.me.id)
        self.agent, self.path = agent, Path(path)
        self.file = self.path if self.path.suffix == ".json" else self.path / "timeline.json"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._stopped = 0
        self._kept = False
        self._gathered: torch.futures.Future[list[int]] = torch.futures.Future()
        wall = time.time_ns() - time.monotonic_ns()
        self._worker = {"rank": self.rank, "name": agent.name, "pid": os.getpid(), "host": host_id(), "wall": wall}
        agent.post.observer = self
        self._streams().line = self
        agent.device.on_staged = self._note_staged

    @staticmethod
    def _streams() -> Any:
        from .places import observing  # a program that only calls does not load ``places`` before it is recorded

        return observing

    def _note_staged(self, nbytes: int) -> None:
        held = self.message.bytes
        held["staged"] = held.get("staged", 0) + nbytes

    def stop(self) -> None:
        """Note nothing more, but for what is under way on other threads at this moment."""
        with self._lock:
            if self._stopped:
                return
            self.agent.post.observer = None
            observing = self._streams()
            if observing.line is self:
                observing.line = None
            self._stopped = time.monotonic_ns()
            self.agent.device.on_staged = None

    def trace(self) -> events.Trace:
        """The trace of the recorded facts. Call it after ``stop``."""
        records = list(self._records)
        worker = self._worker | {"dropped": next(self._count) - len(records)}
        for serving in list(self.serving_now.values()):
            records.append(("served", *serving.key, serving.track, *serving.spans(self._stopped)))
        return events.trace_of(worker, records, self._tracks, self._stopped)

    # -- the whole group's

    def gather(self, deadline: float | None) -> None:
        """Bring all timelines together at rank 0, which writes them. Called in a graceful shutdown, when no call is under way
        any more. Returns when that is done; a worker whose timeline did not get there writes its own in ``close``."""
        self.stop()
        limit = _GATHER_TIMEOUT_S if deadline is None else min(_GATHER_TIMEOUT_S, max(0.1, deadline - time.monotonic()))
        if self.rank == 0:
            self._gathered.set_result(self._gather(limit))
            return
        with suppress(RdmaError):
            self._kept = self.agent.call(self.agent.workers[0], _written, (self.rank,), None, limit, control=True)

    def _gather(self, timeout: float) -> list[int]:
        """The ranks whose timelines were written."""
        agent = self.agent
        asked = [agent.call_async(info, _hand_over, (), None, timeout, control=True) for info in agent.workers if info.id]
        traces = [self.trace()]
        for future in asked:
            with suppress(RdmaError):
                if blob := future.wait():
                    traces.append(json.loads(blob))
        self._kept = _try_to_save(events.merge(traces), self.file)
        return [trace["otherData"]["workers"][0]["rank"] for trace in traces] if self._kept else []

    def close(self) -> None:
        """Write what nobody gathered."""
        self.stop()
        if self._kept:
            return
        self._kept = True
        name = self.agent.name
        own = self.path.with_suffix(f".{name}.json") if self.path.suffix == ".json" else self.path / f"{name}.json"
        _try_to_save(self.trace(), own)


def _try_to_save(trace: events.Trace, path: Path) -> bool:
    """A run does not fail for want of its picture."""
    try:
        events.save(trace, path)
        return True
    except OSError as error:
        warnings.warn(f"the timeline could not be written: {error}", stacklevel=2)
        return False


@contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[Timeline]:
    """Record the calls that this worker makes and serves until the end of the ``with``; then write them to ``path``, or, if its
    name does not end in ``.json``, to ``timeline.json`` in that folder. Calls still under way then are marked ``unfinished``.
    Raises ``RuntimeError`` before ``init_rpc``, or if a timeline is being recorded here already; ``OSError`` if the file cannot
    be written."""
    line = Timeline(_agent.current(), path)
    try:
        yield line
    finally:
        line.stop()
        events.save(line.trace(), line.file)


def for_run(agent: Agent) -> Timeline | None:
    """The timeline of a whole run, if one was asked for (``RpcBackendOptions``)."""
    path = agent.options.timeline or os.environ.get("RDMARPC_TIMELINE")
    if not path:
        return None
    try:
        return Timeline(agent, path)
    except OSError as error:
        warnings.warn(f"no timeline will be written: {error}", stacklevel=2)
        return None


# What other workers call here.


def _hand_over() -> bytes:
    line = _agent.current().timeline
    if not isinstance(line, Timeline):
        return b""
    line.stop()
    return json.dumps(line.trace()).encode()


@async_execution
def _written(rank: int) -> torch.futures.Future[Any]:
    """Whether rank 0, which this is, has written the timeline of that worker; once it has tried."""
    line = _agent.current().timeline
    if isinstance(line, Timeline):
        return line._gathered.then(lambda gathered: rank in gathered.value())
    never: torch.futures.Future[bool] = torch.futures.Future()
    never.set_result(False)
    return never


def main(arguments: list[str]) -> None:
    """``rdmarpc timeline merge FILES... [-o OUT]``"""
    parser = argparse.ArgumentParser(prog="rdmarpc timeline")
    merging = parser.add_subparsers(required=True).add_parser("merge", help="make one timeline of those of several workers")
    merging.add_argument("files", nargs="+", type=Path)
    merging.add_argument("-o", "--output", type=Path, default=Path("timeline.json"))
    given = parser.parse_args(arguments)
    try:
        merged = events.merge([events.load(path) for path in given.files])
        events.save(merged, given.output)
    except (ValueError, OSError) as error:
        sys.exit(f"rdmarpc timeline: {error}")
    print(f"{given.output}: {len(merged['otherData']['workers'])} workers, {len(merged['traceEvents'])} events")
