"""Runs one trial: starts its workers, brings the faults about, watches for hangs, and collects what is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rdmarpc.calls.memory import DEFAULT_S

from . import verdict
from .board import DONE, LEAVING, STARTING, STOP, WORKING, Board
from .diary import KINDS
from .faults import BEGAN, OVER, strike
from .strangers import Siege
from .trial import GRACE_S, PEER_TIMEOUT_S, Fault, Trial
from .worker import FULL_TIMEOUT_S, INIT_TIMEOUT_S, main

_TICK_S = 0.02
_START_S = 40.0
_CROWD = 4.0  # threads a core that want to run: those of a trial or two
_SETTLE_S = 0.8
TAMPER_S = 8.0
_LONGER = {"init": INIT_TIMEOUT_S, "join": INIT_TIMEOUT_S, "wrap": 20.0}
"""Seconds that some operations may take besides: waiting for a worker that never joins, capturing a model."""


@dataclass
class Outcome:
    """``problems``: one line each; empty if the trial passed. ``took``: seconds. ``folder``: kept logs of a failure."""

    trial: Trial
    problems: list[str] = field(default_factory=list)
    took: float = 0.0
    folder: str = ""
    operations: int = 0
    frames: int = 0
    """Mutated ones that went over live connections."""
    lag: float = 0.0
    """Seconds that this machine was late, which are added to every limit."""


def run(trial: Trial, keep: Path | None = None, siege: Siege | None = None, operations: int = 0) -> Outcome:
    """Never raises for what a trial does. ``keep``: where the logs of those that fail go. ``siege``: strangers meanwhile.
    ``operations``: so many are waited for, however slow the host is."""
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    began = time.monotonic()
    outcome = Outcome(trial)
    shared = set(os.listdir("/dev/shm"))
    try:
        with _namespaces(trial) as namespaces:
            watch = _Watch(trial, folder, namespaces, siege, operations)
            watch.run()
        outcome.lag, outcome.operations = watch.late, watch.operations
        entries = _read(folder)
        outcome.frames = sum(entry["frames"] for entry in entries if entry["event"] == "tampered")
        outcome.problems = watch.problems + verdict.judge(trial, entries, watch.times(), watch.late, watch.exits, watch.hung)
        outcome.problems += verdict.left_behind(entries, shared) + verdict.printed(folder)
        if outcome.problems and keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            outcome.folder = str(keep / str(trial.number))
            shutil.rmtree(outcome.folder, ignore_errors=True)
            shutil.copytree(folder, outcome.folder, ignore=shutil.ignore_patterns("board"))
            (Path(outcome.folder) / "problems").write_text("\n".join([str(trial), *outcome.problems]) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome.took = time.monotonic() - began
    return outcome


@contextlib.contextmanager
def _namespaces(trial: Trial) -> Iterator[list[int]]:
    if not any(fault.kind == "cut" for fault in trial.faults):
        yield []
        return
    from hosts import two_hosts

    with two_hosts() as holders:
        yield holders


def _read(folder: Path) -> list[dict[str, Any]]:
    entries = []
    for path in folder.glob("*.diary"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line of one that was killed
                entries.append(json.loads(line))
    return sorted(entries, key=lambda entry: entry["at"])


class _Watch:
    def __init__(self, trial: Trial, folder: Path, namespaces: list[int], siege: Siege | None, wanted: int) -> None:
        from forks import forks

        self.trial, self._folder, self._namespaces, self._siege, self._wanted = trial, folder, namespaces, siege, wanted
        self.board = Board(folder / "board", make=True)
        self.problems: list[str] = []
        self.hung: set[int] = set()
        self.exits: dict[int, int | None] = {}
        self.lag = self.late = 0.0
        self.operations = 0
        self._crowd: deque[int] = deque([1], maxlen=round(5.0 / _TICK_S))
        self._last = time.monotonic()
        cut = {fault.victim for fault in trial.faults if fault.kind == "cut"}
        self.processes = []
        for rank in range(trial.size):
            namespace = namespaces[rank in cut] if namespaces else 0
            process = forks().Process(target=main, args=(trial, rank, str(folder), namespace), daemon=True)
            process.start()
            self.processes.append(process)

    def run(self) -> None:
        strikes: list[threading.Thread] = []
        try:
            strikes += self._strike("init")
            self._until(lambda: all(self._phase(rank) >= WORKING or self._gone(rank) for rank in self._ranks()), _START_S)
            strikes += self._strike("work")
            self._until(lambda: self._struck("init", "work"), 15.0)
            if self._siege is not None:
                self._siege.start(self._folder)
            self._until(lambda: False, self._settle())
            self._until(lambda: sum(map(self.board.count, self._ranks())) >= self._wanted, _START_S)
            if self._siege is not None:
                self._siege.stop()
            self.board.put(STOP, 1)
            self._until(lambda: any(self._phase(rank) >= LEAVING for rank in self._ranks()), 15.0)
            strikes += self._strike("shutdown")
            self._until(lambda: all(self._gone(rank) or self._stopped(rank) for rank in self._ranks()), 45.0)
        finally:
            self.board.put(STOP, 1)
            for strike_ in strikes:
                strike_.join(20)
            self._end()

    # -- looking

    def _ranks(self) -> range:
        return range(self.trial.size)

    def _phase(self, rank: int) -> int:
        return self.board.worker(rank, 0)

    def _gone(self, rank: int) -> bool:
        return self.processes[rank].exitcode is not None

    def _stopped(self, rank: int) -> bool:
        """Whether a fault stopped it for good."""
        return any(
            fault.kind == "stop" and fault.victim == rank and self.board.get(self.board.fault(index) + BEGAN)
            for index, fault in enumerate(self.trial.faults)
        )

    def _until(self, true: Any, seconds: float) -> None:
        """Until it is, or so long, or somebody hangs."""
        self._last = time.monotonic()
        limit = self._last + seconds
        while not self.hung and not true() and time.monotonic() < limit + self.lag:
            time.sleep(_TICK_S)
            now = time.monotonic()
            if now - self._last > 3 * _TICK_S:
                self.lag += now - self._last - _TICK_S
            self._last = now
            self._crowd.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]))
            self._look()
            self.late = max(self.late, self.lag + PEER_TIMEOUT_S * (self.stretch - 1))

    @property
    def stretch(self) -> float:
        """By how much limits are longer, because many more threads of this host want to run than a trial has."""
        return max(1.0, sum(self._crowd) / len(self._crowd) / (os.cpu_count() or 1) / _CROWD)

    def times(self) -> list[tuple[int, int]]:
        """Of each fault: when it began, and was over; 0 if not."""
        return [(self.board.get(at + BEGAN), self.board.get(at + OVER)) for at in self._places()]

    def _places(self) -> list[int]:
        return [self.board.fault(index) for index in range(len(self.trial.faults))]

    def _look(self) -> None:
        """Whoever waits for longer than the limit after the last fault that concerns it hangs."""
        now = time.monotonic_ns()
        for rank in self._ranks():
            if self._gone(rank) or self._stopped(rank) or rank in self.hung or self._phase(rank) == STARTING:
                continue
            for began, touched, kind in self.board.under_way(rank):
                limit = (PEER_TIMEOUT_S + GRACE_S) * self.stretch + self.lag + _LONGER.get(KINDS[kind], self._patience)
                since = max(began, self._concerns(rank), *(self._left(other) for other in self._ranks() if kind == 1))
                if now - since > limit * 1e9:
                    who = [f"worker{other}" for other in self._ranks() if touched >> other & 1]
                    self.problems.append(
                        f"hang: worker{rank} has been in {KINDS[kind]!r} with {', '.join(who)} for {(now - began) / 1e9:.1f} s,"
                        f" {(now - since) / 1e9:.1f} s of them after the last fault (limit {limit:.1f} s)"
                    )
                    self.hung.add(rank)
                    break

    @property
    def _patience(self) -> float:
        """Where memory is short, calls wait for it until their deadlines, and requests that are being served for longer."""
        return max(FULL_TIMEOUT_S, DEFAULT_S) if any(fault.kind == "arena" for fault in self.trial.faults) else 0.0

    def _left(self, rank: int) -> int:
        """When it began to leave: who leaves before waits for it."""
        return (
            self.board.worker(rank, 1) if self._phase(rank) >= LEAVING else time.monotonic_ns() if not self._lost(rank) else 0
        )

    def _lost(self, rank: int) -> bool:
        return self._gone(rank) or any(
            fault.victim == rank and fault.lethal and begun for fault, (begun, _) in zip(self.trial.faults, self.times())
        )

    def _concerns(self, rank: int) -> int:
        """The latest moment at which a fault did something to this worker."""
        latest = 0
        for fault, (began, over) in zip(self.trial.faults, self.times()):
            if not began:
                continue
            ends = began if fault.lethal and fault.victim != rank else over or time.monotonic_ns()
            latest = max(latest, ends)
        return latest

    # -- acting

    def _strike(self, phase: str) -> list[threading.Thread]:
        threads = []
        for at, fault in zip(self._places(), self.trial.faults):
            if fault.phase == phase and fault.kind != "arena":
                thread = threading.Thread(target=self._one, args=(at, fault), daemon=True)
                thread.start()
                threads.append(thread)
        return threads

    def _one(self, at: int, fault: Fault) -> None:
        time.sleep(fault.after)
        pid = self.processes[fault.victim].pid
        assert pid is not None
        if not self._gone(fault.victim):
            strike(fault, at, pid, self.board, self._namespaces)

    def _struck(self, *phases: str) -> bool:
        return all(
            over or fault.phase not in phases or fault.kind == "arena" or self._gone(fault.victim)
            for fault, (_, over) in zip(self.trial.faults, self.times())
        )

    def _settle(self) -> float:
        if self._siege is not None:
            return self._siege.seconds
        if self.trial.workload == "tampered":
            return TAMPER_S
        silent = any(fault.kind in ("stop", "sleeper", "cut") for fault in self.trial.faults)
        return _SETTLE_S + (PEER_TIMEOUT_S if silent else 0.0)

    def _end(self) -> None:
        """End whoever is left, and take down how each ended."""
        for rank in self._ranks():
            process = self.processes[rank]
            alive = process.exitcode is None
            if alive and not self._stopped(rank) and self._phase(rank) != DONE:
                if not self.hung:
                    self.problems.append(f"worker{rank} does not end: phase {self._phase(rank)}")
                with contextlib.suppress(ProcessLookupError):
                    assert process.pid is not None
                    os.kill(process.pid, signal.SIGUSR1)  # its stacks
                self.hung.add(rank)
        if self.hung:
            time.sleep(0.5)
        for rank in self._ranks():
            process = self.processes[rank]
            if self._phase(rank) == DONE:
                process.join(5.0)
            if process.exitcode is None:
                process.kill()
            process.join(10.0)
            self.exits[rank] = process.exitcode
            self.operations += self.board.count(rank)
            process.close()
