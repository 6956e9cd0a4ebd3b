"""Connections that are being made: slow strangers, other users, refusals of every kind, and what they leave behind."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from test_strangers import SESAME, patient, raw_socket
from transport_peer import Peer, State, works

from rdmarpc.transport import (
    AuthenticationError,
    Channel,
    Device,
    NotSupported,
    PeerLost,
    RdmaError,
    TransferTimeout,
    listening,
)
from rdmarpc.transport.peers import auth, service
from rdmarpc.transport.shm import device as of_shm

T = 30.0
HELLO = len(auth._MAGIC) + 32 + 32
Open = Callable[..., Device]


# -- slow ones


@contextmanager
def dribbling(address: bytes, count: int) -> Iterator[list[socket.socket]]:
    """So many strangers that send a byte a second, for ever."""
    socks = [raw_socket(address) for _ in range(count)]
    over = threading.Event()

    def dribble() -> None:
        while not over.wait(1.0):
            for sock in socks:
                with suppress(OSError):
                    sock.send(b"r", socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        yield socks
    finally:
        over.set()
        thread.join(T)
        for sock in socks:
            sock.close()


def patient_there(state: State) -> None:
    patient(pytest.MonkeyPatch())  # until the process ends


def test_a_worker_connects_past_more_slow_strangers_than_are_served_at_once(
    kind: str, open_device: Open, start_peer: Callable[..., Peer]
) -> None:
    peer = start_peer(kind)
    peer.call(patient_there)  # else strangers would go by themselves
    device = open_device(kind)
    with dribbling(peer.address, service.MAX_UNPROVEN + 40):
        for _ in range(3):
            channel = device.connect(peer.address, timeout=T)
            channel.notify(1)
            channel.close()


def test_a_handshake_has_one_deadline_however_slowly_the_peer_trickles(
    kind: str, open_device: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdmarpc.transport.listening.HANDSHAKE_S", 1.5)
    device = open_device(kind)
    with dribbling(device.address, 1) as (sock,):
        started = time.monotonic()
        with suppress(ConnectionError):
            sock.settimeout(20.0)
            while sock.recv(1 << 10):
                pass
        assert time.monotonic() - started < 15.0  # 1.5 s, and what a busy machine needs


def test_a_worker_that_has_proven_itself_may_be_slow(kind: str, open_device: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that gives it the processor seldom. It was hung up on, and its connection was lost."""
    monkeypatch.setattr("rdmarpc.transport.listening.HANDSHAKE_S", 0.5)
    reach = listening.reach
    slow = lambda *given: (reach(*given), time.sleep(1.5))[0]  # noqa: E731
    monkeypatch.setattr("rdmarpc.transport.listening.reach", slow)
    b, a = open_device(kind), open_device(kind)
    a.connect(b.address, timeout=T).notify(1)
    b.accept(timeout=T).close()


