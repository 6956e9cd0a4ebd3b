"""The native RDMA resources of a device: what libibverbs makes, with its owner.

Each object here owns one native object; ``close`` is idempotent. The owner of a resource closes it before those that it was
made from (queue pair, then queues, then memory regions, then the context, which closes what is left). Posting and polling do
not pass through here: kernels get the native addresses, and call through the operations table of the context
(``words/completions``). Names are those of libibverbs. Every failure is an ``RdmaError`` that names the device. In a forked
child ``close`` does nothing: the native objects are the parent's. A context lives until it is closed, or until the process ends
and the kernel takes all of it back.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import mmap
import os
import struct
import threading
from collections.abc import Callable
from ctypes import c_int, c_uint32
from functools import partial
from typing import Any

from ..errors import NotSupported, RdmaError
from ..memory import mapping
from ..words import layout as at
from . import libibverbs
from .attributes import LOCAL, REMOTE_READ, REMOTE_WRITE, DeviceAttr, PortAttr, Route
from .status import event_name, failure, registration_failure

MTU = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
"""Bytes to ``enum ibv_mtu``."""
_BYTES_OF_MTU = {code: nbytes for nbytes, code in MTU.items()}
_PORT_STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
_GRH_REQUIRED = 1
"""``IBV_QPF_GRH_REQUIRED``, of a port's flags: virtual InfiniBand ports."""
_HOP_LIMIT = 64
"""How many routers a packet on a global route may pass. IP packets usually start with as many."""
_ACCESS = {
    LOCAL: at.ACCESS_LOCAL_WRITE,
    REMOTE_READ: at.ACCESS_LOCAL_WRITE | at.ACCESS_REMOTE_READ,
    REMOTE_WRITE: at.ACCESS_LOCAL_WRITE | at.ACCESS_REMOTE_READ | at.ACCESS_REMOTE_WRITE,
}
_LAST = ("ibv_destroy_qp", "ibv_destroy_srq", "ibv_destroy_cq", "ibv_destroy_comp_channel", "ibv_dereg_mr", "ibv_dealloc_pd")
"""What destroys the objects of a context, in the order of its end."""


def _readable(address: int) -> bool:
    """Whether there is memory of ours. Where a sandbox forbids to ask, the kernel will say."""
    byte = ctypes.c_char()
    try:
        mapping.transfer(os.getpid(), ctypes.addressof(byte), address, 1, write=False)
    except NotSupported:
        return True
    except RdmaError:
        return False
    return True


class Resource:
    """One native object of a context, at ``native`` until it is closed. ``destroy``: the verb that ends it."""

    def __init__(self, context: Context, native: int, destroy: str) -> None:
        self.context, self.native, self.destroy = context, native, destroy
        self.address = native
        with context.lock:
            context.children.append(self)

    def owned(self) -> int:
        """The native object, as long as it is open."""
        if not self.native:
            raise RdmaError(f"a closed {type(self).__name__} was used", device=self.context.name)
        return self.native

    def close(self) -> None:
        self.context.end(self)


class MemoryRegion(Resource):
    """Registered memory (``ibv_mr``): the keys hold until ``close``. ``address``: what work requests call its first byte."""

    def __init__(self, context: Context, native: int, address: int) -> None:
        super().__init__(context, native, "ibv_dereg_mr")
        self.address = address
        self.lkey, self.rkey = (c_uint32.from_address(native + offset).value for offset in (at.MR_LKEY, at.MR_RKEY))


class CompletionQueue(Resource):
    """``ibv_cq`` at ``address``, with a completion channel of its own (at ``words/layout.CQ_CHANNEL``).

    ``channel_fd`` (non-blocking): readable when an armed queue has something new. Take its events by ``ibv_get_cq_event``,
    never by reading the descriptor (some drivers count their arm sequence in there), and acknowledge each before ``close``,
    which would wait for it for ever."""

    def __init__(self, context: Context, native: int, channel: Resource) -> None:
        super().__init__(context, native, "ibv_destroy_cq")
        self._channel = channel
        self.channel_fd = c_int.from_address(channel.address + at.CHANNEL_FD).value
        os.set_blocking(self.channel_fd, False)
        self.depth = c_int.from_address(native + at.CQ_CQE).value

    def close(self) -> None:
        super().close()
        self._channel.close()


class SharedReceiveQueue(Resource):
    """``ibv_srq`` at ``address``."""

    def __init__(self, context: Context, native: int, depth: int) -> None:
        super().__init__(context, native, "ibv_destroy_srq")
        self.depth = depth


