"""The native RDMA resources of a device, made by a Python package (``pyverbs``, ``ibverbs``), found behind its objects.

Each object here owns one native object; ``close`` is idempotent. The owner of a resource closes it before those that it was
made from (queue pair, then queues, then memory regions, then the context, which closes what is left). Posting and polling do
not pass through here: kernels get the native addresses, and call through the operations table of the context
(``words/completions``). Names are those of libibverbs. Every failure is an ``RdmaError`` that names the device. In a forked
child ``close`` does nothing: the native objects are the parent's.

A package's object hides its C pointer. ``find`` looks for it in the object's body: every word there that points to readable
memory (asked of the kernel with ``process_vm_readv``: a wrong guess is an error, never a crash) whose content is what is
publicly known of the object. It is the one or it is refused: none, or two different ones, is a ``NotSupported``, and nothing
has been called through a guess. Everything found is checked once more where a queue pair names it (``QueuePair``).

A context lives until it is closed, or until the process ends and the kernel takes all of it back: destructors of the packages
never run by themselves. In a forked child each object has one reference too many for ever, so that no destructor there
reaches through the inherited file descriptors for what the parent still uses; the same at the end of the interpreter, where
destructors would run in any order.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import functools
import mmap
import os
import struct
import threading
from collections.abc import Callable
from typing import Any

from ..errors import NotSupported, RdmaError
from ..memory import mapping
from ..words import layout as at
from . import libibverbs
from .libibverbs import LOCAL, REMOTE_READ, REMOTE_WRITE, DeviceAttr, PortAttr, Route
from .packages import Package

MTU = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
"""Bytes to ``enum ibv_mtu``."""
_BYTES_OF_MTU = {code: nbytes for nbytes, code in MTU.items()}
_PORT_STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
_OBJECT_HEADER = 16
_ACCESS = {
    LOCAL: at.ACCESS_LOCAL_WRITE,
    REMOTE_READ: at.ACCESS_LOCAL_WRITE | at.ACCESS_REMOTE_READ,
    REMOTE_WRITE: at.ACCESS_LOCAL_WRITE | at.ACCESS_REMOTE_READ | at.ACCESS_REMOTE_WRITE,
}
_EVENT_LINK = "anon_inode:[infinibandevent]"


def peek(address: int, nbytes: int) -> bytes | None:
    """A copy of our own memory there, or ``None`` where there is none."""
    buffer = ctypes.create_string_buffer(nbytes)
    try:
        mapping.transfer(os.getpid(), ctypes.addressof(buffer), address, nbytes, write=False)
    except NotSupported:
        raise NotSupported(
            "this system does not let a process ask for its own memory (process_vm_readv), so native queues cannot be found",
            device="verbs",
            hint="containers: allow process_vm_readv in the seccomp profile",
        ) from None
    except RdmaError:
        return None
    return buffer.raw


def word(address: int) -> int:
    """The pointer at ``address``, 0 if that cannot be read."""
    return int.from_bytes(peek(address, 8) or b"", "little")


def half(address: int) -> int:
    """The ``uint32_t`` at ``address``, 0 if that cannot be read."""
    return int.from_bytes(peek(address, 4) or b"", "little")


def find(owner: object, what: str, matches: Callable[[int], bool]) -> int:
    """The address in the body of ``owner``, an object of an extension type, that ``matches``."""
    nbytes = type(owner).__basicsize__
    body = ctypes.string_at(id(owner) + _OBJECT_HEADER, nbytes - _OBJECT_HEADER)
    words = {value for (value,) in struct.iter_unpack("<Q", body[: len(body) & ~7])}
    found = [value for value in words if value and value % 8 == 0 and value >> 56 == 0 and matches(value)]
    if len(found) == 1:
        return found[0]
    raise NotSupported(
        f"{'more than one' if found else 'no'} {what} in a {type(owner).__module__}.{type(owner).__qualname__} of {nbytes} B",
        device="verbs",
        hint="this version of the package keeps it elsewhere; RDMARPC_VERBS names another provider",
    )


def is_context(address: int, name: str, native: Any) -> bool:
    """Whether the ``ibv_context`` of the device with that name lies there, opened by ``native``."""
    fds = peek(address + at.CONTEXT_CMD_FD, 12)
    if fds is None or name_of(word(address + at.CONTEXT_DEVICE)) != name:
        return False
    command, asynchronous, vectors = struct.unpack("<iii", fds)
    return (
        vectors == native.num_comp_vectors
        and getattr(native, "cmd_fd", command) == command
        and getattr(native, "async_fd", asynchronous) == asynchronous
        and _is_event_fd(asynchronous)
    )


def name_of(device: int) -> str | None:
    """The name in the ``ibv_device`` there."""
    text = peek(device + at.DEVICE_NAME, 64) if device else None
    return text.split(b"\0")[0].decode("ascii", "replace") if text else None


def _is_event_fd(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == _EVENT_LINK
    except OSError:
        return False


class _Owner:
    """One native object, held by the package's object ``native``."""

    def __init__(self, context: Context, native: Any) -> None:
        self.context, self.native = context, native
        context.children.append(self)

    def owned(self) -> Any:
        """The package's object, as long as it is open."""
        if self.native is None:
            raise RdmaError(f"a closed {type(self).__name__} was used", device=self.context.name)
        return self.native

    def close(self) -> None:
        self.context.end(self)


