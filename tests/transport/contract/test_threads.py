"""Errors that nobody expected, in each thing that the threads of a device do: they end one peer's channel at most."""

from __future__ import annotations

import ast
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_strangers import comes
from transport_peer import works

import rdmarpc
from rdmarpc.transport import Channel, Device, PeerLost, RdmaError
from rdmarpc.transport.peers import guard

T = 30.0
Open = Callable[..., Device]

THREADS = {
    # How each thread of the package goes on after an error that nobody expected, or why it need not.
    "transport/peers/service.py _shake_hands": "one connection; guarded as a whole",
    "transport/peers/service.py _run": "guarded for each peer, and as a whole",
    "transport/peers/heartbeat.py _run": "a kernel, which raises nothing",
    "transport/verbs/device.py _complete": "guarded for each peer, and as a whole",
    "transport/verbs/device.py _settle": "one peer; ends its channel",
    "transport/verbs/channel.py _give_up_region": "one region; breaks the channel off",
    "transport/gpu/behind.py _serve": "guarded; what waits for that GPU fails",
    "transport/verbs/gpu.py _tend": "guarded",
    "transport/cuda/device.py _watch": "guarded for each peer",
    "transport/cuda/channel.py _forget": "one region; breaks the channel off",
    "transport/cuda/lane.py _linger": "what is left of one channel that has ended",
    "rdmarpc/links/polling/pool.py _pool": "guarded for each message and each job",
    "rdmarpc/links/polling/pool.py _watch": "guarded",
    "rdmarpc/links/polling/pool.py _run_rest": "guarded for each job",
    "rdmarpc/calls/pending.py _run": "guarded for each call",
    "rdmarpc/references/mail.py _catch_up": "one worker, which is lost then",
    "rdmarpc/message/gpu.py _bury": "guarded for each peer",
    "rdmarpc/references/handle.py run": "one backward pass, which fails then",
    "rdmarpc/places/worker.py _serve": "tells its caller that the stream has ended",
    "rdmarpc/tools/debug.py _print_on": "guarded for each signal",
    "rdmarpc/links/ring.py _open": "one peer's ring; the link is refused then",
    "rdmarpc/links/losses.py _run_apart": "guarded for each loss",
    "rdmarpc/servers/server.py meet": "one server, for each worker; it ends then",
    "rdmarpc/collectives/queue.py _serve": "guarded for each call, which fails then",
    "rdmarpc/collectives/pairs.py _serve": "guarded; the group's messages fail then",
    "rdmarpc/collectives/backend.py finish": "guarded; the calls that it stands for fail then",
    "transport/tls/handshake.py _run": "one stream, in a kernel; the stream ends with it",
}


def test_every_thread_of_the_package_is_known_here() -> None:
    """A new one has to say how it survives what nobody expected."""
    root = Path(rdmarpc.__file__).parent
    found = set()
    for folder, base in (("rdmarpc", root), ("transport", root.parent / "transport"), ("graph", root.parent / "graph")):
        for path in (path for path in base.rglob("*.py") if "Thread(" in path.read_text()):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "Thread"):
                    target = next(ast.unparse(word.value) for word in node.keywords if word.arg == "target")
                    found.add(f"{folder}/{path.relative_to(base)} {target.rpartition('.')[2]}")
    assert found == THREADS.keys()


# -- what tells of them


def test_an_error_is_told_once_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    told = guard.Guard("rdmarpc-test")
    with caplog.at_level(logging.ERROR, "rdmarpc"):
        for number in range(1, 1001):
            told.note(ZeroDivisionError(number), "hearing a peer")
        told.note(KeyError(1), "hearing a peer")
        told.note(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "hearing a peer")
    *others, lacks = caplog.records
    assert "it goes on: [Errno 24] Too many open files (this process may have" in lacks.getMessage() and not lacks.exc_info
    assert [record.getMessage() for record in others] == [
        "rdmarpc-test: hearing a peer failed; it goes on",
        *(
            f"rdmarpc-test: hearing a peer failed {count} times, the last time with ZeroDivisionError({count})"
            for count in (10, 100, 1000)
        ),
        "rdmarpc-test: hearing a peer failed; it goes on",
    ]
    assert [record.exc_info is not None for record in others] == [True, False, False, False, True]


# -- the threads of a device


class Raises:
    """Stands in for a function: raises so many times, then does what the function did."""

    def __init__(self, instead_of: Callable[..., Any], times: int = 1, error: BaseException | None = None) -> None:
        self.instead_of, self.left, self.error = instead_of, times, error or ZeroDivisionError("nobody expected this")

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            raise self.error
        return self.instead_of(*args, **options)


class Instead:
    """Stands in for an object, but for some of its attributes."""

    def __init__(self, of: Any, **others: Any) -> None:
        self.__dict__.update(others, _of=of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


class Hub:
    """A device of ours, with two peers, and what it was told of them."""

    def __init__(self, kind: str, open_device: Open) -> None:
        self.kind, self._open = kind, open_device
        self.device = open_device(kind, peer_timeout=2.0)
        self.lost: list[Channel] = []
        self.device.on_lost = self.lost.append
        self.others = [open_device(kind, peer_timeout=2.0) for _ in range(2)]
        self.theirs: list[Channel] = []
        self.ours: list[Channel] = []
        for other in self.others:  # one after the other: handshakes end in any order
            self.theirs.append(other.connect(self.device.address))
            self.ours.append(self.device.accept(timeout=T))

    def handshakes(self) -> Any:
        return self.loops().handshakes

    def loops(self) -> Any:
        """What has the loop."""
        device: Any = self.device
        return device._service

    def goes_on(self) -> None:
        """Newcomers are accepted, and deaths noticed: of the second peer."""
        works(self._open(self.kind), self.device)
        channel: Any = self.theirs[1]
        stream = channel.stream.sock if self.kind == "verbs" else channel.sock
        stream.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLost):
            self.ours[1].expect(1).wait(T)
        comes(lambda: self.ours[1] in self.lost)


