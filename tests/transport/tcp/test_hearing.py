"""A thread that waits on a tcp channel reads the stream itself."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transport_peer import C, Pair, S, filled

from rdmarpc import transport
from rdmarpc.transport import PeerLost, RemoteAccessError, RemoteRegion
from rdmarpc.transport.tcp import transfer as posts
from rdmarpc.transport.tcp.channel import TcpChannel
from rdmarpc.transport.tcp.outbox import HEADER, LAST, NOTIFY, WRITE

T = 20.0


@pytest.fixture
def kind() -> str:
    return "tcp"


def ends(pair: Pair) -> tuple[TcpChannel, TcpChannel]:
    assert isinstance(pair.ab, TcpChannel) and isinstance(pair.ba, TcpChannel)
    return pair.ab, pair.ba


def waiting(channel: TcpChannel, imm: int) -> tuple[threading.Thread, list[BaseException | None]]:
    """A thread that waits for this notification, and reads; and how it ended."""
    ended: list[BaseException | None] = []

    def wait() -> None:
        try:
            channel.expect(imm).wait(T)
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: reads(channel) or bool(ended))
    return thread, ended


def reads(channel: TcpChannel) -> bool:
    """Whether a thread that waits reads, and the I/O thread has been told."""
    with channel.outbox.lock:
        return channel.outbox.read_by_waiter


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + T
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def read_by_io(channel: TcpChannel, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """The bytes that the I/O thread reads from now on: by the kernel for small frames, and by other calls."""
    small, other = [], []
    receive_some, take = channel.reader._receive_some, channel.reader._take

    def noted() -> tuple[int, int]:
        wanted, got = receive_some()
        other.append(got)
        return wanted, got

    def noted_take() -> int:
        taken = take()
        if channel._io.is_current() and taken > 0:
            small.append(taken)
        return taken

    monkeypatch.setattr(channel.reader, "_receive_some", noted)
    monkeypatch.setattr(channel.reader, "_take", noted_take)
    return small, other


def test_who_waits_reads(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second write into a region on, small frames are for the thread that waits; the sender hears that it has them."""
    ab, ba = ends(pair)
    there, here = filled(pair.b, 64, S), filled(pair.a, 64, C)
    transfer = ab.prepare([(pair.remote(there), here)], notify=3)
    transfer.post().wait(T)
    ba.expect(3).wait(T)
    small, other = read_by_io(ba, monkeypatch)
    monkeypatch.setattr(pair.b._service.looks, "due", lambda: 0.0)  # type: ignore[attr-defined]  # before a look it reads all
    for number in range(20):
        here.fill_(number)
        thread, ended = waiting(ba, 3)
        work = transfer.post()
        thread.join(T)
        assert ended == [None] and there.tolist() == [number] * 64
        work.wait(T)
    assert all(got <= HEADER.size for got in small + other)  # signs of life may come between two waits
    until(lambda: not ba.outbox.read_by_waiter)
    here.fill_(99)
    transfer.post().wait(T)  # nobody waits there: the I/O thread reads again
    assert any(got > HEADER.size for got in small) and there.tolist() == [99] * 64
    assert all(got <= HEADER.size for got in other)


def test_small_frames_that_the_socket_does_not_take(pair: Pair) -> None:
    """Where nobody reads, small frames wait too; all of them arrive, in order and whole."""
    ab, ba = ends(pair)
    there, here = filled(pair.b, 1000, S), filled(pair.a, 1000, C)
    window, count = ab.window(pair.remote(there), here, notify=6), 0
    with ba.reader.lock:
        while ab.outbox.empty:
            here.fill_(count % 251)
            window.put(0, 1000)
            count += 1
        for _ in range(30):  # behind what is left of one frame
            here.fill_(count % 251)
            window.put(0, 1000)
            count += 1
    here.fill_(255)
    ba.expect(6, count).wait(T)
    assert there.tolist() == [(count - 1) % 251] * 1000
    ab.fence(T)
    assert ab.outbox.empty and ba.count(6).consumed == count


