"""GPU memory on ``verbs`` without hardware: the order of what is asked of the driver and of libibverbs, in a process with a
software GPU; and over Soft-RoCE that the addresses of such registrations are the right ones.

What an adapter's driver would do with GPU memory is played by ``softverbs``."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import softgpu
import softverbs
import torch
from softverbs import PATH
from test_gpudirect import MODULE

from rdmarpc.transport import (
    Device,
    NotSupported,
    RdmaError,
    RegistrationError,
    RemoteAccessError,
    RemoteRegion,
    TransferTimeout,
    open_device,
)
from rdmarpc.transport.gpu import driver as cuda_driver
from rdmarpc.transport.memory.memory import Memory
from rdmarpc.transport.nic import packages
from rdmarpc.transport.nic.libibverbs import REMOTE_WRITE, DmaBufMR
from rdmarpc.transport.nic.native import Context, MemoryRegion
from rdmarpc.transport.notify import Expectation, Poller
from rdmarpc.transport.verbs import gpu as verbs_gpu
from rdmarpc.transport.verbs import gpudirect
from rdmarpc.transport.verbs.gpu import GpuMemory
from rdmarpc.transport.verbs.gpudirect import DMA_BUF, PEERMEM, STAGED, WAYS, Gpu

# -- registration, in a process with a software GPU


class FakeRegion(MemoryRegion):
    def __init__(self, address: int, key: int) -> None:
        self.address, self.lkey, self.rkey = address, key, key + 1
        self.open = True

    def close(self) -> None:
        self.open = False


class FakeContext:
    """Takes what ``refuse`` does not name, and writes down what it was asked."""

    name = "mlx5_0"

    def __init__(self, **refuse: str) -> None:
        self.refuse = refuse
        self.asked: list[tuple[Any, ...]] = []
        self.made: list[FakeRegion] = []
        self.first_bytes: list[bytes] = []

    def dma_buf_status(self) -> str:
        return self.refuse.get("status", "EBADF")

    def _make(self, way: str, address: int) -> FakeRegion:
        if status := self.refuse.get(way):
            raise RdmaError("the verb failed", device=self.name, status=status)
        self.made.append(FakeRegion(address, 100 * (len(self.made) + 1)))
        return self.made[-1]

    def register_dma_buf(self, fd: int, offset: int, nbytes: int) -> MemoryRegion:
        self.asked.append((DMA_BUF, offset, nbytes))
        with mmap.mmap(fd, offset + nbytes) as memory:
            self.first_bytes.append(memory[offset : offset + 4])
        return self._make("dma_buf", offset)

    def register(self, address: int, nbytes: int, access: int, *, device_memory: bool = False) -> MemoryRegion:
        assert access == REMOTE_WRITE and device_memory
        self.asked.append((PEERMEM, address, nbytes))
        return self._make("peermem", address)


class Bench:
    """A ``GpuMemory`` over such a context, and what it counted."""

    def __init__(self, gpu: Callable[[Gpu], Gpu] = lambda gpu: gpu, module: str = MODULE, **refuse: str) -> None:
        softgpu.load()
        self.counts: dict[str, int] = {}
        self.context = FakeContext(**refuse)
        self._patches = pytest.MonkeyPatch()
        real = gpudirect.gpu_of
        self._patches.setattr(gpudirect, "gpu_of", lambda *args: gpu(real(*args)))
        self._patches.setattr(gpudirect, "pci_path", lambda device: PATH)
        self._patches.setattr(gpudirect, "peermem", lambda root: module)
        self.memory = GpuMemory(self.context, self.count)  # type: ignore[arg-type]

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.close()
        self._patches.undo()
        assert not any(region.open for region in self.context.made), "something stayed registered"


def tensor(value: float, count: int = 1000, index: int = 0) -> torch.Tensor:
    return torch.full((count,), value, device=torch.device("softgpu", index))


def registers_a_segment_once() -> None:
    with Bench() as bench:
        one, two = tensor(1.0), tensor(2.0)
        torch.softgpu.drain()  # type: ignore[attr-defined]
        base, nbytes, _ = whole(one)
        assert whole(two)[0] == base, "the allocator puts small tensors into one segment"
        places = [bench.memory.reach(each) for each in (one, two, one[100:200])]
        assert bench.context.asked == [(DMA_BUF, 0, nbytes)]
        assert places == [(each.data_ptr() - base, 100) for each in (one, two, one[100:])]
        assert bench.counts == {"registrations": 1}
        (shared,) = [bench.memory.share(two)]
        assert (shared.address, shared.rkey) == (two.data_ptr() - base, 101)
        assert len(bench.context.asked) == 1
        assert "1 segments dma-buf" in "\n".join(bench.memory.explain())
        shared.close()
        shared.close()


def whole(value: torch.Tensor) -> tuple[int, int, int]:
    driver = cuda_driver.driver()
    with driver.on(value.device.index):
        return driver.allocation(value.data_ptr())


def gives_the_bytes_of_the_segment() -> None:
    with Bench() as bench:
        value = torch.full((1 << 20,), 3.0, device="softgpu")
        torch.softgpu.drain()  # type: ignore[attr-defined]
        assert bench.memory.reach(value) is not None
        if whole(value)[0] == value.data_ptr():  # so it is, unless a test before left some of a segment
            assert bench.context.first_bytes == [torch.tensor(3.0).numpy().tobytes()]


def goes_on_to_the_next_way() -> None:
    with Bench(dma_buf="EINVAL") as bench:
        value = tensor(1.0)
        base, nbytes, _ = whole(value)
        assert bench.memory.reach(value) == (value.data_ptr(), 100)
        assert [way for way, *_ in bench.context.asked] == [DMA_BUF, PEERMEM]
        assert bench.context.asked[1] == (PEERMEM, base, nbytes)
        assert "not dma-buf: the verb failed (EINVAL)" in "\n".join(bench.memory.explain())
        large = tensor(1.0, 8 << 20)  # an errno of that memory: another segment may fare better
        assert bench.memory.reach(large) is not None
        assert [way for way, *_ in bench.context.asked] == [DMA_BUF, PEERMEM] * 2
    with Bench(dma_buf="EOPNOTSUPP") as bench:
        kept = [tensor(1.0), tensor(1.0, 8 << 20)]
        assert all(bench.memory.reach(each) is not None for each in kept)
        assert [way for way, *_ in bench.context.asked] == [DMA_BUF, PEERMEM, PEERMEM], "an errno of the adapter"
        assert bench.memory.decision(0).way == PEERMEM


def stages_what_cannot_be_reached() -> None:
    with Bench(dma_buf="ENOMEM", peermem="EFAULT") as bench:
        value = tensor(1.0)
        assert bench.memory.reach(value) is None and bench.memory.reach(value[10:]) is None
        assert len(bench.context.asked) == 2, "it is not tried for each copy"
        with pytest.raises(RegistrationError, match=r"dma-buf.*ENOMEM.*nvidia-peermem.*EFAULT") as raised:
            bench.memory.share(value)
        assert "host memory" in raised.value.hint
    with Bench(module="", status="EOPNOTSUPP") as bench:
        assert bench.memory.reach(tensor(1.0)) is None and bench.context.asked == []
        with pytest.raises(RegistrationError, match=r"takes none .EOPNOTSUPP.; not nvidia-peermem: the module is not loaded"):
            bench.memory.share(tensor(1.0))
    with Bench() as bench:
        value = tensor(1.0)
        with pytest.raises(NotSupported, match="several allocations"):
            bench.memory.segment(value.data_ptr(), 1 << 40, 0)
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(cuda_driver.Driver, "allocation", lambda self, pointer: (pointer, 16, 1 << 40))
            assert bench.memory.reach(value) is None
            with pytest.raises(RegistrationError, match="several allocations"):
                bench.memory.share(value)


def notices_freed_memory() -> None:
    with Bench() as bench:
        value = tensor(1.0, 8 << 20)
        base, _, number = whole(value)
        assert bench.memory.reach(value) is not None
        shared = bench.memory.share(value)
        del value
        torch.softgpu.empty_cache()  # type: ignore[attr-defined]
        bench.memory.sweep()
        assert bench.context.made[0].open, "peers may still touch it"
        shared.close()
        again = tensor(1.0, 8 << 20)
        if whole(again)[0] == base:
            assert whole(again)[2] != number
        assert bench.memory.reach(again) is not None
        assert len(bench.context.asked) == 2 and not bench.context.made[0].open, "found when the next one was registered"
        del again
        torch.softgpu.empty_cache()  # type: ignore[attr-defined]
        deadline = time.monotonic() + 30.0  # nothing is registered any more, but it is noticed
        while bench.memory._segments:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not bench.context.made[1].open


def waits_for_streams() -> None:
    module = softgpu.load()
    with Bench() as bench:
        value = tensor(0.0)
        module.drain()
        bench.memory.wait([0])
        assert bench.counts == {}
        release = module.hold()
        module.fill_later(value, 5.0, 0)
        ticks = [0]

        def tick() -> None:
            for _ in range(20):
                time.sleep(0.01)
                ticks[0] += 1
            release()

        other = threading.Thread(target=tick)
        other.start()
        bench.memory.wait([0])
        assert ticks[0] == 20, "others run meanwhile"
        other.join()
        assert bench.counts == {"gpu_waits": 1}
        assert (module.peek(value) == 5.0).all()
        before, verbs_gpu.WAIT_LIMIT_S = verbs_gpu.WAIT_LIMIT_S, 0.1
        with module.held(), pytest.raises(TransferTimeout, match="not done after"):
            module.fill_later(value, 6.0, 0)
            bench.memory.wait([0])
        verbs_gpu.WAIT_LIMIT_S = before
        bench.memory.wait([0, 1] if module.device_count() > 1 else [0])
        assert (module.peek(value) == 6.0).all()


def flushes_where_it_is_needed() -> None:
    calls: list[str] = []
    real = cuda_driver.Driver.attempt

    def attempt(self: cuda_driver.Driver, name: str, *args: Any) -> str:
        if name in ("cuFlushGPUDirectRDMAWrites", "cuStreamWaitValue32_v2"):
            calls.append(name)
            if name.startswith("cuFlush"):
                assert args == (0, 100)
            else:
                assert args[3] == 1 << 30
        return real(self, name, *args)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(cuda_driver.Driver, "attempt", attempt)
        for options, function in (
            (1, "cuFlushGPUDirectRDMAWrites"),
            (3, "cuFlushGPUDirectRDMAWrites"),
            (2, "cuStreamWaitValue32_v2"),
        ):
            calls.clear()
            with Bench(lambda gpu, options=options: replace(gpu, ordering=0, flush_options=options)) as bench:  # type: ignore[misc]
                assert not bench.memory.flushes
                assert bench.memory.reach(tensor(1.0)) is not None
                assert bench.memory.flushes
                tried = len(calls)
                assert tried == 1, "whether the GPU can be flushed was tried before"
                bench.memory.flush()
                bench.memory.flush()
                assert len(calls) == 3 and set(calls) == {function}
                assert bench.counts["gpu_flushes"] == 2
            assert not bench.memory.flushes
        calls.clear()
        with Bench() as bench:  # ordered by itself
            assert bench.memory.reach(tensor(1.0)) is not None and not bench.memory.flushes
            bench.memory.flush()
        with Bench(lambda gpu: replace(gpu, ordering=0, flush_options=0)) as bench:
            assert bench.memory.reach(tensor(1.0)) is None and bench.context.asked == []
            assert "neither orders" in "\n".join(bench.memory.explain())
        assert calls == []


def needs_a_flush_and_has_none() -> None:
    """The driver says that it could, and then does not."""
    with Bench(lambda gpu: replace(gpu, ordering=0, flush_options=1, dma_buf=True, pinnable=True)) as bench:
        assert bench.memory.reach(tensor(1.0)) is None and bench.context.asked == []
        assert bench.memory.decision(0).ways == (STAGED,)
        assert "needs a flush, and cuFlushGPUDirectRDMAWrites failed: the driver says CUDA_ERROR_NOT_SUPPORTED" in "\n".join(
            bench.memory.explain()
        )


def stages_there_and_back() -> None:
    module = softgpu.load()
    memory = Memory(64 << 20, shared=False)
    with Bench() as bench:
        value = torch.arange(3 << 18, device="softgpu", dtype=torch.int32)
        block = memory.arena.allocate(value.nbytes)
        bench.memory.stage(block, value, out=True)
        bench.memory.wait([0])
        staged = torch.frombuffer(block.segment.view, dtype=torch.int32, offset=block.offset, count=value.numel())
        assert torch.equal(staged, torch.arange(3 << 18, dtype=torch.int32))
        staged += 1
        bench.memory.stage(block, value, out=False)
        bench.memory.wait([0])
        assert torch.equal(module.peek(value), staged)
        del staged
    memory.close()


@pytest.fixture(scope="module")
def process() -> Iterator[softgpu.Process]:
    with softgpu.Process(SOFTCUDA_DMABUF="1") as one:
        yield one


CASES = (
    registers_a_segment_once,
    gives_the_bytes_of_the_segment,
    goes_on_to_the_next_way,
    stages_what_cannot_be_reached,
    notices_freed_memory,
    waits_for_streams,
    flushes_where_it_is_needed,
    stages_there_and_back,
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_gpu_memory(process: softgpu.Process, case: Callable[[], None]) -> None:
    process.run(case)


@pytest.mark.gpu
def test_a_driver_that_does_not_flush() -> None:
    with softgpu.Process() as process:
        process.run(needs_a_flush_and_has_none)


def test_what_arrives_is_flushed() -> None:
    """The two places where a notification is waited for, on another device."""
    with open_device("shm") as a, open_device("shm") as b:
        ab = a.connect(b.address)
        ba = b.accept(timeout=30.0)
        calls: list[int] = []
        expected = Expectation(ba, 20, 1, ba.count(20), lambda: calls.append(1))
        with pytest.raises(TransferTimeout):
            expected.wait(0.01)
        assert not calls
        ab.notify(20)
        expected.wait(30.0)
        assert len(calls) == 1
        poller = Poller(b.memory, b.port, lambda: calls.append(1))
        row = poller.add(ba, 21)
        assert poller.wait(0.01) is None and poller.take() is None and len(calls) == 1
        ab.notify(21)
        assert poller.wait(30.0) == (row, 1) and len(calls) == 2
        ab.notify(21)
        deadline = time.monotonic() + 30.0
        while poller.take() is None:
            assert time.monotonic() < deadline
        assert len(calls) == 3
        poller.close()


# -- over Soft-RoCE, with memory of the software GPU


def couple() -> tuple[Device, Device, Any, Any]:
    a, b = open_device("verbs"), open_device("verbs")
    ab = a.connect(b.address)
    return a, b, ab, b.accept(timeout=10.0)


def over_the_wire(way: str) -> int:
    """All directions between two devices of this process; the bytes that were moved."""
    real = gpudirect.gpu_of
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(gpudirect, "peermem", lambda root: MODULE if way == PEERMEM else "")
        patches.setattr(gpudirect, "pci_path", lambda device: () if way == STAGED else PATH)
        if way == PEERMEM:
            patches.setattr(gpudirect, "gpu_of", lambda *args: replace(real(*args), dma_buf=False))
        return all_directions(way)


def all_directions(way: str) -> int:
    module = softgpu.load()
    a, b, ab, ba = couple()
    with a, b:
        count = 70_000  # more than a few packets, in the midst of a segment
        source = torch.zeros(3 * count, device="softgpu")[count : 2 * count]
        there = torch.zeros(3 * count, device="softgpu")[count : 2 * count]
        host = b.empty(count, dtype=torch.float32, writable=True)
        nbytes = source.nbytes
        arrived = ba.expect(17)

        # A WRITE from a GPU, of what its stream has still to make.
        transfer = ab.prepare([(RemoteRegion.load(b.export(host)), source)], notify=17)
        module.drain()
        module.fill_later(source, 3.0, 1000)
        transfer.post().wait(30.0)
        arrived.wait(30.0)
        assert (host == 3.0).all()
        assert a.counters()["gpu_posts_behind"] == 1
        # A READ into it.
        host.fill_(4.0)
        ab.memcpy(source, RemoteRegion.load(b.export(host))).wait(30.0)
        assert (module.peek(source) == 4.0).all()
        staged = a.counters()["bytes_staged"]
        assert staged == (2 * nbytes if way == STAGED else 0), a.explain()
        # One transfer, from the host, from a GPU, and from the host again.
        ours = a.empty(count, dtype=torch.float32)
        ours.fill_(5.0)
        transfer = ab.prepare([(RemoteRegion.load(b.export(host)), ours)], notify=17)
        for local, value in ((source, 4.0), (ours, 5.0), (source, 4.0)):
            transfer.unbind(0)
            transfer.rebind(0, local)
            transfer.post().wait(30.0)
            arrived.wait(30.0)
            assert (host == value).all()
        if way == STAGED:
            with pytest.raises(RegistrationError, match="peers cannot reach memory of GPU 0: not dma-buf"):
                b.register(there)
            assert "staged" in a.explain()
            return 5 * nbytes
        assert f"segments {way}" in a.explain()

        # Into a GPU from a GPU, a part of it from the host; and back.
        module.fill_later(there, 6.0, 400)
        region = b.register(there)
        remote = RemoteRegion.load(region.export())
        ab.memcpy(source, remote).wait(30.0)
        assert (module.peek(source) == 6.0).all(), "what the stream had been given when it was registered"
        module.fill_later(source, 7.0, 100)
        ab.memcpy(remote, source, notify=17).wait(30.0)
        arrived.wait(30.0)
        assert (module.peek(there) == 7.0).all()
        part = slice(4 * 100, 4 * 60_100)
        ab.memcpy(remote[part], ours[:60_000], notify=17).wait(30.0)
        arrived.wait(30.0)
        seen = module.peek(there)
        assert (seen[:100] == 7.0).all() and (seen[100:60_100] == 5.0).all() and (seen[60_100:] == 7.0).all()
        around = torch.empty(0, device="softgpu").set_(there.untyped_storage())
        assert (module.peek(around)[:count] == 0).all() and (module.peek(around)[2 * count :] == 0).all()
        assert a.counters()["bytes_staged"] == 0
        # A peer that comes later is told; nobody is any more when it is closed.
        with open_device("verbs") as late:
            lb = late.connect(b.address)
            b.accept(timeout=10.0)
            got = late.empty(count, dtype=torch.float32)
            lb.memcpy(got, remote).wait(30.0)
            assert torch.equal(got, seen)
            region.close()
            for channel in (lb, ab):
                with pytest.raises(RemoteAccessError):
                    channel.memcpy(remote, ours).wait(30.0)
        ab.memcpy(RemoteRegion.load(b.export(host)), ours, notify=17).wait(30.0)
        arrived.wait(30.0)
        behind_streams(ab, ba, b.export(host), host, source)
    return 5 * nbytes + 4 * nbytes + 4 * 60_000 + nbytes


def behind_streams(ab: Any, ba: Any, remote: bytes, host: torch.Tensor, source: torch.Tensor) -> None:
    """Nobody waits who posts, and all who wait for what was posted."""
    module, arrived, told = softgpu.load(), ba.expect(17), ba.expect(18)
    module.drain()
    host.zero_()
    module.fill_later(source, 9.0, 1500)
    work = ab.memcpy(RemoteRegion.load(remote), source, notify=17)
    ab.notify_after(18, source.device)
    assert not work.done() and not arrived.done() and not told.done()
    with pytest.raises(TransferTimeout, match="the GPU has not made"):
        ab.fence(0.01)
    ab.fence(30.0)
    assert (host == 9.0).all()
    arrived.wait(30.0)
    told.wait(30.0)
    with pytest.raises(NotSupported, match="cpu is no GPU"):
        ab.notify_after(18, "cpu")
    # The end, with something under way.
    module.fill_later(source, 10.0, 3000)
    work = ab.memcpy(RemoteRegion.load(remote), source, notify=17)
    ab.abort()
    with pytest.raises(RdmaError, match="aborted"):
        work.wait(30.0)
    assert (host == 9.0).all()


def within_auto() -> int:
    """A GPU that has to be flushed, on a device behind another one, whose poller says what has come."""
    module, real = softgpu.load(), gpudirect.gpu_of
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(gpudirect, "pci_path", lambda device: PATH)
        patches.setattr(gpudirect, "gpu_of", lambda *args: replace(real(*args), ordering=0, flush_options=2))
        with open_device("auto") as a, open_device("verbs") as b:
            ab = a.connect(b.address)
            ba = b.accept(timeout=10.0)
            there, ours = torch.zeros(70_000, device="softgpu"), b.empty(70_000, dtype=torch.float32)
            ours.fill_(8.0)
            poller = a.poller()
            row = poller.add(ab, 30)
            with ab.device.register(there) as region:
                ba.memcpy(RemoteRegion.load(region.export()), ours, notify=30).wait(30.0)
                assert poller.wait(30.0) == (row, 1)
                assert a.counters()["gpu_flushes"] == 1
                assert (module.peek(there) == 8.0).all()
            poller.close()
            return int(ours.nbytes)


@pytest.fixture(scope="module")
def helped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[softgpu.Process]:
    """A process in which an adapter's driver takes GPU memory."""
    library = softverbs.library(tmp_path_factory.mktemp("softverbs"))
    with softgpu.Process(SOFTCUDA_DMABUF="1") as process:
        process.run(softverbs.play, library)
        yield process