@pytest.fixture
def hub(kind: str, open_device: Open) -> Hub:
    return Hub(kind, open_device)


@pytest.fixture(autouse=True)
def no_thread_ends() -> Iterator[None]:
    """By an exception, silently or not."""
    ended: list[Any] = []
    before = threading.excepthook
    threading.excepthook = ended.append
    yield
    threading.excepthook = before
    assert not ended


def test_hearing_one_peer(hub: Hub) -> None:
    channel: Any = hub.ours[0]
    heard = channel if hub.kind == "shm" else channel.stream if hub.kind == "verbs" else channel.reader
    heard.receive = Raises(heard.receive)
    hub.theirs[0].notify(1) if hub.kind == "tcp" else hub.others[0].register(_foreign())
    with pytest.raises(RdmaError, match="nobody expected this") as caught:
        channel.expect(7).wait(T)
    error = caught.value
    assert isinstance(error, PeerLost) and error.peer == channel.peer and error.device == hub.kind
    assert isinstance(error.__cause__, ZeroDivisionError)
    comes(lambda: hub.lost == [channel])
    with pytest.raises(PeerLost, match=r"could not go on|closed|ended|broke"):
        hub.theirs[0].expect(7).wait(T)
    hub.goes_on()


def _foreign() -> Any:
    import torch

    return torch.zeros(1000)


def test_looking_after_one_peer(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    device, bad = hub.device, hub.ours[0]
    look = device._look  # type: ignore[attr-defined]

    def fails(channel: Channel, seconds: float) -> None:
        if channel is bad:
            raise MemoryError("nobody expected this")
        look(channel, seconds)

    monkeypatch.setattr(device, "_look", fails)
    comes(lambda: hub.lost == [bad])
    assert isinstance(bad.error, PeerLost) and isinstance(bad.error.__cause__, MemoryError)
    hub.goes_on()


def test_accepting(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.handshakes(), "_admits", Raises(hub.handshakes()._admits))
    with pytest.raises(RdmaError):
        hub.others[0].connect(hub.device.address, timeout=0.005)
    monkeypatch.setattr(hub.handshakes(), "_admits", Raises(hub.handshakes()._admits, times=2))
    hub.others[0].connect(hub.device.address, timeout=T)  # tries again
    hub.device.accept(timeout=T)
    hub.goes_on()


def test_a_thread_for_a_handshake_that_does_not_start(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    start, main = threading.Thread.start, threading.current_thread()
    left = [3]

    def fails(thread: threading.Thread) -> None:
        if thread.name == "rdmarpc-handshake" and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fails)
    hub.others[0].connect(hub.device.address, timeout=T)
    assert main is threading.current_thread() and not left[0]
    hub.device.accept(timeout=T)
    hub.goes_on()


@pytest.mark.parametrize("error", [ZeroDivisionError("nobody expected this"), SystemExit(1)])
def test_welcoming(kind: str, open_device: Open, error: BaseException) -> None:
    hub = Hub(kind, open_device)
    kept = hub.device.door.greet
    hub.device.door.greet = Raises(kept, error=error)
    with pytest.raises((PeerLost, RdmaError)):
        hub.others[0].connect(hub.device.address, timeout=2.0)
    hub.goes_on()


def test_waiting_for_what_comes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    loops = hub.loops()
    true = loops._epoll
    fails = Raises(true.poll, times=3)
    monkeypatch.setattr(loops, "_epoll", Instead(true, poll=fails))
    hub.theirs[0].close()
    comes(lambda: not fails.left)
    monkeypatch.setattr(loops, "_epoll", true)
    hub.goes_on()


def test_hanging_up_on_the_slow(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Raises(hub.handshakes().hang_up_on_the_slow, times=2)
    monkeypatch.setattr(hub.handshakes(), "hang_up_on_the_slow", fails)
    comes(lambda: not fails.left)
    hub.goes_on()


@pytest.mark.parametrize("error", [ZeroDivisionError("nobody expected this"), SystemExit(1)])
def test_telling_of_a_loss(kind: str, open_device: Open, error: BaseException) -> None:
    hub = Hub(kind, open_device)
    hub.device.on_lost = fails = Raises(hub.lost.append, error=error)
    channel: Any = hub.theirs[0]
    (channel.stream.sock if kind == "verbs" else channel.sock).shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerLost):
        hub.ours[0].expect(1).wait(T)
    comes(lambda: not fails.left)  # told a moment after those who wait
    hub.goes_on()


@pytest.mark.rdma
def test_looking_at_completions(open_device: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub("verbs", open_device)
    device: Any = hub.device
    fails = Raises(device.watch._look_for_failures, times=2)
    monkeypatch.setattr(device.watch, "_look_for_failures", fails)
    for _ in range(2):
        device.watch.wake()
        time.sleep(0.2)
    comes(lambda: not fails.left)
    bad: Any = hub.ours[0]
    monkeypatch.setattr(bad, "tend", Raises(bad.tend))
    comes(lambda: hub.lost == [bad])
    assert isinstance(bad.error.__cause__, ZeroDivisionError)
    hub.goes_on()
