"""Calls that are given up before their arguments were READ: the callee must not run with what the caller wrote there since, and
keeps none of the references that came along."""

from __future__ import annotations

import pytest
import torch
from called import hold_the_gil
from group import results, run_group
from timing import eventually

import rdmarpc as rpc

NUMBERS = 50_000
_came: list[list[float]] = []


def take(*tensors: torch.Tensor) -> None:
    _came.append([tensor.unique().tolist() for tensor in tensors])


def take_all(tensors: list[object]) -> None:
    take(*[tensor for tensor in tensors if isinstance(tensor, torch.Tensor)])


def taken() -> list[list[float]]:
    found = list(_came)
    _came.clear()
    return found


def given_up(rank: int) -> None:
    if rank == 0:
        bulk = b"x" * (4 << 20)  # a pickle too large for a frame
        shared = rpc.RRef(1)
        for number, send in enumerate(
            (
                lambda tensor: rpc.rpc_sync("worker1", take, (tensor,), timeout=1),
                lambda tensor: rpc.rpc_async("worker1", take, (tensor, tensor * 1), timeout=1).wait(),
                lambda tensor: rpc.rpc_sync("worker1", take_all, ([bulk, tensor],), timeout=1),
                lambda tensor: rpc.remote("worker1", take, (tensor, 1 * tensor, tensor[1:]), timeout=1).to_here(timeout=1),
                lambda tensor: rpc.rpc_sync("worker1", take_all, ([shared, tensor],), timeout=1),
            )
        ):
            held = rpc.rpc_async("worker1", hold_the_gil, (3,))
            tensor = torch.ones(NUMBERS * (number + 1))  # of this size nothing was sent before, so there is no landing place
            with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
                send(tensor)
            tensor.fill_(9)
            held.wait()
            came = rpc.rpc_sync("worker1", taken)
            assert all(each == [1.0] for call in came for each in call), (number, came)
            rpc.rpc_sync("worker1", take, (torch.ones(NUMBERS * (number + 1)),))
            came = rpc.rpc_sync("worker1", taken)  # one that was given up may have come late
            assert [[1.0]] in came and all(each == [1.0] for call in came for each in call), (number, came)
        eventually(lambda: rpc.debug_info()["num_owner_rrefs"], 0, limit=10.0)
    rpc.shutdown()


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_arguments_that_change_after_a_call_was_given_up(device: str) -> None:
    results(run_group(given_up, transport=device))
