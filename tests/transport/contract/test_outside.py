"""Devices that other packages bring by an entry point. ``test_contract`` shows that such a device keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forks import forks

import rdmarpc as rpc
from rdmarpc.transport import Device, NotSupported, kinds, open_device


def test_its_place_and_its_own_options_reach_it(outside: Path) -> None:
    with open_device("outside://there", shout=True, peer_timeout=3.0) as device:
        assert type(device).__name__ == "OutsideDevice" and isinstance(device, Device)
        assert device.place == "there" and device.shout and device.name == "outside"


def test_an_option_that_it_does_not_have(outside: Path) -> None:
    with pytest.raises(TypeError, match="whisper"):
        open_device("outside", whisper=True)
    with pytest.raises(TypeError, match="shout"):
        open_device("shm", shout=True)


def test_an_unknown_kind_names_those_there_are(outside: Path) -> None:
    with pytest.raises(NotSupported, match="no device 'inside://x'") as raised:
        open_device("inside://x")
    assert "auto, shm, cuda, verbs, tcp" in raised.value.hint and "outside (of outside-device)" in raised.value.hint
    assert kinds()["outside"] == "outside-device" and kinds()["shm"] == "rdmarpc"


def test_one_that_cannot_be_loaded(outside: Path) -> None:
    with pytest.raises(NotSupported, match=r"'broken' of outside-device cannot be loaded: .*no_such_module") as raised:
        open_device("broken")
    assert "no_such_module:open" in raised.value.hint


def test_a_name_of_ours_is_taken(outside: Path) -> None:
    with open_device("shm") as device:
        assert type(device).__name__ == "ShmDevice"


def work(rank: int, store: str) -> None:
    options = rpc.RpcBackendOptions(transport="outside", init_method=f"file://{store}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    device = rpc._get_current_rpc_agent().device
    assert device.name == "outside" and device.address.startswith(b"outside:")
    for size in (3, 3, 300_000, 300_000):
        assert torch.equal(rpc.rpc_sync(f"worker{1 - rank}", torch.add, (torch.ones(size), 1)), torch.full((size,), 2.0))
    rpc.shutdown()


@pytest.mark.timeout(120)
def test_a_group_of_workers_runs_over_it(outside: Path, tmp_path: Path) -> None:
    workers = [forks().Process(target=work, args=(rank, str(tmp_path / "store")), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
    assert [worker.exitcode for worker in workers] == [0, 0]
