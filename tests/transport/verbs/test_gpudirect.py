"""GPUDirect RDMA without hardware: the decision over all facts, facts from made-up trees, the native call. See
``test_verbs_gpu`` for what is done with them."""

from __future__ import annotations

import ctypes
import errno
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from softverbs import PATH, compiled

from rdmarpc.tools import doctor
from rdmarpc.tools.doctor import LIMITS, MISSING, OK
from rdmarpc.transport import RdmaError
from rdmarpc.transport.gpu import driver
from rdmarpc.transport.nic import libibverbs
from rdmarpc.transport.verbs import gpudirect
from rdmarpc.transport.verbs.gpudirect import DMA_BUF, PEERMEM, STAGED, WAYS, Adapter, Gpu, Refused

GOOD = Gpu(0, "0000:17:00.0", dma_buf=True, pinnable=True, ordering=100, flush_options=1, path=PATH)
NIC = Adapter("mlx5_0", (*PATH[:2], "0000:18:00.0"), "EBADF")
MODULE = "nvidia_peermem"


# -- the decision


FACTS = itertools.product(
    (True, False),  # dma_buf
    (True, False),  # pinnable
    (0, 100, 200),  # ordering
    (0, 1, 2, 3),  # flush_options
    ((), NIC.path),
    ("EBADF", "", "EOPNOTSUPP", "EPROTONOSUPPORT", "ENOSYS"),
    ("", MODULE),
)


def test_every_decision() -> None:
    ways = set()
    for dma_buf, pinnable, ordering, options, path, status, module in FACTS:
        gpu = replace(GOOD, dma_buf=dma_buf, pinnable=pinnable, ordering=ordering, flush_options=options)
        found = gpudirect.decide(gpu, Adapter("mlx5_0", path, status), module)
        seen = bool(path) and (ordering >= 100 or options > 0)
        wanted = []
        if seen and dma_buf and status in ("EBADF", ""):
            wanted.append(DMA_BUF)
        if seen and pinnable and module:
            wanted.append(PEERMEM)
        assert found.ways == (*wanted, STAGED)
        assert found.way == found.ways[0]
        assert {each.way for each in found.refused} == set(WAYS) - set(found.ways), "each way is taken or refused"
        assert all(each.why for each in found.refused)
        assert {each.way for each in found.why} == set(WAYS[: WAYS.index(found.way)]), "why not each better one"
        if ordering >= 100:
            assert found.flush == gpudirect.NONE
        elif found.way != STAGED:
            assert found.flush == (gpudirect.CALL if options & 1 else gpudirect.MEMOP)
        ways.add(found.ways)
    assert len(ways) == 4


def test_a_way_that_turned_out_not_to_work() -> None:
    found = gpudirect.decide(GOOD, NIC, MODULE)
    assert found.ways == WAYS and not found.refused
    later = found.without(Refused(DMA_BUF, "EOPNOTSUPP"))
    assert later.way == PEERMEM and [str(each) for each in later.why] == ["not dma-buf: EOPNOTSUPP"]
    assert later.without(Refused(PEERMEM, "EFAULT")).way == STAGED


# -- facts


