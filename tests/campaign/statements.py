"""Workloads of drawn programs: the first and the last worker run programs of users' statements (``mixed_programs`` and others)
over the others, beside what each program gives in one process. Who has lost a server replaces it in its model, if that has a
checkpoint, and runs the next programs over the other server.

After ``shutdown`` every worker uses what it has of that life, which has to say so, and those that are left meet once more."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import callers
import distributed_programs
import drawn_programs
import judge
import mixed_calls
import mixed_programs
import served_programs
import torch
import wrapped_programs
from torch import nn

import rdmarpc as rpc

from .board import LEAVING, WORKING
from .diary import KINDS, Wrong, ranks_in, same
from .raw import meet
from .workloads import Scene, calls, name_of

KINDS_OF_PROGRAMS: dict[str, tuple[Any, str]] = {
    "statements": (mixed_programs, "mixed"),
    "served": (served_programs, "served"),
    "wrapped": (wrapped_programs, "wrapped"),
    "distributed": (distributed_programs, "distributed"),
}
"""Where each workload's programs come from, and how ``callers`` places their models."""
PROGRAMS, SERVERS = 3, (1, 2)
_SHUTDOWN_S, _MEET_S, _USED_S = 20.0, 5.0, 3.0
_LEFT_OUT = re.compile(r"default_dtype|deterministic\(\)|detect_anomaly|inference_mode[\s\S]*load_(?:checkpoint|state_dict)")
"""Flags of torch, which are one for all callers of a worker; states that one process could not step after that."""
_ATTEMPTS = mixed_calls.attempts
_OURS = re.compile(r'File "[^"]*/(?:rdmarpc|transport|graph)/')
_OF_PROGRAMS = ("a method", "a function")
_PLAIN = (AttributeError, LookupError, AssertionError, NameError, TypeError)
_NAMES_THE_END = re.compile(r"shut down|init_rpc|Need to initialize|has been deleted")


_DOES = re.compile(r"^    trainer\.does\((\w+), .*\)$", re.MULTILINE)
_NOTHING_ELSE = ("trains", "trains_twice", "trains_and_clears_late", "trains_on_micro_batches")
"""Statements after which a checkpoint is all that there is to go back to."""


class Program(NamedTuple):
    seed: int
    text: str


class Replaced(NamedTuple):
    """In a program: the statement in which a worker was lost, and that worker."""

    number: int
    lost: str


def live(scene: Scene, chance: random.Random) -> None:
    trial, diary, rank = scene.trial, scene.diary, scene.rank
    everybody, joined = range(trial.size), False
    mine = [] if rank in SERVERS else list(itertools.islice(_programs(scene, chance), PROGRAMS))
    for program in mine:
        _alone(scene, program.text)
    mixed_calls.rpc = rpc
    with diary.doing("init", *everybody):
        options = rpc.RpcBackendOptions(**scene.options)
        rpc.init_rpc(name_of(rank), rank=rank, world_size=trial.size, rpc_backend_options=options)
        joined = True
    if not joined:
        return
    diary.write("address", text=rpc._get_current_rpc_agent().device.address.decode())
    uses = _uses(scene, name_of((rank + 1) % trial.size))
    meet(scene, "made", b"", _MEET_S)  # what is made there draws from the generators of programs
    diary.board.tell(rank, WORKING, os.getpid())
    others = threading.Thread(target=_others, args=(scene,), name="campaign-calls", daemon=True)
    others.start()
    while scene.going:
        if not mine or not set(SERVERS) & set(scene.alive()):
            time.sleep(0.01)  # a signal ends this worker
            continue
        with contextlib.suppress(KeyboardInterrupt):
            _run(scene, chance.choice(mine))
    others.join()
    graceful = trial.number % 3 > 0
    if not graceful:
        meet(scene, "done", b"", _MEET_S)
    diary.board.tell(rank, LEAVING, os.getpid())
    with diary.doing("shutdown", *everybody):
        rpc.shutdown(graceful, timeout=_SHUTDOWN_S)
    for what, use in uses.items():
        _used_after(scene, what, use)
    uses.clear()
    _again(scene)


