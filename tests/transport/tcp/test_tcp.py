"""What only the tcp device has: frames, places, a network that can fail."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from halt import halt
from ports import server_below_the_ephemeral_ports
from timing import eventually
from transport_peer import C, Pair, Peer, S, State, accept, filled, make, works

from rdmarpc import transport
from rdmarpc.transport import (
    AuthenticationError,
    Channel,
    Device,
    NotSupported,
    PeerLost,
    RemoteAccessError,
    RemoteRegion,
    TransferTimeout,
    Work,
)
from rdmarpc.transport.peers.address import split_place, where_to_listen
from rdmarpc.transport.peers.heartbeat import Heart
from rdmarpc.transport.tcp import transfer as posts
from rdmarpc.transport.tcp.channel import TcpChannel
from rdmarpc.transport.words import kernels

T = 30.0
Open = Callable[..., Device]


@pytest.fixture
def kind() -> str:
    return "tcp"


# -- frames that a confused peer might send


@pytest.mark.parametrize(
    "frame", [b"\xff" * 48, b"\x07" + b"\0" * 47, b"\x06" + b"\0" * 7 + b"\xff" * 40, b"\x08" + b"\xff" * 47]
)
def test_malformed_frames_end_their_channel_only(pair: Pair, frame: bytes) -> None:
    other = pair.a.connect(pair.b.address)
    other_end = pair.b.accept(timeout=T)
    pair.ab.sock.sendall(frame)  # type: ignore[attr-defined]
    with pytest.raises(PeerLost, match="PROTOCOL"):
        pair.ba.expect(1).wait(T)
    with pytest.raises(PeerLost):
        pair.ab.expect(1).wait(T)
    other.notify(1)
    other_end.expect(1).wait(T)


# -- where tcp listens


def test_tcp_listens_on_loopback_without_a_secret(open_device: Open) -> None:
    device = open_device("tcp")
    assert device.address.startswith(b"tcp:127.0.0.1:") and "loopback" in device.explain()
    for place in ("0.0.0.0", "[::]", where_to_listen()[0]):
        if place.startswith("127."):
            continue
        with pytest.raises(NotSupported, match="secret"):
            transport.open_device(f"tcp://{place}")


def test_tcp_listens_where_others_reach_it_with_a_secret(open_device: Open) -> None:
    device = open_device("tcp", secret=b"x" * 16)
    assert device.address.split(b":")[1].decode() == where_to_listen()[0]
    works(open_device("tcp", secret=b"x" * 16), device)
    everywhere = open_device("tcp://0.0.0.0", secret=b"x" * 16)
    assert everywhere.address.split(b":")[1].decode() == where_to_listen()[0]
    works(device, everywhere)


def test_tcp_at_a_place(open_device: Open) -> None:
    with server_below_the_ephemeral_ports() as probe:
        port = probe.getsockname()[1]
        with pytest.raises(NotSupported, match="cannot listen"):
            transport.open_device(f"tcp://127.0.0.1:{port}")
    fixed = open_device(f"tcp://127.0.0.1:{port}")
    assert fixed.address.startswith(f"tcp:127.0.0.1:{port}:".encode())
    by_name = open_device("tcp://lo")
    assert by_name.address.startswith(b"tcp:127.0.0.1:")
    works(fixed, by_name)
    with pytest.raises(NotSupported, match="no-such-interface"):
        transport.open_device("tcp://no-such-interface")
    with pytest.raises(ValueError, match="port"):
        transport.open_device("tcp://127.0.0.1:http")


def test_tcp_over_ipv6(open_device: Open) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here")
    b = open_device("tcp://[::1]")
    assert b.address.startswith(b"tcp:[::1]:")
    works(open_device("tcp"), b)


def test_a_place_is_an_interface_or_an_address_and_a_port() -> None:
    assert split_place("eth0") == ("eth0", 0)
    assert split_place("10.0.0.1:99") == ("10.0.0.1", 99)
    assert split_place("[fe80::1]:99") == ("fe80::1", 99)
    assert split_place("[fe80::1]") == ("fe80::1", 0)
    assert split_place("fe80::1") == ("fe80::1", 0)
    assert split_place("") == ("", 0)


# -- the network fails


def test_a_peer_that_takes_nothing_any_more_is_lost(open_device: Open, start_peer: Callable[..., Peer]) -> None:
    """Stopped with its window full: the same to the sender as a cut cable."""
    peer = start_peer("tcp")
    device = open_device("tcp", peer_timeout=1.0)
    peer.start(accept)
    channel = device.connect(peer.address)
    peer.finish()
    size = 96 << 20
    remote = RemoteRegion.load(peer.call(make, "theirs", size, S))
    assert peer.process.pid
    source = device.empty(size, dtype=torch.uint8).fill_(C)
    halt(peer.process.pid)
    with pytest.raises(PeerLost):  # by the post already, where this thread had no turn for so long
        channel.memcpy(remote, source).wait(20.0)
    peer.kill()


def accept_another(state: State) -> None:
    state.kept.setdefault("channels", []).append(state.device.accept(timeout=T))


def test_a_device_with_stopped_peers_closes_in_bounded_time(open_device: Open, start_peer: Callable[..., Peer]) -> None:
    """However many connections there are: what was posted has one second for all of them."""
    device, peer, count = open_device("tcp", peer_timeout=0.0), start_peer("tcp"), 24
    channels = []
    for _ in range(count):
        peer.start(accept_another)
        channels.append(device.connect(peer.address))
        peer.finish()
    remote, ours = RemoteRegion.load(peer.call(make, "theirs", 16 << 20, S)), device.empty(16 << 20, dtype=torch.uint8)
    assert peer.process.pid
    halt(peer.process.pid)
    for channel in channels:
        channel.memcpy(remote, ours)
    started = time.monotonic()
    device.close()
    assert time.monotonic() - started < 0.75 * count
    peer.kill()


def test_a_stream_cut_in_the_middle_of_a_copy(pair: Pair) -> None:
    size = 64 << 20
    theirs = pair.b.empty(size, dtype=torch.uint8, writable=True).fill_(S)
    with pair.ba.reader.lock:  # type: ignore[attr-defined]  # more than what is under way is not taken
        work = pair.ab.memcpy(pair.remote(theirs), pair.a.empty(size, dtype=torch.uint8).fill_(C), notify=1)
        pair.ba.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
    with pytest.raises(PeerLost):
        work.wait(T)
    with pytest.raises(PeerLost):
        pair.ba.expect(1).wait(T)


# -- regions closed while they are in use


def test_a_region_closed_during_a_copy_into_it(pair: Pair) -> None:
    """The rest of the payload is thrown away, the writer hears of it, and the next copy works."""
    size = 128 << 20
    ours = pair.a.empty(size, dtype=torch.uint8).fill_(C)
    for _ in range(5):
        foreign = torch.zeros(size, dtype=torch.uint8)
        region = pair.b.register(foreign)
        work = pair.ab.memcpy(region.remote, ours, notify=1)
        region.close()
        foreign.zero_()
        try:
            work.wait(T)
            pair.ba.expect(1).wait(T)
        except RemoteAccessError:
            pass
        assert not bool(foreign.any())
    assert not pair.ba.expect(1).done()
    theirs = pair.b.empty(10, dtype=torch.uint8, writable=True)
    pair.ab.memcpy(pair.remote(theirs), ours[:10]).wait(T)
    assert bool((theirs == C).all())


def test_a_region_closed_during_a_copy_out_of_it(pair: Pair) -> None:
    size = 64 << 20
    foreign = torch.full((size,), S, dtype=torch.uint8)
    into = pair.a.empty(size, dtype=torch.uint8).zero_()
    region = pair.b.register(foreign)
    work = pair.ab.memcpy(into, region.remote)
    region.close()
    foreign.zero_()
    try:
        work.wait(T)
        assert bool((into == S).all())
    except RemoteAccessError:
        pass
    assert pair.ab.error is None


def test_a_post_to_a_peer_that_has_just_hung_up(pair: Pair) -> None:
    """The I/O thread has let go of the socket, and a thread that posts finds that out."""
    remote = pair.remote(filled(pair.b, 1 << 10, S))
    pair.ab._io._epoll.unregister(pair.ab.sock)  # type: ignore[attr-defined]
    pair.ab.outbox.flush()  # type: ignore[attr-defined]
    pair.ab.memcpy(remote, filled(pair.a, 1 << 10, C))
    pair.ab._io._epoll.register(pair.ab.sock)  # type: ignore[attr-defined]


def test_a_peer_that_hangs_up_before_it_is_served(open_device: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing beats for its stream, whose row of the heart would be lost."""
    a, b = open_device("tcp"), open_device("tcp")
    start = TcpChannel.start

    def late(channel: TcpChannel, heart: Heart) -> None:
        if channel.device is b:
            assert channel._gone.wait(T)
        start(channel, heart)

    monkeypatch.setattr(TcpChannel, "start", late)
    a.connect(b.address).close()
    assert isinstance(b.accept(timeout=T).error, PeerLost)
    heart: Heart = b._heart  # type: ignore[attr-defined]
    assert len(heart._unused) == kernels.load(heart._rows)


