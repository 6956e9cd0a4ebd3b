"""Answers of which something has to be READ from a worker that is held up: calls end at their deadlines, and delay no other."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from called import hold_the_gil, identity, stop
from group import dismiss, on_every_device, results, until_dismissed
from timing import after

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.nn import RemoteModule

DEADLINE, MARGIN, HELD = 4.0, 6.0, 12.0
BYTES = 2 << 20
THREADS = 4
KINDS = ("tensor", "pickle", "both")
"""A large tensor, a pickle too large for a frame, a message of both."""
MANY = 6
EXPECTED = 4 * MANY + 3

arrived: list[object] = []
go = threading.Event()


def value(number: int, kind: str) -> object:
    """None of its size was asked for before, so there is no landing place; what is pickled never has one."""
    tensor = torch.full((BYTES + number,), number, dtype=torch.uint8)
    pickled = tensor.numpy().tobytes()
    return {"tensor": tensor, "pickle": pickled, "both": (tensor, pickled, tensor + 1)}[kind]


def same(found: object, number: int, kind: str) -> bool:
    expected = value(number, kind)
    if isinstance(expected, tuple):
        assert isinstance(found, tuple)
        return torch.equal(found[0], expected[0]) and found[1] == expected[1] and torch.equal(found[2], expected[2])
    return torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


@rpc.functions.async_execution
def value_when_told(number: int, kind: str) -> torch.futures.Future[object]:
    promise: torch.futures.Future[object] = torch.futures.Future()
    arrived.append(lambda: promise.set_result(value(number, kind)))
    return promise


def until_told(*_: object) -> None:
    arrived.append(lambda: None)
    assert go.wait(30)


def with_a_hook(weight: torch.Tensor) -> torch.Tensor:
    found = weight * 2
    found.register_hook(until_told)
    return found


class Doubles(torch.nn.Module):
    def forward(self, number: int) -> object:
        until_told()
        return value(number, "tensor")


def lent() -> int:
    """Results that lie here for others to READ."""
    return len(agent.current().callee._sources)


def used() -> int:
    me = agent.current()
    me.device.arena.sweep()
    return me.device.arena.used - me.callee.promises.nbytes


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit, "it does not happen"
        time.sleep(0.02)


def ask_back(worker: str) -> int:
    return rpc.rpc_sync(worker, identity, (1,))


class Calls:
    """``ended``: after how many seconds each with a deadline ended, and how. ``patient``: those without one."""

    def __init__(self, deadline: float) -> None:
        self.module = RemoteModule("worker1", Doubles)
        self.weight = torch.ones(BYTES // 4 + 1, requires_grad=True)
        self.ended: list[tuple[float, object]] = []
        self.patient: list[tuple[torch.futures.Future[object], int, str]] = []
        self._threads: list[threading.Thread] = []
        numbers = iter(range(10_000))
        for kind in (KINDS * MANY)[:MANY]:
            self._in_a_thread(
                lambda args: rpc.rpc_sync("worker1", value_when_told, args, timeout=deadline), (next(numbers), kind)
            )
            for wait in (self._with_a_callback, self._in_a_thread_of_its_own):
                begin = time.monotonic()
                wait(begin, rpc.rpc_async("worker1", value_when_told, (next(numbers), kind), timeout=deadline))
            args = next(numbers), kind
            self.patient.append((rpc.rpc_async("worker1", value_when_told, args, timeout=0), *args))
        reference = rpc.remote("worker1", value_when_told, (next(numbers), "tensor"))
        self._in_a_thread(lambda: reference.to_here(timeout=deadline))
        self._in_a_thread(self.backward)
        self._in_a_thread_of_its_own(time.monotonic(), self.module.forward_async(next(numbers)))

    def backward(self) -> None:
        with rpc.autograd.context() as context:
            found = rpc.rpc_sync("worker1", with_a_hook, (self.weight,))
            rpc.autograd.backward(context, [found.sum()])

    def _run(self, begin: float, call: Callable[..., object], *args: object) -> None:
        try:
            outcome = call(*args)
        except Exception as error:
            outcome = error
        self.ended.append((time.monotonic() - begin, outcome))

    def _in_a_thread(self, call: Callable[..., object], *args: object) -> None:
        self._start(lambda: self._run(time.monotonic(), call, *args))

    def _in_a_thread_of_its_own(self, begin: float, future: torch.futures.Future[object]) -> None:
        self._start(lambda: self._run(begin, future.wait))

    def _start(self, run: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def _with_a_callback(self, begin: float, future: torch.futures.Future[object]) -> None:
        future.then(lambda done: self._run(begin, done.value))

    def have_ended(self) -> bool:
        return len(self.ended) == EXPECTED - MANY


def calls_end(calls: Calls, how: str) -> None:
    """On worker 0."""
    start, slowest = time.monotonic(), 0.0
    while not calls.have_ended():
        begin = time.monotonic()
        rpc.rpc_sync("worker2", ask_back, ("worker0",))
        slowest = max(slowest, time.monotonic() - begin)
        assert begin - start < HELD, (len(calls.ended), EXPECTED)
    assert slowest < 4.0, f"calls of another worker waited for the one that does not answer: {slowest}"
    for seconds, outcome in calls.ended:
        if how == "dies":
            assert "worker1 is lost" in str(outcome), (seconds, outcome)
        else:
            assert "ran for more than set timeout" in str(outcome), outcome
            assert DEADLINE - 0.1 < seconds < DEADLINE + MARGIN, (seconds, outcome)
    for future, number, kind in calls.patient:
        if how == "dies":
            with pytest.raises(rpc.PeerLost, match="worker1"):
                future.wait()
        else:
            assert same(future.wait(), number, kind)


def nothing_stays(how: str) -> None:
    """On worker 0. What comes too late is fetched nevertheless, and let go at both ends."""
    rpc.rpc_sync("worker1", identity, (1,))
    rpc.rpc_sync("worker2", ask_back, ("worker0",))
    before = used()
    calls_end(Calls(20.0 if how == "dies" else DEADLINE), how)
    if how != "dies":
        until(lambda: rpc.rpc_sync("worker1", lent) == 0)
        assert same(rpc.rpc_sync("worker1", value, (7, "both")), 7, "both")
    gc.collect()
    until(lambda: not agent.current().caller.expired and used() <= before)


class HeldUp:
    """Worker 1 answers, and is held up before any of the READs is answered. It is a thread of Python that answers these, on
    ``tcp``."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __call__(self, rank):
        if rank == 0:
            nothing_stays(self.how)
            dismiss("worker2")
        elif rank == 2:
            until_dismissed()
        else:
            until(lambda: len(arrived) == EXPECTED)
            if self.how != "gil":
                after(
                    1.0 if self.how == "dies" else HELD, (os.getpid(), signal.SIGKILL if self.how == "dies" else signal.SIGCONT)
                )
            reader = getattr(agent.current().connections.to(0).channel, "reader", None)
            with reader.lock if reader else nullcontext():
                go.set()
                for answer in arrived:
                    answer()
                time.sleep(0.2)
                if self.how == "gil":
                    hold_the_gil(HELD)
                else:
                    stop()
        rpc.shutdown(graceful=self.how != "dies")
        return "survived"


