"""One worker process of a trial: joins, works on several threads until told to stop, leaves, and looks at what is left."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .board import DONE, JOINING, LEAVING, WORKING, Board
from .diary import Diary
from .trial import PEER_TIMEOUT_S, PROGRAMS, Trial

RPC_TIMEOUT_S = 20.0
"""Longer than anybody may hang."""
INIT_TIMEOUT_S = 6.0
FULL_TIMEOUT_S = 6.0
"""Of calls where arenas are small: for so long a call waits for memory."""
THREADS = 3
_M_MMAP_THRESHOLD = -3
SHUTDOWN_S, FULL_SHUTDOWN_S = 20.0, 60.0
"""Of ``shutdown``; the second where arenas are small: one operation may wait for memory several times."""


def main(trial: Trial, rank: int, folder: str, namespace: int) -> None:
    place = Path(folder)
    log = os.open(place / f"worker{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1), os.dup2(log, 2)
    os.close(log)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Large memory that was freed goes back to the system: what the allocator keeps for later would look like a leak.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 17)
    if namespace:
        from hosts import enter

        enter(namespace)
    board = Board(place / "board")
    diary = Diary(place / f"worker{rank}.diary", board, rank)
    board.tell(rank, JOINING, os.getpid())
    try:
        _life(trial, rank, place, diary)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise  # the fault was that
        diary.write("escaped", type=type(error).__name__, text=str(error)[:1000], trace=traceback.format_exc()[-2000:])
    board.tell(rank, DONE, os.getpid())
    sys.stdout.flush(), sys.stderr.flush()


def _life(trial: Trial, rank: int, place: Path, diary: Diary) -> None:
    import torch

    from . import collective
    from .faults import Saboteur
    from .statements import live
    from .workloads import Scene

    torch.set_num_threads(1)
    options: dict[str, Any] = {
        "init_method": f"file://{place}/store",
        "rpc_timeout": INIT_TIMEOUT_S if any(fault.phase == "init" for fault in trial.faults) else RPC_TIMEOUT_S,
        "transport": trial.device,
        "peer_timeout": PEER_TIMEOUT_S,
        "secret": "a secret that every worker of this trial was given",
    }
    if any(fault.kind == "arena" for fault in trial.faults):
        options |= {"arena_limit": (12 + 4 * trial.size) << 20, "rpc_timeout": FULL_TIMEOUT_S}
    scene = Scene(trial, rank, diary, place, options, count(place))
    saboteur = Saboteur(scene)
    saboteur.start()
    body: Callable[[Any, random.Random], None] = {
        "channels": _channels,
        "groups": _groups,
        "tampered": _tampered,
        **dict.fromkeys(PROGRAMS, live),
        "collective": collective.live,
    }.get(trial.workload, _calls)
    body(scene, random.Random(1000 * trial.number + rank))
    saboteur.join()
    _left_over(diary, scene.before, place)


def _work(scene: Any, step: Callable[[random.Random], None], threads: int) -> None:
    """``step`` again and again on so many threads, until the board says stop."""
    board, rank = scene.diary.board, scene.rank
    if scene.trial.workload != "wrap" or rank:  # the model is captured first, which takes seconds
        board.tell(rank, WORKING, os.getpid())

    def loop(number: int) -> None:
        chance = random.Random(100_000 * scene.trial.number + 100 * rank + number)
        try:
            while scene.going:
                step(chance)
        except BaseException as error:
            scene.diary.write(
                "escaped", type=type(error).__name__, text=str(error)[:1000], trace=traceback.format_exc()[-2000:]
            )

    workers = [threading.Thread(target=loop, args=(number,), name=f"campaign-{number}") for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    board.tell(rank, LEAVING, os.getpid())


def _calls(scene: Any, chance: random.Random) -> None:
    """A group of fixed size."""
    import rdmarpc as rpc

    from . import training
    from .workloads import STEPS, name_of

    everybody, joined = range(scene.trial.size), False
    with scene.diary.doing("init", *everybody):
        plan = rpc.RpcBackendOptions(**scene.options)
        rpc.init_rpc(name_of(scene.rank), rank=scene.rank, world_size=scene.trial.size, rpc_backend_options=plan)
        joined = True
    if not joined:
        return
    scene.diary.write("address", text=rpc._get_current_rpc_agent().device.address.decode())
    step = STEPS.get(scene.trial.workload) or {"wrap": training.wrap, "serve": training.serve}[scene.trial.workload]
    _work(scene, lambda chance: step(scene, chance), THREADS if scene.trial.workload in STEPS else 1)
    full = any(fault.kind == "arena" for fault in scene.trial.faults)
    with scene.diary.doing("shutdown", *everybody):
        rpc.shutdown(timeout=FULL_SHUTDOWN_S if full else SHUTDOWN_S)


def _channels(scene: Any, chance: random.Random) -> None:
    from .raw import LANES, Ends, meet

    ends = Ends(scene)
    scene.diary.write("address", text=ends.device.address.decode())
    ends.connect()
    _work(scene, ends.step, LANES)
    meet(scene, "done", b"", 2.0)
    with scene.diary.doing("end", *range(scene.trial.size)):
        ends.device.close()


def _groups(scene: Any, chance: random.Random) -> None:
    import rdmarpc as rpc

    from .raw import Visits, meet

    visits = Visits(scene)
    board, rank = scene.diary.board, scene.rank
    while scene.going:
        if not visits.join():
            time.sleep(0.05)
            continue
        scene.diary.write("address", text=rpc._get_current_rpc_agent().device.address.decode())
        board.tell(rank, WORKING, os.getpid())
        visits.stay(chance)
        if not scene.going:
            meet(scene, "done", b"", 2.0)  # who stays to the end is called to the end
        board.tell(rank, LEAVING, os.getpid())
        visits.leave()


def _tampered(scene: Any, chance: random.Random) -> None:
    """Two workers in a group with one whose frames are tampered with."""
    from .raw import Visits, meet
    from .tamper import LIAR, Liar, honest

    if scene.rank == LIAR:
        scene.diary.board.tell(LIAR, WORKING, os.getpid())
        liar = Liar(scene)
        while scene.going:
            liar.live()
        scene.diary.write("tampered", frames=liar.frames)
        scene.diary.board.tell(LIAR, LEAVING, os.getpid())
        return
    visits = Visits(scene)
    if not visits.join():
        return
    scene.diary.lost.add(LIAR)  # as far as calls that are checked are concerned
    meet(scene, "here", b"", 10.0)
    _work(scene, lambda chance: honest(scene, chance), THREADS)
    meet(scene, "done", b"", 5.0)
    visits.leave()


# -- what is left


def count(place: Path) -> dict[str, int]:
    """Descriptors of this process, and its own memory in MiB."""
    found = {"descriptors": 0}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        found["descriptors"] += str(place) not in target
    with open("/proc/self/status") as file:
        found["memory"] = next(int(line.split()[1]) for line in file if line.startswith("RssAnon:")) >> 10
    return found


def _left_over(diary: Diary, before: dict[str, int], place: Path) -> None:
    """After everything was shut down. Threads may need a moment to end."""
    limit = time.monotonic() + 4.0
    while True:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        threads = sorted(t.name for t in threading.enumerate() if t.name.startswith(("rdmarpc", "campaign")))
        after = count(place)
        if (not threads and after["descriptors"] <= before["descriptors"]) or time.monotonic() > limit:
            break
        time.sleep(0.05)
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(f"{entry.name}:{entry.readlink()}")
        except OSError:
            continue
    frames = sys._current_frames()  # a thread may end meanwhile
    others = {t.name: traceback.format_stack(frames[t.ident])[-4:] for t in threading.enumerate() if t.ident in frames}
    diary.write("left", before=before, after=after, threads=threads, open=sorted(targets), others=others)
