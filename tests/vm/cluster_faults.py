"""What may happen between two hosts, and what each of it has to end in: the documented error within its time, bytes that are
right, and other peers that go on.

A case gets the cluster and the device's name and returns what came of it, and the seconds from the fault to that. It fails with
an exception.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster_hosts import Cluster, Failed, Peer

LOST_WITHIN_S = {"verbs": 6.0, "tcp": 12.0}
"""On ``verbs`` it should be about 2 s, on ``tcp`` the 3 s of ``cluster_actions``; but both hosts are emulated, on few cores.
The two guests keep two cores busy; where others do as well, the patience grows with the load."""
START_S = 300.0
"""A process, its imports and its device."""
SIZE = 1 << 20


@dataclass(frozen=True)
class Case:
    name: str
    expected: str
    run: Callable[[Cluster, str], tuple[str, float]]
    devices: tuple[str, ...]


CASES: list[Case] = []
Run = Callable[[Cluster, str], tuple[str, float]]


def case(name: str, expected: str, devices: tuple[str, ...] = ("verbs", "tcp")) -> Callable[[Run], Run]:
    """A case that runs in its turn; the last ones leave the cluster with one host."""

    def register(run: Run) -> Run:
        CASES.append(Case(name, expected, run, devices))
        return run

    return register


class Trio:
    """``a`` on the first host copies to ``b`` on the second; ``c``, beside ``a``, is connected with ``a`` and has to go on."""

    def __init__(self, hosts: Sequence[Any], device: str) -> None:
        self.device, self._hosts = device, hosts
        self.a, self.b, self.c = hosts[0].peer("a"), hosts[1].peer("b"), hosts[0].peer("c")
        for peer in (self.a, self.b, self.c):
            peer.start("open_device", device)
        _, self.b_address, c_address = (peer.finish(START_S) for peer in (self.a, self.b, self.c))
        self.join_b()
        join(self.a, "a", self.c, "c", c_address)
        self._beside = self.c.call("make", "sink", 4096, 0)
        self.a.call("make", "small", 4096, 2)
        self.reset()

    def reset(self, size: int = SIZE) -> None:
        """``a``'s source holds pattern 1, and ``b``'s sink pattern 0."""
        self.size = size
        self.sink = self.b.call("make", "sink", size, 0)
        self.a.call("make", "source", size, 1)

    def join_b(self) -> None:
        join(self.a, "a", self.b, "b", self.b_address)

    def new_b(self) -> None:
        """Another process in the place of one that has ended."""
        self.b = self._hosts[1].peer("b")
        self.b_address = self.b.call("open_device", self.device, timeout=START_S)
        self.join_b()

    def writes(self, times: int = 1, timeout: float = 60.0) -> float:
        """Writes of everything, and the bytes are right; seconds that they took."""
        begin = time.monotonic()
        for _ in range(times):
            self.a.call("write", "b", "source", self.sink, 7, timeout, timeout=timeout + 10)
        seconds = time.monotonic() - begin
        self.b.call("wait_for", "a", 7, times, timeout, timeout=timeout + 10)
        assert self.b.call("holds", "sink", 1), "the bytes that arrived are not those that were sent"
        return seconds

    def others_go_on(self) -> None:
        """``a`` and ``c`` do, whatever became of ``b``."""
        for _ in range(3):
            self.a.call("write", "c", "small", self._beside, 8, 20.0)
        self.c.call("wait_for", "a", 8, 3, 20.0)
        assert self.c.call("holds", "sink", 2)
        assert not self.a.call("error_of", "c")

    def end(self) -> None:
        for peer in (self.a, self.b, self.c):
            peer.call("close")
            peer.end()


def trio_of(cluster: Cluster, device: str, size: int = SIZE) -> Trio:
    """The three of the case before, unless that failed: processes are slow to start here."""
    if cluster.trio is None:
        cluster.trio = Trio(cluster.hosts, device)
    cluster.trio.reset(size)
    return cluster.trio


def join(one: Peer, one_name: str, other: Peer, other_name: str, address: str) -> None:
    other.start("accept", one_name)
    one.call("connect", other_name, address)
    other.finish()


def fails(peer: Peer, kind: str) -> str:
    """The order under way at this peer has to end in this error; its status."""
    try:
        result = peer.finish()
    except Failed as error:
        if error.kind != kind:
            raise
        assert error.text.strip(), "an error without a text"
        return error.status
    raise AssertionError(f"{kind} expected, got {result!r}")


def lost(device: str, begin: float, *peers: Peer) -> tuple[str, float]:
    """The orders under way at these peers have to end in ``PeerLost``, soon after ``begin``."""
    statuses = [fails(peer, "PeerLost") for peer in peers]
    seconds = time.monotonic() - begin
    patience = LOST_WITHIN_S[device] * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2)
    assert seconds < patience, f"PeerLost {statuses} came only after {seconds:.1f} s, and had {patience:.1f} s"
    return got("PeerLost", statuses), seconds


def got(kind: str, statuses: Sequence[str]) -> str:
    named = sorted({status for status in statuses if status})
    return f"{kind} ({', '.join(named)})" if named else kind


# -- nothing goes wrong


@case("1 MiB written, notified and read back", "bytes right")
def copies(cluster: Cluster, device: str) -> tuple[str, float]:
    before = [host.rdma_counters() for host in cluster.hosts]
    trio = trio_of(cluster, device)
    seconds = trio.writes(2)
    trio.a.call("make", "back", SIZE, 5)
    trio.a.call("read", "b", "back", trio.sink, 60.0)
    assert trio.a.call("holds", "back", 1)
    trio.others_go_on()
    after = [host.rdma_counters() for host in cluster.hosts]
    sent, received = after[0]["sent_pkts"] - before[0]["sent_pkts"], after[1]["rcvd_pkts"] - before[1]["rcvd_pkts"]
    if device == "verbs":
        assert sent >= 2 * SIZE // 4096 and received >= 2 * SIZE // 4096, (
            f"{sent} packets sent by the RDMA device, {received} received"
        )
    return f"bytes right; RDMA packets {sent} out, {received} in", seconds


# -- descriptors that give no access


@case("wrong key", "RemoteAccessError")
def wrong_key(cluster: Cluster, device: str) -> tuple[str, float]:
    return _refused(cluster, device, {"key": 0x1234567890ABCDEF})


@case("out of range", "RemoteAccessError")
def out_of_range(cluster: Cluster, device: str) -> tuple[str, float]:
    return _refused(cluster, device, {"offset": 1 << 40})


@case("of another life", "RemoteAccessError")
def another_life(cluster: Cluster, device: str) -> tuple[str, float]:
    return _refused(cluster, device, {"epoch": 1})


def _refused(cluster: Cluster, device: str, changes: dict[str, int]) -> tuple[str, float]:
    trio = trio_of(cluster, device, 4096)
    begin = time.monotonic()
    trio.a.start("altered", "b", trio.sink, changes)
    status = fails(trio.a, "RemoteAccessError")
    seconds = time.monotonic() - begin
    assert trio.b.call("holds", "sink", 0), "bytes were written by a descriptor that gives no access"
    assert not trio.b.call("came", "a", 99), "a refused copy was announced"
    trio.writes()  # the channel goes on
    trio.others_go_on()
    return got("RemoteAccessError", [status]), seconds


@case("wrong rkey on the wire", "RemoteAccessError, then a new channel", devices=("verbs",))
def wrong_rkey(cluster: Cluster, device: str) -> tuple[str, float]:
    """What this side checks let through: the peer's device has to refuse it, and a queue pair is dead after that."""
    trio = trio_of(cluster, device, 4096)
    trio.a.call("forge_rkey", "b", trio.sink)
    begin = time.monotonic()
    trio.a.start("write", "b", "source", trio.sink, 99, 20.0)
    status = fails(trio.a, "RemoteAccessError")
    seconds = time.monotonic() - begin
    assert status == "REM_ACCESS_ERR", status
    trio.others_go_on()
    trio.join_b()
    assert trio.b.call("holds", "sink", 0), "bytes were written with a wrong key"
    trio.writes()
    return got("RemoteAccessError", [status]), seconds


