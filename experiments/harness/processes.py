"""Worker processes of one job: started together, taking turns where they must not disturb each other, ended together.

The launcher owns the processes. None outlives it: a worker asks the kernel to be killed when the launcher dies, takes
Ctrl-C at once, and one worker that fails takes the others with it. Workers are forked from a process that has imported torch
and done nothing else.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .findings import available_gib

PRELOADED = ("torch", "torch._dynamo", "hydra", "rdmarpc")
"""What is imported once for all workers of a program: it takes seconds of a core."""
PR_SET_PDEATHSIG = 1
WORKER_GIB = 0.08
"""Memory that a worker has for itself before it computes anything."""
TURN = "turn"


class WorkerFailed(Exception):
    """A worker ended before the job did; the message names it and says how it ended."""


class Launcher:
    """The launcher as a worker sees it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def tell(self, event: tuple[Any, ...]) -> None:
        """Hands an event (anything that can be pickled) to the launcher's `on_event`."""
        self._pipe.send(event)

    def wait_for_turn(self) -> None:
        """Ends the turn of this worker's group; returns when it has the next one. For rank 0 only."""
        self._pipe.send((TURN,))
        self._pipe.recv()


@dataclass(frozen=True)
class Group:
    """Processes that talk to each other; each runs `main(rank, job, launcher)`, and rank 0 leads.

    Groups take turns: of all the ranks 0 that wait for their turn, one has it. `freeze` stops the processes in between,
    for an RPC layer whose threads keep polling when there is nothing to do and would take the cores from the others.
    """

    name: str
    main: Callable[[int, dict[str, Any], Launcher], None]
    count: int
    freeze: bool = False


OnEvent = Callable[[str, tuple[Any, ...]], None]


def run_job(groups: list[Group], job: dict[str, Any], on_event: OnEvent, timeout_s: float) -> None:
    """Runs all groups in new processes and returns when every process has ended well.

    What a rank 0 tells arrives as `on_event(group name, event)`. Raises WorkerFailed when a worker fails or the job takes
    longer than `timeout_s` seconds; whatever the way out, every process has ended when this returns. Ends the program with
    one line where the processes alone would fill the memory.
    """
    count = sum(group.count for group in groups)
    if count * WORKER_GIB > (has := available_gib()):
        needs = f"{count} worker processes need at least {count * WORKER_GIB:.1f} GiB of memory"
        raise SystemExit(f"error: {needs}, {has:.1f} GiB are available")
    running: list[RunningGroup] = []
    deadline = time.monotonic() + timeout_s
    try:
        for group in groups:  # one after the other, because those that run may keep all cores busy
            group_running = RunningGroup(group)
            running.append(group_running)
            group_running.start(job)
            if _supervise(group_running, running, on_event, deadline):
                group_running.pause()
        while active := [each for each in running if not each.ended]:
            for group_running in active:
                group_running.resume()
                if _supervise(group_running, running, on_event, deadline):
                    group_running.pause()
    finally:
        for group_running in running:
            group_running.kill()


class RunningGroup:
    """The processes of a group, and the pipe to its rank 0."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.workers: list[Any] = []
        self.ended = False

    def start(self, job: dict[str, Any]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        for rank in range(self.group.count):
            ours, theirs = context.Pipe()
            name = f"worker{rank} of {self.group.name}"
            worker = context.Process(target=_enter, args=(self.group.main, rank, job, theirs), name=name)
            worker.start()
            theirs.close()
            self.workers.append(worker)
            if rank == 0:
                self.pipe = ours

    def pause(self) -> None:
        if self.group.freeze:
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Give rank 0 its turn."""
        if self.group.freeze:
            self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has died; _supervise says so
            self.pipe.send(TURN)

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.join()

    def _signal(self, number: signal.Signals) -> None:
        for worker in self.workers:
            if worker.is_alive():
                os.kill(worker.pid, number)


def _supervise(leading: RunningGroup, everybody: list[RunningGroup], on_event: OnEvent, deadline: float) -> bool:
    """Passes events on until the leading group has ended its turn: True, or has ended altogether: False."""
    pipe_open = True
    while True:
        alive = [worker for each in everybody for worker in each.workers if worker.exitcode is None]
        for worker in (worker for each in everybody for worker in each.workers):
            if worker.exitcode not in (None, 0):
                raise WorkerFailed(f"{worker.name} {_how_it_ended(worker.exitcode)}; the other workers have been ended")
        if not pipe_open and not any(worker in alive for worker in leading.workers):
            leading.ended = True
            return False
        ready = wait(
            [*(worker.sentinel for worker in alive), *([leading.pipe] if pipe_open else [])], deadline - time.monotonic()
        )
        if not ready:
            raise WorkerFailed("the job did not end within timeout_s; its processes have been ended")
        if pipe_open and leading.pipe in ready:
            try:
                event = leading.pipe.recv()
            except EOFError:
                pipe_open = False
                continue
            if event[0] == TURN:
                return True
            on_event(leading.group.name, event)


def _how_it_ended(exitcode: int) -> str:
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode} (its error is above)"


def _let_go_of_the_server() -> None:
    """multiprocessing gives every process the pipe whose end ends the one that forks: held by workers, it would stay with
    them when the launcher is killed."""
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _enter(main: Any, rank: int, job: dict[str, Any], pipe: Connection) -> None:
    """First function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The process that forks workers ends with the launcher, and the workers with it, stopped ones, too.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _let_go_of_the_server()
    launcher = multiprocessing.parent_process()
    if launcher is None or not launcher.is_alive():  # it died before the kernel knew about our wish
        os._exit(1)
    # One thread a worker: the workers share few cores, and sums over one thread have one order, so that a part gives
    # the same bits alone, in another process and next to other workers.
    torch.set_num_threads(1)
    try:
        main(rank, job, Launcher(pipe))
    except BaseException:
        print(f"worker{rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)  # threads of an RPC layer that has lost its peers could keep an ordinary exit waiting
    pipe.close()
