"""What a peer may touch, tried by one that goes beyond it: by the words of the contract, and by what lies under them."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timing import eventually
from transport_peer import C, Pair, S, all_are, altered, filled

from rdmarpc.transport import Channel, Device, RemoteAccessError, RemoteRegion
from rdmarpc.transport.memory import mapping

T = 30.0
Open = Callable[..., Device]


def readable(device: Device, nbytes: int, fill: int) -> torch.Tensor:
    return device.empty(nbytes, dtype=torch.uint8).fill_(fill)


def connected(device: Device, other: Device) -> tuple[Channel, Channel]:
    channel = device.connect(other.address)
    return channel, other.accept(timeout=T)


def refused(channel: Channel, remote: RemoteRegion, ours: torch.Tensor, *, read: bool = False) -> str:
    """The words with which a copy is refused."""
    with pytest.raises(RemoteAccessError) as caught:
        channel.memcpy(*((ours, remote) if read else (remote, ours))).wait(T)
    return caught.value.message


def test_what_peers_read_they_cannot_write(pair: Pair) -> None:
    theirs, ours = readable(pair.b, 5000, S), filled(pair.a, 5000, C)
    remote = RemoteRegion.load(pair.b.export(theirs))
    into = filled(pair.a, 5000, 0)
    pair.ab.memcpy(into, remote).wait(T)
    assert all_are(into, S)
    assert "may only be read" in refused(pair.ab, remote, ours)  # the same descriptor object has just been resolved
    with pytest.raises(RemoteAccessError, match="may only be read"):
        pair.ab.prepare([(RemoteRegion.load(remote.dump()), ours)], notify=20).post().wait(T)
    with pytest.raises(RemoteAccessError, match="may only be read"):
        pair.ab.window(RemoteRegion.load(remote.dump()), ours, notify=20)
    pair.ab.notify(21)
    pair.ba.expect(21).wait(T)
    assert all_are(theirs, S)  # and nothing was notified, and the channel goes on


def test_what_is_one_peers_is_not_anothers(kind: str, open_device: Open) -> None:
    """Of three devices, ``c`` has the descriptor of what ``a`` may write at ``b``."""
    a, b, c = open_device(kind), open_device(kind), open_device(kind)
    (ab, ba), (cb, bc) = connected(a, b), connected(c, b)
    place = ba.empty(5000, dtype=torch.uint8).fill_(0)
    remote = b.export(place)
    ab.memcpy(RemoteRegion.load(remote), filled(a, 5000, C)).wait(T)
    assert all_are(place, C)
    thief = filled(c, 5000, S)
    refused(cb, RemoteRegion.load(remote), thief)
    refused(cb, RemoteRegion.load(remote), thief, read=True)
    assert all_are(place, C) and all_are(thief, S)
    own = bc.empty(5000, dtype=torch.uint8).fill_(0)
    moved = altered(RemoteRegion.load(b.export(own)), region=RemoteRegion.load(remote).region)
    refused(cb, moved, thief)  # another region under the key of its own
    cb.memcpy(RemoteRegion.load(b.export(own)), thief).wait(T)
    assert all_are(own, S) and all_are(place, C)


def test_memory_for_one_peer_ends_with_its_channel(pair: Pair) -> None:
    """It goes back to the system when nothing uses it, and what is still held stays good."""
    before = pair.b.counters()
    kept, place = (pair.ba.empty(1 << 20, dtype=torch.uint8).fill_(fill) for fill in (S, 0))
    pair.ab.memcpy(RemoteRegion.load(pair.b.export(place)), filled(pair.a, 1 << 20, C)).wait(T)
    assert pair.b.counters()["segments"] == before["segments"] + 1
    pair.ab.close()
    pair.ba.close()
    del place
    pair.b.empty(1)
    assert pair.b.arena.find(kept.data_ptr(), 1 << 20) is not None and all_are(kept, S)
    alias = kept[10:20]
    del kept
    pair.b.empty(1)
    assert all_are(alias, S)
    del alias

    def given_back() -> bool:
        gc.collect()
        pair.b.arena.sweep()
        after = pair.b.counters()
        return after["segments"] <= before["segments"] + 1 and after["arena_used"] <= before["arena_used"] + 64

    eventually(given_back)  # a thread that serves the channel may just have been at it
    assert len(pair.b.memory.regions) == pair.b.counters()["segments"]
    other = readable(pair.b, 1 << 20, S)
    assert all_are(other, S)


def test_a_loan_is_for_one_peer_one_tensor_and_its_life(open_device: Open) -> None:
    """``tcp``: whatever the descriptor says is looked up at its owner."""
    a, b, c = open_device("tcp"), open_device("tcp"), open_device("tcp")
    (ab, ba), (cb, _) = connected(a, b), connected(c, b)
    lent, secret = readable(b, 5000, S), readable(b, 5000, 7)
    remote = b.lend(lent, ba)
    into = filled(a, 5000, 0)
    ab.memcpy(into, remote).wait(T)
    assert all_are(into, S)
    ab.memcpy(into[:100], remote[50:150]).wait(T)
    refused(cb, remote, filled(c, 5000, 0), read=True)
    refused(ab, remote, into)
    for offset in (1, secret.data_ptr() - lent.data_ptr()):
        refused(ab, altered(remote, offset=offset & (1 << 64) - 1), into, read=True)
    refused(ab, altered(remote, nbytes=5001), filled(a, 5001, 0), read=True)
    refused(ab, altered(remote, key=remote.key ^ 1), into, read=True)
    alias = lent[:10]
    del lent
    ab.memcpy(into, remote).wait(T)  # its memory is still held here
    del alias
    gc.collect()
    assert "not registered" in refused(ab, remote, into, read=True)
    assert not ba.access.lent  # type: ignore[attr-defined]


# -- under the contract: what the kernel, or the adapter, says


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every file of memory that peers handed to devices of this process, for keeps."""
    files: list[int] = []
    real = mapping.check_sealed

    def check(fd: int, nbytes: int) -> None:
        files.append(os.dup(fd))
        real(fd, nbytes)

    monkeypatch.setattr(mapping, "check_sealed", check)
    yield files
    for fd in files:
        os.close(fd)


