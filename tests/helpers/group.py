"""Run one scenario in several worker processes, and collect what each returned or raised."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu
from forks import forks

from rdmarpc.calls import agent


@dataclass
class Outcome:
    """What became of one worker: its result, or its exception as type name and text, or neither if it was killed."""

    result: Any = None
    error: str = ""
    text: str = ""
    exit_code: int | None = None


class Meeting:
    """For scenarios that call ``init_rpc`` themselves: where, and a store of the test's own to keep step."""

    def __init__(self, place: str, rank: int, options: dict[str, Any]) -> None:
        import torch.distributed as dist

        self._place, self.rank, self._options = place, rank, options
        self._store = dist.FileStore(place + "-steps", -1)

    def join(self, name: str = "", rank: int | None = None, world_size: int | None = None, **options: Any) -> None:
        import rdmarpc as rpc

        rank = self.rank if rank is None else rank
        plan = {"init_method": f"file://{self._place}", "rpc_timeout": 20, **self._options, **options}
        rpc.init_rpc(
            name or f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=rpc.RpcBackendOptions(**plan)
        )

    def say(self, what: str, text: str = "1") -> None:
        self._store.set(what, text)

    def said(self, what: str) -> str:
        """The text, when it has been said."""
        self.hear(what)
        return bytes(self._store.get(what)).decode()

    def hear(self, *what: str, timeout: float = 20.0) -> None:
        deadline = time.monotonic() + timeout
        while not self._store.check(list(what)):
            assert time.monotonic() < deadline, f"{what} did not happen"
            time.sleep(0.005)

    def step(self, what: str, size: int) -> None:
        """Nobody goes on before ``size`` workers have come here."""
        self.say(f"{what}/{self.rank}")
        self.hear(*(f"{what}/{rank}" for rank in range(size)))


def _main(scenario: Callable[..., Any], rank: int, size: int, place: str, options: dict[str, Any], pipe: Any) -> None:
    import torch

    import rdmarpc as rpc

    faulthandler.enable()
    torch.set_num_threads(1)
    if callable(allow := options.get("allow")):
        options["allow"] = allow()  # modules cannot be sent to the process
    os.environ.update(options.pop("environment", {}))
    try:
        if options.pop("gpu", False):
            gpu.load()
        if options.pop("dynamic", False):
            pipe.send(("result", scenario(Meeting(place, rank, options))))
            return
        name = options.pop("name", None) or f"worker{rank}"
        plan = rpc.RpcBackendOptions(**{"init_method": f"file://{place}", "rpc_timeout": 20, **options})
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=plan)
        pipe.send(("result", scenario(rank)))
    except BaseException as error:
        pipe.send(("error", (type(error).__name__, str(error) + "\n" + traceback.format_exc())))
    pipe.close()


def run_group(
    scenario: Callable[[Any], Any],
    size: int = 2,
    *,
    timeout: float = 120.0,
    ranks: list[int] | None = None,
    each: dict[int, dict[str, Any]] | None = None,
    **options: Any,
) -> list[Outcome]:
    """``scenario(rank)`` runs in each worker after ``init_rpc`` and has to shut down itself. ``options`` go to
    ``RpcBackendOptions`` (``each``: per rank, also ``name``). ``ranks``: start only these. Fails if a worker hangs.
    With ``dynamic=True`` it is ``scenario(meeting)``, without ``init_rpc``; with ``gpu=True`` each has a GPU (``gpu.load``).
    ``environment``: variables of the workers. ``allow``: a function that gives the option."""
    if options.get("gpu"):
        gpu.build()
    outcomes = [Outcome() for _ in range(size)]
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "store")
        running = []
        for rank in ranks if ranks is not None else range(size):
            ours, theirs = forks().Pipe(duplex=False)
            mine = {**options, **(each or {}).get(rank, {})}
            process = forks().Process(target=_main, args=(scenario, rank, size, place, mine, theirs), daemon=True)
            process.start()
            theirs.close()
            running.append((rank, process, ours))
        deadline = time.monotonic() + timeout
        try:
            for rank, process, pipe in running:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    for _, other, _ in running:
                        if other.is_alive():
                            os.kill(other.pid, signal.SIGABRT)  # it prints where it is
                            other.join(5)
                    raise AssertionError(f"worker {rank} hangs")
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    kind, value = "killed", None
                if kind == "result":
                    outcomes[rank].result = value
                elif kind == "error":
                    outcomes[rank].error, outcomes[rank].text = value
                process.join(max(0.1, deadline - time.monotonic()))
                outcomes[rank].exit_code = process.exitcode
                assert process.exitcode is not None, f"worker {rank} does not exit"
        finally:
            for _, process, pipe in running:
                if process.is_alive():
                    process.kill()
                process.join(5)
                pipe.close()
    return outcomes


def on_every_device(
    scenario: Callable[[Any], Any], size: int = 2, *, devices: tuple[str, ...] = ("shm", "tcp"), **options: Any
) -> dict[str, list[Outcome]]:
    """The same scenario over each device, in groups that run side by side: for those that mostly wait."""
    forks()  # one thread starts the server
    with ThreadPoolExecutor() as pool:
        runs = {device: pool.submit(run_group, scenario, size, transport=device, **options) for device in devices}
    return {device: run.result() for device, run in runs.items()}


def results(outcomes: list[Outcome]) -> list[Any]:
    """The results of workers that must all have succeeded."""
    wrong = [f"worker {rank}: {outcome.error}: {outcome.text}" for rank, outcome in enumerate(outcomes) if outcome.error]
    assert not wrong, "\n".join(wrong)
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code == 0, f"worker {rank} exited with {outcome.exit_code}"
    return [outcome.result for outcome in outcomes]


_dismissals = threading.Semaphore(0)


def dismiss(*workers: str) -> None:
    """End ``until_dismissed`` of these. They may leave before they have answered: that is then no failure."""
    import rdmarpc as rpc

    for worker in workers:
        with suppress(rpc.PeerLost):
            rpc.rpc_sync(worker, _leave)


def _leave() -> None:
    _dismissals.release()


def until_dismissed(times: int = 1) -> None:
    for _ in range(times):
        assert _dismissals.acquire(timeout=50), "nobody has dismissed this worker"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def may_stage() -> bool:
    """Whether the device of this worker sends nothing but registered memory: what lies elsewhere is staged, once."""
    return agent.current().device.name.startswith("verbs")
