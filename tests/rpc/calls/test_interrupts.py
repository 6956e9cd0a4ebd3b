"""Ctrl-C while a call is waited for, alarms that raise at any moment, and handlers that make calls."""

from __future__ import annotations

import copy
import ctypes
import os
import random
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import filelock
import llvmlite
import numba
import pytest
import torch
from called import held, identity, let_go
from group import results, run_group
from rref_things import wait_until_empty
from timing import eventually
from torch import nn

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.links.polling import steps
from rdmarpc.transport import interrupts as kept_handlers
from rdmarpc.transport import kernels


def interrupts(pid, gate, tensor):
    """Interrupts its caller, which waits, and does not answer before it is let go."""
    time.sleep(0.3)
    os.kill(pid, signal.SIGINT)
    held(gate)
    return slowly(0.0, tensor)


def slowly(seconds, tensor):
    time.sleep(seconds)
    return [rpc.RRef(seconds), tensor + 1]


def interrupted(rank):
    if rank == 0:
        caller = agent.current().caller
        large = torch.ones(1 << 20)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for turn, late in enumerate((False, True, True)):  # with landing places granted ahead from the second time on
            with pytest.raises(KeyboardInterrupt):
                rpc.rpc_sync("worker1", interrupts, (os.getpid(), str(turn), large))
            assert not caller.pending and agent.current().idle
            ((_, given_up),) = caller.expired.items()
            assert (given_up.expired and given_up.keep is not None) or late
            assert rpc.rpc_sync("worker1", identity, (late,)) == late
            del given_up
            rpc.rpc_sync("worker1", let_go, (str(turn),))
            eventually(lambda: len(caller.expired), 0)  # the answer is taken though nobody waits
            wait_until_empty(range(2))
            rpc.rpc_sync("worker1", let_go, ("at once",))
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            assert torch.equal(rpc.rpc_sync("worker1", interrupts, (os.getpid(), "at once", large))[1], large + 1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            wait_until_empty(range(2))
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_an_interrupted_call_is_given_up(device):
    results(run_group(interrupted, transport=device))


def raise_timeout(number, frame):
    raise TimeoutError


def alarmed(rank):
    if rank == 0:
        draw = random.Random(0)
        signal.signal(signal.SIGALRM, raise_timeout)
        tensors = [torch.full((size,), float(size)) for size in (1, 20_000, 300_000)]
        for turn in range(150):
            with pytest.raises(TimeoutError):
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0002, 0.004))
                while True:
                    sent = tensors[turn % 3]
                    assert torch.equal(rpc.rpc_sync("worker1", identity, (sent,)), sent)
            assert rpc.rpc_sync("worker1", identity, (turn,)) == turn
        wait_until_empty(range(2))
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_alarms_at_any_moment_leave_nothing_half_done(device):
    results(run_group(alarmed, transport=device))


def waited_for(rank):
    """What is waited for comes when it is let go, and not before."""
    if rank == 0:
        signal.signal(signal.SIGALRM, raise_timeout)
        ours, theirs = rpc.remote("worker0", held, ("ours",)), rpc.rpc_async("worker1", held, ("theirs",))
        all_of_them = partial(torch.futures.wait_all, [theirs])
        for wait in (ours.to_here, ours.local_value, all_of_them, torch.futures.collect_all([theirs]).wait):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(TimeoutError):
                wait()
        with pytest.raises(rpc.TransferTimeout, match="nobody has made the value"):
            ours.to_here(timeout=0.05)
        let_go("ours")
        rpc.rpc_sync("worker1", let_go, ("theirs",))
        ours.to_here()
        all_of_them()
    rpc.shutdown()


def test_every_wait_ends_by_an_alarm_and_the_next_has_the_value():
    results(run_group(waited_for))


def handled(rank):
    if rank == 0:
        came = []

        def calls(number, frame):
            came.append(rpc.rpc_sync("worker2", identity, (number,), timeout=20))
            signal.setitimer(signal.ITIMER_REAL, 0.05)  # not before: on a slow machine the next would come while this one calls

        signal.signal(signal.SIGALRM, calls)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        for seconds in (0.4, 0.0):  # while one call is waited for, and between many
            enough, limit = len(came) + 4, time.monotonic() + 30
            while len(came) < enough:
                assert time.monotonic() < limit
                assert rpc.rpc_sync("worker1", slowly, (seconds, torch.ones(3)), timeout=20)[1].tolist() == [2, 2, 2]
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert set(came) == {signal.SIGALRM}
        wait_until_empty(range(3))
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_signal_handler_makes_calls(device):
    results(run_group(handled, 3, transport=device))


def let_go_and_told(gate):
    """Lets the caller's call end, and shows that the caller answers meanwhile."""
    told = rpc.rpc_sync("worker0", identity, ("told",), timeout=10)
    let_go(gate)
    return told


def a_handler_waits(rank):
    if rank == 0:
        found = []

        def handle(number, frame):
            with ThreadPoolExecutor(1) as pool:
                found.append(pool.submit(rpc.rpc_sync, "worker1", let_go_and_told, ("handled",), timeout=10).result(20))

        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        rpc.rpc_sync("worker1", held, ("handled",), timeout=30)
        assert found == ["told"]
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_handler_waits_for_other_threads_and_others_are_answered_meanwhile(device):
    results(run_group(a_handler_waits, transport=device))


class Stop(Exception):
    """What ends a thread that waits."""


