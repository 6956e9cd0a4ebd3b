"""Tensors with a tangent, and calls from within modes of torch's."""

from __future__ import annotations

import threading

import pytest
import torch
from called import identity
from group import results, run_group
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import rdmarpc as rpc
from rdmarpc.transport import NotSupported

WHY = "forward_ad.* cannot travel"


class Named(torch.Tensor):
    pass


def refused(rank: int) -> None:
    """However it is sent, and also where it is a result."""
    if rank == 0:
        plain = torch.ones(3)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(plain, torch.ones(3))
            large = forward_ad.make_dual(torch.ones(1 << 16), torch.ones(1 << 16))
            for args in ((dual,), (large,), (1, dual), ([dual],), ({"x": dual},), (dual * 2,), (dual.as_subclass(Named),)):
                with pytest.raises(RuntimeError, match=WHY):
                    rpc.rpc_sync("worker1", identity, args)
            with pytest.raises(RuntimeError, match=WHY):
                rpc.rpc_sync("worker1", identity, kwargs={"value": dual})
            with pytest.raises(RuntimeError, match=WHY):
                rpc.remote("worker1", identity, (dual,))
            for tensor in (plain, forward_ad.unpack_dual(dual).primal):
                assert torch.equal(rpc.rpc_sync("worker1", identity, (tensor,)), plain)
        assert torch.equal(rpc.rpc_sync("worker1", identity, (dual,)), plain)  # the level has ended, and the tangent with it
        with pytest.raises(RuntimeError, match=WHY):
            rpc.rpc_sync("worker1", returns_dual)
        with pytest.raises(RuntimeError, match="inside of a transform of torch"):
            torch.func.grad(lambda x: rpc.rpc_sync("worker1", identity, (x,)).sum())(plain)
    rpc.shutdown()


def returns_dual() -> torch.Tensor:
    forward_ad.enter_dual_level()  # until this worker ends
    return forward_ad.make_dual(torch.ones(3), torch.ones(3))


def test_tensors_with_tangents_are_refused() -> None:
    results(run_group(refused))


GO = threading.Event()


def wait_and_give(value: torch.Tensor) -> torch.Tensor:
    assert GO.wait(60)
    return value


def go() -> None:
    GO.set()


def without_data(rank: int) -> None:
    if rank == 0:
        small, large, mode = torch.ones(3), torch.ones(1 << 17), FakeTensorMode()
        begun = rpc.rpc_async("worker1", wait_and_give, (large,))
        with mode:
            for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
                for value in (1, small, large, torch.ones(3)):
                    with pytest.raises(NotSupported, match="within a FakeTensorMode"):
                        call("worker1", identity, (value,))
            with pytest.raises(NotSupported, match="within a FakeTensorMode"):
                begun.wait()
            fake = torch.ones(3)
        rpc.rpc_sync("worker1", go)
        assert torch.equal(begun.wait(), large)
        with pytest.raises(RuntimeError, match="a FakeTensor has no data"):
            rpc.rpc_sync("worker1", identity, (fake,))
        assert torch.equal(rpc.rpc_sync("worker1", identity, (small,)), small)
    rpc.shutdown()


def test_calls_where_tensors_have_no_data_are_refused() -> None:
    results(run_group(without_data))
