"""``serve`` when trainers end before, or while, the others train: who is told of whom."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import torch
from group import Meeting, die, on_every_device, results, run_group
from halt import halt
from timing import eventually
from torch import nn

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.servers import server as serving
from rdmarpc.servers.model import ServedModel
from rdmarpc.servers.server import Server

TRAINERS, SERVERS = ["worker0", "worker1"], ["worker2", "worker3"]
P = 3.0
"""``peer_timeout``, seconds."""


def train(timeout: float = 20.0) -> ServedModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return rpc.serve(net, SERVERS, torch.optim.SGD, lr=0.1, workers=TRAINERS, timeout=timeout)


@contextmanager
def in_a_group(meeting: Meeting) -> Iterator[None]:
    meeting.join(world_size=4)
    try:
        yield
    finally:
        with suppress(rpc.RdmaError):
            rpc.shutdown(graceful=False)


def comes_never(how: str, meeting: Meeting) -> None:
    """Worker 0 trains, and worker 1 would; nobody is connected with that one yet."""
    with in_a_group(meeting):
        if meeting.rank == 1:
            meeting.say("pid", str(os.getpid()))
            if how == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            meeting.hear("asked")
            limit = time.monotonic() + 15.0
            while len(agent.current().links.by_worker) < len(SERVERS) and time.monotonic() < limit:
                time.sleep(0.01)
            raise ValueError("before it came")
        if meeting.rank == 0:
            pid = int(meeting.said("pid"))
            if how == "stops":
                halt(pid)
            meeting.say("asked")
            start = time.monotonic()
            with pytest.raises(rpc.PeerLost, match=r"before it came" if how == "raises" else "it cannot be reached") as raised:
                train()
            assert raised.value.peer == "worker1" and time.monotonic() - start < P + 14.0
            meeting.say("told")
            if how == "stops":
                os.kill(pid, signal.SIGKILL)
        else:
            meeting.hear("told")
            eventually(lambda: [one for table in serving._servers.values() for one in table.values() if one.is_alive()], [])


@pytest.mark.parametrize("how", ["stops", "raises"])
def test_who_ends_before_it_came_is_lost_to_the_others(how: str) -> None:
    for device, outcomes in on_every_device(partial(comes_never, how), 4, dynamic=True, peer_timeout=P).items():
        for rank in (0, 2, 3):
            assert not outcomes[rank].error, f"{device}, worker {rank}: {outcomes[rank].text}"


def dies_at_the_door(meeting: Meeting) -> None:
    """Worker 0 dies when worker 1 has made its server, and not let it in yet."""
    meeting.join(world_size=2)
    me = agent.current()
    if meeting.rank == 0:
        net = nn.Linear(4, 4)
        threading.Thread(target=rpc.serve, args=(net, ["worker1"]), daemon=True).start()
        meeting.hear("knocks")
        die()
    ask = Server.ask

    def late(server: Server, method: str, *args: Any) -> Any:
        meeting.say("knocks")
        while not me.links.lost:
            time.sleep(0.01)
        return ask(server, method, *args)

    Server.ask = late  # type: ignore[method-assign]
    eventually(lambda: bool(me.links.lost))
    # Its thread ends first, and then it is forgotten.
    eventually(
        lambda: (any(isinstance(thread, Server) for thread in threading.enumerate()), bool(serving._table(me))), (False, False)
    )
    rpc.shutdown(graceful=False)


def test_a_server_ends_with_whom_it_was_made_for() -> None:
    outcome = run_group(dies_at_the_door, 2, dynamic=True)[1]
    assert not outcome.error, outcome.text


def comes_late(meeting: Meeting) -> None:
    """Worker 1 comes when worker 0 has given up waiting for it. Then both try again."""
    with in_a_group(meeting):
        if meeting.rank == 0:
            with pytest.raises(rpc.TransferTimeout):
                train(timeout=3.0)
            meeting.say("gave up")
            meeting.hear("told")
        elif meeting.rank == 1:
            meeting.hear("gave up")
            start = time.monotonic()
            with pytest.raises(rpc.RdmaError, match="'worker0' has closed the model"):
                train()
            assert time.monotonic() - start < 18.0
            meeting.say("told")
        if meeting.rank < 2:
            served = train()
            served(torch.ones(1, 4)).sum().backward()
            served.optimizer.step()
            served.close()
        meeting.step("done", 4)
        if meeting.rank > 1:
            table = serving._table(agent.current())
            assert not table and not table.given_up


def again(rank: int) -> None:
    """Workers of different speeds serve, train and close under one name again and again."""
    if rank < 2:
        for _ in range(4):
            served = train()
            served(torch.ones(1, 4)).sum().backward()
            served.optimizer.step()
            time.sleep(0.05 * rank)
            served.close()
    rpc.shutdown()


def test_a_worker_that_serves_again_waits_until_the_others_have_closed() -> None:
    results(run_group(again, 4))


def kept_here() -> tuple[int, int]:
    """How many models this server keeps, and how many optimizers of one of them."""
    found = [server for table in serving._servers.values() for server in table.values()]
    return len(found), max(len(server._kept._optimizers) for server in found)


def drops(rank: int) -> None:
    """More models than a device has bells for, and optimizers, that nobody closes."""
    if rank == 0:
        for _ in range(70):
            served = rpc.serve(nn.Linear(4, 4), ["worker1"], torch.optim.SGD, lr=0.1)
            served(torch.ones(1, 4)).sum().backward()
            served.optimizer.step()
        assert rpc.rpc_sync("worker1", kept_here)[0] < 20
        for _ in range(10):
            served.new_optimizer(torch.optim.SGD, lr=0.1).step()
            gc.collect()
        gc.collect()
        served.new_optimizer(torch.optim.SGD, lr=0.1)
        assert rpc.rpc_sync("worker1", kept_here)[1] <= 3
        served.close()
    rpc.shutdown()


def test_what_a_program_drops_is_not_kept_at_servers() -> None:
    results(run_group(drops, 2))


def test_who_comes_late_is_told_who_gave_the_model_up() -> None:
    results(run_group(comes_late, 4, dynamic=True))