def containing(files: list[int], mark: bytes) -> list[int]:
    """Those in which these bytes are."""
    found = []
    for fd in files:
        with mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ) as memory:
            if memory.find(mark) >= 0:
                found.append(fd)
    return found


def tries(fd: int) -> dict[str, Callable[[], object]]:
    """Ways to write a file that was handed to us."""
    size = os.fstat(fd).st_size

    def mapped() -> None:
        mmap.mmap(fd, size).close()

    def reopened() -> None:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        try:
            mmap.mmap(again, size).close()
        finally:
            os.close(again)

    def upgraded() -> None:
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as memory:
            address = np.frombuffer(memory, np.uint8).ctypes.data
            library = ctypes.CDLL(None, use_errno=True)
            if library.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE):
                raise OSError(ctypes.get_errno(), "mprotect")

    def punched() -> None:
        library = ctypes.CDLL(None, use_errno=True)
        keep_size, punch_hole = 1, 2
        if library.fallocate(fd, keep_size | punch_hole, ctypes.c_long(0), ctypes.c_long(4096)):
            raise OSError(ctypes.get_errno(), "fallocate")

    return {"write": lambda: os.pwrite(fd, b"!", 0), "map": mapped, "reopen": reopened, "mprotect": upgraded, "punch": punched}


def test_the_kernel_keeps_peers_to_reading(handed: list[int], open_device: Open) -> None:
    a, b = open_device("shm"), open_device("shm")
    mark = os.urandom(32)
    theirs = readable(b, 5000, S)
    theirs[:32] = torch.frombuffer(bytearray(mark), dtype=torch.uint8)
    ab, _ = connected(a, b)
    ab.memcpy(filled(a, 1000, 0), RemoteRegion.load(b.export(theirs))[1000:2000]).wait(T)
    [fd] = containing(handed, mark)
    for name, attempt in tries(fd).items():
        with pytest.raises(PermissionError):
            attempt()
            pytest.fail(f"{name} is a way to write what peers only read")
    assert bytes(theirs[:32].numpy()) == mark and all_are(theirs[32:], S)
    theirs.fill_(C)  # we may still
    assert all_are(theirs, C)


def test_nobody_else_is_handed_what_one_peer_may_write(handed: list[int], open_device: Open) -> None:
    a, b, c = open_device("shm"), open_device("shm"), open_device("shm")
    (ab, ba), (cb, bc) = connected(a, b), connected(c, b)
    marks = {}
    for channel, back in ((ba, ab), (bc, cb)):
        before, mark = len(handed), os.urandom(32)
        place = channel.empty(5000, dtype=torch.uint8)
        back.memcpy(RemoteRegion.load(b.export(place)), torch.frombuffer(bytearray(mark * 200)[:5000], dtype=torch.uint8)).wait(
            T
        )
        marks[mark] = handed[before:]
    for mark, files in marks.items():  # one file for one peer, which nobody got a second time
        assert containing(handed, mark) == containing(files, mark) != []
        assert len(containing(files, mark)) == 1


@pytest.mark.rdma
def test_the_adapter_keeps_peers_to_reading(open_device: Open) -> None:
    """A peer that does not look at what it was told posts the WRITE all the same."""
    a, b = open_device("verbs", arena_limit=32 << 20), open_device("verbs", arena_limit=32 << 20)
    ab, _ = connected(a, b)
    theirs = readable(b, 5000, S)
    remote = RemoteRegion.load(b.export(theirs))
    into = filled(a, 5000, 0)
    ab.memcpy(into, remote).wait(T)
    assert all_are(into, S)
    places: Any = ab.places.known  # type: ignore[attr-defined]
    places[remote.region] = (*places[remote.region][:4], True)
    with pytest.raises(RemoteAccessError, match="REM_ACCESS_ERR"):
        ab.memcpy(RemoteRegion.load(remote.dump()), filled(a, 5000, C)).wait(T)
    assert all_are(theirs, S)


def test_nothing_is_left_open(open_device: Open) -> None:
    """Files of memory for one peer do not outlive its channel."""

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    a, b = open_device("shm"), open_device("shm")
    first = 0
    for turn in range(10):
        ab, ba = connected(a, b)
        place = ba.empty(5000, dtype=torch.uint8)
        ab.memcpy(RemoteRegion.load(b.export(place)), filled(a, 5000, C)).wait(T)
        del place
        ab.close()
        ba.close()
        del ab, ba
        if turn == 0:
            first = open_files()
    limit = time.monotonic() + T
    while open_files() > first + 8 and time.monotonic() < limit:  # what the last connection had may be closed a moment later
        gc.collect()
        b.arena.sweep()
        time.sleep(0.02)
    assert open_files() <= first + 8