@case("revoked region", "RemoteAccessError")
def revoked(cluster: Cluster, device: str) -> tuple[str, float]:
    trio = trio_of(cluster, device, 4096)
    lent = trio.b.call("register", "lent", 4096, 3)
    trio.a.call("prepare", "b", "source", lent, 9)
    trio.a.call("post", "b", 1, 20.0)
    assert trio.b.call("holds", "lent", 1)
    trio.b.call("revoke", "lent")
    trio.a.call("make", "source", 4096, 4)
    begin = time.monotonic()
    trio.a.start("post", "b", 1, 20.0)
    statuses = [fails(trio.a, "RemoteAccessError")]
    seconds = time.monotonic() - begin
    trio.a.start("write", "b", "source", lent, 9, 20.0)
    statuses.append(fails(trio.a, "RemoteAccessError"))
    assert trio.b.call("holds", "lent", 1), "bytes were written after the region was closed"
    trio.a.call("make", "source", 4096, 1)
    trio.writes()
    trio.others_go_on()
    return got("RemoteAccessError", statuses), seconds


# -- more than there is room for


@case("exhausted send queue", "all arrive")
def flood(cluster: Cluster, device: str) -> tuple[str, float]:
    count = 1000
    trio = trio_of(cluster, device, 64 * count)
    begin = time.monotonic()
    trio.a.call("flood", "b", trio.sink, 7, count, 100.0, timeout=120)
    seconds = time.monotonic() - begin
    trio.b.call("wait_for", "a", 7, count, 60.0)
    assert trio.b.call("holds", "sink", 1)
    trio.others_go_on()
    return f"{count} posts at once arrived", seconds