def tree(root: Path, files: dict[str, str], links: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name, target in links.items():
        (root / target).mkdir(parents=True, exist_ok=True)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(root / target)
    return root


SWITCH = "sys/devices/pci0000:16/0000:16:02.0/0000:17:00.0"
TREE = {
    "sys/bus/pci/devices/0000:d0:00.0": f"{SWITCH}/0000:18:00.0/0000:d0:00.0",
    "sys/bus/pci/devices/0000:d1:00.0": "sys/devices/pci0000:16/0000:16:03.0/0000:d1:00.0",
    "sys/class/infiniband/mlx5_0/device": f"{SWITCH}/0000:18:01.0/0000:1a:00.0",
    "sys/class/infiniband/mlx5_1/device": "sys/devices/pci0000:c0/0000:c0:01.0/0000:c1:00.0",
    "sys/class/infiniband/mlx5_2/device": f"{SWITCH}/0000:18:02.0/0000:1b:00.1/mlx5_core.sf.4",  # a subfunction
}
SOFTWARE = {"sys/class/infiniband/rxe0/node_type": "1: CA\n"}


def test_facts_of_a_tree(tmp_path: Path) -> None:
    assert gpudirect.adapters(tmp_path) == [] and gpudirect.peermem(tmp_path) == ""
    tree(tmp_path, {**SOFTWARE, "sys/module/nv_peer_mem/refcnt": "0"}, TREE)
    assert gpudirect.peermem(tmp_path) == "nv_peer_mem"
    tree(tmp_path, {"sys/module/nvidia_peermem/refcnt": "0"}, {})
    assert gpudirect.peermem(tmp_path) == "nvidia_peermem"
    assert gpudirect.adapters(tmp_path) == ["mlx5_0", "mlx5_1", "mlx5_2", "rxe0"]
    near, far, subfunction, software = (gpudirect.adapter_of(name, tmp_path, "EBADF") for name in gpudirect.adapters(tmp_path))
    assert near.path[-1] == "0000:1a:00.0" and len(near.path) == 5
    assert subfunction.path[-1] == "0000:1b:00.1", "what is no PCI device is left out"
    assert software.path == ()
    paths = [gpudirect.pci_path(tmp_path / f"sys/bus/pci/devices/0000:d{index}:00.0") for index in range(2)]
    gpus = [replace(GOOD, path=path) for path in paths]
    assert gpudirect.distance(gpus[0], near) == gpudirect.distance(gpus[0], subfunction) == gpudirect.DISTANCES[0]
    assert gpudirect.distance(gpus[1], near) == gpudirect.DISTANCES[1]
    assert gpudirect.distance(gpus[0], far) == gpudirect.DISTANCES[2]
    assert gpudirect.distance(gpus[0], software) == gpudirect.distance(replace(GOOD, path=()), near) == gpudirect.DISTANCES[3]


def test_the_window_of_a_gpu(tmp_path: Path) -> None:
    registers, window = "0x00000000f4000000 0x00000000f4ffffff 0x0000000000040200", "0x38000000000 0x381ffffffff 0x14220c"
    (tmp_path / "resource").write_text(f"{registers}\n{window}\n0x0 0x0 0x0\n")
    assert gpudirect._bar1(tmp_path) == 8 << 30
    for broken in ("", registers, f"{registers}\n0x0 0x0 0x0\n", f"{registers}\nnothing\n"):
        (tmp_path / "resource").write_text(broken)
        assert gpudirect._bar1(tmp_path) == 0


class FakeDriver:
    """Of two GPUs. ``good``: what the attributes say."""

    def __init__(self, good: dict[int, int]) -> None:
        self.good = good

    def pci_bus_id(self, index: int) -> str:
        return f"0000:d{index}:00.0"

    def attribute(self, index: int, attribute: int) -> int:
        return self.good.get(attribute, 0)


def facts(monkeypatch: pytest.MonkeyPatch, good: dict[int, int]) -> None:
    monkeypatch.setattr(driver, "kind", lambda: "cuda")
    monkeypatch.setattr(driver, "count", lambda: 2)
    monkeypatch.setattr(driver, "driver", lambda: FakeDriver(good))


def test_what_the_doctor_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(name: str) -> str:
        asked.append(name)
        return "EOPNOTSUPP" if name == "rxe0" else "EBADF"

    asked: list[str] = []
    monkeypatch.setattr(driver, "kind", lambda: "")
    assert [each.state for each in doctor.gpu(tmp_path, ask)] == [OK]
    tree(tmp_path, {"proc/driver/nvidia/version": ""}, {})
    found = doctor.gpu(tmp_path, ask)
    assert [each.state for each in found] == [LIMITS] and "torch is built without CUDA" in found[0].text
    facts(monkeypatch, {116: 1, 118: 100})
    found = doctor.gpu(tmp_path, ask)
    assert [each.state for each in found] == [OK] and "no RDMA adapter" in found[0].text and not asked
    tree(tmp_path, SOFTWARE, TREE)
    found = doctor.gpu(tmp_path, ask)
    assert asked == ["mlx5_0", "mlx5_1", "mlx5_2", "rxe0"]
    assert [each.state for each in found] == [LIMITS] * 4, "for each GPU the adapters that could, and the one that never can"
    assert found[0].text == (
        "GPU 0 is staged in host memory, from mlx5_0 (behind one PCI switch), mlx5_2 (behind one PCI switch), "
        "mlx5_1 (across host bridges); not dma-buf: the GPU's driver gives out none; "
        "not nvidia-peermem: the module is not loaded"
    )
    assert "open kernel modules" in found[0].hint
    assert "no PCI device" in found[1].text and "rxe0" in found[1].text
    tree(tmp_path, {"sys/module/nvidia_peermem/refcnt": "0"}, {})
    found = doctor.gpu(tmp_path, ask)
    assert [each.state for each in found] == [OK, LIMITS] * 2
    assert "GPU 1 is reached by nvidia-peermem (untried on hardware), from mlx5_0 (under one host bridge)" in found[2].text
    assert "not dma-buf" in found[2].text
    facts(monkeypatch, {116: 1, 117: 1, 118: 0, 124: 1})
    found = doctor.gpu(tmp_path, ask)
    assert "reached by dma-buf" in found[0].text and "not " not in found[0].text
    assert all("rdmarpc does not" not in each.text for each in found)

    def broken() -> Any:
        raise RdmaError("cuInit failed: the driver says CUDA_ERROR_NO_DEVICE")

    monkeypatch.setattr(driver, "driver", broken)
    assert [each.state for each in doctor.gpu(tmp_path, ask)] == [MISSING]


# -- the native call


RECORDER = r"""
#include <errno.h>
#include <stdint.h>
#include <string.h>
struct ibv_mr { void *context, *pd, *addr; uint64_t length; uint32_t handle, lkey, rkey; } mr = {0, 0, 0, 0, 0, 0xabc, 0xdef};
uint64_t said[8];
int refusal, closed;
struct ibv_mr *ibv_reg_dmabuf_mr(void *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
    uint64_t now[8] = {(uintptr_t)pd, offset, length, iova, fd, access};
    memcpy(said, now, sizeof said);
    errno = refusal;
    return refusal ? 0 : &mr;
}
int ibv_dereg_mr(struct ibv_mr *which) { closed += which == &mr; return refusal; }
"""


def test_the_native_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ctypes.CDLL(str(compiled(tmp_path, "recorder", RECORDER)), use_errno=True)
    real_cdll = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, **_: fake if name == "libibverbs.so.1" else real_cdll(name))
    for name in ("ibv_get_async_event", "ibv_ack_async_event"):
        monkeypatch.setattr(fake, name, ctypes.CFUNCTYPE(None)(lambda: None), raising=False)
    lib = libibverbs.library()
    big = 1 << 40
    mr = libibverbs.DmaBufMR(lib, 0xFF00_0000_1000, 5 * big, 7, 31, 3 * big)
    said = list((ctypes.c_uint64 * 8).in_dll(fake, "said"))
    assert said[:6] == [0xFF00_0000_1000, 3 * big, 5 * big, 3 * big, 31, 7], "pd, offset, length, iova, fd, access"
    assert (mr.lkey, mr.rkey) == (0xABC, 0xDEF)
    mr.close()
    assert ctypes.c_int.in_dll(fake, "closed").value == 1
    ctypes.c_int.in_dll(fake, "refusal").value = errno.EOPNOTSUPP
    with pytest.raises(OSError) as raised:
        libibverbs.DmaBufMR(lib, 1, 4096, 7, -1, 0)
    assert raised.value.errno == errno.EOPNOTSUPP
    with pytest.raises(OSError):
        mr.close()
    with pytest.raises(OSError) as raised:
        libibverbs.DmaBufMR(ctypes.CDLL(None), 1, 4096, 7, -1, 0)
    assert raised.value.errno == errno.ENOSYS, "a libibverbs from before rdma-core 34"
