"""The seam between the ``verbs`` device and the Python packages that own native RDMA resources.

A provider opens devices and makes resources. Each of these objects owns one native object, and ``close`` is idempotent. The
owner of a resource closes it before the resources that it was made from (queue pair, then queues, then memory regions, then the
context, which closes what is left). Posting and polling do not pass through here: kernels get the native addresses, and call
through the operations table of the context (``words/completions``). Names are those of libibverbs. Every failure is an
``RdmaError`` that names the device. In a forked child ``close`` does nothing: the native objects are the parent's.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

LOCAL, REMOTE_READ, REMOTE_WRITE = range(3)
"""Rights on a memory region: only this process uses it; peers may READ it; peers may READ and WRITE it."""


@dataclass(frozen=True, slots=True)
class DeviceAttr:
    """The limits of a device (``ibv_query_device``)."""

    fw_ver: str
    node_guid: int
    max_mr: int
    max_mr_size: int
    max_qp: int
    max_qp_wr: int
    max_sge: int
    max_cqe: int
    max_srq: int
    max_srq_wr: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int


@dataclass(frozen=True, slots=True)
class PortAttr:
    """``ibv_query_port``. ``state``: ``"ACTIVE"``, ``"DOWN"``, ...; ``link_layer``: ``"INFINIBAND"`` or ``"ETHERNET"``; MTUs in
    bytes; ``gbit_per_s``: width times speed; ``global_only``: every packet needs a global route header."""

    state: str
    link_layer: str
    lid: int
    max_mtu: int
    active_mtu: int
    max_msg_sz: int
    gid_tbl_len: int
    gbit_per_s: float
    global_only: bool


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table. ``kind``: ``"IB"``, ``"RoCEv1"`` or ``"RoCEv2"``; ``netdev``: the network interface,
    or ``""``."""

    index: int
    raw: bytes
    kind: str
    netdev: str


@dataclass(frozen=True, slots=True)
class Route:
    """How a queue pair reaches its peer. ``mtu`` in bytes; ``sgid_index``: entry of our GID table; ``retry_cnt``: how often an
    unanswered packet is sent again, 4.096 us times 2 to the power ``timeout`` apart."""

    port: int
    sgid_index: int
    dgid: bytes
    dlid: int
    dest_qp_num: int
    rq_psn: int
    sq_psn: int
    mtu: int
    global_route: bool
    timeout: int
    retry_cnt: int
    max_rd_atomic: int
    max_dest_rd_atomic: int


class MemoryRegion(abc.ABC):
    """Registered memory (``ibv_mr``): the keys hold until ``close``. ``address``: what work requests call its first byte."""

    address: int
    lkey: int
    rkey: int

    @abc.abstractmethod
    def close(self) -> None: ...


class CompletionQueue(abc.ABC):
    """``ibv_cq`` with a completion channel of its own (at ``words/layout.CQ_CHANNEL``).

    ``address``: of the ``ibv_cq``; ``channel_fd`` (non-blocking): readable when an armed queue has something new. Take its
    events by ``ibv_get_cq_event``, never by reading the descriptor (some drivers count their arm sequence in there), and
    acknowledge each before ``close``, which would wait for it for ever.
    """

    address: int
    channel_fd: int
    depth: int

    @abc.abstractmethod
    def close(self) -> None: ...


class SharedReceiveQueue(abc.ABC):
    """``ibv_srq`` at ``address``."""

    address: int
    depth: int

    @abc.abstractmethod
    def close(self) -> None: ...


class QueuePair(abc.ABC):
    """A reliable connected ``ibv_qp`` at ``address``; ``max_inline`` as granted (bytes), ``depth`` as granted."""

    address: int
    qp_num: int
    depth: int
    max_inline: int

    @abc.abstractmethod
    def connect(self, route: Route) -> None:
        """Bring the queue pair from INIT to ready-to-receive and ready-to-send. ``rnr_retry`` is 7: a slow receiver is no
        error."""

    @abc.abstractmethod
    def error(self) -> None:
        """Bring the queue pair to the error state: posts are flushed, and no data of the peer lands any more. Idempotent."""

    @abc.abstractmethod
    def close(self) -> None: ...


class Context(abc.ABC):
    """An open device with a protection domain. ``address``: of the ``ibv_context``; ``async_fd`` (non-blocking): readable when
    something happened to the device. Thread-safe."""

    name: str
    address: int
    async_fd: int

    @abc.abstractmethod
    def device(self) -> DeviceAttr: ...

    @abc.abstractmethod
    def port(self, number: int) -> PortAttr: ...

    @abc.abstractmethod
    def register(self, address: int, nbytes: int, access: int, *, device_memory: bool = False) -> MemoryRegion:
        """Register memory. ``access``: ``LOCAL``, ``REMOTE_READ`` or ``REMOTE_WRITE``. Raises ``RegistrationError`` with the
        limit that was met (memlock, max_mr_size, max_mr) and how to raise it. ``device_memory``: ``address`` is a GPU's
        (``gpudirect.PEERMEM``)."""

    @abc.abstractmethod
    def register_dma_buf(self, fd: int, offset: int, nbytes: int) -> MemoryRegion:
        """Register ``nbytes`` of a dma-buf from ``offset`` on (``ibv_reg_dmabuf_mr``), for this process and for peers. The
        address of the first byte in work requests is ``offset``. The caller may close ``fd`` afterwards. Raises ``RdmaError``
        with the errno's name as ``status``."""

    @abc.abstractmethod
    def dma_buf_status(self) -> str:
        """The name of the errno with which registering a dma-buf of an invalid descriptor fails
        (``gpudirect.Adapter.status``)."""

    @abc.abstractmethod
    def completion_queue(self, depth: int) -> CompletionQueue: ...

    @abc.abstractmethod
    def shared_receive_queue(self, depth: int) -> SharedReceiveQueue: ...

    @abc.abstractmethod
    def queue_pair(
        self, cq: CompletionQueue, srq: SharedReceiveQueue, *, port: int, depth: int, max_sge: int, max_inline: int
    ) -> QueuePair:
        """Make a queue pair in state INIT, with remote READ and WRITE allowed. The device may grant less than
        ``max_inline``."""

    @abc.abstractmethod
    def async_event(self) -> str | None:
        """The next asynchronous event by name (``"QP_FATAL"``, ``"PORT_ERR"``, ...), acknowledged; ``None`` when there is
        none."""

    @abc.abstractmethod
    def close(self) -> None: ...


class Provider(abc.ABC):
    """A package that reaches libibverbs."""

    name: str
    """The package's name and version, for people."""

    @abc.abstractmethod
    def devices(self) -> list[str]:
        """Names of the RDMA devices of this host; empty where there is none, or no driver."""

    @abc.abstractmethod
    def open(self, name: str) -> Context: ...
