"""Workload ``statements``: the first and the last worker run drawn programs of users' statements (``mixed_programs``) over the
others, beside what each program gives in one process. Who has lost a server runs the next ones over the other server.

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

import drawn_programs
import judge
import mixed_calls
import mixed_programs
import torch
from torch import nn

import rdmarpc as rpc

from .board import LEAVING, WORKING
from .diary import KINDS, Wrong, same
from .raw import meet
from .workloads import Scene, calls, name_of

PROGRAMS, SERVERS = 3, (1, 2)
_SHUTDOWN_S, _MEET_S, _USED_S = 20.0, 5.0, 3.0
_LEFT_OUT = re.compile(r"default_dtype|deterministic\(\)|detect_anomaly|inference_mode[\s\S]*load_(?:checkpoint|state_dict)")
"""Flags of torch, which are one for all callers of a worker; states that one process could not step after that."""
_OURS = re.compile(r'File "[^"]*/(?:rdmarpc|transport|graph)/')
_OF_PROGRAMS = ("a method", "a function")
_PLAIN = (AttributeError, LookupError, AssertionError, NameError, TypeError)
_NAMES_THE_END = re.compile(r"shut down|init_rpc|Need to initialize|has been deleted")


class Program(NamedTuple):
    """``alone``: what it gives in one process."""

    seed: int
    text: str
    alone: judge.Outcome


def live(scene: Scene, chance: random.Random) -> None:
    trial, diary, rank = scene.trial, scene.diary, scene.rank
    everybody, joined = range(trial.size), False
    mine = [] if rank in SERVERS else [_alone(scene, seed) for seed in itertools.islice(_seeds(scene, chance), PROGRAMS)]
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


def _source(scene: Scene, seed: int) -> str:
    return mixed_programs.source(mixed_programs.recipe(seed)).replace("worker0", name_of(scene.rank))


def _seeds(scene: Scene, chance: random.Random) -> Iterator[int]:
    while True:
        seed = chance.randrange(10**6)
        if not _LEFT_OUT.search(_source(scene, seed)):
            yield seed


def _alone(scene: Scene, seed: int) -> Program:
    me, text = name_of(scene.rank), _source(scene, seed)
    mixed_calls._Here.worker, mixed_calls.rpc = me, mixed_calls.Alone(me)
    return Program(seed, text, judge.outcome(drawn_programs.loaded(text).program, lambda net, _: net))


def _run(scene: Scene, program: Program) -> None:
    """It does what it does alone, up to the first statement that a fault ended."""
    diary, text, alive = scene.diary, program.text, scene.alive()
    left = next(rank for rank in SERVERS if rank in alive)
    for rank in {*SERVERS} - {*alive}:
        text = text.replace(name_of(rank), name_of(left))
    text = re.sub(r"\['(\w+)', '\1'\]", r"['\1']", text)
    touched = sorted({scene.rank, *(rank for rank in SERVERS if name_of(rank) in text)})
    watch, found = _Watch(scene, touched), None
    mixed_calls.attempts = watch.attempts  # type: ignore[assignment]
    diary.write("program", seed=program.seed, workers=touched)
    with diary.doing("program", *touched):
        found = judge.outcome(drawn_programs.loaded(text).program, lambda net, placement: rpc.wrap(net, dict(placement)))
        if _by_fault(found.error):
            watch.deviates = True
            assert found.error is not None
            raise found.error
    if found is None:
        return
    if watch.deviates:
        verdict = judge.worst_of(program.alone.seen, found.seen)
        wrong = verdict.kind == "WRONG" and "kept" not in verdict.detail
    else:
        verdict = judge.compared(program.alone, found)
        wrong = verdict.kind not in (*judge.GOOD, "refused", "rounded", "metadata")
    if wrong:
        notes = [note for _, kept in found.seen for _, value in kept for note in getattr(value, "__notes__", [])]
        text = f"program {program.seed}: {verdict.kind}: {verdict.detail}: {notes}"
        diary.write("wrong", kind="program", touched=touched, text=text)


def _by_fault(error: BaseException | None) -> bool:
    """An error of ours, or one that has it as text, or one of a file that the program opens."""
    if error is None or isinstance(error, rpc.NotSupported):
        return False
    named = isinstance(error, rpc.RdmaError) or "PeerLost" in str(error) or "TransferTimeout" in str(error)
    return named or (isinstance(error, OSError) and error.errno == errno.EMFILE)


class _Watch:
    """What becomes of the statements of one run. ``deviates``: one was ended by a fault, so later ones have other values."""

    def __init__(self, scene: Scene, touched: list[int]) -> None:
        self._scene, self._touched, self.deviates = scene, touched, False

    def attempts(self, keep: Callable[[str, Any], None]) -> Callable[[int], Any]:
        """As ``mixed_calls.attempts``."""

        @contextlib.contextmanager
        def attempt(number: int) -> Iterator[None]:
            error: BaseException | None = None
            with self._watched():
                try:
                    yield
                except (Exception, KeyboardInterrupt) as raised:
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
    dead = {fault.victim for fault in scene.trial.faults if fault.kind in ("kill", "stop", "exit", "raise", "sleeper", "cut")}
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
