"""A worker leaves while it serves others: these hear of its loss, not of what leaving did to the functions that ran there."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from logging.handlers import BufferingHandler

import pytest
import torch
from called import held, hold_the_gil
from group import dismiss, on_every_device, results, run_group, until_dismissed
from ports import free_port
from timing import eventually

import rdmarpc as rpc
from rdmarpc.calls import agent, termination
from rdmarpc.links.group import group
from rdmarpc.links.group import meeting as groups


def by_way_of_another(seconds):
    rpc.rpc_sync("worker2", time.sleep, (seconds,))


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.7)
        return gradient * 2


def slow(x):
    return Slow.apply(x)


def leaves_in_between(rank):
    if rank:
        until_dismissed()
        time.sleep(0.3)
        rpc.shutdown(graceful=False)
        return
    waiting = rpc.rpc_async("worker1", by_way_of_another, (8.0,))
    with rpc.autograd.context() as context:
        value = rpc.rpc_sync("worker1", slow, (torch.ones(3, requires_grad=True),))
        dismiss("worker1")
        with contextlib.suppress(rpc.PeerLost):  # it may be done before the connection ends
            rpc.autograd.backward(context, [value.sum()])
    with pytest.raises(rpc.PeerLost, match="worker worker1 is lost") as lost:
        waiting.wait()
    assert lost.value.peer == "worker1" and "shut down here" not in str(lost.value)
    dismiss("worker2")
    rpc.shutdown(graceful=False)


def test_calls_under_way_to_a_worker_that_leaves_lose_it():
    for outcomes in on_every_device(leaves_in_between, 3).values():
        results(outcomes)


def has_said_goodbye(rank):
    if rank:
        until_dismissed()
        agent.current().say_goodbye()
        time.sleep(1.0)
        rpc.shutdown(graceful=False)
        return
    assert rpc.rpc_sync("worker1", abs, (-1,)) == 1
    dismiss("worker1")
    time.sleep(0.3)
    with pytest.raises(rpc.PeerLost, match="worker worker1 is lost"):
        rpc.rpc_sync("worker1", abs, (-1,))
    rpc.shutdown(graceful=False)


def test_who_has_said_goodbye_to_some_serves_nobody():
    for outcomes in on_every_device(has_said_goodbye, 2).values():
        results(outcomes)


def held_by_a_function(rank):
    """Worker 0 comes to ``shutdown`` while it runs a function that nobody lets go; worker 1 ends."""
    termination._LEAVE_TIMEOUT_S = 0.1
    if rank == 0:
        with pytest.raises(rpc.PeerLost, match="worker worker1 is lost"):
            rpc.shutdown()
        return
    if rank == 1:
        rpc.rpc_sync("worker0", abs, (-1,))
        until_dismissed()
        os._exit(1)
    waiting = rpc.rpc_async("worker0", held, ("gate",))
    dismiss("worker1")
    with pytest.raises(rpc.PeerLost, match="worker worker0 is lost"):
        waiting.wait()  # not its own deadline: worker 0 leaves
    rpc.shutdown(graceful=False)


def test_shutdown_does_not_wait_for_functions_when_a_worker_is_lost():
    for outcomes in on_every_device(held_by_a_function, 3, rpc_timeout=50).values():
        results([outcomes[0], outcomes[2]])


def after(what, seconds, *args):
    time.sleep(seconds)
    return what(*args)


def answers_slowly(report, number, rank, *counts):
    future = report(number, rank, *counts)
    time.sleep(0.1 * rank)  # the answer to the last that came is still to be sent
    return future


def ends_when_all_is_done(victim, how, rank):
    """Workers 1 and 2 have no connection to each other. The victim ends when all have agreed that nothing is left to do."""
    group._LEAVE_TIMEOUT_S = 3600.0
    leaving = agent.current().termination
    leaving.report = partial(answers_slowly, leaving.report)
    leaving._check = partial(after, leaving._check, 0.05 * rank)  # worker 2 comes last, and hears of the end before it looks
    first = rpc.rpc_sync("worker0", os.getpid)
    if rank == victim:
        groups.Rendezvous.leave = lambda *_: os.kill(os.getpid(), how)
    rpc.shutdown()
    if how == signal.SIGSTOP:
        with contextlib.suppress(ProcessLookupError):  # another one let it go on
            os.kill(first, signal.SIGCONT)


@pytest.mark.parametrize(
    ("store", "victim", "how"),
    [(store, victim, signal.SIGKILL) for store in ("file", "tcp") for victim in (0, 1)] + [("tcp", 0, signal.SIGSTOP)],
)
def test_nobody_waits_for_a_worker_that_ends_when_all_is_done(store, victim, how):
    """Worker 0 keeps the store that is at an address, which ends, or is silent, with it."""
    place = {"init_method": f"tcp://127.0.0.1:{free_port()}"} if store == "tcp" else {}
    outcomes = run_group(partial(ends_when_all_is_done, victim, how), 3, timeout=60, peer_timeout=1.0, **place)
    results([outcome for rank, outcome in enumerate(outcomes) if rank != victim or how == signal.SIGSTOP])


@rpc.functions.async_execution
def never():
    return torch.futures.Future()


def comes_too_late(rank):
    if rank == 0:
        with pytest.raises(rpc.TransferTimeout, match="worker1 did not come to shutdown in time"):
            rpc.shutdown(timeout=0.5)
    else:
        eventually(lambda: bool(agent.current().links.lost))
        rpc.shutdown(graceful=False)


def is_not_connected_to(rank):
    """Worker 1 holds the GIL as the others connect to it for the first time, which they would await for a minute."""
    if rank == 1:
        hold_the_gil(8)
        with pytest.raises((rpc.PeerLost, rpc.TransferTimeout)):
            rpc.shutdown(timeout=20)
        return
    time.sleep(1)
    begin = time.monotonic()
    with pytest.raises(rpc.TransferTimeout, match="worker1"):
        rpc.shutdown(timeout=1)
    assert time.monotonic() - begin < 5
    time.sleep(8)


def test_shutdown_keeps_its_time_while_it_connects():
    for outcomes in on_every_device(is_not_connected_to).values():
        results(outcomes)


def has_an_unanswered_call(rank):
    if rank == 0:
        with pytest.raises(rpc.TransferTimeout, match="RPC ran for more"):
            rpc.rpc_sync("worker0", never, timeout=0.01)
        eventually(lambda: 1 in agent.current().termination._reports.get(0, ()))  # worker 1 has come
        with pytest.raises(rpc.TransferTimeout, match="every worker came to shutdown, but of 1 calls only 0 are answered"):
            rpc.shutdown(timeout=5)
        return
    # Worker 0 has gone, or has still answered what worker 1 asked with its own error.
    with pytest.raises((rpc.PeerLost, rpc.TransferTimeout)):
        rpc.shutdown()


def test_shutdown_says_what_it_has_waited_for():
    for scenario in (has_an_unanswered_call, comes_too_late):
        for outcomes in on_every_device(scenario).values():
            results(outcomes)


def shut_down_here(timeout=30.0):
    rpc.shutdown(timeout=timeout)


@rpc.functions.async_execution
def until_dismissed_elsewhere():
    answer = torch.futures.Future()
    threading.Thread(target=lambda: (until_dismissed(), answer.set_result(None))).start()
    return answer


def waits_for_an_answer(rank):
    termination._SPEAKS_S = 0.3
    if rank == 0:
        rpc.rpc_async("worker1", until_dismissed_elsewhere)
        said = logging.getLogger("rdmarpc")
        said.addHandler(handler := BufferingHandler(10))
        threading.Thread(target=lambda: (eventually(lambda: bool(handler.buffer)), dismiss("worker1"))).start()
    rpc.shutdown()
    if rank == 0:
        assert [record.getMessage() for record in handler.buffer] == ["shutdown waits for the answers of calls to worker1"]


def test_shutdown_says_which_worker_has_not_answered():
    results(run_group(waits_for_an_answer))


def several_threads_leave(rank):
    with ThreadPoolExecutor(3) as pool:
        for each in [pool.submit(shut_down_here) for _ in range(3)]:
            try:
                each.result(60)
            except RuntimeError as error:  # it came last
                assert "RPC has not been initialized" in str(error)


def a_handler_leaves_too(rank):
    if rank == 0:
        signal.signal(signal.SIGALRM, lambda number, frame: rpc.shutdown())
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(1)
    rpc.shutdown(timeout=30)


@pytest.mark.parametrize("scenario", [several_threads_leave, a_handler_leaves_too])
def test_a_worker_leaves_once(scenario):
    results(run_group(scenario))


KEPT = []


def keeps(x):
    KEPT[:] = [x.to(rpc.device("worker0"))]


def leaves_already():
    return agent.current().termination._beginning.locked()


def uses_what_it_keeps():
    return (KEPT[0] + 1).sum().item()


def serves_with_what_lies_elsewhere(rank):
    if rank == 0:
        rpc.rpc_sync("worker1", keeps, (torch.ones(3),))
        dismiss("worker1")
        eventually(lambda: rpc.rpc_sync("worker1", leaves_already))
        time.sleep(0.2)
        assert rpc.rpc_sync("worker1", uses_what_it_keeps) == 6
    else:
        until_dismissed()
    rpc.shutdown(timeout=30)


def test_what_lies_elsewhere_is_there_while_a_worker_that_leaves_serves():
    results(run_group(serves_with_what_lies_elsewhere))


def left_by_a_function(rank):
    if rank == 0:
        for to in ("worker0", "worker1"):
            with pytest.raises(rpc.NotSupported, match="shutdown waits for functions and callbacks that run here"):
                rpc.rpc_sync(to, shut_down_here, (5.0,))
    rpc.shutdown(timeout=30)


def test_a_function_does_not_wait_for_itself():
    results(run_group(left_by_a_function))
