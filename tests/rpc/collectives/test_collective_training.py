"""What trains over groups: DDP, FSDP2 and DTensor beside gloo; and what of a group is seldom used."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group import Meeting, results, run_group
from test_collective_failures import caught, join
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 4
Bits = tuple[list[torch.Tensor], list[torch.Tensor]]
"""What is each rank's own: losses, and statistics of batches; and what all ranks have: parameters."""


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 5))


def _steps(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """The losses of a few steps, each rank on data of its own."""
    data = torch.Generator().manual_seed(100 + rank)
    # Not Adam: it makes whole steps of the rounding in gradients that are zero, such as that of a bias before a BatchNorm.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        x, y = torch.randn(8, 20, generator=data), torch.randint(5, (8,), generator=data)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _bits(model: nn.Module, losses: list[torch.Tensor]) -> Bits:
    whole = [each.full_tensor() if isinstance(each, DTensor) else each.detach() for each in model.parameters()]
    return losses + list(model.buffers()), whole


def _ddp(group: Any, mesh: DeviceMesh, rank: int, **options: Any) -> Bits:
    model = DDP(_model(), process_group=group, bucket_cap_mb=0.1, **options)
    return _bits(model, _steps(model, rank))


def _hooked(group: Any, mesh: DeviceMesh, rank: int) -> Bits:
    """Without synchronisation at first, then with gradients in half precision."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DDP(_model(), process_group=group)
    model.register_comm_hook(group, fp16_compress_hook)
    with model.no_sync():
        model(torch.ones(4, 20) * rank).sum().backward()
    return _bits(model, _steps(model, rank))


def _static(group: Any, mesh: DeviceMesh, rank: int) -> Bits:
    return _ddp(group, mesh, rank, static_graph=True, gradient_as_bucket_view=True)


def _unused(group: Any, mesh: DeviceMesh, rank: int) -> Bits:
    return _ddp(group, mesh, rank, find_unused_parameters=True)


def _fsdp(group: Any, mesh: DeviceMesh, rank: int) -> Bits:
    model = _model()
    del model[1]  # batch statistics are each rank's own
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _bits(model, _steps(model, rank))


def _tensors(group: Any, mesh: DeviceMesh, rank: int) -> Bits:
    """Tensor parallel layers, which all ranks feed with the same data; a tensor that changes its layout."""
    model = _model()
    del model[1]
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    losses = _steps(model, 0)
    uneven = distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0)])
    moved = uneven.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()])
    own, whole = _bits(model, losses)
    return own, [*whole, moved.to_local()]


CASES = {"ddp": _ddp, "hooked": _hooked, "static": _static, "unused": _unused, "fsdp": _fsdp, "tensors": _tensors}

_ROUNDING = {"hooked": 1e-3}
"""How far sums in another order may be from gloo's, where that is more than float32 rounds."""


def _trains(meeting: Meeting) -> None:
    import rdmarpc  # noqa: F401

    rank, size = meeting.rank, int(os.environ["TEST_SIZE"])
    store = dist.FileStore(meeting._place + "-group", -1)
    dist.init_process_group("rdmarpc", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    meshes = [DeviceMesh.from_group(group, "cpu") for group in (ours, gloo)]
    for name, case in CASES.items():
        first, again, theirs = case(ours, meshes[0], rank), case(ours, meshes[0], rank), case(gloo, meshes[1], rank)
        for one, other, oracle in zip(*([*own, *whole] for own, whole in (first, again, theirs)), strict=True):
            assert torch.equal(one, other), f"{name}: another run has other bits"
            if size == 2:
                assert torch.equal(one, oracle), f"{name}: {one.flatten()[:4]} for gloo's {oracle.flatten()[:4]}"
            else:
                text = f"{name}: not as gloo within rounding"
                torch.testing.assert_close(one, oracle, rtol=1e-4, atol=_ROUNDING.get(name, 1e-6), msg=text)
        for mine in first[1]:
            root = mine.clone()
            dist.broadcast(root, 0, group=gloo)
            assert torch.equal(mine, root), f"{name}: rank {rank} has other bits than rank 0"
    dist.destroy_process_group()


def _seldom(meeting: Meeting) -> None:
    """Messages from anybody, barriers that name who is missing, calls in one, pipelines of batches, an end by force."""
    join(meeting, 3, "seldom")
    rank = meeting.rank
    if rank == 0:
        came = torch.empty(5)
        sources = [dist.recv(came) for _ in range(2)]
        assert sorted(sources) == [1, 2] and came[0] == sources[-1]
    else:
        dist.send(torch.full((5,), float(rank)), 0)
    with pytest.raises(RuntimeError, match=r"sourceRank\(\) is of a message that was received, not of broadcast"):
        dist.broadcast(torch.ones(1), 0, async_op=True).source_rank()
    dist.monitored_barrier()
    part = dist.split_group(split_ranks=[[2, 0]])
    assert (part is None) == (rank == 1)
    if part is not None:
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=part)
        assert total.item() == 2.0 and (part.rank(), part.size()) == ([0, 2].index(rank), 2)
    for bad in ([], [[0], [0, 1]], [[3]]):
        with pytest.raises(ValueError, match="split_ranks"):
            dist.split_group(split_ranks=bad)
    several = [torch.full((n,), rank + 1.0) for n in (3, 50_000)]
    with dist._coalescing_manager(async_ops=True) as calls:
        for each in several:
            dist.all_reduce(each)
    calls.wait()
    assert all(torch.equal(each, torch.full_like(each, 6.0)) for each in several)
    gathered = [torch.empty(3 * n) for n in (2, 70)]
    with dist._coalescing_manager():
        for out in gathered:
            dist.all_gather_into_tensor(out, torch.full((len(out) // 3,), float(rank)))
    assert all(torch.equal(out.view(3, -1)[:, 0], torch.arange(3.0)) for out in gathered)
    out, into = torch.arange(4.0) + rank, torch.empty(4)
    swaps = [dist.P2POp(dist.isend, out, (rank + 1) % 3), dist.P2POp(dist.irecv, into, (rank - 1) % 3)]
    for work in dist.batch_isend_irecv(swaps):
        work.wait()
    assert torch.equal(into, torch.arange(4.0) + (rank - 1) % 3)
    late, cut = (dist.new_group(timeout=timedelta(seconds=20)) for _ in range(2))
    meeting.step("late", 3)
    if rank == 1:
        meeting.hear("named")
    else:
        name, seconds, text = caught(lambda: dist.monitored_barrier(late, timedelta(seconds=3)))
        assert "rank 1" in text and seconds < 15, (name, text)
        assert ("Rank 1 failed to pass monitoredBarrier in 3000 ms" in text) == (rank == 0), text
        meeting.say(f"named/{rank}")
        if rank == 0:
            meeting.hear("named/2")
            meeting.say("named")
    meeting.step("cut", 3)
    if rank == 1:
        time.sleep(0.1)
        cut.abort()
        assert caught(lambda: dist.barrier(cut))[0]
    else:
        name, seconds, text = caught(lambda: dist.barrier(cut))
        assert name and "rank 1 aborted" in text and seconds < 15, (name, text)
    dist.barrier()
    dist.destroy_process_group()
    for turn in range(5):
        _ended_by_force(meeting, turn)


def _ended_by_force(meeting: Meeting, turn: int) -> None:
    """The device closes under calls that another thread has under way."""
    join(meeting, 3, f"forced{turn}")
    group, big = dist.group.WORLD, torch.ones(3_000_000)
    call = message = None
    if meeting.rank != 1:
        call, message = dist.all_reduce(big, async_op=True), dist.irecv(torch.empty(4), 1)
        waits = [threading.Thread(target=caught, args=(each.wait,)) for each in (call, message)]
        for thread in waits:
            thread.start()
    meeting.step(f"forced{turn}", 3)
    group.abort()
    if call is not None:
        for thread in waits:
            thread.join(20)
        ended = caught(call.wait)  # another rank's abort may be seen before our own
        assert ("aborted" in ended[2] or ended[0] == "PeerLost") and caught(message.wait)[0], ended
    dist.destroy_process_group()


def test_what_is_seldom_used():
    results(run_group(_seldom, 3, dynamic=True))


@pytest.mark.parametrize("size", [2, 3])
def test_trains_as_over_gloo(size: int):
    results(run_group(_trains, size, dynamic=True, timeout=100, environment={"TEST_SIZE": str(size)}))
