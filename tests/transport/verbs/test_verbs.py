"""What only the ``verbs`` device has: work requests, queue pairs, registered memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transport_peer import C, Pair, S, all_are, filled

from rdmarpc import transport
from rdmarpc.transport import Device, NotSupported, PeerLost, RdmaError, RemoteAccessError, RemoteRegion, TransferTimeout

pytestmark = pytest.mark.rdma
T = 20.0


@pytest.fixture
def pair(open_device: Callable[..., Device]) -> Iterator[Pair]:
    a, b = open_device("verbs", arena_limit=32 << 20), open_device("verbs", arena_limit=32 << 20)
    ab = a.connect(b.address)
    yield Pair(a, b, ab, b.accept(timeout=T))


def test_many_posts(pair: Pair) -> None:
    """More than the send queue holds, small and large by turns, and copies that a later message announces."""
    ours, theirs = filled(pair.a, 1 << 20, 0), filled(pair.b, 1 << 20, 0)
    ours.copy_(torch.arange(1 << 20) % 251)
    remote = pair.remote(theirs)
    large = [pair.ab.prepare([(remote, ours)], notify=7) for _ in range(4)]
    works = [transfer.post() for transfer in large]
    for _ in range(700):
        pair.ab.notify(3)
    pair.ba.expect(3, 700).wait(T)
    pair.ba.expect(7, 4).wait(T)
    for work in works:
        work.wait(T)
    assert torch.equal(ours, theirs)
    for fill in range(1, 30):
        ours.fill_(fill)
        pair.ab.memcpy(remote, ours)
        pair.ab.notify(4)
        pair.ba.expect(4).wait(T)
        assert all_are(theirs, fill)


def test_a_full_send_queue_makes_the_poster_wait(open_device: Callable[..., Device]) -> None:
    a, b = open_device("verbs", arena_limit=32 << 20), open_device("verbs", arena_limit=32 << 20)
    ab, ba = a.connect(b.address), b.accept(timeout=T)
    ours, theirs = filled(a, 8 << 20, C), filled(b, 8 << 20, S)
    transfers = [ab.prepare([(RemoteRegion.load(b.export(theirs)), ours)]) for _ in range(2)]
    works = [transfer.post() for transfer in transfers]
    for _ in range(2000):
        ab.notify(1)
    ba.expect(1, 2000).wait(60.0)
    for work in works:
        work.wait(T)
    assert a.counters()["send_queue_full"] > 0
    assert all_are(theirs, C)


def test_memory_outside_the_arena_is_registered_or_staged_and_let_go(open_device: Callable[..., Device]) -> None:
    a, b = open_device("verbs", arena_limit=32 << 20), open_device("verbs", arena_limit=32 << 20)
    ab = a.connect(b.address)
    b.accept(timeout=T)
    theirs = filled(b, 100_000, S)
    remote = RemoteRegion.load(b.export(theirs))
    a.empty(1)  # what is staged lies there
    before = a.counters()
    plain = torch.full((100_000,), C, dtype=torch.uint8)
    ab.memcpy(remote, plain).wait(T)
    assert all_are(theirs, C)
    after = a.counters()
    assert after["bytes_staged"] - before["bytes_staged"] == 100_000
    assert after["registrations"] == before["registrations"]
    transfer = ab.prepare([(remote, plain.fill_(1))])
    for fill in (1, 2):
        plain.fill_(fill)
        transfer.post().wait(T)
        assert all_are(theirs, fill)
    assert a.counters()["registrations"] == before["registrations"] + 1
    assert a.counters()["bytes_staged"] == after["bytes_staged"]
    back = torch.zeros(100_000, dtype=torch.uint8)
    ab.memcpy(back, remote).wait(T)
    assert all_are(back, 2)
    del transfer
    gc.collect()
    ab.prepare([])  # sweeps
    assert not len(ab.leftovers)
    a.empty(1)  # takes back what was freed
    assert a.counters()["arena_used"] == before["arena_used"]


def test_what_the_adapter_refuses_ends_that_channel_only(open_device: Callable[..., Device]) -> None:
    """A wrong remote key, past our own checks: named, at both ends, and other peers go on."""
    a, b, c = (open_device("verbs", arena_limit=32 << 20) for _ in range(3))
    ab, ac = a.connect(b.address), a.connect(c.address)
    ba = b.accept(timeout=T)
    c.accept(timeout=T)
    lost: list[str] = []
    a.on_lost = lambda channel: lost.append(channel.error.status)
    ours, theirs, others = filled(a, 1000, C), filled(b, 1000, S), filled(c, 1000, S)
    remote = RemoteRegion.load(b.export(theirs))
    ab.memcpy(ours, remote).wait(T)
    for number, (address, nbytes, key, rkey, writable) in list(ab.places.known.items()):
        ab.places.known[number] = (address, nbytes, key, rkey ^ 0x5A00, writable)
    remote = RemoteRegion.load(b.export(theirs))
    with pytest.raises(RemoteAccessError, match="REM_ACCESS_ERR") as caught:
        ab.memcpy(remote, ours, notify=1).wait(T)
    assert ab.peer in str(caught.value) and "hint" in str(caught.value)
    with pytest.raises(RdmaError):
        ab.notify(1)
    with pytest.raises((PeerLost, RemoteAccessError)):  # its adapter may tell it why
        ba.expect(1).wait(T)
    assert all_are(theirs, S)
    assert lost == ["REM_ACCESS_ERR"]
    ac.memcpy(RemoteRegion.load(c.export(others)), ours.fill_(C)).wait(T)
    assert all_are(others, C)


def deaf(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue pairs are others than it says: no packet arrives there, as behind a firewall."""
    made = device._pair  # type: ignore[attr-defined]

    def wrong() -> Any:
        qp, setup = made()
        return qp, setup._replace(qp_num=0xABCDE)

    monkeypatch.setattr(device, "_pair", wrong)


