"""Workers of two hosts in one group: each is reached by its own device, over one arena."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from functools import partial

import hosts
import pytest
import torch
from group import Meeting, results, run_group
from trained import train

import rdmarpc as rpc
from rdmarpc.base import here
from rdmarpc.transport import NotSupported
from rdmarpc.transport.nic import sysfs

SIZE = 3
SECRET = "what both hosts were told"


@pytest.fixture
def two_hosts() -> Iterator[list[int]]:
    if reason := hosts.why_not():
        pytest.skip(reason)
    with hosts.two_hosts() as found:
        yield found


def break_rdma() -> None:
    """From here on this host has RDMA hardware that cannot be used."""
    folder = tempfile.mkdtemp()
    os.makedirs(os.path.join(folder, "mlx5_0", "ports", "1"))
    sysfs.ROOT = folder


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("rdmarpc").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def apart(at: list[int], meeting: Meeting) -> tuple[dict[str, str], int, list[str]]:
    """Workers 0 and 1 are at one host; worker 2 is at the other, which has broken RDMA hardware."""
    hosts.enter(at[meeting.rank == 2])
    if meeting.rank == 2:
        break_rdma()
    log = Log()
    meeting.join(world_size=SIZE)
    others = [f"worker{rank}" for rank in range(SIZE) if rank != meeting.rank]
    if meeting.rank == 2:
        meeting.hear("called/0", "called/1")
    for size in (4, 300_000):
        x = torch.rand(size)
        for other in others * 2:
            assert torch.equal(rpc.rpc_sync(other, plus_one, (x,)), x + 1)
    meeting.step("called", SIZE)
    if meeting.rank == 0:
        train()
    agent = here.current()
    ways = {other: agent.channel(other).device.name for other in others}
    counters = agent.counters()
    assert "auto" in rpc.explain() and counters["channels"] == 2
    rpc.shutdown()
    return ways, counters["fallbacks"], log.texts


def test_each_worker_by_its_own_device(two_hosts: list[int]) -> None:
    found = results(run_group(partial(apart, two_hosts), SIZE, dynamic=True, timeout=120, rpc_timeout=60, secret=SECRET))
    assert [ways for ways, _, _ in found] == [
        {"worker1": "shm", "worker2": "tcp"},
        {"worker0": "shm", "worker2": "tcp"},
        {"worker0": "tcp", "worker1": "tcp"},
    ]
    assert [fallbacks for _, fallbacks, _ in found] == [1, 1, 2]
    # It has no port that works, or no library that would find one.
    whys = ["no usable RDMA port", "no Python package reaches libibverbs"]
    (why,) = [why for why in whys if f"over tcp, not verbs: {why}" in found[2][2][0]]
    assert len(found[2][2]) == 2 and f"over tcp, not verbs: {why}" in found[2][2][1]
    assert "2 hosts meet in one file" in found[0][2].pop(0)
    for told in (found[0][2], found[1][2]):
        assert len(told) == 1 and f"tcp:{hosts.ADDRESSES[1]}:" in told[0] and f"at the peer: {why}" in told[0]


def required(at: list[int], meeting: Meeting) -> str:
    """A dynamic group: worker 0 requires RDMA; worker 1 comes from another host, first with the same wish, then without."""
    hosts.enter(at[meeting.rank])
    if meeting.rank == 0:
        meeting.join(require="rdma")
        meeting.say("there")
        meeting.hear("joined")
        with pytest.raises(NotSupported, match=r"this host has no RDMA device.*require='rdma' forbids it"):
            rpc.rpc_sync("worker1", plus_one, (torch.ones(1),))
        meeting.say("tried")
        text = ""
    else:
        meeting.hear("there")
        with pytest.raises(NotSupported) as raised:
            meeting.join(require="rdma")
        meeting.join()
        meeting.say("joined")
        with pytest.raises(NotSupported, match="tcp: the peer has no tcp"):
            rpc.rpc_sync("worker0", plus_one, (torch.ones(1),))
        meeting.hear("tried")
        text = str(raised.value)
    rpc.shutdown()
    return text


def test_rdma_is_required(two_hosts: list[int]) -> None:
    text = results(run_group(partial(required, two_hosts), 2, dynamic=True, timeout=60, secret=SECRET))[1]
    for part in ("not reached by what is required", "peer=worker0", "another host", "no RDMA device", "rdmarpc doctor"):
        assert part in text


def at_no_address_for_others(at: list[int], meeting: Meeting) -> None:
    hosts.enter(at[meeting.rank])
    meeting.join(world_size=2)
    meeting.step("joined", 2)
    if meeting.rank == 0:
        with pytest.raises(rpc.PeerLost, match=r"it is on another host, and listens at 127\.0\.0\.1:\d+: .* TP_SOCKET_IFNAME"):
            rpc.rpc_sync("worker1", plus_one, (torch.ones(1),))
    meeting.step("tried", 2)
    rpc.shutdown(graceful=False)


def test_an_address_that_leads_others_elsewhere_is_named(two_hosts: list[int]) -> None:
    scenario = partial(at_no_address_for_others, two_hosts)
    results(run_group(scenario, 2, dynamic=True, timeout=60, secret=SECRET, transport="tcp://127.0.0.1"))


def untold(at: list[int], meeting: Meeting) -> None:
    hosts.enter(at[meeting.rank])
    meeting.join(world_size=2)


def test_two_hosts_need_a_secret(two_hosts: list[int]) -> None:
    for outcome in run_group(partial(untold, two_hosts), 2, dynamic=True, timeout=60):
        assert outcome.error == "AuthenticationError" and "export RDMARPC_SECRET=" in outcome.text, outcome