@case("ulimit -l of 64 KiB", "RegistrationError", devices=("verbs",))
def memlock(cluster: Cluster, device: str) -> tuple[str, float]:
    trio = trio_of(cluster, device, 4096)
    poor = cluster.hosts[0].peer("poor")
    poor.call("limit_memlock", 64 << 10)
    begin = time.monotonic()
    poor.start("open_and_fill", device)
    try:
        poor.finish()
    except Failed as error:
        assert error.kind == "RegistrationError", str(error)
        assert re.search("memlock|ulimit -l", error.text), f"no word of what to do: {error.text}"
    else:
        raise AssertionError("registered more than the limit allows")
    seconds = time.monotonic() - begin
    poor.end()
    trio.writes()
    trio.others_go_on()
    return "RegistrationError, with the command", seconds


# -- the network


@case("1 % of packets lost", "bytes right")
def loss(cluster: Cluster, device: str) -> tuple[str, float]:
    return _under(cluster, device, "loss 1%")


@case("delay of 20 ms", "bytes right")
def delay(cluster: Cluster, device: str) -> tuple[str, float]:
    return _under(cluster, device, "delay 20ms")


@case("every 20th packet overtakes", "bytes right")
def reordering(cluster: Cluster, device: str) -> tuple[str, float]:
    return _under(cluster, device, "delay 5ms reorder 5% 50%")


def _under(cluster: Cluster, device: str, rules: str) -> tuple[str, float]:
    trio = trio_of(cluster, device, 256 << 10)
    for host in cluster.hosts:
        host.shape(rules)
    try:
        seconds = trio.writes(3)
        trio.others_go_on()
    finally:
        for host in cluster.hosts:
            host.shape("")
    return "bytes right", seconds


@case("link down for 0.5 s", "goes on")
def flap(cluster: Cluster, device: str) -> tuple[str, float]:
    trio = trio_of(cluster, device)
    trio.writes()
    trio.a.call("prepare", "b", "source", trio.sink, 7)
    trio.a.start("post", "b", 3, 60.0)
    time.sleep(0.1)
    cluster.hosts[1].plug(link=False)
    time.sleep(0.5)
    cluster.hosts[1].plug(link=True)
    begin = time.monotonic()
    trio.a.finish()
    seconds = time.monotonic() - begin
    trio.b.call("wait_for", "a", 7, 3, 60.0)
    assert trio.b.call("holds", "sink", 1)
    trio.writes()
    trio.others_go_on()
    return "went on", seconds


@case("link down, then up", "PeerLost at both ends, then a new channel")
def cut(cluster: Cluster, device: str) -> tuple[str, float]:
    trio = trio_of(cluster, device, 4096)
    trio.a.call("prepare", "b", "source", trio.sink, 7)
    trio.a.start("post_until_lost", "b", 10**6, 0.01)
    trio.b.start("wait_until_lost", "a", 60.0)
    time.sleep(1.0)
    begin = time.monotonic()
    cluster.hosts[1].plug(link=False)
    try:
        came = lost(device, begin, trio.a, trio.b)
        trio.others_go_on()
    finally:
        cluster.hosts[1].plug(link=True)
    time.sleep(1.0)
    trio.join_b()
    trio.writes()
    return came