def _others(scene: Scene) -> None:
    """Calls between all workers, meanwhile."""
    chance = random.Random(scene.trial.number + scene.rank)
    while scene.going:
        calls(scene, chance)
        time.sleep(0.02)


# -- programs


def _programs(scene: Scene, chance: random.Random) -> Iterator[Program]:
    drawn, me = KINDS_OF_PROGRAMS[scene.trial.workload][0], name_of(scene.rank)
    named = {"worker0": me, me: "worker0"}
    while True:
        seed = chance.randrange(10**6)
        text = drawn.source(drawn.recipe(seed))
        if not _LEFT_OUT.search(text):
            text = re.sub(r"worker\d", lambda found: named.get(found[0], found[0]), text)
            yield Program(seed, _replaceable(text) if scene.trial.workload == "wrapped" else text)


def _replaceable(text: str) -> str:
    """With a checkpoint at its beginning, and more steps."""
    text = _DOES.sub(lambda found: f"{found[0]}\n    trainer.does(trains, {found.start()}, 0.5)", text)
    return text.replace("    trainer.does(", "    trainer.does(saves_a_checkpoint, 0, 0.5)\n    trainer.does(", 1)


_known: dict[str, judge.Outcome] = {}


def _alone(scene: Scene, text: str) -> judge.Outcome:
    """What it gives in one process."""
    if text not in _known:
        me = name_of(scene.rank)
        mixed_calls._Here.worker, mixed_calls.rpc, mixed_calls.attempts = me, mixed_calls.Alone(me), _ATTEMPTS
        _known[text] = judge.outcome(drawn_programs.loaded(text).program, callers.identity)
    return _known[text]


def _over_who_is_left(scene: Scene, text: str) -> str:
    alive = scene.alive()
    left = next(rank for rank in SERVERS if rank in alive)
    for rank in {*range(scene.trial.size)} - {*alive}:
        text = text.replace(name_of(rank), name_of(left))
    return re.sub(r"\['(\w+)', '\1'\]", r"['\1']", text)


def _run(scene: Scene, program: Program) -> None:
    """It does what it does alone, up to the first statement that a fault ended, or from the checkpoint on."""
    diary, text = scene.diary, _over_who_is_left(scene, program.text)
    alone = _alone(scene, text)
    touched = sorted({scene.rank, *(rank for rank in range(scene.trial.size) if name_of(rank) in text)})
    watch, found = _Watch(scene, touched, text), None
    mixed_calls.rpc, mixed_calls.attempts = rpc, watch.attempts  # type: ignore[assignment]
    diary.write("program", seed=program.seed, workers=touched)
    with diary.doing("program", *touched):
        module = drawn_programs.loaded(watch.text)
        module.__dict__["replaced"] = watch.replaces
        found = judge.outcome(module.program, callers.TARGETS[KINDS_OF_PROGRAMS[scene.trial.workload][1]][0])
        if _by_fault(found.error):
            watch.deviates = True
            assert found.error is not None
            raise found.error
    for rank in {*scene.alive()} - {scene.rank}:  # what was to come from a lost worker is told late
        with contextlib.suppress(rpc.RdmaError):
            torch.ones((), device=rpc.device(name_of(rank))).item()
    if found is None:
        return
    if watch.replaced is not None:
        diary.write("replaced", seed=program.seed, number=watch.replaced.number, lost=watch.replaced.lost)
        alone = _alone(scene, _replacing(text, watch.replaced))
    if watch.deviates:
        verdict = judge.worst_of(alone.seen, found.seen)
        wrong = verdict.kind == "WRONG" and "kept" not in verdict.detail
    else:
        verdict = judge.compared(alone, found)
        wrong = verdict.kind not in (*judge.GOOD, "refused", "rounded", "metadata")
    if wrong:
        notes = [note for _, kept in found.seen for _, value in kept for note in getattr(value, "__notes__", [])]
        text = f"program {program.seed}: {watch.replaced}: {verdict.kind}: {verdict.detail}: {notes}"
        diary.write("wrong", kind="program", touched=touched, text=text)


