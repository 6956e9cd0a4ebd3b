"""GPU memory between two processes: order without waiting on the host, what can be shared, and with whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gpu
import pytest
import torch
from cuda_peer import GpuPeer, T, Two, make, post_again, read, start_two, tensor_of, values, write, write_late
from transport_peer import C, S, State, wait_for

from rdmarpc import transport
from rdmarpc.transport import NotSupported, RemoteAccessError, RemoteRegion, TransferTimeout

pytestmark = pytest.mark.gpu

SLOW = {"SOFTCUDA_DELAY_US": "1500"}
"""Every operation of a stream late by up to so much; of the GPU in software."""


@pytest.fixture
def start() -> Iterator[Callable[..., Two]]:
    yield from start_two()


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    """For tests that leave the channel as it was."""
    peers = GpuPeer(environment=SLOW), GpuPeer(environment=SLOW)
    yield Two(*peers)
    for peer in peers:
        peer.stop()


# -- order


def post_late(state: State, remote: bytes, ms: float, imm: int) -> None:
    """A WRITE of what a slow kernel makes. Nothing here waits for the GPU."""
    there = RemoteRegion.load(remote)
    ours = torch.zeros(there.nbytes // 4, device=gpu.device())
    transfer = state.channel.prepare([(there, ours)], notify=imm)
    torch.accelerator.synchronize()
    waits = gpu.host_waits()
    gpu.fill_later(ours, 7.0, ms)
    work = transfer.post()
    assert not work.done() and gpu.host_waits() == waits
    work.wait(T)
    assert work.done() and work.exception() is None and gpu.host_waits() == waits


def sees(state: State, imm: int, value: float) -> bool:
    """After the notification: is every float of what landed this?"""
    state.channel.expect(imm).wait(T)
    landed = state.kept["landing"].view(torch.float32)
    return bool((landed == value).all())


@pytest.mark.parametrize("place", ["gpu", "other", "cpu"])
def test_a_copy_waits_for_its_producer_and_nobody_waits_for_the_copy(two: Two, place: str) -> None:
    remote = two.landing(40_000, place)
    two.there.start(sees, 1, 7.0)
    two.here.call(post_late, remote, 1000.0, 1)
    assert two.there.finish()


def write_turns(state: State, remote: bytes, place: str, turns: int) -> None:
    there = RemoteRegion.load(remote)
    ours = tensor_of(state.device, there.nbytes, place, 0)
    transfer = state.channel.prepare([(there, ours)], notify=2)
    for turn in range(turns):
        ours.fill_(turn)
        work = transfer.post()
        state.channel.expect(3).wait(T)
        work.wait(T)


def check_turns(state: State, turns: int) -> None:
    for turn in range(turns):
        state.channel.expect(2).wait(T)
        assert values(state, "landing") == {turn}
        state.channel.notify(3)


@pytest.mark.parametrize("places", [("gpu", "gpu"), ("cpu", "gpu"), ("gpu", "cpu")], ids="-".join)
def test_the_data_is_there_before_its_notification(two: Two, places: tuple[str, str]) -> None:
    remote = two.landing(3_000_000, places[1])
    two.there.start(check_turns, 10)
    two.here.call(write_turns, remote, places[0], 10)
    two.there.finish()


def use_streams(state: State, remote: bytes) -> None:
    """Order by streams alone: what is read is used, and what is written is overwritten, without waiting."""
    there = RemoteRegion.load(remote)
    ours = torch.empty(there.nbytes, dtype=torch.uint8, device=gpu.device())
    torch.accelerator.synchronize()
    reading = state.channel.memcpy(ours, there)
    reading.block_current_stream()
    assert set((ours + 1).cpu().tolist()) == {S + 1}
    ours.fill_(C)
    writing = state.channel.memcpy(there, ours)
    writing.block_current_stream()
    ours.fill_(9)
    writing.wait(T)
    writing.block_current_stream()


def test_streams_go_on_after_a_copy(two: Two) -> None:
    remote = two.landing(2_000_000, "gpu", S)
    two.here.call(use_streams, remote)
    assert two.there.call(values, "landing") == {C}


def post_captured(state: State, remote: bytes) -> None:
    """What would go into a graph is refused; afterwards all is as ever."""
    there = RemoteRegion.load(remote)
    ours = torch.full((there.nbytes,), C, dtype=torch.uint8, device=gpu.device())
    transfer = state.channel.prepare([(there, ours)])
    with gpu.capture():
        for post in (transfer.post, lambda: state.channel.memcpy(there, ours)):
            with pytest.raises(transport.RdmaError, match="refused") as raised:
                post()
            assert "CAPTURE" in raised.value.status and "CUDA graph" in raised.value.hint
        with pytest.raises(transport.RdmaError, match="refused"):
            state.channel.notify_after(1, ours.device)
    transfer.post().wait(T)


def test_nothing_goes_into_a_graph(two: Two) -> None:
    remote = two.landing(40_000, "gpu", S)
    two.here.call(post_captured, remote)
    assert two.there.call(values, "landing") == {C}


def notify_late(state: State, ms: float, imm: int) -> None:
    waits = gpu.host_waits()
    gpu.sleep(ms)
    start = time.monotonic()
    work = state.channel.notify_after(imm, gpu.device())
    state.channel.notify_after(imm, gpu.TYPE)  # while the first one is still to come
    assert time.monotonic() - start < ms / 1000 and not work.done()
    state.channel.notify(imm + 1)
    work.wait(T)
    assert gpu.host_waits() == waits


def test_a_notification_comes_after_what_the_stream_was_given(two: Two) -> None:
    two.here.start(notify_late, 2000.0, 4)
    two.there.call(wait_for, 5, 1, T)
    with pytest.raises(TransferTimeout):
        two.there.call(wait_for, 4, 1, 0.01)
    two.there.call(wait_for, 4, 2, T)
    two.here.finish()


def produce(state: State, slots: list[bytes], rounds: int) -> None:
    device = gpu.device()
    sources = [state.device.empty(5000, device=device) for _ in slots]  # type: ignore[call-arg]
    transfers = [
        state.channel.prepare([(RemoteRegion.load(slot), source)], notify=10 + at)
        for at, (slot, source) in enumerate(zip(slots, sources))
    ]
    credits = [state.channel.expect(20 + at) for at in range(len(slots))]
    waits, works = gpu.host_waits(), [transport.DONE for _ in slots]
    for turn in range(rounds):
        at = turn % len(slots)
        if turn >= len(slots):
            credits[at].wait(T)
        works[at].block_current_stream()
        sources[at].copy_(torch.full((5000,), float(turn)))
        works[at] = transfers[at].post()
    for work in works:
        work.wait(T)
    if gpu.TYPE == "cuda":
        assert gpu.host_waits() == waits


def consume(state: State, rounds: int) -> list[int]:
    """Every slot is given back by the stream that reads it, before it has been read."""
    slots = [state.kept[f"slot{at}"].view(torch.float32) for at in range(3)]
    arrived = [state.channel.expect(10 + at) for at in range(3)]
    taken = []
    for turn in range(rounds):
        at = turn % 3
        arrived[at].wait(T)
        gpu.sleep(2.0)
        taken.append(torch.empty_like(slots[at]).copy_(slots[at]))
        state.channel.notify_after(20 + at, gpu.device())
    return [turn for turn, tensor in enumerate(taken) if set(tensor.cpu().tolist()) != {float(turn)}]


def test_slots_are_used_again_and_again(two: Two) -> None:
    slots = [two.there.call(make, f"slot{at}", 20_000, "gpu", 0) for at in range(3)]
    two.there.start(consume, 40)
    two.here.call(produce, slots, 40)
    assert two.there.finish() == []


def post_mixed(state: State, header: bytes, payload: bytes, far: bytes) -> None:
    parts = [tensor_of(state.device, 64, "cpu", 1), *(tensor_of(state.device, 100_000, place, 2) for place in ("gpu", "other"))]
    targets = [RemoteRegion.load(each) for each in (header, payload, far)]
    before = state.device.counters()["bytes_direct"]
    transfer = state.channel.prepare(list(zip(targets, parts)), notify=6)
    for turn in range(5):
        for part in parts[1:]:
            part.fill_(turn)
        parts[0].fill_(turn)
        transfer.post().wait(T)
        state.channel.expect(7).wait(T)
    assert state.device.counters()["bytes_direct"] - before == 5 * 200_064


def check_mixed(state: State) -> None:
    for turn in range(5):
        state.channel.expect(6).wait(T)
        assert all(values(state, name) == {turn} for name in ("header", "payload", "far"))
        state.channel.notify(7)


def test_one_notification_for_a_header_and_payloads_on_two_gpus(two: Two) -> None:
    header, payload, far = (
        two.there.call(make, name, nbytes, place, 9)
        for name, nbytes, place in (("header", 64, "cpu"), ("payload", 100_000, "gpu"), ("far", 100_000, "other"))
    )
    two.there.start(check_mixed)
    two.here.call(post_mixed, header, payload, far)
    two.there.finish()


# -- memory


def rebind(state: State, remote: bytes) -> None:
    there = RemoteRegion.load(remote)
    transfer = state.channel.prepare([(there, tensor_of(state.device, there.nbytes, "gpu", 1))])
    back = torch.empty(there.nbytes, dtype=torch.uint8)
    for place in ("gpu", "other", "cpu", "gpu"):
        for fill in (11, 12):
            transfer.rebind(0, tensor_of(state.device, there.nbytes, place, fill))
            transfer.post().wait(T)
            transfer.unbind(0)
            state.channel.memcpy(back, there).wait(T)
            assert set(back.tolist()) == {fill}


def test_rebind_to_memory_elsewhere(two: Two) -> None:
    two.here.call(rebind, two.landing(300_000, "gpu"))


def count(state: State, name: str) -> int:
    return int(torch.get_device_module(gpu.TYPE).count(name)) if gpu.TYPE != "cuda" else 0


def test_a_segment_is_mapped_once(start: Callable[..., Two]) -> None:
    two = start()
    remotes = [two.there.call(make, f"one of many {at}", 1000 + at, "gpu", 0) for at in range(20)]
    for remote in remotes:
        two.here.call(write, remote, "gpu", C, None)
    assert two.there.call(values, "one of many 19") == {C}
    if gpu.TYPE != "cuda":
        assert two.here.call(count, "ipc_open") == 1
    assert "1 segments mapped" in two.here.call(explain) and gpu.TYPE in two.there.call(explain)


def explain(state: State) -> str:
    return state.device.explain()


def export_slowly(state: State) -> bytes:
    """Memory whose last use is still under way when it is made again."""
    kept = state.device.empty(4000, device=gpu.device())  # type: ignore[call-arg]
    gpu.fill_later(kept, 5.0, 150.0)
    del kept
    state.kept["landing"] = state.device.empty(4000, device=gpu.device())  # type: ignore[call-arg]
    return state.device.export(state.kept["landing"])


def test_what_is_exported_is_not_in_use_any_more(two: Two) -> None:
    two.here.call(write, two.there.call(export_slowly), "gpu", C, None)
    assert set(two.there.call(landed_bytes)) == {C}


def landed_bytes(state: State) -> bytes:
    torch.accelerator.synchronize()
    return bytes(state.kept["landing"].cpu().view(torch.uint8).numpy())


def register_foreign(state: State, nbytes: int) -> list[bytes]:
    """Two regions on memory that is not ours: torch's own, of another stream than that of the arena's tensors."""
    with torch.Stream(gpu.device()):
        foreign = [torch.full((nbytes,), S, dtype=torch.uint8, device=gpu.device()) for _ in range(2)]
        state.kept["regions"] = [state.device.register(tensor) for tensor in foreign]
    return [region.export() for region in state.kept["regions"]]


def take_back(state: State, at: int) -> set[int]:
    """Close a region: what its memory holds then, and later."""
    region = state.kept["regions"][at]
    region.close()
    torch.accelerator.synchronize()
    before = set(region.tensor.cpu().tolist())
    region.tensor.fill_(1)
    time.sleep(0.2)
    return before | set(region.tensor.cpu().tolist())


def test_foreign_memory_until_it_is_closed(two: Two) -> None:
    first, second = two.there.call(register_foreign, 30_000)
    assert two.here.call(read, first, "gpu") == {S}
    two.here.call(write_late, first, 200.0)
    assert two.there.call(take_back, 0) == {C, 1}  # the copy that was under way came first, and none after it
    with pytest.raises(RemoteAccessError):
        two.here.call(post_again)
    with pytest.raises(RemoteAccessError):
        two.here.call(read, first, "gpu")
    assert two.here.call(read, second, "cpu") == {S}
    two.there.call(take_back, 1)
    with pytest.raises(RemoteAccessError):
        two.here.call(read, second, "gpu")


def refuse_handles(state: State) -> bytes:
    from rdmarpc.transport.gpu.driver import Driver

    Driver.ipc_handle = lambda self, base: bytes(64)  # type: ignore[method-assign]
    return make(state, "landing", 1000, "gpu", S)


def test_memory_that_cannot_be_mapped_is_an_error_with_a_name(start: Callable[..., Two]) -> None:
    if gpu.TYPE == "cuda":
        pytest.skip("what CUDA makes of a wrong handle is not defined")
    two = start()
    remote = two.there.call(refuse_handles)
    with pytest.raises(NotSupported, match="CUDA_ERROR_INVALID_VALUE") as caught:
        two.here.call(write, remote, "gpu", C, 1)
    assert "hint" in str(caught.value)
    assert "refused (CUDA_ERROR_INVALID_VALUE)" in two.here.call(explain)
    two.here.call(write, two.landing(1000, "cpu"), "gpu", C, 1)
    two.there.call(wait_for, 1, 1, T)


def misuse(state: State, on_gpu: bytes, foreign: bytes) -> None:
    ours = tensor_of(state.device, 1000, "gpu", 0)
    there, host = RemoteRegion.load(on_gpu), RemoteRegion.load(foreign)
    channel = state.channel
    assert channel.map(there) is None
    wrong: list[Callable[[], Any]] = [
        lambda: channel.window(there, tensor_of(state.device, 1000, "cpu", 0), notify=1),
        lambda: channel.adopt(there, there[:8]),
        lambda: channel.memcpy(host, ours),
        lambda: channel.prepare([(there, ours), (host, torch.zeros(1000, dtype=torch.uint8))]),
        lambda: channel.notify_after(1, "cpu"),
        lambda: state.device.empty(10, device="meta"),  # type: ignore[call-arg]
    ]
    for attempt in wrong:
        with pytest.raises(NotSupported):
            attempt()
    with pytest.raises(transport.RegistrationError), torch.Stream(gpu.device()):
        state.device.export(torch.zeros(30 << 20, device=gpu.device()))
    channel.memcpy(there, ours, notify=30).wait(T)


def register_host(state: State) -> bytes:
    state.kept["host"] = state.device.register(torch.zeros(1000, dtype=torch.uint8))
    return state.kept["host"].export()


def test_what_gpu_memory_cannot_do(two: Two) -> None:
    two.here.call(misuse, two.landing(1000, "gpu"), two.there.call(register_host))
    two.there.call(wait_for, 30, 1, T)


# -- who is at the other end


def test_a_peer_without_a_gpu(start: Callable[..., Two]) -> None:
    there = GpuPeer("shm", environment={"NO_GPU": "1"})
    here = GpuPeer()
    try:
        two = Two(here, there)
        remote = there.call(make_on_cpu, 100_000)
        here.call(write, remote, "gpu", C, 1)
        there.call(wait_for, 1, 1, T)
        assert there.call(values, "landing") == {C}
        assert here.call(read, remote, "other") == {C}
        mine = two.here.call(make, "mine", 1000, "gpu", S)
        with pytest.raises(RemoteAccessError):
            there.call(read_on_cpu, mine)
    finally:
        here.stop()
        there.stop()


def make_on_cpu(state: State, nbytes: int) -> bytes:
    state.kept["landing"] = state.device.empty(nbytes, dtype=torch.uint8, writable=True).fill_(0)
    return state.device.export(state.kept["landing"])


def read_on_cpu(state: State, remote: bytes) -> None:
    there = RemoteRegion.load(remote)
    state.channel.memcpy(torch.empty(there.nbytes, dtype=torch.uint8), there).wait(T)


def test_auto_reaches_gpus_too(start: Callable[..., Two]) -> None:
    two = start("auto", "auto")
    remote = two.landing(5000, "gpu", S)
    assert two.here.call(read, remote, "gpu") == {S}
    two.here.call(write, remote, "gpu", C, 1)
    two.there.call(wait_for, 1, 1, T)
    assert two.there.call(values, "landing") == {C}
    first, _ = two.there.call(register_foreign, 3000)
    assert two.here.call(read, first, "gpu") == {S}


@pytest.mark.skipif(gpu.TYPE == "cuda", reason="this process has a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(NotSupported, match="GPU"):
        transport.open_device("cuda")
    with transport.open_device("auto") as device:
        assert "gpu" not in device.explain() and device.devices["shm"].name == "shm"  # type: ignore[attr-defined]
        with pytest.raises(NotSupported):
            device.empty(10, device="cuda")  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="meta"):
            device.register(torch.zeros(10, device="meta"))


def untouched(state: State) -> str:
    from rdmarpc.transport.gpu import driver as cuda_driver

    assert not cuda_driver.driver.cache_info().currsize
    tensor_of(state.device, 10, "cpu", 1)
    assert not cuda_driver.driver.cache_info().currsize
    return state.device.explain()


def test_opening_touches_no_gpu(start: Callable[..., Two]) -> None:
    two = start()
    two.here.call(write_host, two.there.call(make_on_cpu, 100))
    assert gpu.TYPE in two.here.call(untouched)


def write_host(state: State, remote: bytes) -> None:
    there = RemoteRegion.load(remote)
    state.channel.memcpy(there, torch.zeros(there.nbytes, dtype=torch.uint8)).wait(T)


def share(state: State, remote: bytes) -> None:
    array = pytest.importorskip("numba.cuda").to_device(torch.full((1000,), C, dtype=torch.uint8).numpy())
    tensor = torch.as_tensor(array, device="cuda")
    state.channel.memcpy(RemoteRegion.load(remote), tensor).wait(T)
    with state.device.register(tensor) as region:
        assert region.nbytes == 1000


@pytest.mark.skipif(gpu.TYPE != "cuda", reason="needs CUDA")
def test_arrays_of_numba(two: Two) -> None:
    pytest.importorskip("numba")
    two.here.call(share, two.landing(1000, "gpu"))
    assert two.there.call(values, "landing") == {C}


def copy_array(state: State, remote: bytes) -> None:
    """A WRITE of what cupy's stream makes late, and a READ into an array that cupy's stream fills before."""
    import cupy

    there = RemoteRegion.load(remote)
    gpus = torch.get_device_module(gpu.TYPE)
    with cupy.cuda.Stream(non_blocking=True):
        with gpus.stream(gpus.ExternalStream(cupy.cuda.get_current_stream().ptr, device=0)):
            gpu.sleep(200.0)
        array = cupy.full(there.nbytes, C, dtype="uint8")
        state.channel.memcpy(there, array).wait(T)
        with gpus.stream(gpus.ExternalStream(cupy.cuda.get_current_stream().ptr, device=0)):
            gpu.sleep(200.0)
        array.fill(9)
        state.channel.memcpy(array, there).wait(T)
        assert set(array.get().tolist()) == {C}
    with pytest.raises(ValueError, match="contiguous"):
        state.channel.memcpy(there[:10], array[:20:2])


def register_array(state: State, nbytes: int) -> bytes:
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        region = state.kept["region"] = state.device.register(cupy.full(nbytes, S, dtype="uint8"))
    assert region.nbytes == nbytes
    return region.export()


def close_region(state: State) -> None:
    state.kept["region"].close()


@pytest.mark.parametrize("kind", ["cuda", "auto"])
def test_arrays_of_cupy(start: Callable[..., Two], kind: str) -> None:
    """The real one on CUDA, else a stand-in (``softcupy``)."""
    if gpu.TYPE == "cuda":
        pytest.importorskip("cupy")
    two = start(kind, kind, SOFTCUPY="1")
    two.here.call(copy_array, two.landing(3000, "gpu"))
    assert two.there.call(values, "landing") == {C}
    two.here.call(copy_array, two.landing(3000, "cpu"))
    assert two.here.call(read, two.there.call(register_array, 3000), "gpu") == {S}
    two.there.call(close_region)


def copy_around(state: State, remote: bytes) -> None:
    """A GPU copies from one tensor of the arena; then torch copies its neighbours, and what reaches from one to the next."""
    there = RemoteRegion.load(remote)
    tensors = [tensor_of(state.device, 3 << 20, "cpu", value) for value in range(1, 5)]
    state.channel.memcpy(there, tensors[1][: there.nbytes]).wait(T)
    for value, tensor in enumerate(tensors, 1):
        assert set(tensor.to(gpu.device()).cpu().unique().tolist()) == {value}
        tensor.copy_(torch.full_like(tensor, 9, device=gpu.device()))
        assert set(tensor.unique().tolist()) == {9}


def test_torch_copies_arena_memory_of_which_some_is_pinned(start: Callable[..., Two]) -> None:
    two = start()
    two.here.call(copy_around, two.landing(1000, "gpu"))
    assert two.there.call(values, "landing") == {2}


def make_in_threads(state: State) -> None:
    """At once: the pool that torch takes a GPU's memory from is entered by one thread at a time."""

    def loop(number: int) -> int:
        for turn in range(30):
            made = tensor_of(state.device, (number + 1) << 20, "other" if turn % 2 else "gpu", number)
            assert int(made[-1]) == number
        return number

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(loop, range(4))) == [0, 1, 2, 3]


def test_gpu_memory_is_made_by_several_threads(two: Two) -> None:
    two.here.call(make_in_threads)


def number_of_landing(state: State) -> int:
    from rdmarpc.transport.gpu.driver import driver

    with driver().on(0):
        return driver().allocation(state.kept["landing"].data_ptr())[2]


def mapped(state: State) -> set[int]:
    from rdmarpc.transport.gpu.ipc import imports_of

    imports = imports_of(state.channel.peer_memory.uid)  # type: ignore[attr-defined]
    assert imports is state.channel.peer_gpus.imports  # type: ignore[attr-defined]
    return {number for number, _ in imports._mappings}


def test_a_mapping_goes_by_the_number_that_the_driver_gave(two: Two) -> None:
    """Whoever maps a peer's memory uses one table: other numbers of it mean other segments there."""
    remote = two.landing(40_000, "gpu", S)
    two.here.call(write, remote, "gpu", C, None)
    assert two.there.call(number_of_landing) in two.here.call(mapped)