class QueuePair(Resource):
    """A reliable connected ``ibv_qp`` at ``address``; ``depth`` and ``max_inline`` (bytes) as granted."""

    def __init__(self, context: Context, native: int, granted: libibverbs.QpCap) -> None:
        super().__init__(context, native, "ibv_destroy_qp")
        self.qp_num = c_uint32.from_address(native + at.QP_NUM).value
        self.depth, self.max_inline = granted.max_send_wr, granted.max_inline_data

    def modify(self, verb: str, route: Route | None = None, **fields: int) -> None:
        """Set these fields of ``ibv_qp_attr`` (``qp_state`` is one of them), and the address vector."""
        attr = libibverbs.QpAttr(**fields)
        mask = sum(attr.MASK[field] for field in fields)
        if route is not None:
            mask |= attr.MASK["ah_attr"]
            attr.ah_attr = libibverbs.AhAttr(dlid=route.dlid, port_num=route.port)
            if route.global_route:
                vector = attr.ah_attr
                vector.is_global, vector.sgid_index, vector.hop_limit = 1, route.sgid_index, _HOP_LIMIT
                vector.dgid[:] = struct.unpack("=QQ", route.dgid)
        with self.context.lock:
            self.context.done("ibv_modify_qp", self.owned(), ctypes.byref(attr), mask, what=verb)

    def connect(self, route: Route) -> None:
        """Bring the queue pair from INIT to ready-to-receive and ready-to-send."""
        self.modify(
            "ibv_modify_qp to RTR",
            route,
            qp_state=at.QPS_RTR,
            path_mtu=MTU[route.mtu],
            dest_qp_num=route.dest_qp_num,
            rq_psn=route.rq_psn,
            max_dest_rd_atomic=route.reads,
            min_rnr_timer=12,  # 0.64 ms
        )
        self.modify(
            "ibv_modify_qp to RTS",
            qp_state=at.QPS_RTS,
            sq_psn=route.sq_psn,
            timeout=route.timeout,
            retry_cnt=route.retry_cnt,
            rnr_retry=7,  # for ever: a slow receiver is no error
            max_rd_atomic=route.reads,
        )

    def error(self) -> None:
        """Bring the queue pair to the error state: posts are flushed, and no data of the peer lands any more. Idempotent."""
        with self.context.lock:
            if self.native and not self.context.foreign():
                self.modify("ibv_modify_qp to ERR", qp_state=at.QPS_ERR)