@pytest.mark.parametrize("end", ["answer", "abort"])
def test_what_is_not_pending_any_more_is_done(pair: Pair, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """``then`` comes between the moments when a post is taken off the list and when it counts as done."""
    real = posts.kernels

    def late(change: Callable[[int, int], int]) -> Callable[[int, int], None]:
        def changed(word: int, value: int) -> None:
            time.sleep(0.1)
            change(word, value)

        return changed

    slow = SimpleNamespace(add=late(real.add), store=late(real.store), load=real.load, signal=real.signal)
    monkeypatch.setattr(posts, "kernels", slow)
    remote = pair.remote(filled(pair.b, 1 << 10, S))
    ending = threading.Thread(target=pair.ab.abort)
    seen: list[bool] = []
    with pair.ba.reader.lock:  # type: ignore[attr-defined]
        work = pair.ab.memcpy(filled(pair.a, 1 << 10, 0), remote)
        if end == "abort":
            ending.start()
            look_then(pair, work, seen)
    if end == "answer":
        look_then(pair, work, seen)
        ending.start()
    ending.join(T)
    eventually(lambda: seen, [True])


def look_then(pair: Pair, work: Work, seen: list[bool]) -> None:
    deadline = time.monotonic() + T
    while pair.ab._posts.waiting and time.monotonic() < deadline:  # type: ignore[attr-defined]
        time.sleep(0.001)
    work.then(lambda: seen.append(work.done()))


def test_a_put_that_is_refused_ends_the_channel(pair: Pair) -> None:
    foreign = torch.zeros(1000, dtype=torch.uint8)
    ours = pair.a.empty(1000, dtype=torch.uint8).fill_(C)
    with pair.b.register(foreign) as region:
        window = pair.ab.window(region.remote, ours, notify=1)
        window.put(0, 1000)
        pair.ba.expect(1).wait(T)
    window.put(0, 1000)
    with pytest.raises(RemoteAccessError):
        pair.ab.expect(1).wait(T)
    assert not pair.ba.expect(1).done()


# -- servers that are no device


class Listener:
    """A server that is no device: it reads, and answers with ``reply``."""

    def __init__(self, reply: bytes) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self._reply = reply
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.address = f"tcp:127.0.0.1:{self._sock.getsockname()[1]}:{0:016x}".encode()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            self._open.append(sock)
            sock.sendall(self._reply)

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(T)
        for sock in self._open:
            sock.close()


@pytest.fixture
def listen() -> Iterator[Callable[[bytes], Listener]]:
    made: list[Listener] = []

    def one(reply: bytes) -> Listener:
        made.append(Listener(reply))
        return made[-1]

    yield one
    for listener in made:
        listener.close()


def test_a_server_of_another_kind(open_device: Open, listen: Callable[[bytes], Listener]) -> None:
    a = open_device("tcp")
    with pytest.raises(AuthenticationError, match="protocol"):
        a.connect(listen(b"SSH-2.0-OpenSSH_9.6\r\n" + b" " * 60).address, timeout=T)
    with pytest.raises(TransferTimeout, match=r"0\.3 s"):
        a.connect(listen(b"").address, timeout=0.3)
    with pytest.raises(TransferTimeout, match=r"0\.3 s"):
        a.connect(listen(b"rdmarpc\x02").address, timeout=0.3)


def test_the_port_of_a_dead_device_taken_by_another(open_device: Open) -> None:
    a, b = open_device("tcp"), open_device("tcp")
    stale = b.address.rpartition(b":")[0] + b":" + b"0" * 16
    with pytest.raises(PeerLost, match="another device"):
        a.connect(stale)
    works(a, b)


def test_what_on_connect_posts_comes_after_the_answer(open_device: Open) -> None:
    def answer(channel: Channel) -> bytes:
        channel.notify(9)
        return b"x" * 50_000

    b = open_device("tcp", on_connect=answer)
    channel = open_device("tcp").connect(b.address)
    assert channel.peer_hello == b"x" * 50_000
    channel.expect(9).wait(T)
