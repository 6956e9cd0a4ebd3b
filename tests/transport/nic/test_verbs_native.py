"""Where there is no RDMA: what is said then; no device needed."""

from __future__ import annotations

import ctypes

import pytest

from rdmarpc.transport import NotSupported
from rdmarpc.transport.memory import mapping
from rdmarpc.transport.nic import libibverbs, native
from rdmarpc.transport.nic.native import Context


def test_a_host_without_libibverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, **_: object) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    libibverbs.library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    for use in (libibverbs.devices, lambda: Context("mlx5_0")):
        with pytest.raises(NotSupported, match=r"libibverbs\.so\.1") as raised:
            use()
        assert "apt install ibverbs-providers" in raised.value.hint


def test_a_device_that_is_not_there() -> None:
    try:
        found = libibverbs.devices()
    except NotSupported as error:
        pytest.skip(str(error))
    assert found == sorted(found) and "libibverbs.so.1" in libibverbs.release()
    with pytest.raises(NotSupported, match="no such device"):
        Context("no_such_device")


def test_a_libibverbs_without_a_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one from before rdma-core 34 has no ``ibv_reg_dmabuf_mr``."""
    monkeypatch.setattr(libibverbs, "library", lambda: ctypes.CDLL(None))
    with pytest.raises(NotSupported) as raised:
        libibverbs.made("mlx5_0", "ibv_reg_dmabuf_mr")
    assert raised.value.status == "ENOSYS"


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ctypes.create_string_buffer(8)
    assert native._readable(ctypes.addressof(kept))
    assert not any(map(native._readable, (8, 4096, 1 << 40, (1 << 56) - 8)))
    # As in a container whose seccomp profile forbids the call: the kernel says it when it registers.
    monkeypatch.setattr(mapping, "_error", lambda code, pid: NotSupported("not permitted"))
    assert native._readable(8)
