"""What ends a collective: a rank that dies or stops, calls that do not fit each other, a rank that does not come."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group import Meeting, results, run_group
from halt import halt
from timing import eventually

PEER_TIMEOUT = 4.0
"""Where a rank is stopped."""


def join(meeting: Meeting, size: int, what: str, seconds: float = 20.0, peer_timeout: float = 20.0) -> None:
    import rdmarpc

    store = dist.FileStore(f"{meeting._place}-{what}", -1)
    options = rdmarpc.RpcBackendOptions(peer_timeout=peer_timeout)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("rdmarpc", store=store, rank=meeting.rank, world_size=size, timeout=limit, pg_options=options)


def explained() -> list[str]:
    """What ``rdmarpc.explain`` says of the groups of a process that has no RPC."""
    import rdmarpc

    return rdmarpc.explain().splitlines()


def caught(call: Any) -> tuple[str, float, str]:
    """The name of the error's class, after how many seconds, its text."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, time.monotonic() - start, str(error)
    return "", time.monotonic() - start, ""


def _misfits(meeting: Meeting) -> None:
    rank = meeting.rank

    def different() -> None:
        dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(4))

    def sizes() -> None:
        dist.all_reduce(torch.ones(100_000 + (rank == 2)))

    def types() -> None:
        dist.broadcast(torch.ones(8, dtype=torch.float64 if rank == 2 else torch.float32), 0)
        dist.barrier()

    def operations() -> None:
        dist.all_reduce(torch.ones(8), dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM)

    def uneven() -> None:
        dist.all_gather([torch.empty(4), torch.empty(4 + (rank == 0)), torch.empty(4)], torch.ones(4 + (rank == 0 and 0)))

    def shapes() -> None:
        dist.all_reduce(torch.eye(4 + (rank == 1)).to_sparse())

    cases = {
        shapes: ("(4, 4), 2 of them sparse", "(5, 5), 2 of them sparse"),
        different: ("barrier", "all_reduce(4 elements, float32, sum)"),
        sizes: ("100000 elements", "100001 elements"),
        types: ("float32", "float64"),
        operations: ("max", "sum"),
        uneven: ("16", "20"),
    }
    for number, (case, words) in enumerate(cases.items()):
        join(meeting, 3, f"misfit{number}")
        dist.barrier()
        name, seconds, text = caught(case)
        if case is uneven and not name:
            name, seconds, text = caught(dist.barrier)
        assert name == "Mismatch" and seconds < 15, (case.__name__, name, seconds, text)
        assert all(word in text for word in words) and text.count("rank") >= 2, text
        meeting.step(f"misfit{number}", 3)
        dist.destroy_process_group()


def _absent(meeting: Meeting) -> None:
    join(meeting, 2, "absent", seconds=8.0)
    dist.barrier()
    if meeting.rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        eventually(lambda: any("nothing has come from rank 1" in line for line in explained()))
        name, seconds, text = caught(work.wait)
        assert name == "TransferTimeout" and "rank 1" in text and seconds < 20, (name, text)
        meeting.say("over")
    else:
        meeting.hear("over")
        assert "rank 1" in caught(dist.barrier)[2]
    dist.destroy_process_group()


def _interrupted(meeting: Meeting) -> None:
    """Ctrl-C while a collective is waited for."""
    join(meeting, 2, "interrupted")
    dist.barrier()
    if meeting.rank == 0:
        threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,)).start()
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(3))
        name, _, text = caught(dist.barrier)
        assert name == "RdmaError" and "KeyboardInterrupt has ended an earlier call" in text, (name, text)
        meeting.say("interrupted")
    else:
        meeting.hear("interrupted")
        caught(lambda: dist.all_reduce(torch.ones(3)))  # what rank 0 has sent may be here already
        assert "KeyboardInterrupt" in (text := caught(dist.barrier)[2]), text
    dist.destroy_process_group()