class MemoryRegion(_Owner):
    """Registered memory (``ibv_mr``): the keys hold until ``close``. ``address``: what work requests call its first byte."""

    def __init__(self, context: Context, native: Any, address: int) -> None:
        super().__init__(context, native)
        self.address: int = address
        self.lkey: int = native.lkey
        self.rkey: int = native.rkey


class CompletionQueue(_Owner):
    """``ibv_cq`` at ``address``, with a completion channel of its own (at ``words/layout.CQ_CHANNEL``).

    ``channel_fd`` (non-blocking): readable when an armed queue has something new. Take its events by ``ibv_get_cq_event``,
    never by reading the descriptor (some drivers count their arm sequence in there), and acknowledge each before ``close``,
    which would wait for it for ever."""

    def __init__(self, context: Context, native: Any, channel: Any) -> None:
        super().__init__(context, native)
        self.channel = channel

        def is_channel(p: int) -> bool:
            fd = half(p + at.CHANNEL_FD)
            return word(p + at.CHANNEL_CONTEXT) == context.address and getattr(channel, "fd", fd) == fd and _is_event_fd(fd)

        self._channel = find(channel, "ibv_comp_channel", is_channel)
        self.channel_fd = half(self._channel + at.CHANNEL_FD)
        os.set_blocking(self.channel_fd, False)
        self.depth: int = native.cqe
        parents = struct.pack("<QQ", context.address, self._channel)
        self.address = find(
            native, "ibv_cq", lambda p: peek(p + at.CQ_CONTEXT, 16) == parents and half(p + at.CQ_CQE) == self.depth
        )


class SharedReceiveQueue(_Owner):
    """``ibv_srq`` at ``address``."""

    def __init__(self, context: Context, native: Any, depth: int) -> None:
        super().__init__(context, native)
        self.depth = depth
        parents = context.address, context.pd_address
        self.address = find(native, "ibv_srq", lambda p: (word(p + at.SRQ_CONTEXT), word(p + at.SRQ_PD)) == parents)


class QueuePair(_Owner):
    """A reliable connected ``ibv_qp`` at ``address``; ``depth`` and ``max_inline`` (bytes) as granted."""

    def __init__(
        self, context: Context, native: Any, cq: CompletionQueue, srq: SharedReceiveQueue, depth: int, max_inline: int
    ) -> None:
        super().__init__(context, native)
        self.qp_num: int = native.qp_num
        self.depth, self.max_inline = depth, max_inline
        parents = struct.pack("<QQQQ", context.pd_address, cq.address, cq.address, srq.address)
        self.address = find(
            native,
            "ibv_qp",
            lambda p: (
                word(p + at.QP_CONTEXT) == context.address
                and peek(p + at.QP_PD, 32) == parents
                and half(p + at.QP_NUM) == self.qp_num
                and half(p + at.QP_TYPE) == at.QPT_RC
            ),
        )

    def modify(self, verb: str, route: Route | None = None, **fields: int) -> None:
        """Set these fields of ``ibv_qp_attr`` (``qp_state`` is one of them), and the address vector."""
        with self.context.lock:
            native = self.owned()
            self.context.call(verb, lambda: self.context.package.modify(native, fields, route))

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
            if self.native is not None and not self.context.foreign():
                self.modify("ibv_modify_qp to ERR", qp_state=at.QPS_ERR)