def test_what_is_not_small_goes_to_the_io_thread_in_order(pair: Pair) -> None:
    """Writes of all sizes, reads and refusals between them, while the other end waits for every notification."""
    ab, ba = ends(pair)
    rng = random.Random(0)
    there = [filled(pair.b, size, S) for size in (1, 48, 4000, 4048, 4049, 70_000)]
    here = [torch.zeros_like(tensor) for tensor in there]
    remote = [pair.remote(tensor) for tensor in there]
    closed = pair.b.register(pair.b.empty(16, dtype=torch.uint8))
    gone = closed.export()
    closed.close()
    expected = ba.expect(5)
    for number in range(300):
        at = rng.randrange(len(there))
        here[at].fill_(number % 251)
        kind = rng.randrange(4)
        if kind == 0:
            with pytest.raises(RemoteAccessError):
                ab.memcpy(RemoteRegion.load(gone), torch.zeros(16, dtype=torch.uint8), notify=5).wait(T)
        elif kind == 1:
            other = (at + 1) % len(there)
            back = torch.empty_like(there[other])
            ab.memcpy(back, remote[other], notify=5).wait(T)
            expected.wait(T)
            assert torch.equal(back, there[other])
        else:
            works = [ab.memcpy(remote[at], here[at], notify=5) for _ in range(rng.randrange(1, 4))]
            for work in works:
                expected.wait(T)
                assert torch.equal(there[at], here[at])
                work.wait(T)
    until(lambda: ab._posts.answered == ab._posts.last)  # counted after the word that those who wait look at


def test_a_region_that_was_closed_is_not_written_any_more(pair: Pair) -> None:
    ab, ba = ends(pair)
    there = torch.zeros(8, dtype=torch.uint8)
    region = pair.b.register(there)
    transfer = ab.prepare([(RemoteRegion.load(region.export()), filled(pair.a, 8, C))], notify=1)
    for _ in range(2):
        transfer.post().wait(T)
        ba.expect(1).wait(T)
    region.close()
    there.zero_()
    thread, ended = waiting(ba, 2)
    with pytest.raises(RemoteAccessError):
        transfer.post().wait(T)
    ab.notify(2)
    thread.join(T)
    assert ended == [None] and there.tolist() == [0] * 8 and not ba.expect(1).done()


def test_an_empty_write_gives_no_rights(pair: Pair) -> None:
    """It needs none itself: so it must not have the region looked up for those that follow."""
    ab, ba = ends(pair)
    there = pair.b.empty(8, dtype=torch.uint8).fill_(S)
    remote, here = pair.remote(there), filled(pair.a, 8, C)
    for region in (remote.region, 1 << 63):
        ab._posts.put(WRITE, 0, (region, 0, 0, 0), memoryview(b""))
        ab.fence(T)
    thread, ended = waiting(ba, 1)
    with pytest.raises(RemoteAccessError, match="may only be read"):
        ab.memcpy(remote, here).wait(T)
    ab.notify(1)
    thread.join(T)
    assert ended == [None] and there.tolist() == [S] * 8


@pytest.mark.parametrize("peer_timeout", [0.0, 10.0])
def test_a_signal_handler_waits_where_its_thread_waits(peer_timeout: float) -> None:
    """The thread that is to read the stream is in the handler: the I/O thread has to read it."""
    with transport.open_device("tcp", peer_timeout=peer_timeout) as a, transport.open_device("tcp") as b:
        ba = b.connect(a.address)
        ab = a.accept(timeout=T)
        began, ended = threading.Event(), threading.Event()

        def notify() -> None:
            time.sleep(0.2)  # by now the thread waits
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            began.wait(T)
            ba.notify(2)
            ended.wait(T)
            ba.notify(1)

        def handler(number: int, frame: object) -> None:
            began.set()
            ab.expect(2).wait(T)
            ended.set()

        before = signal.signal(signal.SIGUSR1, handler)
        sender = threading.Thread(target=notify)
        try:
            sender.start()
            ab.expect(1).wait(2 * T)
        finally:
            signal.signal(signal.SIGUSR1, before)
            sender.join(T)
        assert ended.is_set()


