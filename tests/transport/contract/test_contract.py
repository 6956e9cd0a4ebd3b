"""The contract of ``Channel`` and ``Device``, sentence by sentence, for every device; both ends in this process."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import torch
from timing import eventually
from transport_peer import C, Pair, S, all_are, altered, filled

from rdmarpc.transport import (
    Device,
    NotSupported,
    PeerLost,
    RemoteAccessError,
    RemoteRegion,
    TransferTimeout,
)

SIZES = (0, 1, 3, 63, 64 * 1024 + 1, 9 * 2**20 + 7)
T = 30.0
"""Longest wait, in seconds, for what comes at once on a machine that is not overloaded."""


# -- copies


def test_what_is_to_happen_then(pair: Pair) -> None:
    size = 3 << 20
    into, remote = filled(pair.a, size, 0), pair.remote(filled(pair.b, size, S))
    found: list[bool] = []
    ended = threading.Event()

    def look() -> None:
        found.append(work.done() and all_are(into, S))
        ended.set()

    work = pair.ab.memcpy(into, remote)
    work.then(look)
    assert ended.wait(T) and found == [True] and work.exception() is None
    work.then(look)
    assert found == [True, True]


def test_then_comes_when_the_channel_ends(pair: Pair) -> None:
    if not pair.ab.reads_take_peer:
        return  # it comes before ``then`` returns
    remote = pair.remote(filled(pair.b, 1 << 20, S))
    ended = threading.Event()
    with pair.ba.reader.lock:  # type: ignore[attr-defined]
        work = pair.ab.memcpy(filled(pair.a, 1 << 20, 0), remote)
        work.then(ended.set)
        assert not ended.wait(0.1)
        pair.ab.close()
        assert ended.wait(T) and isinstance(work.exception(), PeerLost)


def test_write_then_read_back(pair: Pair) -> None:
    for nbytes in SIZES:
        ours, theirs = filled(pair.a, nbytes, C), filled(pair.b, nbytes, S)
        remote = pair.remote(theirs)
        back = filled(pair.a, nbytes, 0)
        pair.ab.memcpy(back, remote).wait(T)
        assert all_are(back, S) and all_are(theirs, S), nbytes
        pair.ab.memcpy(remote, ours).wait(T)
        assert all_are(theirs, C) and all_are(ours, C), nbytes
        pair.ab.memcpy(back, remote).wait(T)
        assert all_are(back, C), nbytes


def test_write_from_the_accepting_side(pair: Pair) -> None:
    ours, theirs = filled(pair.a, 1000, C), filled(pair.b, 1000, S)
    pair.ba.memcpy(RemoteRegion.load(pair.a.export(ours)), theirs, notify=3).wait(T)
    pair.ab.expect(3).wait(T)
    assert all_are(ours, S) and all_are(theirs, S)


def test_both_directions_at_once_with_more_than_any_buffer_holds(pair: Pair) -> None:
    size = 24 << 20
    a_out, a_in = filled(pair.a, size, C), filled(pair.a, size, 0)
    b_out, b_in = filled(pair.b, size, S), filled(pair.b, size, 0)
    works = [
        pair.ab.memcpy(pair.remote(b_in), a_out),
        pair.ba.memcpy(RemoteRegion.load(pair.a.export(a_in)), b_out),
    ]
    for work in works:
        work.wait(T)
    assert all_are(a_in, S) and all_are(b_in, C)


@pytest.mark.slow
def test_more_than_a_gibibyte(pair: Pair) -> None:
    size = 2**30 + 13
    if psutil.virtual_memory().available < 8 * 2**30:
        pytest.skip("needs 8 GiB of free memory")
    ours, theirs = filled(pair.a, size, C), filled(pair.b, size, 0)
    ours[-1] = 1
    remote = pair.remote(theirs)
    pair.ab.memcpy(remote, ours).wait(60.0)
    assert tuple(torch.aminmax(theirs[:-1])) == (C, C) and theirs[-1] == 1
    theirs[2**30 :] = S
    pair.ab.memcpy(ours, remote).wait(60.0)
    assert tuple(torch.aminmax(ours[: 2**30])) == (C, C) and all_are(ours[2**30 :], S)


def test_any_alignment_and_nothing_beside_it(pair: Pair) -> None:
    ours, theirs = filled(pair.a, 100_000, C), filled(pair.b, 100_000, S)
    remote = pair.remote(theirs)
    places = ((0, 1), (1, 0), (3, 7), (63, 64), (4095, 4097))
    for nbytes, (here, there) in itertools.product((1, 5, 4096, 70_001), places):
        ours.fill_(C)
        theirs.fill_(S)
        pair.ab.memcpy(remote[there : there + nbytes], ours[here : here + nbytes]).wait(T)
        case = f"{nbytes} bytes, {here} -> {there}"
        assert all_are(theirs[there : there + nbytes], C), case
        assert all_are(theirs[:there], S) and all_are(theirs[there + nbytes :], S), case
        theirs[there : there + nbytes] = 1
        pair.ab.memcpy(ours[here : here + nbytes], remote[there : there + nbytes]).wait(T)
        assert all_are(ours[here : here + nbytes], 1), case
        assert all_are(ours[:here], C) and all_are(ours[here + nbytes :], C), case


def test_any_dtype_and_shape(pair: Pair) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64)
    for dtype, shape in itertools.product(dtypes, ((), (1,), (3, 5), (2, 0, 4))):
        ours = pair.a.empty(shape, dtype=dtype)
        ours.copy_(torch.randint(0, 2, shape))
        theirs = pair.b.empty(shape, dtype=dtype, writable=True).zero_()
        assert ours.shape == torch.Size(shape) and ours.dtype == dtype
        pair.ab.memcpy(pair.remote(theirs), ours).wait(T)
        assert torch.equal(ours, theirs), (dtype, shape)


def test_local_side_may_lie_anywhere(pair: Pair) -> None:
    theirs = filled(pair.b, 40, S)
    plain = torch.arange(10, dtype=torch.float32)
    pair.ab.memcpy(pair.remote(theirs), plain).wait(T)
    assert torch.equal(theirs.view(torch.float32), plain)
    leaf = torch.zeros(10, requires_grad=True)
    pair.ab.memcpy(leaf, pair.remote(theirs)).wait(T)
    assert torch.equal(leaf.detach(), plain)
    pair.ab.memcpy(pair.a.register(plain), pair.remote(theirs)).wait(T)


# -- prepared transfers


def test_a_list_with_reads_and_writes_and_one_notification(pair: Pair) -> None:
    outs = [filled(pair.a, size, C) for size in (1, 0, 100_000, 7)]
    ins = [filled(pair.b, size, 0) for size in (1, 0, 100_000, 7)]
    source, sink = filled(pair.b, 5000, S), filled(pair.a, 5000, 0)
    pairs: list = [(pair.remote(there), here) for here, there in zip(outs, ins)]
    transfer = pair.ab.prepare([*pairs, (sink, pair.remote(source))], notify=9)
    expectation = pair.ba.expect(9)
    for _ in range(3):
        work = transfer.post()
        expectation.wait(T)
        assert all(all_are(there, C) for there in ins)
        assert all_are(sink, S)
        work.wait(T)
        assert work.done() and work.exception() is None
        for tensor in (*ins, sink):
            tensor.zero_()
    assert not expectation.done()


def test_many_copies_in_one_transfer(pair: Pair) -> None:
    ours = torch.randint(0, 255, (2000, 3), dtype=torch.uint8)
    theirs = filled(pair.b, 6000, 0)
    remote = pair.remote(theirs)
    pair.ab.prepare([(remote[3 * i : 3 * i + 3], ours[i]) for i in range(2000)], notify=1).post().wait(T)
    pair.ba.expect(1).wait(T)
    assert torch.equal(theirs, ours.flatten())


def test_a_transfer_keeps_its_tensors_alive(pair: Pair) -> None:
    theirs = filled(pair.b, 1 << 16, 0)
    transfer = pair.ab.prepare([(pair.remote(theirs), filled(pair.a, 1 << 16, C))])
    assert pair.a.counters()["arena_used"] >= 1 << 16
    filled(pair.a, 1 << 16, 1)
    transfer.post().wait(T)
    assert all_are(theirs, C)


def test_rebind_exchanges_one_source(pair: Pair) -> None:
    first, second = filled(pair.a, 100, 1), filled(pair.a, 100, 2)
    theirs = filled(pair.b, 200, 0)
    remote = pair.remote(theirs)
    into = filled(pair.a, 0, 0)
    transfer = pair.ab.prepare([(remote[0:0], into), (remote[:100], first), (remote[100:], first)])
    transfer.post().wait(T)
    transfer.rebind(2, second)
    transfer.rebind(0, filled(pair.a, 0, 1))
    transfer.post().wait(T)
    assert all_are(theirs[:100], 1) and all_are(theirs[100:], 2)
    for wrong in (filled(pair.a, 99, 3), torch.zeros(10, 20, dtype=torch.uint8)[:, ::2]):
        with pytest.raises(ValueError):
            transfer.rebind(1, wrong)
    reading = pair.ab.prepare([(first, remote[100:])])
    reading.rebind(0, into := filled(pair.a, 100, 0))
    reading.post().wait(T)
    assert all_are(into, 2) and all_are(first, 1)


def test_an_unbound_tensor_is_let_go(pair: Pair) -> None:
    theirs = filled(pair.b, 1 << 16, 0)
    ours = filled(pair.a, 1 << 16, C)
    alive = weakref.ref(ours)
    transfer = pair.ab.prepare([(pair.remote(theirs), ours)])
    transfer.post().wait(T)
    del ours
    assert alive() is not None
    transfer.unbind(0)
    eventually(lambda: alive() is None)  # a thread that sends may just have been at it
    transfer.rebind(0, filled(pair.a, 1 << 16, 1))
    transfer.post().wait(T)
    assert all_are(theirs, 1)


def test_empty_transfers(pair: Pair) -> None:
    pair.ab.prepare([]).post().wait(T)
    pair.ab.prepare([], notify=4).post().wait(T)
    pair.ba.expect(4).wait(T)


# -- notifications


def test_notifications_count_and_do_not_depend_on_order(pair: Pair) -> None:
    for imm in (5, 6, 5, 65535, 0, 5):
        pair.ab.notify(imm)
    for imm, count in ((65535, 1), (0, 1), (5, 2), (6, 1), (5, 1)):
        pair.ba.expect(imm, count).wait(T)
    assert not pair.ba.expect(5).done()
    for wrong in (-1, 65536):
        with pytest.raises(ValueError, match="65535"):
            pair.ab.notify(wrong)
        with pytest.raises(ValueError, match="65535"):
            pair.ba.expect(wrong)


def test_a_timeout_consumes_nothing(pair: Pair) -> None:
    expectation = pair.ba.expect(1, count=2)
    pair.ab.notify(1)
    pair.ba.expect(2).done()
    with pytest.raises(TransferTimeout, match=r"0\.05 s"):
        expectation.wait(0.05)
    with pytest.raises(TransferTimeout):
        expectation.wait(0)
    pair.ab.notify(1)
    expectation.wait(T)
    assert not expectation.done()


def test_the_data_is_there_before_its_notification(pair: Pair) -> None:
    theirs = pair.b.empty(64, dtype=torch.int64, writable=True).zero_()
    ours = pair.a.empty(64, dtype=torch.int64)
    transfer = pair.ab.prepare([(pair.remote(theirs), ours)], notify=1)
    expectation = pair.ba.expect(1)
    for turn in range(200):
        ours.fill_(turn)
        work = transfer.post()
        expectation.wait(T)
        assert bool((theirs == turn).all())
        work.wait(T)


def test_a_waiter_sleeps_and_is_woken(pair: Pair) -> None:
    done: list[bool] = []

    def wait() -> None:
        pair.ba.expect(8).wait(T)
        done.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive() and not done
    pair.ab.notify(8)
    thread.join(T)
    assert done


def test_a_poller_hears_many_channels(pair: Pair, kind: str, open_device: Callable[..., Device]) -> None:
    third = open_device(kind)
    cb = third.connect(pair.b.address)
    bc = pair.b.accept(timeout=T)
    poller = pair.b.poller()
    assert poller.wait(0.01) is None
    first, second, third_row = poller.add(pair.ba, 1), poller.add(pair.ba, 2), poller.add(bc, 1)
    assert len({first, second, third_row, poller.KICK}) == 4
    pair.ab.notify(1)
    assert poller.wait(T) == (first, 1)
    cb.notify(1)
    assert poller.wait(T) == (third_row, 1)
    pair.ab.notify(2)
    pair.ab.notify(2)
    fresh = 0
    while fresh < 2:
        news = poller.wait(T)
        assert news is not None and news[0] == second
        fresh += news[1]
    assert poller.wait(0) is None
    assert poller.take() is None
    pair.ab.notify(2)
    deadline = time.monotonic() + T
    while (news := poller.take()) is None:
        assert time.monotonic() < deadline
    assert news == (second, 1)
    assert poller.take() is None
    threading.Timer(0.15, poller.kick).start()
    assert poller.wait(T) == (poller.KICK, 1)
    threading.Timer(0.15, cb.notify, (1,)).start()
    assert poller.wait(T) == (third_row, 1)
    poller.drop(third_row)
    cb.notify(1)
    assert poller.wait(0.05) is None
    pair.ab.notify(1)
    assert poller.wait(T) == (first, 1)
    poller.close()


def test_a_poller_of_many_takes_turns(pair: Pair) -> None:
    poller, numbers = pair.b.poller(), range(5000)
    rows = [poller.add(pair.ba, number) for number in numbers]
    for number in (4999, 3, 4097):
        pair.ab.notify(number)
        assert poller.wait(T) == (rows[number], 1)
    pair.ab.notify(7)
    pair.ab.notify(8)
    deadline = time.monotonic() + T
    while not poller.unread(rows[8]):  # one connection, in order: the other one has come, too
        assert time.monotonic() < deadline
    assert poller.take() == (rows[7], 1)
    pair.ab.notify(7)
    while not poller.unread(rows[7]):
        assert time.monotonic() < deadline
    assert [poller.take(), poller.take(), poller.take()] == [(rows[8], 1), (rows[7], 1), None]
    poller.close()


# -- windows


def test_mapped_memory_needs_no_copy(pair: Pair, kind: str) -> None:
    theirs = filled(pair.b, 4096, S)
    mapped = pair.ab.map(pair.remote(theirs)[1024:2048])
    if mapped is None:
        assert kind in ("tcp", "verbs")
        return
    here = torch.frombuffer(mapped.memory, dtype=torch.uint8)
    assert all_are(here, S)
    before = pair.a.counters()["bytes_direct"]
    mapped.begin()
    here.fill_(C)
    mapped.end(1024)
    assert pair.a.counters()["bytes_direct"] == before + 1024
    pair.ab.notify(21)
    pair.ba.expect(21).wait(T)
    assert all_are(theirs[1024:2048], C) and all_are(theirs[:1024], S) and all_are(theirs[2048:], S)
    mapped.begin()
    with pytest.raises(TransferTimeout):
        pair.ba.abort(timeout=0.2)  # as for a copy under way
    mapped.end(1024)
    pair.ba.abort(timeout=T)
    with pytest.raises(PeerLost):
        mapped.begin()
    assert all_are(here, C)  # what is held stays readable


def test_a_window_puts_any_range(pair: Pair) -> None:
    ours, theirs = filled(pair.a, 1 << 20, C), filled(pair.b, 1 << 20, S)
    window = pair.ab.window(pair.remote(theirs), ours, notify=11)
    expectation = pair.ba.expect(11)
    window.put(10, 20)
    expectation.wait(T)
    assert all_are(theirs[10:30], C) and all_are(theirs[:10], S) and all_are(theirs[30:], S)
    window.put(5, 0)
    expectation.wait(T)
    assert all_are(theirs[:10], S)


def test_bytes_put_are_those_at_the_time(pair: Pair) -> None:
    """Also when a copy larger than any buffer is on its way before them: other parts of the window may change meanwhile."""
    bulk, landing = filled(pair.a, 16 << 20, 1), filled(pair.b, 16 << 20, 0)
    ours, theirs = filled(pair.a, 50_000, 0), filled(pair.b, 50_000, 0)
    window = pair.ab.window(pair.remote(theirs), ours, notify=2)
    works = [pair.ab.memcpy(pair.remote(landing), bulk) for _ in range(2)]
    for at in range(50):
        ours[at * 1000 :].fill_(at)
        window.put(at * 1000, 1000)
    pair.ba.expect(2, 50).wait(T)
    ours.fill_(255)
    assert torch.equal(theirs.view(50, 1000)[:, 0], torch.arange(50, dtype=torch.uint8))
    assert torch.equal(theirs.view(50, 1000)[:, 999], torch.arange(50, dtype=torch.uint8))
    for work in works:
        work.wait(T)


def test_window_of_wrong_size_or_place(pair: Pair) -> None:
    ours, theirs = filled(pair.a, 100, C), filled(pair.b, 200, S)
    with pytest.raises(ValueError, match="sizes differ"):
        pair.ab.window(pair.remote(theirs), ours, notify=1)
    with pytest.raises(RemoteAccessError):
        pair.ab.window(altered(pair.remote(theirs[:100]), key=1), ours, notify=1)
    pair.ab.window(pair.remote(theirs[:100]), ours, notify=1)


# -- sides that do not fit


def test_sides_that_do_not_fit(pair: Pair) -> None:
    ours, theirs = filled(pair.a, 100, C), filled(pair.b, 100, S)
    remote = pair.remote(theirs)
    wrong = [
        (remote, remote),
        (ours, ours),
        (remote, filled(pair.a, 99, C)),
        (remote[:50], ours),
        (remote, torch.zeros(10, 20, dtype=torch.uint8)[:, ::2]),
        (remote, torch.zeros(5, 20, dtype=torch.uint8).t()),
        (remote, torch.zeros(100, dtype=torch.uint8, device="meta")),
        (remote, torch.eye(5).to_sparse()),
        (remote, b"x" * 100),
        (remote, None),
    ]
    for dst, src in wrong:
        with pytest.raises(ValueError):
            pair.ab.memcpy(dst, src)  # type: ignore[arg-type]
        with pytest.raises(ValueError):
            pair.ab.prepare([(remote, ours), (dst, src)])  # type: ignore[list-item]
    assert all_are(theirs, S)
    pair.ab.memcpy(remote, ours).wait(T)
    assert all_are(theirs, C)


# -- counters, text


def test_counters_tell_posts_and_bytes(pair: Pair) -> None:
    ours, theirs = filled(pair.a, 1000, C), filled(pair.b, 1000, S)
    transfer = pair.ab.prepare([(pair.remote(theirs), ours), (ours[:10], pair.remote(theirs)[:10])], notify=1)
    before = pair.a.counters()
    for _ in range(5):
        transfer.post().wait(T)
        pair.ba.expect(1).wait(T)
    after = pair.a.counters()
    assert after["bytes_direct"] - before["bytes_direct"] == 5 * 1010
    assert after["posts"] - before["posts"] >= 5
    assert after["bytes_staged"] == 0 and after["registrations"] == before["registrations"]
    assert after["channels"] == 1 and after["segments"] == 1 and after["arena_bytes"] >= after["arena_used"] >= 1000
    pair.a.count_staged(7)
    assert pair.a.counters()["bytes_staged"] == 7
    pair.ab.close()
    ended = pair.a.counters()
    assert ended["channels"] == 0 and ended["bytes_direct"] == after["bytes_direct"] and ended["posts"] >= after["posts"]


def test_text_for_people(pair: Pair, kind: str) -> None:
    assert pair.a.explain().startswith(f"{kind}: ") and "arena" in pair.a.explain()
    assert "open" in repr(pair.ab)
    assert pair.a.address.decode().isprintable() and pair.a.address.startswith(kind.encode() + b":")
    assert pair.ba.peer_hello == b"from a" and pair.ab.peer_hello == b""


@pytest.mark.parametrize("nbytes", (0, 1000))
def test_what_was_posted_before_a_fence_is_counted_after_it(pair: Pair, nbytes: int) -> None:
    ours, remote = filled(pair.a, nbytes, C), pair.remote(filled(pair.b, nbytes, S))
    written = pair.ab.prepare([(remote, ours)], notify=5)
    counts = [pair.ba.expect(imm, 40) for imm in (4, 5)]
    for turn in range(1, 26):
        for _ in range(40):
            pair.ab.notify(4)
            written.post().wait(T)
        pair.ab.fence(T)
        for count in counts:
            assert count.done(), f"fence {turn} returned too early"
            count.wait(T)
    pair.a.close()
    with pytest.raises(PeerLost):
        pair.ab.fence(T)


# -- threads


def test_threads_share_a_channel(pair: Pair) -> None:
    theirs = filled(pair.b, 8 * 30_000, 0)
    remote = pair.remote(theirs)
    errors: list[BaseException] = []

    def run(lane: int) -> None:
        try:
            part = remote[lane * 30_000 : (lane + 1) * 30_000]
            ours, back = filled(pair.a, 30_000, 0), filled(pair.a, 30_000, 0)
            for turn in range(20):
                ours.fill_(lane * 20 + turn)
                pair.ab.memcpy(part, ours, notify=lane).wait(T)
                pair.ab.memcpy(back, part).wait(T)
                assert torch.equal(ours, back)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(lane,)) for lane in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not errors
    for lane in range(8):
        pair.ba.expect(lane, 20).wait(T)
        assert all_are(theirs[lane * 30_000 : (lane + 1) * 30_000], lane * 20 + 19)


def test_unknown_devices() -> None:
    from rdmarpc import transport

    for name in ("", "infiniband", "shm://here"):
        with pytest.raises(NotSupported, match="shm"):
            transport.open_device(name)


def test_arrays_of_numpy_are_copied_as_tensors_are(pair: Pair) -> None:
    source, into = np.full(1000, C, np.uint8), np.zeros(1000, np.uint8)
    theirs = filled(pair.b, 1000, 0)
    pair.ab.memcpy(pair.remote(theirs), source).wait(T)
    assert all_are(theirs, C)
    pair.ab.memcpy(into, pair.remote(theirs)).wait(T)
    assert (into == C).all()
    with pytest.raises(ValueError, match="contiguous"):
        pair.ab.memcpy(pair.remote(theirs), np.zeros(2000, np.uint8)[::2])
    with pytest.raises(ValueError, match=r"an array that torch\.from_dlpack takes, or a Region, got builtins\.bytes"):
        pair.ab.memcpy(pair.remote(theirs), bytes(1000))  # type: ignore[arg-type]


def test_an_array_of_numpy_is_registered(pair: Pair) -> None:
    array = np.full(1000, S, np.uint8)
    into = filled(pair.a, 1000, 0)
    with pair.b.register(array) as region:
        pair.ab.memcpy(into, RemoteRegion.load(region.export())).wait(T)
    assert all_are(into, S)
