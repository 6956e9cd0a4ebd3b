"""How channels and devices end, for every device; both ends in this process."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from transport_peer import C, Pair, S, all_are, filled

from rdmarpc.transport import Device, PeerLost, RdmaError
from rdmarpc.transport.peers.heartbeat import SILENT
from rdmarpc.transport.shm.channel import SYNC

T = 30.0


def test_close_is_idempotent_and_what_was_prepared_fails(pair: Pair) -> None:
    ours, theirs = filled(pair.a, 100, C), filled(pair.b, 100, S)
    remote = pair.remote(theirs)
    transfer = pair.ab.prepare([(remote, ours)], notify=1)
    window = pair.ab.window(remote, ours, notify=2)
    expectation = pair.ab.expect(1)
    pair.ab.close()
    pair.ab.close()
    pair.ab.abort()
    for use in (
        transfer.post,
        lambda: window.put(0, 10),
        lambda: pair.ab.notify(3),
        lambda: pair.ab.memcpy(remote, ours),
        lambda: pair.ab.memcpy(ours, remote),
        lambda: pair.ab.prepare([(remote, ours)]),
        lambda: expectation.wait(T),
    ):
        with pytest.raises(PeerLost):
            use()
    assert isinstance(pair.ab.error, PeerLost) and "PeerLost" in repr(pair.ab)
    assert all_are(theirs, S)
    with pytest.raises(PeerLost):
        pair.ba.expect(1).wait(T)
    pair.ba.close()


def frames(error: BaseException | None) -> int:
    return 0 if error is None or error.__traceback__ is None else len(list(traceback.walk_tb(error.__traceback__)))


def test_the_error_of_a_channel_holds_no_frames_however_often_it_is_raised(pair: Pair) -> None:
    ours = filled(pair.a, 100, C)
    remote = pair.remote(filled(pair.b, 100, S))
    transfer = pair.ab.prepare([(remote, ours)], notify=1)
    pair.ba.close()
    with pytest.raises(PeerLost):
        pair.ab.expect(1).wait(T)
    for _ in range(3):
        for use in (transfer.post, lambda: pair.ab.notify(3), lambda: pair.ab.prepare([]), lambda: pair.ab.expect(1).wait(T)):
            with pytest.raises(PeerLost):
                use()
    for channel in (pair.ab, pair.ba):
        assert isinstance(channel.error, PeerLost) and frames(channel.error) == 0


@pytest.mark.parametrize("how", ["close", "abort"])
def test_the_error_of_a_channel_names_the_peer_as_its_user_does(pair: Pair, how: str) -> None:
    ours, remote = filled(pair.a, 100, C), pair.remote(filled(pair.b, 100, S))
    pair.ab.peer = "somebody"
    getattr(pair.ba, how)()
    with pytest.raises(PeerLost, match="peer=somebody"):
        pair.ab.expect(1).wait(T)
    with pytest.raises(PeerLost, match="peer=somebody"):
        pair.ab.memcpy(remote, ours)
    assert pair.ab.peer == "somebody"


def test_what_is_heard_after_close_is_no_error(pair: Pair, kind: str) -> None:
    """By the thread that hears the peers, and had just found that something came."""
    pair.ab.close()
    if kind == "shm":
        assert pair.ab.receive() is False  # type: ignore[attr-defined]


@pytest.mark.parametrize("unread", [False, True], ids=["all was read", "the peer left some unread"])
def test_who_finds_a_broken_connection_is_told_what_the_peer_said_last(
    open_device: Callable[..., Device], unread: bool
) -> None:
    """Also before the thread that hears the peers has come to it."""
    a: Any = open_device("shm")
    b: Any = open_device("shm")
    ab, ba = a.connect(b.address), b.accept(timeout=T)
    may_hear = threading.Event()
    hear = a._hear
    a._hear = lambda channel: (may_hear.wait(T), hear(channel))
    if unread:
        b._hear = lambda channel: may_hear.wait(T)
        ab.send(SYNC, 1)
    ba.give_up(PeerLost("not seen running", status="SILENT"), SILENT)
    b.forget(ba)
    with pytest.raises(PeerLost, match="gave this worker up") as raised:
        ab.send(SYNC, 2)
    assert raised.value.status == ab.error.status == "GIVEN_UP"
    may_hear.set()


def test_a_question_that_was_answered_does_not_fail_because_the_peer_has_left_since(open_device: Callable[..., Device]) -> None:
    a: Any = open_device("shm")
    b: Any = open_device("shm")
    ab, ba = a.connect(b.address), b.accept(timeout=T)
    answered, news = threading.Event(), ab.questions.answer
    ab.questions.answer = lambda *answer: (news(*answer), answered.set())

    def send(kind: int, number: int) -> None:
        """Come back late."""
        ab.send(kind, number)
        assert answered.wait(T)
        ba.close()
        with pytest.raises(PeerLost):
            ab.expect(1).wait(T)

    ab.questions.ask(ab, send, SYNC, ab.questions.number())
    assert isinstance(ab.error, PeerLost)


def test_what_was_posted_before_close_arrives(pair: Pair) -> None:
    ours, theirs = filled(pair.a, 6 << 20, C), filled(pair.b, 6 << 20, S)
    work = pair.ab.memcpy(pair.remote(theirs), ours, notify=1)
    pair.ab.notify(2)
    pair.ab.close()
    work.wait(T)
    pair.ba.expect(1).wait(T)
    pair.ba.expect(2).wait(T)
    assert all_are(theirs, C)


@pytest.mark.parametrize("order", ["ab ba a b", "a b ab ba", "b ab a ba", "ba b a ab"])
def test_close_in_any_order(pair: Pair, order: str) -> None:
    for name in order.split() * 2:
        getattr(pair, name).close()
    for device in (pair.a, pair.b):
        with pytest.raises(RdmaError, match="closed"):
            device.empty(10)
        with pytest.raises(RdmaError, match="closed"):
            device.connect(pair.b.address)


def test_on_lost_is_called_once_for_a_channel_that_broke(pair: Pair) -> None:
    lost: list[object] = []
    heard = threading.Event()

    def on_lost(channel: object) -> None:
        lost.append(channel)
        heard.set()

    pair.b.on_lost = on_lost
    pair.a.on_lost = lost.append
    pair.ab.close()
    assert heard.wait(T)
    pair.ba.close()
    pair.b.close()
    assert lost == [pair.ba]


def test_an_on_lost_that_fails_harms_nobody(
    pair: Pair, kind: str, open_device: Callable[..., Device], caplog: pytest.LogCaptureFixture
) -> None:
    heard = threading.Event()

    def fail(channel: object) -> None:
        heard.set()
        raise RuntimeError("the caller's mistake")

    pair.b.on_lost = fail
    other = open_device(kind).connect(pair.b.address)
    end = pair.b.accept(timeout=T)
    pair.ab.close()
    assert heard.wait(T)
    other.notify(1)
    end.expect(1).wait(T)
    pair.b.empty(10)
    other.memcpy(pair.remote(filled(pair.b, 10, S)), filled(other.device, 10, C)).wait(T)
    deadline = time.monotonic() + T
    while "the caller's mistake" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "the caller's mistake" in caplog.text


def test_tensors_outlive_their_device(kind: str, open_device: Callable[..., Device]) -> None:
    device = open_device(kind)
    tensor = filled(device, 1 << 20, C)
    device.close()
    del device
    assert all_are(tensor, C)
    tensor.fill_(S)
    assert all_are(tensor, S)


def test_abort_by_the_writer(pair: Pair) -> None:
    ours, theirs = filled(pair.a, 64 << 20, C), filled(pair.b, 64 << 20, S)
    transfer = pair.ab.prepare([(pair.remote(theirs), ours)], notify=1)
    transfer.post()
    pair.ab.abort(T)
    theirs.fill_(1)
    with pytest.raises(PeerLost):
        transfer.post()
    with pytest.raises(PeerLost):
        pair.ba.expect(2).wait(T)
    assert all_are(theirs, 1)
    pair.ab.abort()


def test_a_new_connection_works_after_an_abort(pair: Pair) -> None:
    theirs = filled(pair.b, 100, S)
    pair.ab.abort(T)
    again = pair.a.connect(pair.b.address)
    again.memcpy(pair.remote(theirs), filled(pair.a, 100, C)).wait(T)
    assert all_are(theirs, C)
