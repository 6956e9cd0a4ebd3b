"""Both providers on a real device: what they make is what libibverbs has, and nothing of it outlives its owner."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import mmap
import os
import resource
import select
import struct
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rdmarpc.transport import NotSupported, PeerLost, RdmaError, RegistrationError, RemoteAccessError
from rdmarpc.transport.nic import libibverbs, packages, ports, sysfs
from rdmarpc.transport.nic.libibverbs import LOCAL, REMOTE_WRITE, Route
from rdmarpc.transport.nic.native import Context, Package, half, word
from rdmarpc.transport.nic.ports import route
from rdmarpc.transport.words import layout as at

pytestmark = pytest.mark.rdma
NBYTES = 1 << 20


PACKAGES = ["pyverbs"] + ["ibverbs"] * (importlib.util.find_spec("ibverbs") is not None)


@pytest.fixture(scope="module", params=PACKAGES)
def provider(request: pytest.FixtureRequest) -> Package:
    return packages.choose(request.param)


class Loop:
    """Two queue pairs of one process, connected to each other, and what it takes to post and poll without a kernel of ours."""

    def __init__(self, provider: Package) -> None:
        self.port = ports.choose(provider)
        self.context = context = self.port.context
        self.pages = mmap.mmap(-1, NBYTES)
        self.memory = np.frombuffer(self.pages, np.uint8)
        self.address = self.memory.ctypes.data
        self.region = context.register(self.address, NBYTES, REMOTE_WRITE)
        self.cq = context.completion_queue(64)
        self.srq = context.shared_receive_queue(64)
        self.pairs = [context.queue_pair(self.cq, self.srq, port=self.port.number, depth=16, max_inline=128) for _ in range(2)]
        for mine, theirs in (self.pairs, self.pairs[::-1]):
            way = route(
                self.port.endpoint,
                self.port.endpoint,
                port=self.port.number,
                sgid_index=self.port.gid.index,
                dest_qp_num=theirs.qp_num,
                rq_psn=11,
                sq_psn=11,
                timeout=14,
                retry_cnt=7,
            )
            mine.connect(way)

    def operation(self, offset: int, *kinds: Any) -> Callable[..., int]:
        return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(word(self.context.address + offset))

    def post(self, pair: int, opcode: int, local: int, remote: int, nbytes: int, *, imm: int = 0, rkey: int = 0) -> None:
        sge = ctypes.create_string_buffer(struct.pack("<QII", self.address + local, nbytes, self.region.lkey), at.SGE_BYTES)
        request = ctypes.create_string_buffer(at.SEND_WR_BYTES)
        fields = (7, 0, ctypes.addressof(sge), 1, opcode, at.SEND_SIGNALED, struct.pack(">I", imm))
        struct.pack_into("<QQQiiI4s", request, 0, *fields)
        struct.pack_into("<QI", request, at.SEND_WR_REMOTE_ADDR, self.address + remote, rkey or self.region.rkey)
        bad = ctypes.c_void_p()
        post_send = self.operation(at.OPS_POST_SEND, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        assert post_send(self.pairs[pair].address, ctypes.addressof(request), ctypes.addressof(bad)) == 0

    def post_receive(self) -> None:
        request = ctypes.create_string_buffer(struct.pack("<QQQi", 99, 0, 0, 0), at.RECV_WR_BYTES)
        bad = ctypes.c_void_p()
        post_recv = self.operation(at.OPS_POST_SRQ_RECV, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        assert post_recv(self.srq.address, ctypes.addressof(request), ctypes.addressof(bad)) == 0

    def poll(self, count: int) -> list[tuple[int, ...]]:
        """wr_id, status, opcode, byte_len, imm_data (as sent), qp_num of ``count`` completions, those of receives first."""
        poll_cq = self.operation(at.OPS_POLL_CQ, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
        one, found = ctypes.create_string_buffer(at.WC_BYTES), []
        deadline = time.monotonic() + 20
        while len(found) < count:
            assert time.monotonic() < deadline, f"{found} and no more"
            if poll_cq(self.cq.address, 1, ctypes.addressof(one)) == 1:
                wr_id, status, opcode, _, nbytes = struct.unpack_from("<QiiII", one, 0)
                imm, qp_num = struct.unpack_from(">I", one, at.WC_IMM_DATA)[0], struct.unpack_from("<I", one, at.WC_QP_NUM)[0]
                found.append((wr_id, status, opcode, nbytes, imm, qp_num))
        assert poll_cq(self.cq.address, 1, ctypes.addressof(one)) == 0
        return sorted(found, reverse=True)

    def arm(self) -> None:
        assert self.operation(at.OPS_REQ_NOTIFY_CQ, ctypes.c_void_p, ctypes.c_int)(self.cq.address, 0) == 0


@pytest.fixture
def loop(provider: Package) -> Iterator[Loop]:
    made = Loop(provider)
    yield made
    made.context.close()


def in_child(action: Callable[[], None]) -> None:
    """Run ``action`` in a forked child; what it raises fails the test."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_notified_write_a_read_and_a_wrong_key(loop: Loop) -> None:
    one, two = loop.pairs
    for pair in loop.pairs:  # what was found is what the package says, and what libibverbs has
        assert half(pair.address + at.QP_NUM) == pair.qp_num and half(pair.address + at.QP_STATE) == at.QPS_RTS
        assert word(pair.address + at.QP_SEND_CQ) == word(pair.address + at.QP_RECV_CQ) == loop.cq.address
        assert word(pair.address + at.QP_SRQ) == loop.srq.address and word(pair.address) == loop.context.address
        assert pair.depth >= 16 and pair.max_inline >= 0
    assert loop.cq.depth >= 64

    loop.post_receive()
    loop.arm()
    loop.memory[:4096] = np.arange(4096) % 251
    loop.post(0, at.WR_RDMA_WRITE_WITH_IMM, 0, 65536, 4096, imm=0xABCD)
    assert select.select([loop.cq.channel_fd], [], [], 20)[0], "an armed queue did not make its channel readable"
    library, queue, cookie = ctypes.CDLL("libibverbs.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    channel = ctypes.c_void_p(word(loop.cq.address + at.CQ_CHANNEL))
    assert library.ibv_get_cq_event(channel, ctypes.byref(queue), ctypes.byref(cookie)) == 0
    assert queue.value == loop.cq.address
    library.ibv_ack_cq_events(queue, 1)
    assert library.ibv_get_cq_event(channel, ctypes.byref(queue), ctypes.byref(cookie)) != 0, "the channel does not block"
    received, sent = loop.poll(2)
    assert received[1:] == (at.WC_SUCCESS, at.WC_RECV_RDMA_WITH_IMM, 4096, 0xABCD, two.qp_num)
    assert (sent[1], sent[2], sent[5]) == (at.WC_SUCCESS, at.WC_RDMA_WRITE, one.qp_num)
    assert (loop.memory[65536 : 65536 + 4096] == loop.memory[:4096]).all()

    loop.memory[131072 : 131072 + 64] = 5
    loop.post(1, at.WR_RDMA_READ, 8192, 131072, 64)
    assert loop.poll(1)[0][1:3] == (at.WC_SUCCESS, at.WC_RDMA_READ)
    assert (loop.memory[8192 : 8192 + 64] == 5).all()

    loop.post(0, at.WR_RDMA_WRITE, 0, 65536, 64, rkey=loop.region.rkey ^ 0x10000)
    error = libibverbs.error_of(loop.poll(1)[0][1], peer="itself")
    assert type(error) is RemoteAccessError and error.status == "REM_ACCESS_ERR"
    two.error()
    two.error()
    loop.post(1, at.WR_RDMA_WRITE, 0, 65536, 64)
    error = libibverbs.error_of(loop.poll(1)[0][1], peer="itself")
    assert type(error) is PeerLost and error.status == "WR_FLUSH_ERR"
    events = []
    while (event := loop.context.async_event()) is not None:
        events.append(event)
    assert not [event for event in events if event.startswith("EVENT_")]


def test_a_forked_child_destroys_nothing(loop: Loop) -> None:
    def child() -> None:
        assert loop.memory[100] == 9, "registered memory is a child's as well"
        for pair in loop.pairs:
            pair.error()
            pair.close()
        loop.region.close()
        loop.context.close()
        natives = loop.context.natives()
        assert natives and loop.context.async_event() is None
        with pytest.raises(RdmaError, match="another process"):
            loop.context.completion_queue(8)
        loop.__dict__.clear()
        del natives
        gc.collect()

    loop.memory[100] = 9
    in_child(child)
    loop.memory[:64] = 3
    loop.post(0, at.WR_RDMA_WRITE, 0, 65536, 64)
    assert loop.poll(1)[0][1] == at.WC_SUCCESS and (loop.memory[65536 : 65536 + 64] == 3).all()


def descriptors() -> int:
    names = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    links = [os.readlink(name) for name in names if os.path.lexists(name)]
    return sum("infiniband" in link for link in links)


def test_what_is_closed_is_gone(provider: Package) -> None:
    before = descriptors()
    loop = Loop(provider)
    assert descriptors() > before
    loop.pairs[0].close()
    loop.pairs[0].close()
    loop.pairs[0].error()
    with pytest.raises(RdmaError, match="closed"):
        loop.pairs[0].connect(route_to_itself(loop))
    loop.context.close()  # with children open: it closes them first
    loop.context.close()
    for thing in (*loop.pairs, loop.srq, loop.cq, loop.region):
        thing.close()
    assert loop.context.async_event() is None
    with pytest.raises(RdmaError, match="closed"):
        loop.context.register(loop.address, NBYTES, REMOTE_WRITE)
    assert descriptors() == before, "a descriptor of a closed device is still open"


def test_limits_are_named(loop: Loop) -> None:
    context, limits = loop.context, loop.port.device
    with pytest.raises(RegistrationError, match="no memory at its address"):
        context.register(8192, 8192, REMOTE_WRITE)
    with pytest.raises(RegistrationError, match="no memory at its address"):
        context.register(loop.address, 1 << 46, LOCAL)
    with pytest.raises(RdmaError, match="ibv_create_cq failed"):
        context.completion_queue(2 * limits.max_cqe)
    with pytest.raises(RdmaError, match="ibv_create_srq failed"):
        context.shared_receive_queue(2 * limits.max_srq_wr)
    with pytest.raises(RdmaError, match="ibv_create_qp failed"):
        context.queue_pair(loop.cq, loop.srq, port=loop.port.number, depth=2 * limits.max_qp_wr, max_inline=0)
    with pytest.raises(RdmaError, match="ibv_modify_qp to INIT failed"):
        context.queue_pair(loop.cq, loop.srq, port=99, depth=16, max_inline=0)
    with pytest.raises(RdmaError, match="ibv_modify_qp to RTR failed"):
        loop.pairs[0].connect(route_to_itself(loop))  # is connected already
    with pytest.raises(RdmaError, match="ibv_query_port"):
        context.port(99)
    greedy = context.queue_pair(loop.cq, loop.srq, port=loop.port.number, depth=16, max_inline=1 << 16)
    assert greedy.max_inline < 1 << 16, "more was granted than any adapter has"


def route_to_itself(loop: Loop) -> Route:
    end = loop.port.endpoint
    numbers = {"rq_psn": 1, "sq_psn": 1, "timeout": 14, "retry_cnt": 7}
    return route(end, end, port=1, sgid_index=loop.port.gid.index, dest_qp_num=loop.pairs[1].qp_num, **numbers)


def test_a_tiny_memlock_limit_is_named(provider: Package) -> None:
    """By a process without privileges, which opens the device and then may lock 64 KiB."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody else")

    def child() -> None:
        context = Context(provider, ports.rank(sysfs.survey())[0][0].device)
        os.setresuid(65534, 65534, 65534)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        pages = np.zeros(NBYTES, np.uint8)
        with pytest.raises(RegistrationError, match=r"may lock 65536 bytes of memory \(memlock\)") as raised:
            context.register(pages.ctypes.data, NBYTES, REMOTE_WRITE)
        assert "ulimit -l unlimited" in raised.value.hint
        context.register(pages.ctypes.data, 8192, REMOTE_WRITE).close()
        context.close()

    in_child(child)


def test_the_port_that_is_chosen(provider: Package) -> None:
    found = ports.rank(sysfs.survey())[0][0]
    interface = next(iter(found.interfaces))
    for place in ("", found.device, found.name, interface):
        port = ports.choose(provider, place)
        try:
            assert port.name == found.name and port.port.state == "ACTIVE"
            assert port.gid == ports.pick_gid(found)[0]
            assert port.lines[0].startswith(f"{found.name} chosen: ")
            assert port.lines[1].startswith(f"GID {port.gid.index} ")
            assert port.lines[2].startswith(f"MTU {port.port.active_mtu} bytes")
            assert port.address.count(".") == 3 or ":" in port.address
            assert (port.port.link_layer, port.port.lid) == (found.link_layer, found.lid), "the kernel's files say otherwise"
        finally:
            port.context.close()
    with pytest.raises(NotSupported, match="no RDMA device, port or interface"):
        ports.choose(provider, "no_such_place")


def test_a_device_that_does_not_open_is_left_out_with_its_reason(provider: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        provider, "new_context", lambda name: (_ for _ in ()).throw(libibverbs.failure(name, "ibv_open_device", 13))
    )
    with pytest.raises(NotSupported) as raised:
        ports.choose(provider)
    assert "ibv_open_device failed: Permission denied" in raised.value.message and "--device=/dev/infiniband" in str(
        raised.value
    )
    monkeypatch.setattr(provider, "devices", list)
    with pytest.raises(NotSupported, match="libibverbs has no driver for it"):
        ports.choose(provider)