@case("half-open connection", "PeerLost")
def half_open(cluster: Cluster, device: str) -> tuple[str, float]:
    """The peer's process ends while nothing of that can arrive here."""
    trio = trio_of(cluster, device, 4096)
    trio.a.start("wait_until_lost", "b", 60.0)
    time.sleep(0.5)
    begin = time.monotonic()
    cluster.hosts[1].plug(link=False)
    try:
        trio.b.start("die")
        came = lost(device, begin, trio.a)
        trio.others_go_on()
    finally:
        cluster.hosts[1].plug(link=True)
    trio.new_b()
    return came


@case("100 connections that say nothing", "others connect and go on")
def strangers(cluster: Cluster, device: str) -> tuple[str, float]:
    trio = trio_of(cluster, device, 4096)
    number = trio.b.call("pid")
    listening = cluster.hosts[1].sh(f"ss -Hltnp | grep pid={number},")
    port = int(listening.split()[3].rpartition(":")[2])
    trio.c.call("strangers", cluster.hosts[1].address, port, 100)
    begin = time.monotonic()
    join(trio.c, "c", trio.b, "b", trio.b_address)
    seconds = time.monotonic() - begin
    trio.writes()
    trio.others_go_on()
    return "connected", seconds


# -- the peer


@case("kill -9 of the peer's process", "PeerLost")
def killed_process(cluster: Cluster, device: str) -> tuple[str, float]:
    trio = trio_of(cluster, device)
    trio.a.call("prepare", "b", "source", trio.sink, 7)
    trio.a.start("post_until_lost", "b", 10**6, 0.0)
    time.sleep(1.0)
    begin = time.monotonic()
    trio.b.start("die")
    came = lost(device, begin, trio.a)
    trio.others_go_on()
    trio.new_b()
    return came


@case("pause of the peer's host", "PeerLost, also there when it goes on")
def paused_host(cluster: Cluster, device: str) -> tuple[str, float]:
    trio = trio_of(cluster, device, 4096)
    trio.a.call("prepare", "b", "source", trio.sink, 7)
    trio.a.start("post_until_lost", "b", 10**6, 0.01)
    trio.b.start("wait_until_lost", "a", 60.0)
    time.sleep(1.0)
    begin = time.monotonic()
    cluster.hosts[1].pause()
    try:
        came = lost(device, begin, trio.a)
        trio.others_go_on()
    finally:
        cluster.hosts[1].go_on()
    fails(trio.b, "PeerLost")
    trio.join_b()
    trio.writes()
    return came


@case("kill -9 of the peer's host", "PeerLost, in calls too; the others go on")
def killed_host(cluster: Cluster, device: str) -> tuple[str, float]:
    """Sending, only waiting, and in the middle of RPC calls. The other host comes back as a new one."""
    trio = trio_of(cluster, device)
    waiter = cluster.hosts[0].peer("waiter")
    waiter.call("open_device", device)
    join(waiter, "waiter", trio.b, "b", trio.b_address)
    workers = [cluster.hosts[place].peer(f"worker{rank}_") for rank, place in enumerate((0, 0, 1))]
    meeting = f"tcp://{cluster.hosts[0].address}:29400"
    for rank, worker in enumerate(workers):
        worker.start("join", rank, len(workers), device, meeting)
    for worker in workers:
        worker.finish(120)
    assert workers[0].call("call", "worker2", 1000, 3) and workers[0].call("call", "worker1", 1000, 3)

    trio.a.call("prepare", "b", "source", trio.sink, 7)
    trio.a.start("post_until_lost", "b", 10**6, 0.0)
    waiter.start("wait_until_lost", "b", 60.0)
    workers[0].start("call_until_lost", "worker2", 100_000)
    time.sleep(2.0)
    begin = time.monotonic()
    cluster.hosts[1].kill()
    came = lost(device, begin, trio.a, waiter, workers[0])
    trio.others_go_on()
    assert workers[0].call("call", "worker1", 100_000, 5)
    workers[1].start("call", "worker2", 10, 1)  # it was never connected with it, so it only finds that nobody answers
    fails(workers[1], "TransferTimeout")
    return came