@pytest.mark.gpu
@pytest.mark.rdma
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_over_the_wire(way: str, helped: softgpu.Process, record_property: Callable[[str, object], None]) -> None:
    record_property("bytes_direct", helped.run(over_the_wire, way, timeout=120.0))


@pytest.mark.gpu
@pytest.mark.rdma
@pytest.mark.timeout(600)
def test_within_auto(helped: softgpu.Process, record_property: Callable[[str, object], None]) -> None:
    record_property("bytes_direct", helped.run(within_auto, timeout=120.0))


@pytest.mark.rdma
def test_soft_roce_takes_no_dma_buf() -> None:
    """Through each package: what an adapter without says to a bad descriptor, and to a good one."""
    assert gpudirect.ask("rxe0") == "EOPNOTSUPP"
    context = Context(packages.choose(), "rxe0")
    fd = os.memfd_create("no dma-buf")
    os.truncate(fd, 1 << 16)
    try:
        with pytest.raises(NotSupported) as raised:
            context.register_dma_buf(fd, 0, 1 << 16)
        assert raised.value.status == "EOPNOTSUPP" and "ibv_reg_dmabuf_mr failed" in raised.value.message
        with pytest.raises(OSError) as native:
            DmaBufMR(context.lib, context.pd_address, 1 << 16, 7, fd, 0)
        assert native.value.errno == errno.EOPNOTSUPP
    finally:
        os.close(fd)
        context.close()
