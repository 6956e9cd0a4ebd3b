"""GPUDirect RDMA: whether an adapter reaches GPU memory itself, by which way, and why not by a better one.

Written against the documented interfaces and tested without hardware; **never run on hardware**.

Three ways, the best first (``WAYS``): a dma-buf of the memory is given to the adapter (``ibv_reg_dmabuf_mr``);
``nvidia_peermem`` lets it take the device pointer (``ibv_reg_mr``); or the bytes are copied through host memory, which works
always. What is known of a GPU, an adapter and the kernel is gathered first (``Gpu``, ``Adapter``, ``peermem``), the decision is
a pure function of that. An adapter may still refuse when memory is registered (``verbs/gpu``): then the next way is taken.

Sources: CUDA Driver API reference (``CU_DEVICE_ATTRIBUTE_*``, ``cuMemGetHandleForAddressRange``,
``cuFlushGPUDirectRDMAWrites``), NVIDIA's GPUDirect RDMA guide, ``ibv_reg_mr(3)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import NamedTuple

from ..errors import RdmaError
from ..gpu import driver as cuda_driver

DMA_BUF, PEERMEM, STAGED = "dma-buf", "nvidia-peermem", "staged"
WAYS = (DMA_BUF, PEERMEM, STAGED)
NONE, CALL, MEMOP = "none", "cuFlushGPUDirectRDMAWrites", "a stream's memory operation"
"""How what arrives in GPU memory becomes visible there: by itself; by a call; by a flush on a stream."""
_ORDERING_OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: kernels of the GPU itself see what arrived, in order
_OPTION_HOST, _OPTION_MEMOPS = 1, 2  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_*
_NOT_TAKEN = ("EOPNOTSUPP", "EPROTONOSUPPORT")
_PEERMEM_MODULES = ("nvidia_peermem", "nv_peer_mem")
_PCI = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_OPEN_MODULES = (
    "NVIDIA's open kernel modules with a driver of CUDA 11.7 or newer, on Linux 5.12 or newer "
    "(CONFIG_PCI_P2PDMA, CONFIG_DMABUF_MOVE_NOTIFY)"
)
DISTANCES = ("behind one PCI switch", "under one host bridge", "across host bridges", "at an unknown distance")
"""The nearest first."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver and the kernel show it."""

    index: int
    pci: str
    """As in ``/sys/bus/pci/devices``."""
    dma_buf: bool
    """``CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED``: it gives out dma-bufs."""
    pinnable: bool
    """``CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED``: other kernel modules may pin its memory (``nvidia_p2p_get_pages``)."""
    ordering: int
    """``CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING``."""
    flush_options: int
    """``CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS``, bits."""
    path: tuple[str, ...] = ()
    """Bridges from the host bridge to it, itself last; empty: not known."""
    bar1: int = 0
    """Bytes of its memory that are to be seen on the bus at once: no more can be registered. 0: not known."""


class Adapter(NamedTuple):
    """An RDMA adapter. ``status``: what ``ibv_reg_dmabuf_mr`` answered to a bad file descriptor (the errno's name): an adapter
    that could, names the descriptor (``EBADF``)."""

    name: str
    path: tuple[str, ...]
    """As ``Gpu.path``; empty: no PCI device."""
    status: str


class Refused(NamedTuple):
    """A way that is not taken: why, and what would change that."""

    way: str
    why: str
    hint: str = ""

    def __str__(self) -> str:
        return f"not {self.way}: {self.why}"


class Decision(NamedTuple):
    """The ways by which an adapter reaches a GPU's memory. ``ways`` are tried in this order; the last one is always ``STAGED``.
    ``refused``: the other ways. ``flush``: see ``NONE``."""

    ways: tuple[str, ...]
    refused: tuple[Refused, ...]
    flush: str

    @property
    def way(self) -> str:
        return self.ways[0]

    @property
    def why(self) -> tuple[Refused, ...]:
        """Why ``way`` is not a better one."""
        return better(self.refused, self.way)

    def without(self, refused: Refused) -> Decision:
        """This decision without a way that an adapter or a driver turned out not to take."""
        ways = tuple(way for way in self.ways if way != refused.way)
        return self._replace(ways=ways, refused=(*self.refused, refused))


def better(refused: Iterable[Refused], way: str) -> tuple[Refused, ...]:
    """The refused ways that would have been preferred to ``way``."""
    return tuple(each for each in refused if WAYS.index(each.way) < WAYS.index(way))


