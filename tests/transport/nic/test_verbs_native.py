"""Finding native structures, and finding the packages; no device needed."""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
from pathlib import Path

import pytest

from rdmarpc.transport import NotSupported, RdmaError
from rdmarpc.transport.memory import mapping
from rdmarpc.transport.nic import packages
from rdmarpc.transport.nic.native import Context, find, half, peek, word


def test_looking_at_memory_that_is_not_there() -> None:
    kept = ctypes.create_string_buffer(b"abcdefgh", 8)
    address = ctypes.addressof(kept)
    assert peek(address, 8) == b"abcdefgh"
    assert word(address) == int.from_bytes(b"abcdefgh", "little") and half(address) == int.from_bytes(b"abcd", "little")
    for nowhere in (8, 4096, 1 << 40, (1 << 56) - 8):
        assert peek(nowhere, 8) is None and word(nowhere) == 0
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    assert peek(start, 8) == bytes(8)
    assert peek(start + mmap.PAGESIZE, 8) is None
    assert peek(start + mmap.PAGESIZE - 4, 8) is None, "half of a structure is none"


class Hidden(ctypes.Structure):
    """Stands for an object of an extension type: its values lie in its body. (Room for four words in the object itself.)"""

    _fields_ = [("first", ctypes.c_uint64), ("second", ctypes.c_uint64)]


def test_the_one_pointer_that_matches() -> None:
    native = ctypes.create_string_buffer(b"queue 17", 8)
    other = ctypes.create_string_buffer(b"queue 18", 8)
    address = ctypes.addressof(native)

    def matches(candidate: int) -> bool:
        return peek(candidate, 8) == b"queue 17"

    # Beside it: a pointer to nothing, a pointer to something else, an odd number.
    for beside in (1 << 40, ctypes.addressof(other), 12345, address):
        assert find(Hidden(beside, address), "queue", matches) == address
    with pytest.raises(NotSupported, match=r"no queue in a .*Hidden of"):
        find(Hidden(1 << 40, ctypes.addressof(other)), "queue", matches)
    twin = ctypes.create_string_buffer(b"queue 17", 8)
    with pytest.raises(NotSupported, match="more than one queue"):
        find(Hidden(address, ctypes.addressof(twin)), "queue", matches)


def test_pyverbs_does_not_decide_about_the_logging_of_the_program() -> None:
    handlers, level, paths = list(logging.root.handlers), logging.root.level, set(sys.path)
    try:
        provider = packages.Pyverbs()
    except NotSupported as error:
        pytest.skip(str(error))
    assert logging.root.handlers == handlers and logging.root.level == level
    assert "pyverbs in /" in provider.name and "libibverbs.so.1" in provider.name
    assert paths >= set(sys.path), "more than one package was put within reach"
    assert provider.devices() == sorted(provider.devices())
    with pytest.raises(RdmaError, match="ibv_open_device"):
        Context(provider, "no_such_device")


def test_why_no_package_is_usable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built_for_another = tmp_path / "pyverbs"
    built_for_another.mkdir()
    (built_for_another / "__init__.py").touch()
    (built_for_another / "device.cpython-26-x86_64-linux-gnu.so").touch()
    monkeypatch.setattr(packages, "_FOLDERS", (str(tmp_path),))
    for name in [name for name in sys.modules if name.split(".")[0] in ("pyverbs", "ibverbs")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    monkeypatch.setitem(sys.modules, "ibverbs", None)
    packages.choose.cache_clear()
    with pytest.raises(NotSupported) as raised:
        packages.choose()
    said = str(raised.value)
    assert "device.cpython-26-x86_64-linux-gnu.so" in said and "ibverbs: " in said
    assert "apt install python3-pyverbs" in said and "pip install ibverbs" in said
    monkeypatch.setenv("RDMARPC_VERBS", "ibverbs")
    with pytest.raises(NotSupported) as raised:
        packages.choose()
    assert "pyverbs:" not in raised.value.message
    monkeypatch.setenv("RDMARPC_VERBS", "umad")
    with pytest.raises(NotSupported, match="RDMARPC_VERBS='umad' names no provider"):
        packages.choose()


def test_a_package_that_does_not_load_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip's pyverbs does that was built for another rdma-core: the next place is tried."""
    broken = tmp_path / "pyverbs"
    broken.mkdir()
    (broken / "__init__.py").touch()
    for name in ("addr", "cq", "device", "mr", "pd", "qp", "srq"):
        (broken / f"{name}{packages.importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"\x7fELF not quite")
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "pyverbs"}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    reason = packages._load_from(str(broken))
    assert "addr" in reason
    assert not [name for name in sys.modules if name.split(".")[0] == "pyverbs"], "halves of a package are left behind"


def test_where_a_process_may_not_ask_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose seccomp profile forbids the call."""
    monkeypatch.setattr(mapping, "_error", lambda code, pid: NotSupported("not permitted"))
    with pytest.raises(NotSupported, match="process_vm_readv") as raised:
        peek(8, 8)
    assert "seccomp" in raised.value.hint