@pytest.mark.parametrize("where", ["settle", "_send_ack"])
def test_an_interrupted_wait_loses_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A signal handler may raise wherever Python code runs: frames that were taken are answered later."""
    ab, ba = ends(pair)
    there, here = filled(pair.b, 8, S), filled(pair.a, 8, C)
    transfer = ab.prepare([(pair.remote(there), here)], notify=1)
    transfer.post().wait(T)
    ba.expect(1).wait(T)
    monkeypatch.setattr(posts, "_UNANSWERED", 0)  # every post is answered at once
    owner: Any = ab._posts if where == "settle" else ba.reader
    real, raised = getattr(owner, where), []

    def interrupted(*given: Any) -> Any:
        if not raised and not (ab if where == "settle" else ba)._io.is_current():
            raised.append(True)
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(owner, where, interrupted)
    if where == "settle":
        thread, ended = waiting(ab, 7)
        work = transfer.post()
        ba.expect(1).wait(T)
    else:
        thread, ended = waiting(ba, 1)
        work = transfer.post()
    thread.join(T)
    assert raised and isinstance(ended[0], KeyboardInterrupt)
    work.wait(T)
    if where == "_send_ack":
        ba.expect(1).wait(T)
    until(lambda: ab._posts.answered == ab._posts.last)
    assert not ba.expect(1).done()
    transfer.post().wait(T)
    ba.expect(1).wait(T)


def test_the_end_of_a_channel_ends_the_wait(pair: Pair) -> None:
    ab, ba = ends(pair)
    thread, ended = waiting(ba, 1)
    ab.close()
    thread.join(T)
    assert isinstance(ended[0], PeerLost) and ended[0].status == "CLOSED"


def test_a_closed_channel_does_not_wait_for_the_garbage_collector(pair: Pair) -> None:
    ab, ba = ends(pair)
    ab.notify(1)
    ba.expect(1).wait(T)
    of, channel = ab._posts, weakref.ref(ab)
    ab.close()
    ba.close()
    until(ab._gone.is_set)
    del ab
    pair.ab = pair.ba
    gc.disable()
    try:
        until(lambda: channel() is None)
    finally:
        gc.enable()
    assert of.error is not None


def test_malformed_frames_while_somebody_waits(pair: Pair) -> None:
    ab, ba = ends(pair)
    thread, ended = waiting(ba, 1)
    ab.sock.sendall(b"\xff" * 48)
    thread.join(T)
    assert isinstance(ended[0], PeerLost) and ended[0].status == "PROTOCOL"


def work_answered(channel: TcpChannel, number: int) -> bool:
    return channel._posts.answered >= number


def test_the_answer_to_a_small_post_rides_on_what_goes_back(pair: Pair) -> None:
    ab, ba = ends(pair)
    there, here = filled(pair.b, 64, S), filled(pair.a, 64, C)
    transfer = ab.prepare([(pair.remote(there), here)], notify=3)
    for number in range(1, 4):
        work: Any = transfer.post()
        ba.expect(3).wait(T)
        with ba.reader.lock:  # the frame is dealt with
            assert ab._posts.answered < work.seq == number
        ba.notify(4)
        ab.expect(4).wait(T)
        until(partial(work_answered, ab, number))
        assert ab._posts.last == work.seq  # nobody has asked
        assert work.done() and work.exception() is None


def test_who_needs_the_answer_asks_for_it(pair: Pair) -> None:
    """Whatever is asked of a small post: to wait, a second look, a callback. One question is enough."""
    ab, _ = ends(pair)
    there, here = filled(pair.b, 64, S), filled(pair.a, 64, C)
    transfer = ab.prepare([(pair.remote(there), here)])
    works: list[Any] = [transfer.post() for _ in range(5)]
    works[3].wait(T)
    assert works[0].done() and works[3].done() and ab._posts.last == works[4].seq + 1
    works[4].wait(T)
    assert ab._posts.last == works[4].seq + 1
    looked: Any = transfer.post()
    assert not looked.done() and ab._posts.last == looked.seq
    until(looked.done)
    heard = threading.Event()
    transfer.post().then(heard.set)
    assert heard.wait(T)


def test_small_posts_without_an_answer_are_bounded(pair: Pair) -> None:
    """Where nothing goes back and nobody asks, the peer answers now and then."""
    ab, _ = ends(pair)
    there, here = filled(pair.b, 8, S), filled(pair.a, 8, C)
    transfer = ab.prepare([(pair.remote(there), here)])
    for _ in range(500):
        transfer.post()
    until(lambda: len(ab._posts._pending) < 64)
    assert ab._posts.answered > 0 and ab._posts.last == 500


def test_a_number_of_a_post_that_no_peer_gives_does_not_end_the_wait(pair: Pair) -> None:
    ab, ba = ends(pair)
    thread, ended = waiting(ba, 5)
    with ab.outbox.lock:
        ab.outbox.send([HEADER.pack(NOTIFY, LAST, 0, 6, (1 << 64) - 1, 0, 0, 0, 0)])
    thread.join(T)
    assert ended == [None]