def test_a_path_that_carries_nothing_is_found_before_anybody_hears_of_it(
    open_device: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_device("verbs", arena_limit=32 << 20), open_device("verbs", arena_limit=32 << 20)
    lost: list[Any] = []
    a.on_lost = b.on_lost = lost.append
    with monkeypatch.context() as patch:
        deaf(b, patch)
        with pytest.raises(NotSupported, match=r"(?s)no RDMA packet comes back.*RETRY_EXC_ERR.*4791"):
            a.connect(b.address, timeout=T)
        with pytest.raises(TransferTimeout):
            b.accept(timeout=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(b._queues, "room", 0)
        with pytest.raises(NotSupported, match=r"the peer refused: the completion queue .* has room for 0 queue pairs"):
            a.connect(b.address, timeout=T)
    a.connect(b.address, timeout=T).notify(3)
    b.accept(timeout=T).expect(3).wait(T)
    assert not lost and a.counters()["channels"] == b.counters()["channels"] == 1


def test_nothing_lands_after_an_abort() -> None:
    # Not by the fixture: most of what is posted here is never sent, and would be missed among the packets.
    with transport.open_device("verbs", arena_limit=64 << 20) as a, transport.open_device("verbs", arena_limit=64 << 20) as b:
        ab, ba = a.connect(b.address), b.accept(timeout=T)
        ours, theirs = filled(a, 16 << 20, C), filled(b, 16 << 20, S)
        work = ab.prepare([(RemoteRegion.load(b.export(theirs)), ours)]).post()
        ba.abort(timeout=T)
        theirs.fill_(S)  # memory is safe again: whatever is still on its way must not show
        with pytest.raises(RdmaError):
            work.wait(T)
            ab.notify(1)
        assert all_are(theirs, S)


def test_a_forked_child_is_told(open_device: Callable[..., Device]) -> None:
    a, b = open_device("verbs", arena_limit=32 << 20), open_device("verbs", arena_limit=32 << 20)
    ab = a.connect(b.address)
    b.accept(timeout=T)
    ours, theirs = filled(a, 4096, C), filled(b, 4096, S)
    remote = RemoteRegion.load(b.export(theirs))
    child = os.fork()
    if child == 0:
        try:
            ab.notify(1)
        except RdmaError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ours.fill_(9)  # copied on write: the adapter must see ours
    ab.memcpy(remote, ours).wait(T)
    assert all_are(theirs, 9)