class Context:
    """An open device with a protection domain. ``address``: of the ``ibv_context``; ``async_fd`` (non-blocking): readable when
    something happened to the device. Thread-safe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()
        self.children: list[Resource] = []
        self.pid = os.getpid()
        self.address = libibverbs.opened(name)
        self.open = True
        self.async_fd = c_int.from_address(self.address + at.CONTEXT_ASYNC_FD).value
        os.set_blocking(self.async_fd, False)
        try:
            self.pd = Resource(self, self.made("ibv_alloc_pd", self.address), "ibv_dealloc_pd")
        except RdmaError:
            self.close()
            raise

    def made(self, verb: str, *arguments: Any) -> int:
        """See ``libibverbs.made``."""
        self._check()
        return libibverbs.made(self.name, verb, *arguments)

    def done(self, verb: str, *arguments: Any, what: str = "") -> None:
        """See ``libibverbs.done``."""
        self._check()
        libibverbs.done(self.name, verb, *arguments, what=what)

    def _check(self) -> None:
        if not self.open or self.foreign():
            raise RdmaError("the RDMA device is closed, or another process's", device=self.name)

    def device(self) -> DeviceAttr:
        attr = libibverbs.DeviceAttr()
        self.done("ibv_query_device", self.address, ctypes.byref(attr))
        found = {field.name: getattr(attr, field.name) for field in dataclasses.fields(DeviceAttr)}
        return DeviceAttr(**found | {"fw_ver": attr.fw_ver.decode("ascii", "replace")})

    def port(self, number: int) -> PortAttr:
        attr = libibverbs.PortAttr()
        self.done("ibv_query_port", self.address, number, ctypes.byref(attr))
        return PortAttr(
            state=_PORT_STATES[attr.state],
            link_layer=libibverbs.LINK_LAYERS[attr.link_layer],
            lid=attr.lid,
            max_mtu=_BYTES_OF_MTU.get(attr.max_mtu, 0),
            active_mtu=_BYTES_OF_MTU.get(attr.active_mtu, 0),
            max_msg_sz=attr.max_msg_sz,
            global_only=bool(attr.flags & _GRH_REQUIRED),
        )

    def register(self, address: int, nbytes: int, access: int, *, device_memory: bool = False) -> MemoryRegion:
        """Register memory. ``access``: ``LOCAL``, ``REMOTE_READ`` or ``REMOTE_WRITE``. Raises ``RegistrationError`` with the
        limit that was met (memlock, max_mr_size, max_mr) and how to raise it. ``device_memory``: ``address`` is a GPU's
        (``gpudirect.PEERMEM``)."""
        # libibverbs may change the mappings of the whole range before the kernel refuses it.
        if not device_memory and not (_readable(address) and _readable(address + nbytes - 1)):
            raise registration_failure(self.name, nbytes, "EFAULT", self.device(), mapped=False)
        try:
            native = self.made("ibv_reg_mr", self.pd.native, address, nbytes, _ACCESS[access])
        except RdmaError as error:
            raise registration_failure(self.name, nbytes, error.status, self.device(), mapped=True) from error
        return MemoryRegion(self, native, address)

    def register_dma_buf(self, fd: int, offset: int, nbytes: int) -> MemoryRegion:
        """Register ``nbytes`` of a dma-buf from ``offset`` on (``ibv_reg_dmabuf_mr``), for this process and for peers. The
        address of the first byte in work requests is ``offset``. The caller may close ``fd`` afterwards. Raises ``RdmaError``
        with the errno's name as ``status``."""
        access = _ACCESS[REMOTE_WRITE]
        return MemoryRegion(self, self.made("ibv_reg_dmabuf_mr", self.pd.native, offset, nbytes, offset, fd, access), offset)

    def dma_buf_status(self) -> str:
        """The name of the errno with which registering a dma-buf of an invalid descriptor fails
        (``gpudirect.Adapter.status``)."""
        try:
            self.register_dma_buf(-1, 0, mmap.PAGESIZE).close()
        except RdmaError as error:
            return error.status
        return ""

    def completion_queue(self, depth: int) -> CompletionQueue:
        channel = Resource(self, self.made("ibv_create_comp_channel", self.address), "ibv_destroy_comp_channel")
        try:
            return CompletionQueue(self, self.made("ibv_create_cq", self.address, depth, None, channel.native, 0), channel)
        except RdmaError:
            channel.close()
            raise

    def shared_receive_queue(self, depth: int) -> SharedReceiveQueue:
        wanted = libibverbs.SrqInitAttr(max_wr=depth, max_sge=1)
        return SharedReceiveQueue(self, self.made("ibv_create_srq", self.pd.native, ctypes.byref(wanted)), depth)

    def queue_pair(self, cq: CompletionQueue, srq: SharedReceiveQueue, *, port: int, depth: int, max_inline: int) -> QueuePair:
        """Make a queue pair in state INIT, with remote READ and WRITE allowed. The device may grant less than
        ``max_inline``."""
        queues = {"send_cq": cq.owned(), "recv_cq": cq.owned(), "srq": srq.owned()}
        while True:
            cap = libibverbs.QpCap(max_send_wr=depth, max_send_sge=1, max_inline_data=max_inline)
            wanted = libibverbs.QpInitAttr(qp_type=at.QPT_RC, cap=cap, **queues)
            try:
                native = self.made("ibv_create_qp", self.pd.native, ctypes.byref(wanted))
                break
            except RdmaError as error:
                if not max_inline or error.status not in ("EINVAL", "ENOMEM", "ENOSPC"):
                    raise
                max_inline //= 2
        pair = QueuePair(self, native, wanted.cap)
        try:
            pair.modify(
                "ibv_modify_qp to INIT",
                qp_state=at.QPS_INIT,
                pkey_index=0,
                port_num=port,
                qp_access_flags=at.ACCESS_REMOTE_WRITE | at.ACCESS_REMOTE_READ,
            )
        except RdmaError:
            pair.close()
            raise
        return pair

    def async_event(self) -> str | None:
        """The next asynchronous event by name (``"QP_FATAL"``, ``"PORT_ERR"``, ...), acknowledged; ``None`` when there is
        none."""
        event = ctypes.create_string_buffer(at.ASYNC_EVENT_BYTES)
        with self.lock:
            if not self.open or self.foreign():
                return None
            lib = libibverbs.library()
            if lib.ibv_get_async_event(self.address, event):
                code = ctypes.get_errno()
                if code in (errno.EAGAIN, errno.EINTR):
                    return None
                raise failure(self.name, "ibv_get_async_event", code)
            lib.ibv_ack_async_event(event)
        return event_name(struct.unpack_from("<i", event, at.ASYNC_EVENT_TYPE)[0])

    def foreign(self) -> bool:
        """Whether this is a child of the process that opened the device."""
        return os.getpid() != self.pid

    def end(self, child: Resource) -> None:
        """Destroy what ``child`` owns, once."""
        with self.lock:
            if not child.native or self.foreign():
                return
            native, child.native = child.native, 0
            self.children.remove(child)
            self.done(child.destroy, native)

    def close(self) -> None:
        with self.lock:
            if not self.open or self.foreign():
                return
            children = sorted(self.children, key=lambda child: _LAST.index(child.destroy))
            steps: list[Callable[[], None]] = [partial(self.end, child) for child in children]
            steps.append(partial(self.done, "ibv_close_device", self.address))
            failed = []
            for step in steps:
                try:
                    step()
                except RdmaError as error:  # an adapter that failed may refuse some: the others are done all the same
                    failed.append(error)
            self.open = False
        if failed:
            raise failed[0]