@pytest.mark.parametrize("how", ["gil", "stopped", "dies"])
def test_a_call_whose_answer_cannot_be_read_ends_at_its_deadline(how):
    each = {1: {"num_worker_threads": EXPECTED}}
    found = on_every_device(
        HeldUp(how),
        3,
        devices=("tcp",),
        num_worker_threads=THREADS,
        rpc_timeout=20 if how == "dies" else DEADLINE,
        peer_timeout=20,
        each=each,
    )
    for device, outcomes in found.items():
        survivors = (0, 2) if how == "dies" else (0, 1, 2)
        assert [outcomes[rank].result for rank in survivors] == ["survived"] * len(survivors), (device, outcomes)


def is_first_reached_late(rank):
    """Worker 1 holds the GIL as worker 0 connects to it for its first tensor there."""
    if rank == 1:
        hold_the_gil(3 * DEADLINE)
    else:
        time.sleep(0.5)
        begin = time.monotonic()
        with pytest.raises(rpc.TransferTimeout, match="worker1"):
            torch.ones(3).to(rpc.device("worker1"))
        assert time.monotonic() - begin < 2 * DEADLINE
        assert rpc.rpc_sync("worker1", identity, (1,), timeout=30) == 1
        assert (torch.ones(3).to(rpc.device("worker1")) + 1).tolist() == [2, 2, 2]
    rpc.shutdown()


def test_the_first_tensor_at_a_worker_has_its_time_too():
    for outcomes in on_every_device(is_first_reached_late, each={0: {"rpc_timeout": DEADLINE}}).values():
        results(outcomes)
