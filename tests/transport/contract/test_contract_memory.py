"""The contract as to memory, for every device: descriptors, registered memory, the arena; both ends in this process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import torch
from transport_peer import C, Pair, S, all_are, altered, filled

from rdmarpc.transport import (
    ArenaFull,
    Channel,
    Device,
    PeerLost,
    RegistrationError,
    RemoteAccessError,
    RemoteRegion,
)

T = 30.0


def no_cma(channel: Channel, elsewhere: str = "") -> str:
    """Why the kernel copies nothing here; ``elsewhere`` where the device does not ask it to."""
    memory = getattr(channel, "peer_memory", None)
    return elsewhere if memory is None else memory.no_cma


# -- descriptors


@pytest.mark.parametrize("write", [True, False])
def test_bad_descriptors_are_refused_and_the_channel_goes_on(pair: Pair, write: bool) -> None:
    ours, theirs = filled(pair.a, 100_000, C), filled(pair.b, 100_000, S)
    good = pair.remote(theirs)
    bad = [
        altered(good, key=good.key ^ 1),
        altered(good, region=good.region + 77),
        altered(good, offset=1 << 40),
        altered(good, offset=(1 << 64) - 8),
        altered(good, owner=good.owner ^ 1),
        altered(good, epoch=good.epoch ^ 1),
        RemoteRegion.load(pair.a.export(ours)),
    ]
    for remote in bad:
        with pytest.raises(RemoteAccessError) as caught:
            pair.ab.memcpy(*((remote, ours) if write else (ours, remote)), notify=1).wait(T)
        assert pair.ab.peer in str(caught.value)
    assert all_are(theirs, S) and all_are(ours, C)
    assert not pair.ba.expect(1).done()
    assert pair.ab.error is None
    pair.ab.memcpy(good, ours, notify=1).wait(T)
    pair.ba.expect(1).wait(T)
    assert all_are(theirs, C)
    assert not pair.ba.expect(1).done()


def test_one_bad_copy_in_a_list_means_no_notification(pair: Pair) -> None:
    ours, theirs = filled(pair.a, 1000, C), filled(pair.b, 1000, S)
    good = pair.remote(theirs)
    bad = altered(good, key=0)
    for order in ([good, bad], [bad, good], [good, bad, good]):
        with pytest.raises(RemoteAccessError):
            pair.ab.prepare([(remote, ours) for remote in order], notify=1).post().wait(T)
    pair.ab.notify(2)
    pair.ba.expect(2).wait(T)
    assert not pair.ba.expect(1).done()


def test_garbage_is_no_descriptor(pair: Pair) -> None:
    good = pair.b.export(filled(pair.b, 10, S))
    for blob in (b"", good[:-1], good + b"\0", b"XXXX" + good[4:], good[:4] + b"\x09" + good[5:], b"\0" * len(good)):
        with pytest.raises(RemoteAccessError):
            RemoteRegion.load(blob)


# -- memory of others


def test_foreign_memory_is_written_and_read_until_it_is_closed(pair: Pair) -> None:
    if no_cma(pair.ab):
        pytest.skip("this system does not allow cross-memory attach")
    foreign = torch.full((200_000,), S, dtype=torch.uint8)
    before = pair.b.counters()["registrations"]
    with pair.b.register(foreign) as region:
        assert pair.b.counters()["registrations"] == before + 1
        remote = RemoteRegion.load(region.export())
        ours = filled(pair.a, 200_000, 0)
        pair.ab.memcpy(ours, remote).wait(T)
        assert all_are(ours, S)
        ours.fill_(C)
        pair.ab.memcpy(remote[7:], ours[7:], notify=1).wait(T)
        pair.ba.expect(1).wait(T)
        assert all_are(foreign[:7], S) and all_are(foreign[7:], C)
        transfer = pair.ab.prepare([(remote, ours)])
    with pytest.raises(RemoteAccessError):
        transfer.post().wait(T)
    with pytest.raises(RemoteAccessError):
        pair.ab.memcpy(remote, ours).wait(T)
    assert all_are(foreign[:7], S)
    region.close()
    assert pair.ab.error is None


@pytest.mark.parametrize("kind", ["shm"], indirect=True)
def test_a_copy_of_what_is_gone_asks_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the lock that the thread which hears the peer waits for when more regions go."""
    if no_cma(pair.ab):
        pytest.skip("this system does not allow cross-memory attach")
    region = pair.b.register(torch.full((5000,), S, dtype=torch.uint8))
    transfer = pair.ab.prepare([(filled(pair.a, 5000, 0), RemoteRegion.load(region.export()))])
    transfer.post().wait(T)
    region.close()
    asked: list[object] = []
    monkeypatch.setattr(pair.ab.questions, "ask", lambda *question: asked.append(question))  # type: ignore[attr-defined]
    with pytest.raises(RemoteAccessError, match="not registered"):
        transfer.post().wait(T)
    assert not asked


@pytest.mark.parametrize("kind", ["shm"], indirect=True)
def test_foreign_memory_of_a_process_that_has_ended_is_a_loss_of_that_peer(pair: Pair) -> None:
    if no_cma(pair.ab, "not by attach"):
        pytest.skip("cross-memory attach is not used, or not allowed")
    ended = subprocess.Popen(["true"])
    ended.wait(T)
    pair.ab.peer, pair.ab.peer_memory.pid = "worker7", ended.pid
    with pair.b.register(torch.ones(1000)) as region, pytest.raises(PeerLost) as lost:
        pair.ab.memcpy(pair.a.empty(1000), region.remote).wait(T)
    assert lost.value.peer == "worker7" and lost.value.status == "ESRCH"


def test_register_is_free_for_arena_memory(pair: Pair) -> None:
    tensor = filled(pair.b, 1000, S)
    before = pair.b.counters()["registrations"]
    part = pair.b.register(tensor[100:300])
    assert pair.b.counters()["registrations"] == before
    part.close()
    ours = filled(pair.a, 200, C)
    pair.ab.memcpy(part.remote, ours).wait(T)
    assert all_are(tensor[100:300], C) and all_are(tensor[:100], S) and all_are(tensor[300:], S)
    with pytest.raises(RegistrationError, match="arena"):
        pair.b.export(torch.zeros(3))
    with pytest.raises(ValueError, match="contiguous"):
        pair.b.register(torch.zeros(4, 4).t())


# -- the arena, through the device


def test_arena_memory_returns_when_the_last_view_dies(pair: Pair) -> None:
    tensor = pair.a.empty((256, 1024))
    where = tensor.data_ptr()
    view = tensor.t()[3:, 5:].detach()
    del tensor
    other = pair.a.empty((256, 1024))
    assert other.data_ptr() != where
    del view
    assert pair.a.empty((256, 1024)).data_ptr() == where


def test_a_full_arena_names_the_limit_and_the_option(kind: str, open_device: Callable[..., Device]) -> None:
    device = open_device(kind, arena_limit=1 << 20)
    kept = device.empty(900_000, dtype=torch.uint8)
    with pytest.raises(ArenaFull, match=r"1048576(.|\n)*arena_limit(.|\n)*RDMARPC_ARENA_LIMIT"):
        device.empty(900_000, dtype=torch.uint8)
    del kept
    device.empty(900_000, dtype=torch.uint8)


def test_growth_is_reachable_at_once(pair: Pair) -> None:
    """A segment made after the connection can be named by the next descriptor."""
    big = filled(pair.b, 80 << 20, 0)
    pair.ab.memcpy(pair.remote(big)[-5:], filled(pair.a, 5, C)).wait(T)
    assert all_are(big[-5:], C)