class Context:
    """An open device with a protection domain. ``address``: of the ``ibv_context``; ``async_fd`` (non-blocking): readable when
    something happened to the device. Thread-safe."""

    def __init__(self, package: Package, name: str) -> None:
        self.package, self.name = package, name
        self.native: Any = self._attempt("ibv_open_device", lambda: package.new_context(name))
        self.lock = threading.RLock()
        self.children: list[Any] = []
        self.lib = libibverbs.library()
        self.pid = os.getpid()
        self.address = find(self.native, "ibv_context", lambda p: is_context(p, name, self.native))
        self.async_fd = half(self.address + at.CONTEXT_ASYNC_FD)
        os.set_blocking(self.async_fd, False)
        self.pd = self.call("ibv_alloc_pd", lambda: package.new_domain(self.native))
        self.pd_address = find(self.pd, "ibv_pd", lambda p: word(p + at.PD_CONTEXT) == self.address)
        _open.add(self)

    def call(self, verb: str, make: Callable[[], Any]) -> Any:
        """Run ``make``; what the package raises becomes an error of ours."""
        if self.native is None or self.foreign():
            raise RdmaError("the RDMA device is closed, or another process's", device=self.name)
        return self._attempt(verb, make)

    def _attempt(self, verb: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:
            code = self.package.errno_of(error)
            if code is None:
                raise
            if code <= 0:
                raise RdmaError(f"{verb} failed: {error}", device=self.name) from error
            raise libibverbs.failure(self.name, verb, code) from error

    def device(self) -> DeviceAttr:
        attr = self.call("ibv_query_device", lambda: self.native.query_device())
        return DeviceAttr(**{name: getattr(attr, self.package.renamed.get(name, name)) for name in DeviceAttr._fields})

    def port(self, number: int) -> PortAttr:
        attr = self.call("ibv_query_port", lambda: self.native.query_port(number))
        return PortAttr(
            state=_PORT_STATES[attr.state],
            link_layer=libibverbs.LINK_LAYERS[attr.link_layer],
            lid=attr.lid,
            max_mtu=_BYTES_OF_MTU.get(attr.max_mtu, 0),
            active_mtu=_BYTES_OF_MTU.get(attr.active_mtu, 0),
            max_msg_sz=attr.max_msg_sz,
            global_only=self.package.global_only(attr),
        )

    def register(self, address: int, nbytes: int, access: int, *, device_memory: bool = False) -> MemoryRegion:
        """Register memory. ``access``: ``LOCAL``, ``REMOTE_READ`` or ``REMOTE_WRITE``. Raises ``RegistrationError`` with the
        limit that was met (memlock, max_mr_size, max_mr) and how to raise it. ``device_memory``: ``address`` is a GPU's
        (``gpudirect.PEERMEM``)."""
        # libibverbs may change the mappings of the whole range before the kernel refuses it.
        if not device_memory and (peek(address, 1) is None or peek(address + nbytes - 1, 1) is None):
            raise libibverbs.registration_failure(self.name, nbytes, "EFAULT", self.device(), mapped=False)
        try:
            native = self.call("ibv_reg_mr", lambda: self.package.new_region(self.pd, address, nbytes, _ACCESS[access]))
        except RdmaError as error:
            raise libibverbs.registration_failure(self.name, nbytes, error.status, self.device(), mapped=True) from error
        return self.add(MemoryRegion, native, address)

    def register_dma_buf(self, fd: int, offset: int, nbytes: int) -> MemoryRegion:
        """Register ``nbytes`` of a dma-buf from ``offset`` on (``ibv_reg_dmabuf_mr``), for this process and for peers. The
        address of the first byte in work requests is ``offset``. The caller may close ``fd`` afterwards. Raises ``RdmaError``
        with the errno's name as ``status``."""
        place, access = (self.pd, self.pd_address), _ACCESS[REMOTE_WRITE]
        native = self.call("ibv_reg_dmabuf_mr", lambda: self.package.new_dma_buf_region(*place, fd, offset, nbytes, access))
        return self.add(MemoryRegion, native, offset)

    def dma_buf_status(self) -> str:
        """The name of the errno with which registering a dma-buf of an invalid descriptor fails
        (``gpudirect.Adapter.status``)."""
        try:
            self.register_dma_buf(-1, 0, mmap.PAGESIZE).close()
        except RdmaError as error:
            return error.status
        return ""

    def completion_queue(self, depth: int) -> CompletionQueue:
        channel = self.call("ibv_create_comp_channel", lambda: self.package.new_channel(self.native))
        queue = self.call("ibv_create_cq", lambda: self.package.new_queue(self.native, depth, channel))
        return self.add(CompletionQueue, queue, channel)

    def shared_receive_queue(self, depth: int) -> SharedReceiveQueue:
        queue = self.call("ibv_create_srq", lambda: self.package.new_shared_queue(self.pd, depth))
        return self.add(SharedReceiveQueue, queue, depth)

    def queue_pair(self, cq: CompletionQueue, srq: SharedReceiveQueue, *, port: int, depth: int, max_inline: int) -> QueuePair:
        """Make a queue pair in state INIT, with remote READ and WRITE allowed. The device may grant less than
        ``max_inline``."""
        queues = cq.owned(), srq.owned()
        while True:
            make = functools.partial(self.package.new_queue_pair, self.pd, *queues, depth, max_inline)
            try:
                native, granted, inline = self.call("ibv_create_qp", make)
                break
            except RdmaError as error:
                if not max_inline or error.status not in ("EINVAL", "ENOMEM", "ENOSPC"):
                    raise
                max_inline //= 2
        pair = self.add(QueuePair, native, cq, srq, granted, inline)
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
            if self.native is None or self.foreign():
                return None
            if self.lib.ibv_get_async_event(self.address, event):
                code = ctypes.get_errno()
                if code in (errno.EAGAIN, errno.EINTR):
                    return None
                raise libibverbs.failure(self.name, "ibv_get_async_event", code)
            self.lib.ibv_ack_async_event(event)
        return libibverbs.event_name(struct.unpack_from("<i", event, at.ASYNC_EVENT_TYPE)[0])

    def add(self, kind: Callable[..., Any], native: Any, *rest: Any) -> Any:
        """Own what was just made; what cannot be owned is destroyed again."""
        with self.lock:
            try:
                return kind(self, native, *rest)
            except BaseException:
                if self.children and self.children[-1].native is native:
                    self.end(self.children[-1])
                raise

    def foreign(self) -> bool:
        """Whether this is a child of the process that opened the device."""
        return os.getpid() != self.pid

    def end(self, child: Any) -> None:
        """Destroy what ``child`` owns, once."""
        with self.lock:
            if child.native is None or self.foreign():
                return
            native, child.native = child.native, None
            self.children.remove(child)
            self.call("the destruction of a native object", native.close)
            channel = getattr(child, "channel", None)
            if channel is not None:
                self.call("ibv_destroy_comp_channel", channel.close)

    def close(self) -> None:
        order = (QueuePair, SharedReceiveQueue, CompletionQueue, MemoryRegion)
        with self.lock:
            if self.native is None or self.foreign():
                return
            children = sorted(self.children, key=lambda child: order.index(type(child)))
            steps: list[Callable[[], Any]] = [functools.partial(self.end, child) for child in children]
            steps.append(lambda: self.call("ibv_dealloc_pd", self.pd.close))
            steps.append(lambda: self.call("ibv_close_device", self.native.close))
            failed = []
            for step in steps:  # an adapter that failed may refuse some of them: the others are done all the same
                try:
                    step()
                except RdmaError as error:
                    failed.append(error)
            self.native = None
            _open.discard(self)
        if failed:
            raise failed[0]

    def natives(self) -> list[Any]:
        """Every object of the package that a destructor could end."""
        channels = [child.channel for child in self.children if isinstance(child, CompletionQueue)]
        return [child.native for child in self.children] + channels + [self.pd, self.native]


_open: set[Context] = set()


def _keep() -> None:
    for context in _open:
        for native in context.natives():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


os.register_at_fork(after_in_child=_keep)
atexit.register(_keep)
