"""Workload ``collective``: all workers run drawn programs of ``torch.distributed`` (``collective_programs``) over this backend,
statement by statement beside what each gave over gloo. Who is left makes another group."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import collective_calls
import collective_programs
import judge
import torch
import torch.distributed as dist

import rdmarpc as rpc

from .board import LAST_STEP, LEAVING, WORKING
from .diary import KINDS, same
from .raw import meet
from .workloads import Scene

PROGRAMS, _MEET_S = 2, 20.0
_LIMIT = timedelta(seconds=8)


def live(scene: Scene, chance: random.Random) -> None:
    trial, board, rank = scene.trial, scene.diary.board, scene.rank
    common = random.Random(trial.number)  # the same at all ranks
    texts: list[str] = []
    while len(texts) < PROGRAMS:
        made = collective_programs.recipe(common.randrange(10**6))
        texts += [collective_programs.source(made)] if made.size == trial.size else []
    if trial.device != "auto":
        os.environ["RDMARPC_COLLECTIVES_DEVICE"] = trial.device
    options = {name: scene.options[name] for name in ("peer_timeout", "secret")}
    collective_calls.LIMITS["rdmarpc"] = _LIMIT
    _World.scene, _World.options = scene, rpc.RpcBackendOptions(**options)
    known = [_over(scene, "gloo", text, f"gloo{number}", []) for number, text in enumerate(texts)]
    from .worker import count  # which imports this

    scene.before = count(scene.folder)  # gloo keeps some
    meet(scene, "made", b"", _MEET_S)
    board.tell(rank, WORKING, os.getpid())
    number, lost = 0, False
    while not lost and not 0 < board.get(LAST_STEP) <= number:
        number += 1
        if rank == 0 and not scene.going and not board.get(LAST_STEP):
            board.put(LAST_STEP, number + 1)
        try:
            lost = _run(scene, number, texts[number % PROGRAMS], known[number % PROGRAMS])
        except KeyboardInterrupt:
            if rank in trial.dead:
                raise
    board.tell(rank, LEAVING, os.getpid())
    _again(scene)


class _World(collective_calls.World):
    """Over this backend each statement is watched."""

    scene: Scene

    def __init__(self, *args: Any) -> None:
        self.failed: list[Exception] = []
        super().__init__(*args)

    def begin(self) -> None:
        """Waits for all, also for one that does not come."""
        if self.backend == "gloo":
            super().begin()
            return
        board, bits = self.scene.diary.board, (1 << self.size) - 1
        board.begin(self.scene.rank, bits, KINDS.index("join"))
        super().begin()
        board.begin(self.scene.rank, bits, KINDS.index("statement"))

    def again(self) -> None:
        if self.failed:
            raise self.failed[0]
        super().again()

    @contextlib.contextmanager
    def attempt(self, number: int) -> Iterator[None]:
        raised: list[Exception] = []
        watched = self.scene.diary.doing("statement", *range(self.size))
        with contextlib.nullcontext() if self.backend == "gloo" else watched:
            with super().attempt(number):
                try:
                    yield
                except Exception as error:
                    raised.append(error)
                    raise
            if self.backend == "rdmarpc" and raised and _by_fault(raised[0]):
                self.failed += raised
                raise raised[0]


def _by_fault(error: Exception) -> bool:
    ours = isinstance(error, rpc.RdmaError) and not isinstance(error, rpc.NotSupported)
    return ours or "PeerLost" in str(error) or "TransferTimeout" in str(error)


def _over(scene: Scene, backend: str, text: str, folder: str, worlds: list[_World]) -> judge.Outcome:
    names: dict[str, Any] = {}
    exec(compile(text, "drawn.py", "exec"), names)
    place, size = scene.folder / folder, scene.trial.size
    place.mkdir(exist_ok=True)

    def program(_: Any, keep: Any) -> None:
        try:
            with scene.diary.doing("join", *range(size)):
                worlds.append(_World(backend, scene.rank, size, str(place), keep))
            if worlds:
                names["program"](worlds[0], scene.rank, size)
        finally:
            _leave()

    return judge.outcome(program, lambda net, _: net)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(scene: Scene, number: int, text: str, known: judge.Outcome) -> bool:
    """Whether somebody was lost."""
    _leave()  # what an interrupt has left
    diary, worlds, everybody = scene.diary, list[_World](), range(scene.trial.size)
    found: judge.Outcome | None = None
    with diary.doing("program", *everybody):
        found = _over(scene, "rdmarpc", text, f"run{number}", worlds)
        if found.error is not None and _by_fault(found.error):
            raise found.error
    failed = worlds[0].failed if worlds else []
    lost = found is None or found.error is not None or not worlds or any(isinstance(error, rpc.PeerLost) for error in failed)
    theirs, ours = collective_calls._statements(known.seen), collective_calls._statements(found.seen if found else [])
    whole = not lost and not failed
    for name in theirs:
        if not whole and (name not in ours or (ours[name][1] is not None and theirs[name][1] is None)):
            break  # what comes later depends on it
        verdict = collective_calls._statement(theirs[name], ours[name])
        if verdict.kind not in (*judge.GOOD, "refused"):
            told = f"run {number}: {name}: {verdict.kind}: {verdict.detail}"
            diary.write("wrong", kind="statement", touched=[*everybody], text=told)
    return lost and any(fault.lethal for fault in scene.trial.faults)


def _again(scene: Scene) -> None:
    """Of those that are left."""
    ranks = [rank for rank in range(scene.trial.size) if rank not in scene.trial.dead]
    if scene.rank not in ranks:
        return
    scene.diary.lost |= scene.trial.dead
    meet(scene, "left", b"", 2 * _LIMIT.total_seconds())  # who was a statement ahead waits its limit out alone
    with scene.diary.doing("again", *ranks):
        _leave()
        store, mine = dist.FileStore(f"{scene.folder}/again", -1), ranks.index(scene.rank)
        dist.init_process_group(
            "rdmarpc", store=store, rank=mine, world_size=len(ranks), pg_options=_World.options, timeout=_LIMIT
        )
    while dist.is_initialized():
        with scene.diary.doing("again", *ranks):
            for count in (1, 300_000):
                x = torch.full((count,), float(mine + 1))
                dist.all_reduce(x)
                same(x, torch.full((count,), float(sum(range(len(ranks) + 1)))), "a sum of those that are left")
            going = torch.tensor(float(scene.going))
            dist.all_reduce(going, dist.ReduceOp.MIN)
            if going:
                continue
        _leave()
