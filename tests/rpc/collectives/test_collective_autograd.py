"""What autograd is told of collectives: versions of what is written, and warnings where a gradient would be missing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group import Meeting, results, run_group
from torch import nn

SIZE = 2


def _join(meeting: Meeting, backend: str) -> None:
    store = dist.FileStore(f"{meeting._place}-{backend}", -1)
    dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=SIZE, timeout=timedelta(seconds=60))


def _writing(rank: int, y: torch.Tensor, later: bool) -> dict[str, Callable[[], Any]]:
    """Every collective that writes ``y`` (4 elements) at this rank."""
    part, half, wide = torch.ones(4), y.view(2, 2), torch.ones(8)
    x = torch.ones(2)

    def message() -> Any:
        if rank == 0:
            dist.send(torch.ones(4), 1)
            return dist.irecv(y, 1)
        work = dist.irecv(y, 0)
        dist.send(torch.ones(4), 0)
        return work

    return {
        "all_reduce": lambda: dist.all_reduce(y, async_op=later),
        "all_reduce with gaps": lambda: dist.all_reduce(y.view(2, 2).t(), async_op=later),
        "coalesced": lambda: dist.all_reduce_coalesced([part, y], async_op=later),
        "reduce": lambda: dist.reduce(y if rank == 0 else part, 0, async_op=later),
        "broadcast": lambda: dist.broadcast(y if rank == 1 else part, 0, async_op=later),
        "all_gather": lambda: dist.all_gather(list(half), x, async_op=later),
        "all_gather single": lambda: dist.all_gather_into_tensor(y, x, async_op=later),
        "gather": lambda: dist.gather(x, list(half) if rank == 1 else None, 1, async_op=later),
        "scatter": lambda: dist.scatter(y, [part, part] if rank == 0 else None, 0, async_op=later),
        "reduce_scatter": lambda: dist.reduce_scatter(y, [part, part], async_op=later),
        "reduce_scatter single": lambda: dist.reduce_scatter_tensor(y, wide, async_op=later),
        "all_to_all": lambda: dist.all_to_all(list(half), [x, x], async_op=later),
        "all_to_all single": lambda: dist.all_to_all_single(y, part, async_op=later),
        "recv": message,
    }


WRITES_AT = {"reduce": 0, "broadcast": 1, "gather": 1}
"""Where only one rank is written at."""


def _versions(meeting: Meeting) -> int:
    _join(meeting, "rdmarpc")
    warnings.simplefilter("ignore")
    done = 0
    for later in (False, True):
        for name in _writing(meeting.rank, torch.zeros(4), later):
            a = torch.arange(1.0, 5.0, requires_grad=True)
            y = (a * 1).detach()
            saved = (y * a).sum()  # keeps y, for the gradient of a
            before = y._version
            work = _writing(meeting.rank, y, later)[name]()
            if work is not None:
                work.wait()
            if WRITES_AT.get(name, meeting.rank) != meeting.rank:
                assert y._version == before, name
                saved.backward()
                assert torch.equal(a.grad, torch.arange(1.0, 5.0))
                continue
            assert y._version > before, name
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                saved.backward()
            done += 1
    y = torch.full((3,), 6.0, requires_grad=True) * 1  # as in the report: 72 for 36
    loss = (y * y).sum()
    with torch.no_grad():
        dist.all_reduce(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        kept = torch.ones(3)
        dist.all_reduce(kept)  # has no version
    dist.destroy_process_group()
    return done


def test_what_a_collective_writes_is_no_saved_tensor_any_more():
    """The gradient was wrong, silently."""
    assert min(results(run_group(_versions, SIZE, dynamic=True, timeout=100))) > 20


def _told(call: Callable[[torch.Tensor], Any], *, grad: bool = True) -> tuple[bool, list[float]]:
    """Whether a warning of a missing kernel comes in a forward and backward, and the gradient."""
    a = torch.arange(1.0, 5.0, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = a * 2
        with torch.set_grad_enabled(grad):
            call(y)
        y.sum().backward()
    assert a.grad is not None
    return any("an autograd kernel was not registered" in str(each.message) for each in caught), a.grad.tolist()


def _warned(meeting: Meeting) -> list[Any]:
    in_place = (
        dist.all_reduce,
        lambda y: dist.broadcast(y, 0),
        lambda y: dist.all_gather([torch.empty(4), torch.empty(4)], y),
    )
    found = []
    for backend in ("gloo", "rdmarpc"):
        _join(meeting, backend)
        found.append([_told(call) for call in in_place] + [_told(call, grad=False) for call in in_place])
        if backend == "gloo":
            dist.destroy_process_group()
    for call in (  # gloo fails
        lambda y: dist.all_gather_into_tensor(torch.empty(8), y),
        lambda y: dist.reduce_scatter_tensor(torch.empty(2), y),
        lambda y: dist.all_to_all_single(torch.empty(4), y),
    ):
        assert _told(call)[0] and not _told(call, grad=False)[0]
    leaf = torch.ones(3, requires_grad=True)
    for _ in range(5):
        dist.broadcast(leaf, 0)
    assert len(leaf._backward_hooks or {}) == 1  # they would pile up
    dist.destroy_process_group()
    return found


def test_a_missing_gradient_is_warned_of_as_with_gloo():
    for gloo, ours in results(run_group(_warned, SIZE, dynamic=True, timeout=100)):
        assert ours == gloo and ours[0][0] and not ours[-1][0]


def _trains(meeting: Meeting) -> list[float]:
    """What saves tensors between collectives that write parameters, and must go on to work: FSDP of both kinds, and DDP."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    _join(meeting, "rdmarpc")
    losses = []
    for kind in ("ddp", "fsdp", "fsdp2"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if kind == "ddp" else nn.ReLU(), nn.Linear(8, 1))
        if kind == "ddp":
            model: Any = nn.parallel.DistributedDataParallel(net)
        elif kind == "fsdp":
            model = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
        else:
            model = fully_shard(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8) + meeting.rank).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    dist.destroy_process_group()
    return losses


def test_trainers_go_on():
    assert all(len(each) == 9 for each in results(run_group(_trains, SIZE, dynamic=True, timeout=100)))