def _replacing(text: str, replaced: Replaced) -> str:
    """That statement does nothing, and the program goes on from its checkpoint."""
    numbers = itertools.count(1)

    def done(found: re.Match[str]) -> str:
        return found[0] if next(numbers) != replaced.number else f"    trainer.replaces({replaced.lost!r})"

    return _DOES.sub(done, text)


def _by_fault(error: BaseException | None) -> bool:
    """An error of ours, or one that has it as text, or one of a file that the program opens."""
    if error is None or isinstance(error, rpc.NotSupported):
        return False
    named = isinstance(error, rpc.RdmaError) or "PeerLost" in str(error) or "TransferTimeout" in str(error)
    return named or (isinstance(error, OSError) and error.errno == errno.EMFILE)


class _Watch:
    """What becomes of the statements of one run. ``deviates``: one was ended by a fault, so later ones have other values."""

    def __init__(self, scene: Scene, touched: list[int], text: str) -> None:
        self._scene, self._touched, self.deviates = scene, touched, False
        self._names = _DOES.findall(text) if scene.trial.workload == "wrapped" and "Rare" not in text else []
        numbers = itertools.count(1)
        self.text = _DOES.sub(lambda found: f"{found[0]}; replaced(trainer, {next(numbers)})", text) if self._names else text
        self.replaced: Replaced | None = None
        self._lost: tuple[Replaced, Exception] | None = None

    def replaces(self, trainer: Any, number: int) -> None:
        """After that statement: the worker that was lost in it, if so."""
        lost, self._lost = self._lost, None
        if lost is None:
            return
        replaced, error = lost
        if trainer.spare(replaced.lost) is None:
            raise error
        trainer.replaces(replaced.lost)
        self.replaced = replaced  # without the error, whose frames refer to parameters: torch swaps none that others refer to

    def _replaceable(self, number: int, error: Exception) -> bool:
        names = self._names[number - 1 : number] if not self.deviates and self.replaced is None else []
        lost = [name_of(rank) for rank in SERVERS if rank in ranks_in(getattr(error, "peer", ""))]
        if isinstance(error, rpc.PeerLost) and lost and set(names) & set(_NOTHING_ELSE):
            self._lost = Replaced(number, lost[0]), error
        return self._lost is not None

    def attempts(self, keep: Callable[[str, Any], None]) -> Callable[[int], Any]:
        """As ``mixed_calls.attempts``."""

        @contextlib.contextmanager
        def attempt(number: int) -> Iterator[None]:
            error: BaseException | None = None
            with self._watched():
                try:
                    yield
                except (Exception, KeyboardInterrupt) as raised:
                    if isinstance(raised, Exception) and self._replaceable(number, raised):
                        raise
                    error = raised
                    if self._ended(raised):
                        raise
            given_up = isinstance(error, KeyboardInterrupt)
            plain = mixed_calls._plain(error) if isinstance(error, Exception) and not _by_fault(error) else error
            keep(f"write {number}", rpc.RdmaError("given up") if given_up else plain)

        return attempt

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Threads of a program are watched by the statement that waits for them."""
        diary = self._scene.diary
        if threading.current_thread() is not threading.main_thread():
            try:
                yield
            except Exception as error:
                diary._failed("statement", tuple(self._touched), time.monotonic_ns(), error)
            return
        with diary.doing("statement", *self._touched):
            yield
        diary.board.begin(self._scene.rank, sum(1 << rank for rank in self._touched), KINDS.index("program"))

    def _ended(self, error: BaseException) -> bool:
        """Whether the error is to be judged."""
        interrupted = isinstance(error, KeyboardInterrupt)
        self.deviates |= interrupted or _by_fault(error)
        if self.deviates and isinstance(error, _PLAIN) and not any(text in str(error) for text in _OF_PROGRAMS):
            lines = [line for line in "".join(traceback.format_exception(error)).split("\n") if 'File "' in line]
            if lines and _OURS.search(lines[-1]):
                text = f"an error from our insides: {type(error).__name__}: {error}: {lines[-1]}"
                self._scene.diary.write("wrong", kind="statement", touched=self._touched, text=text)
        return not interrupted and _by_fault(error)


# -- what is used after its life


def _uses(scene: Scene, to: str) -> dict[str, Callable[[], Any]]:
    """Ways to use what lies at that worker; none if it was lost meanwhile."""
    with scene.diary.doing("reference", scene.rank, (scene.rank + 1) % scene.trial.size):
        x, inputs = torch.ones(4, 4).to(rpc.device(to)), torch.ones(4, 4)
        rref, module = rpc.remote(to, torch.ones, (3,)), rpc.nn.RemoteModule(to, nn.Linear, (4, 4))
        rref.to_here()
        net = rpc.wrap(nn.Linear(4, 4), {"": to})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net(x).sum().backward()
        step = rpc.graphed(lambda v: net(v).detach() * 1)
        for _ in range(4):
            step(x)
        owner = rpc.remote(to, nn.Linear, (4, 4))
        distributed = rpc.optim.DistributedOptimizer(
            torch.optim.SGD, rpc.rpc_sync(to, mixed_calls.parameters_of, (owner,)), lr=0.1
        )
        served = rpc.serve(nn.Linear(4, 4), [to], torch.optim.SGD, lr=0.1, name=f"of worker {scene.rank}")

        def trains() -> None:
            served(inputs).sum().backward()
            served.optimizer.step()

        trains()
        return {
            "a value": lambda: (x + 1).sum().item(),
            "a value, brought home": lambda: x.cpu(),
            "a reference": rref.to_here,
            "a method of a value": lambda: rref.rpc_sync().sum(),
            "a remote module": lambda: module.forward(inputs),
            "a model": lambda: net(inputs).cpu(),
            "a step": lambda: (optimizer.step(), net(inputs).cpu()),
            "a state": lambda: [value.cpu() for value in net.state_dict().values()],
            "a closed model": net.close,  # type: ignore[operator]
            "a graphed step": lambda: step(x).cpu(),
            "a distributed step": lambda: distributed.step(1),
            "a distributed state": distributed.state_dict,
            "a served step": trains,
            "a served state": served.optimizer.state_dict,
            "a call": lambda: rpc.rpc_sync(to, abs, (-1,)),
            "a context": lambda: rpc.autograd.context().__enter__(),
        }
    return {}


def _used_after(scene: Scene, what: str, use: Callable[[], Any]) -> None:
    began = time.monotonic()
    try:
        told = f"nothing was raised: {use()}"
    except RuntimeError as error:
        told = "" if _NAMES_THE_END.search(str(error)) else repr(error)
    except Exception as error:
        told = repr(error)
    took = time.monotonic() - began
    if told or took > _USED_S:
        scene.diary.write("wrong", kind="after shutdown", touched=[], text=f"{what}: {took:.1f} s: {told}")


def _again(scene: Scene) -> None:
    """Another life, of all whose processes are left and connected."""
    dead = scene.trial.dead
    ranks = [rank for rank in range(scene.trial.size) if rank not in dead]
    if scene.rank in dead or len(ranks) < 2:
        return
    mine, size = ranks.index(scene.rank), len(ranks)
    options = {**scene.options, "init_method": f"file://{scene.folder}/again"}
    with scene.diary.doing("again", *ranks):
        rpc.init_rpc(f"again{mine}", rank=mine, world_size=size, rpc_backend_options=rpc.RpcBackendOptions(**options))
        to, x = f"again{(mine + 1) % size}", torch.arange(6.0)
        there = x.to(rpc.device(to))
        same(((there + 1) * 2).cpu(), (x + 1) * 2, "a value of another life")
        same(rpc.rpc_sync(to, mixed_calls.double, (x,)), x * 2, "a call of another life")
        net = rpc.wrap(nn.Linear(6, 2), {"": to})
        net(there).sum().backward()
        if net.weight.grad is None:
            raise Wrong("no gradient in another life")
        rpc.shutdown(timeout=_SHUTDOWN_S)