def test_what_fails_at_the_peer_is_not_said_to_have_failed_here(
    kind: str, open_device: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise OSError(27, "File too large")

    b, a = open_device(kind), open_device(kind)
    monkeypatch.setattr(b, "_receive_setup", fails)
    with pytest.raises(PeerLost, match=r"the peer (?!.*failed here)|the connection broke"):
        a.connect(b.address, timeout=T)


def test_who_is_accepted_and_not_heard_connects_again(kind: str, open_device: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when something takes the GIL there in the middle of a handshake."""
    b, a, first, over = open_device(kind), open_device(kind), [True], threading.Event()
    prove = b._prove  # type: ignore[attr-defined]

    def forgets_the_first(*given: Any, **named: Any) -> Any:
        if first:
            first.clear()
            over.wait(T)
        return prove(*given, **named)

    monkeypatch.setattr(b, "_prove", forgets_the_first)
    a.connect(b.address, timeout=4.0).notify(1)
    over.set()
    b.accept(timeout=T).close()


@pytest.mark.parametrize("late", ["acceptor", "initiator"])
def test_a_limit_that_passes_between_the_last_answer_and_what_follows_loses_nothing(
    kind: str, open_device: Open, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The one whose limit it was hung up on a peer that was told, or had said, that the proof is right: a broken pipe."""
    monkeypatch.setattr(listening, "HANDSHAKE_S", 1.0)
    monkeypatch.setattr(listening, "_HALVES_S", 0.1)
    authenticate, slept = auth.authenticate, []

    def slow(*given: Any, initiator: bool, **named: Any) -> bytes:
        key = authenticate(*given, initiator=initiator, **named)
        if initiator == (late == "initiator") and not slept:
            slept.append(time.sleep(2.5))
        return key

    monkeypatch.setattr(auth, "authenticate", slow)
    b, a = open_device(kind), open_device(kind)
    a.connect(b.address, timeout=T if late == "acceptor" else 4.0).notify(1)
    b.accept(timeout=T).close()
    assert slept


def test_time_in_which_this_process_did_not_run_is_not_the_peers(
    kind: str, open_device: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, a, over = open_device(kind), open_device(kind), threading.Event()

    def is_silent(*given: Any, **named: Any) -> Any:
        over.wait(T)
        raise PeerLost("it was silent")

    monkeypatch.setattr(b, "_prove", is_silent)
    with ThreadPoolExecutor() as pool, pytest.raises(TransferTimeout) as raised:
        connected = pool.submit(a.connect, b.address, timeout=1.0)
        time.sleep(0.3)
        ctypes.PyDLL(None).usleep(3_000_000)
        try:
            connected.result(T)
        finally:
            over.set()
    assert raised.value.status == "BUSY"


def test_who_connects_has_one_deadline_too(kind: str, open_device: Open) -> None:
    """The one at that address trickles."""
    device = open_device(kind)
    over = threading.Event()
    with socket.socket(
        *((socket.AF_UNIX, socket.SOCK_SEQPACKET) if kind == "shm" else (socket.AF_INET, socket.SOCK_STREAM))
    ) as at:
        name = f"slow{os.getpid():012}"
        at.bind(f"\0rdmarpc-{name}" if kind == "shm" else ("127.0.0.1", 0))
        at.listen(5)

        def trickle() -> None:
            sock, _ = at.accept()
            with sock, suppress(OSError):
                for byte in b"rdmarpc\x02" + b"n" * 20:
                    sock.send(bytes([byte]))
                    if over.wait(0.3):
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        theirs = device.address.decode().split(":")
        port = at.getsockname()[1] if kind != "shm" else 0
        where = {
            "shm": f"shm:{theirs[1]}:{name}",
            "tcp": f"tcp:127.0.0.1:{port}:0",
            "verbs": f"verbs:127.0.0.1:{port}:0:{theirs[-1]}",
        }[kind]
        started = time.monotonic()
        with pytest.raises(TransferTimeout):
            device.connect(where.encode(), timeout=1.0)
        assert time.monotonic() - started < 15.0
        over.set()
        thread.join(T)


def test_the_oldest_stranger_makes_way(kind: str, open_device: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_UNPROVEN", 3)
    patient(monkeypatch)
    device = open_device(kind)
    strangers = [raw_socket(device.address) for _ in range(4)]
    try:
        for stranger in strangers[1:]:  # all that an acceptor says first
            auth.receive_exactly(stranger, HELLO)
        with suppress(ConnectionError):
            while strangers[0].recv(HELLO):
                pass
        for stranger in strangers[1:]:
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.recv(1)
    finally:
        for stranger in strangers:
            stranger.close()


# -- another user


def test_another_user_is_refused_before_a_thread_is_spent(open_device: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device("shm")
    welcomed: list[socket.socket] = []
    monkeypatch.setattr(device._service.handshakes, "_welcome", welcomed.append)  # type: ignore[attr-defined]
    monkeypatch.setattr(of_shm.os, "geteuid", lambda: 12345)
    with raw_socket(device.address) as sock:
        assert sock.recv(100) == b""
    assert not welcomed


def test_a_worker_of_another_user_is_named_and_auto_takes_another_way(
    open_device: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_device("shm"), open_device("shm")
    far, near = open_device("auto"), open_device("auto")
    monkeypatch.setattr(of_shm, "_same_user", lambda sock: False)
    with pytest.raises(NotSupported, match="user"):
        a.connect(b.address)
    assert far.connect(near.address).device.name in ("tcp", "verbs")


# -- what refusals leave behind


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def descriptors_of(state: State) -> int:
    return open_descriptors()


def refuse_everybody(state: State) -> None:
    def refuse(channel: Channel) -> bytes:
        raise RdmaError("no second worker of this name")

    state.device.door.greet = refuse


def settle(count: Callable[[], int], wanted: int) -> int:
    """What it says in the end: closed is a moment later than told."""
    limit = time.monotonic() + T
    while (found := count()) > wanted and time.monotonic() < limit:
        time.sleep(0.05)
    return found


TURNS = 50


@pytest.mark.parametrize("how", ["wrong secret", "refused by on_connect"])
def test_refused_connections_leave_no_descriptor_at_either_end(
    kind: str, open_device: Open, start_peer: Callable[..., Peer], how: str
) -> None:
    peer = start_peer(kind, secret=SESAME)
    device = open_device(kind, secret=SESAME.title() if how == "wrong secret" else SESAME)
    peer.call(refuse_everybody)

    def refused() -> None:
        with pytest.raises((AuthenticationError, PeerLost, TransferTimeout)):
            device.connect(peer.address, timeout=5.0)

    refused()
    time.sleep(0.2)
    here, there = open_descriptors(), peer.call(descriptors_of)
    for _ in range(TURNS):
        refused()
    assert settle(open_descriptors, here) <= here
    assert settle(lambda: peer.call(descriptors_of), there) <= there


@pytest.mark.parametrize("stage", ["at once", "in the proof", "after the proof", "after the setup"])
def test_connections_that_are_broken_off_leave_no_descriptor(
    kind: str, open_device: Open, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the one that connects: at each stage."""
    device = open_device(kind, on_connect=lambda channel: b"")  # or ``accept`` would keep what came this far
    caller = open_device(kind)

    def break_off() -> None:
        if stage == "at once":
            raw_socket(device.address).close()
            return
        if stage == "in the proof":
            with raw_socket(device.address) as sock:
                sock.send(b"rdmarpc\x02")
            return
        name = "_send_setup" if stage == "after the proof" else "_receive_setup"
        with monkeypatch.context() as patch:
            patch.setattr(caller, name, broken)
            with pytest.raises(PeerLost, match="no further"):
                caller.connect(device.address)

    def broken(*args: object) -> None:
        raise PeerLost("no further")

    break_off()
    time.sleep(0.2)
    before = open_descriptors()
    for _ in range(TURNS):
        break_off()
    assert settle(open_descriptors, before) <= before
    device.door.keep = True
    works(caller, device)