def decide(gpu: Gpu, adapter: Adapter, module: str) -> Decision:
    """How an adapter reaches the memory of a GPU. ``module``: the result of ``peermem``."""
    flush = flush_of(gpu)
    common: tuple[str, ...] = ()
    if not adapter.path:
        common = ("the adapter is no PCI device: a software one copies by processor", "a network card with RDMA")
    elif not flush:
        common = ("the GPU neither orders what arrives nor can be made to", "")
    refused = []
    if why := common or _why_no_dma_buf(gpu, adapter):
        refused.append(Refused(DMA_BUF, *why))
    if why := common or _why_no_peermem(gpu, module):
        refused.append(Refused(PEERMEM, *why))
    gone = [each.way for each in refused]
    return Decision(tuple(way for way in WAYS if way not in gone), tuple(refused), flush or NONE)


def flush_of(gpu: Gpu) -> str:
    """The kind of flush that makes arrived data visible to the GPU (``NONE``: it needs none); empty if there is no way."""
    if gpu.ordering >= _ORDERING_OWNER:
        return NONE
    if gpu.flush_options & _OPTION_HOST:
        return CALL
    return MEMOP if gpu.flush_options & _OPTION_MEMOPS else ""


def _why_no_dma_buf(gpu: Gpu, adapter: Adapter) -> tuple[str, ...]:
    if not gpu.dma_buf:
        return "the GPU's driver gives out none", _OPEN_MODULES
    if adapter.status == "ENOSYS":
        return "this libibverbs has no ibv_reg_dmabuf_mr", "rdma-core 34 or newer"
    if adapter.status in _NOT_TAKEN:
        return f"the adapter's driver takes none ({adapter.status})", "mlx5 does from Linux 5.12 on"
    return ()


def _why_no_peermem(gpu: Gpu, module: str) -> tuple[str, ...]:
    if not gpu.pinnable:
        return "the GPU does not let others pin its memory", "a data centre or workstation GPU"
    if not module:
        return "the module is not loaded", "modprobe nvidia_peermem (needs NVIDIA's MLNX_OFED or DOCA)"
    return ()


# -- facts


def peermem(root: Path) -> str:
    """The module that lets adapters take device pointers, as it is loaded; empty without one."""
    return next((name for name in _PEERMEM_MODULES if (root / "sys/module" / name).exists()), "")


def gpu_of(driver: cuda_driver.Driver, index: int, root: Path) -> Gpu:
    pci = driver.pci_bus_id(index)
    device = root / "sys/bus/pci/devices" / pci
    return Gpu(
        index,
        pci,
        dma_buf=bool(driver.attribute(index, cuda_driver.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)),
        pinnable=bool(driver.attribute(index, cuda_driver.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)),
        ordering=driver.attribute(index, cuda_driver.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING),
        flush_options=driver.attribute(index, cuda_driver.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS),
        path=pci_path(device),
        bar1=_bar1(device),
    )


def adapter_of(name: str, root: Path, status: str) -> Adapter:
    return Adapter(name, pci_path(root / "sys/class/infiniband" / name / "device"), status)


def adapters(root: Path) -> list[str]:
    """Names of the RDMA adapters of the host."""
    with suppress(OSError):
        return sorted(entry.name for entry in (root / "sys/class/infiniband").iterdir())
    return []


def survey(root: Path, status_of: Callable[[str], str]) -> list[tuple[Gpu, Adapter, Decision]]:
    """Every GPU of this process with every adapter. ``status_of``: ``Adapter.status`` by name. ``RdmaError`` where the GPU's
    driver does not answer."""
    driver, module = cuda_driver.driver(), peermem(root)
    found = [adapter_of(name, root, status_of(name)) for name in adapters(root)]
    gpus = [gpu_of(driver, index, root) for index in range(cuda_driver.count())]
    return [(gpu, adapter, decide(gpu, adapter, module)) for gpu in gpus for adapter in found]


def ask(name: str) -> str:
    """``Adapter.status`` of an adapter of this host. Opens it for a moment."""
    from ..nic import packages
    from ..nic.native import Context

    try:
        context = Context(packages.choose(), name)
    except RdmaError as error:
        return error.status or "unknown"
    try:
        return context.dma_buf_status()
    finally:
        context.close()


def pci_path(device: Path) -> tuple[str, ...]:
    """The PCI devices on the way to one, by its link in /sys; empty if it is none."""
    return tuple(part for part in device.resolve().parts if _PCI.fullmatch(part)) if device.exists() else ()


def distance(gpu: Gpu, adapter: Adapter) -> str:
    """One of ``DISTANCES``. It decides about speed: a processor passes on between devices of its bridges, if slowly."""
    if not gpu.path or not adapter.path:
        return DISTANCES[3]
    common = sum(takewhile(bool, map(eq, gpu.path, adapter.path)))
    return DISTANCES[2 - min(common, 2)]


def _bar1(device: Path) -> int:
    """The second line of ``resource``: NVIDIA's memory window, behind its registers. First and last address, flags."""
    with suppress(OSError, IndexError, ValueError):
        first, last, _ = (device / "resource").read_text().splitlines()[1].split()
        return int(last, 16) - int(first, 16) + 1 if int(last, 16) else 0
    return 0