def waits(gate, ended):
    try:
        ended.append(rpc.rpc_sync("worker1", held, (gate,)))
    except Stop:
        ended.append("stopped")


def stopping(real, thread, *given):
    found = real(*given)
    if threading.current_thread() is thread and found > 0:
        raise Stop
    return found


def another_thread_raises(rank):
    """``kernel``: the thread was stopped as that one returned, which had taken something; none: wherever it waited."""
    if rank == 0:
        for turn, kernel in enumerate([None, (kernels, "wait_any"), (steps, "take")] * 3):
            gate, ended, limit = f"gate {turn}", [], time.monotonic() + 20
            thread = threading.Thread(target=waits, args=(gate, ended), daemon=True)
            with pytest.MonkeyPatch.context() as patch:
                if kernel is not None:
                    patch.setattr(*kernel, partial(stopping, getattr(*kernel), thread))
                thread.start()
                if kernel is None:
                    time.sleep(0.2)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stop))
                while not ended:
                    assert time.monotonic() < limit
                    assert rpc.rpc_sync("worker1", identity, (turn,), timeout=5) == turn
            assert ended == ["stopped"]
            assert rpc.rpc_sync("worker1", identity, (turn,), timeout=5) == turn
            rpc.rpc_sync("worker1", let_go, (gate,), timeout=5)
    rpc.shutdown()


def test_what_another_thread_raises_in_a_wait_ends_that_wait_alone():
    """``PyThreadState_SetAsyncExc``, by which job queues and test runners stop threads. What the thread had taken was lost, and
    all that came later was not read."""
    results(run_group(another_thread_raises))


def a_handler_shuts_down(rank):
    if rank == 0:
        signal.signal(signal.SIGALRM, lambda number, frame: rpc.shutdown(timeout=30))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert rpc.rpc_sync("worker1", time.sleep, (1.0,)) is None
    else:
        rpc.shutdown(timeout=30)


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_handler_shuts_down_while_a_call_is_waited_for(device):
    results(run_group(a_handler_shuts_down, transport=device))


class Long(nn.Module):
    """Runs code of its own for most of a trace."""

    def __init__(self):
        super().__init__()
        self.part = nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(60):
            x = torch.tanh(x) - x.mean()
        return self.part(x)


came = 0


def counts(number, frame):
    global came
    came += 1


def sampled(rank):
    """As by a profiler, which takes note of where the program is each time the timer says so."""
    if rank == 0:
        threads = len(os.listdir("/proc/self/task"))
        torch.manual_seed(0)
        model = Long()
        alone = copy.deepcopy(model)
        signal.signal(signal.SIGALRM, counts)
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        wrapped = rpc.wrap(model, {"part": "worker1"})
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (wrapped, alone)]
        for seed in range(20):
            x = torch.randn(5 + seed // 5, 8, generator=torch.Generator().manual_seed(seed))
            losses = []
            for net, optimizer in zip((wrapped, alone), optimizers):
                optimizer.zero_grad()
                losses.append(net(x).square().mean())
                losses[-1].backward()
                optimizer.step()
            assert losses[0].item() == losses[1].item()
            assert rpc.rpc_sync("worker1", identity, (seed,)) == seed
            assert len(os.listdir("/proc/self/task")) < threads + 20
            eventually(lambda before=came: came > before)
        signal.setitimer(signal.ITIMER_REAL, 0)
    rpc.shutdown()


@pytest.mark.parametrize("of, works", [(filelock, True), (torch, True), (llvmlite, True), (numba, True), (pytest, False)])
def test_what_is_called_in_the_midst_of_work(of, works):
    """A handler waits while an audit hook of filelock runs, as in torch, and while a kernel is loaded or compiled, under a lock
    that the thread that reads the answers may need. What else this package calls is the user's."""
    seen = []
    look = {"__name__": f"{of.__name__}.hooks", "look": lambda: seen.append(kept_handlers._at_work(sys._getframe(1)))}
    exec(compile("def hook(): look()", str(Path(of.__file__).parent / "hooks.py"), "exec"), look)
    exec("def work(): hook()\nwork()", {"__name__": "rdmarpc.calls.made_up", "hook": look["hook"]})
    assert seen == [works]


def test_a_finalizer_of_the_users_code_is_the_midst_of_work():
    """Python prints what is raised there, and drops it: Ctrl-C would be lost."""
    seen, value, call = [], nn.Identity(), weakref.finalize.__call__.__code__
    weakref.finalize(value, int)
    sys.setprofile(lambda frame, *_: seen.append(kept_handlers._at_work(frame)) if frame.f_code is call else None)
    del value
    sys.setprofile(None)
    assert seen and all(seen)


def test_a_timer_that_samples_the_program_changes_nothing():
    results(run_group(sampled))


def test_a_process_that_did_not_run_for_long_is_not_interrupted_in_the_midst_of_work(monkeypatch):
    """It was stopped, or the machine had no processor for it: that is no reason not to wait for the end of the work."""
    clock, done, seen = [0.0], [], []
    monkeypatch.setattr(kept_handlers, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    before = signal.signal(signal.SIGALRM, kept_handlers.Kept(lambda *_: seen.append(len(done))))
    known = {"__name__": "rdmarpc.calls.made_up", "come": signal.raise_signal, "clock": clock, "done": done}
    exec("def work():\n come(14)\n clock[0] += 5\n for _ in range(20): done.append(1)\nwork()", known)
    signal.signal(signal.SIGALRM, before)
    assert seen == [20]