def _lost(meeting: Meeting) -> None:
    """Rank 2 dies while the others wait in several ways."""
    meeting.step("all there", 3)  # rank 2 had less to do so far
    join(meeting, 3, "lost")
    other = dist.new_group(timeout=timedelta(seconds=20))
    dist.barrier()
    dist.barrier(other)
    if meeting.rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    later = dist.all_reduce(torch.ones(1_000_000), async_op=True)
    found: list[tuple[str, float, str]] = []
    wait = threading.Thread(target=lambda: found.append(caught(lambda: dist.recv(torch.empty(4), 2, group=other))))
    wait.start()
    for name, seconds, text in (caught(later.wait), caught(lambda: dist.barrier(other))):
        assert name == "PeerLost" and "rank 2" in text and seconds < 15, (name, seconds, text)
    wait.join(20)
    assert found and found[0][0] == "PeerLost" and "rank 2" in found[0][2], found
    meeting.step("named", 2)  # who is named after one has left may be that one
    dist.destroy_process_group()


def _stopped(meeting: Meeting) -> None:
    """Rank 2 is stopped, and goes on when the others have given it up."""
    rank = meeting.rank
    join(meeting, 3, "stopped", peer_timeout=PEER_TIMEOUT)
    dist.barrier()
    if rank == 2:
        meeting.say("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        name, _, text = caught(lambda: dist.all_reduce(torch.ones(1_000_000)))
        assert name == "PeerLost", (name, text)
    else:
        pid = int(meeting.said("pid"))
        later = dist.all_reduce(torch.ones(1_000_000), async_op=True)
        eventually(lambda: any("nothing has come from rank 2" in line for line in explained()))
        messages = [dist.irecv(torch.empty(4), 2), dist.isend(torch.empty(4_000_000), 2)]  # more than its slots hold
        for call in (later, *messages):
            name, seconds, text = caught(call.wait)
            assert name == "PeerLost" and "rank 2" in text and seconds < PEER_TIMEOUT + 13, (name, seconds, text)
        meeting.step("given up", 2)
        if rank == 0:
            os.kill(pid, signal.SIGCONT)
    dist.destroy_process_group()


def _each(meeting: Meeting) -> None:
    _misfits(meeting)
    _stopped(meeting)
    if meeting.rank < 2:
        _absent(meeting)
        _interrupted(meeting)
    _lost(meeting)


def test_failures_are_named_and_soon():
    outcomes = run_group(_each, 3, dynamic=True, timeout=100)
    assert not outcomes[2].error, outcomes[2].text
    results(outcomes[:2])
    assert outcomes[2].exit_code == -signal.SIGKILL


class _Late:
    """A transfer whose post comes after the peer has ended, and after its channel knows that."""

    def __init__(self, transfer: Any, channel: Any, end: Callable[[], object]) -> None:
        self.transfer, self.channel, self.end = transfer, channel, end

    def post(self) -> Any:
        self.end()
        limit = time.monotonic() + 10
        while self.channel.error is None and time.monotonic() < limit:
            time.sleep(0.001)
        return self.transfer.post()


def _between(meeting: Meeting) -> None:
    join(meeting, 2, "between")
    dist.barrier()
    group: Any = dist.group.WORLD
    how = os.environ["TEST_POST"]
    if meeting.rank == 1:
        meeting.say("pid", str(os.getpid()))
        if how == "piece to who has left":
            meeting.hear("leave")
            dist.destroy_process_group()
            return
        dist.barrier()
        dist.all_reduce(torch.ones(4))
        return
    pid, streams = int(meeting.said("pid")), group.engine.streams
    lane = streams.lanes[1]
    end = partial(meeting.say, "leave") if how == "piece to who has left" else partial(os.kill, pid, signal.SIGKILL)
    if how == "credit":  # rank 1 is not needed any more
        lane.credit = _Late(lane.credit, lane.channel, end)
        dist.barrier()
    else:
        transfer = streams._transfer
        streams._transfer = lambda *given: _Late(transfer(*given), lane.channel, end)
    # The root of a broadcast awaits nothing from rank 1.
    calls = {"piece to who has left": partial(dist.broadcast, src=0)}
    name, _, text = caught(lambda: calls.get(how, dist.all_reduce)(torch.ones(4)))
    assert name == "PeerLost" and "rank 1" in text, (name, text)
    dist.destroy_process_group()


@pytest.mark.parametrize("post", ["piece", "credit", "piece to who has left"])
def test_a_rank_that_is_lost_before_a_post(post: str):
    outcomes = run_group(
        _between, 2, dynamic=True, environment={"TEST_POST": post, "RDMARPC_COLLECTIVES_DEVICE": "tcp"}, timeout=60
    )
    results(outcomes[:1])
    assert outcomes[1].exit_code == (0 if post == "piece to who has left" else -signal.SIGKILL)


def _held_up(meeting: Meeting) -> None:
    """Rank 1 stands still for less than its peer timeout, as rank 0 tells it where the rest of a first large message goes."""
    join(meeting, 2, "held up")
    rank = meeting.rank
    for call in (dist.all_reduce, _there_and_back):
        stopped, goes_on = f"{call.__name__} stopped", f"{call.__name__} goes on"
        if rank == 1:
            meeting.say(stopped, str(os.getpid()))
            meeting.hear(goes_on)
        else:
            pid = int(meeting.said(stopped))
            halt(pid)
            threading.Timer(2.5, partial(_let_go_on, meeting, goes_on, pid)).start()
        x = torch.full((4_000_000,), float(rank + 1))
        call(x)
        assert torch.equal(x, torch.full_like(x, 3.0))
    dist.destroy_process_group()


def _let_go_on(meeting: Meeting, told: str, pid: int) -> None:
    meeting.say(told)
    os.kill(pid, signal.SIGCONT)


def _there_and_back(x: torch.Tensor) -> None:
    """A sum, by messages between two."""
    theirs, other = torch.empty_like(x), 1 - dist.get_rank()
    for work in [dist.irecv(theirs, other), dist.isend(x, other)]:
        work.wait()  # type: ignore[union-attr]
    x += theirs


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_a_rank_that_is_held_up_for_seconds_disturbs_no_first_large_message(device: str):
    results(run_group(_held_up, 2, dynamic=True, environment={"RDMARPC_COLLECTIVES_DEVICE": device}, timeout=90))


def _left_at_once(meeting: Meeting) -> None:
    """Rank 0 leaves after the first large call. Rank 1 has not yet heard there of the memory for further ones."""
    from rdmarpc.transport.exchange.lane import Lane
    from rdmarpc.transport.shm.channel import LANDING, MESSAGE, ShmChannel

    join(meeting, 2, "left")
    x, rank = torch.full((300_000,), 1.0 + meeting.rank), meeting.rank
    if rank == 1:
        changed, change_out, heed = threading.Event(), Lane.change_out, ShmChannel._heed

        def late(channel: Any, data: bytes, fds: list[int]) -> bool:
            if MESSAGE.unpack(data)[0] == LANDING and threading.current_thread() is not threading.main_thread():
                changed.wait(20)
            return heed(channel, data, fds)

        def waits(*args: Any) -> None:
            meeting.hear("left")
            try:
                change_out(*args)
            finally:
                changed.set()

        Lane.change_out, ShmChannel._heed = waits, late
    meeting.step("there", 2)
    if os.environ["TEST_CALL"] == "all_reduce":
        dist.all_reduce(x)
        assert torch.equal(x, torch.full_like(x, 3.0))
    else:
        dist.send(x, 0) if rank else dist.recv(x, 1)
        assert torch.equal(x, torch.full_like(x, 2.0))
    if rank == 0:
        dist.destroy_process_group()
        meeting.say("left")
        return
    meeting.hear("left")
    assert caught(dist.barrier)[0] == "PeerLost"
    dist.destroy_process_group()


@pytest.mark.parametrize("call", ["all_reduce", "send"])
def test_who_leaves_after_a_call_does_not_make_it_fail(call: str):
    """``the peer closed the channel``, raised by a call that was done."""
    environment = {"TEST_CALL": call, "RDMARPC_COLLECTIVES_DEVICE": "shm"}
    results(run_group(_left_at_once, 2, dynamic=True, environment=environment, timeout=90))


def _all_gone(meeting: Meeting) -> None:
    """Rank 2 is killed, and rank 1 has left because of it, when rank 0 begins a call that makes memory grow."""
    join(meeting, 3, "gone")
    group: Any = dist.group.WORLD
    dist.barrier()
    meeting.step("there", 3)
    if meeting.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if meeting.rank == 1:
        name, _, text = caught(lambda: dist.all_reduce(torch.ones(1_000_000)))
        assert name == "PeerLost" and "rank 2 was lost" in text, (name, text)
        dist.destroy_process_group()
        meeting.say("left")
        return
    meeting.hear("left")
    lanes = group.engine.streams.lanes
    eventually(lambda: all(lane.channel.error is not None for lane in lanes.values()))
    large = torch.ones(1_000_000)
    calls = {
        "all_reduce": lambda: dist.all_reduce(large),
        "send": lambda: dist.send(large, 1),
        "receive": lambda: dist.recv(large, 1),
    }
    name, _, text = caught(calls[os.environ["TEST_CALL"]])
    assert name == "PeerLost" and "rank 2 was lost" in text, (name, text)
    dist.destroy_process_group()


@pytest.mark.parametrize("device", ["shm", "tcp"])
@pytest.mark.parametrize("call", ["all_reduce", "send", "receive"])
def test_who_left_because_of_a_loss_is_not_taken_for_its_cause(call: str, device: str):
    """``the peer closed the channel``, of the rank that had only left."""
    environment = {"TEST_CALL": call, "RDMARPC_COLLECTIVES_DEVICE": device}
    results(run_group(_all_gone, 3, dynamic=True, environment=environment, timeout=60)[:2])


def test_the_news_of_a_loss_goes_before_that_of_a_leaving(monkeypatch: pytest.MonkeyPatch):
    """Rank 1 leaves because rank 2 was lost, which is seen here after that."""
    from rdmarpc.collectives import meeting
    from rdmarpc.collectives.engine import LEFT, Engine
    from rdmarpc.transport import PeerLost

    def lane(notice: str) -> SimpleNamespace:
        return SimpleNamespace(notice=lambda: notice, channel=SimpleNamespace(error=None, peer=""))

    lanes = {1: lane(LEFT), 2: lane("")}
    streams = SimpleNamespace(lanes=lanes, needs=lambda rank: True)
    members = object.__new__(meeting.Ranks)
    vars(members).update(rank=0, size=3, ranks=range(3), streams=streams, lanes=[lanes, {}])
    engine = Engine(members, 20.0)

    def told(_: float) -> None:
        lanes[2].channel.error = PeerLost("the process ended")

    monkeypatch.setattr(meeting, "time", SimpleNamespace(sleep=told))
    with pytest.raises(PeerLost, match="rank 2 was lost"):
        engine._look(streams, False)
    monkeypatch.undo()
    lanes[2].channel.error = None
    with pytest.raises(PeerLost, match="rank 1 has left"):
        engine._look(streams, False)


def _in_backward(meeting: Meeting) -> None:
    join(meeting, 2, "backward")
    torch.manual_seed(0)
    network = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
    model = torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.25)
    model(torch.ones(8, 256)).sum().backward()
    if meeting.rank == 1:
        network[1].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    name, _, text = caught(lambda: model(torch.ones(8, 256)).sum().backward())
    assert name == "RuntimeError" and "PeerLost: rank 1 was lost during all_reduce" in text, (name, text)
    future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
    name, _, text = caught(future.wait)
    assert name == "RuntimeError" and "PeerLost: rank 1 was lost" in text, (name, text)
    dist.destroy_process_group()


def test_a_rank_that_is_lost_during_a_backward():
    """DDP's reducer waits in C++, for the futures of its buckets."""
    outcomes = run_group(_in_backward, 2, dynamic=True, timeout=60)
    results(outcomes[:1])
    assert outcomes[1].exit_code == -signal.SIGKILL
