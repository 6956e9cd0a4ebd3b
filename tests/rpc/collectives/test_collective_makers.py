"""Premultiplied sums, groups that are made in other ways than by ``init_process_group``, and where torch asks for gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group import Meeting, results, run_group
from torch import nn
from torch.distributed import distributed_c10d as c10d

LIMIT = timedelta(seconds=60)
PREMUL = dist._make_nccl_premul_sum


def _join(meeting: Meeting, size: int, backend: str = "rdmarpc") -> None:
    store = dist.FileStore(f"{meeting._place}-{backend}", -1)
    dist.init_process_group(backend, store=store, rank=meeting.rank, world_size=size, timeout=LIMIT)


def _parts(dtype: torch.dtype, count: int, size: int = 3) -> list[torch.Tensor]:
    return [(torch.arange(count) % 37 + rank).to(dtype) for rank in range(size)]


def _premultiplied(meeting: Meeting) -> None:
    _join(meeting, 3)
    rank = meeting.rank
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for count in (3, 300, 300_000):
            for factor in (1 / 3, 0.5, torch.tensor([1 / 7])):
                parts, op = _parts(dtype, count), PREMUL(factor)
                scaled = [part * float(factor) for part in parts]
                expected = scaled[0] + scaled[1] + scaled[2]
                for call in ("all_reduce", "coalesced", "reduce", "gaps"):
                    x = parts[rank].clone()
                    if call == "all_reduce":
                        dist.all_reduce(x, op)
                    elif call == "coalesced":
                        dist.group.WORLD.allreduce_coalesced([x], _with(dist.AllreduceCoalescedOptions, op)).wait()
                    elif call == "reduce":
                        dist.reduce(x, 1, op)
                        assert torch.equal(x, expected if rank == 1 else parts[rank])
                        continue
                    else:
                        wide = torch.stack([x, x], 1)
                        dist.all_reduce(wide[:, 0], op, async_op=True).wait()
                        x = wide[:, 0]
                    assert torch.equal(x, expected), (call, dtype, count)
                wide = torch.cat(parts)
                for call in ("single", "list"):
                    out, given = torch.empty(count, dtype=dtype), wide.clone()
                    if call == "single":
                        dist.reduce_scatter_tensor(out, given, op)
                    else:
                        dist.reduce_scatter(out, list(given.chunk(3)), op)
                    each = parts[rank] * float(factor)
                    assert torch.equal(out, each + each + each), (call, dtype, count)
                    assert torch.equal(given, wide)  # an input is left as it is
    for wrong, error in ((torch.ones(2, dtype=torch.int64), ValueError), (torch.ones(2, dtype=torch.bool), ValueError)):
        with pytest.raises(error, match="premultiplied sum is for floating-point numbers"):
            dist.all_reduce(wrong, PREMUL(2.0))
    dist.barrier()
    dist.destroy_process_group()


def _with(kind: Any, op: Any) -> Any:
    made = kind()
    made.reduceOp = op
    return made


def test_premultiplied_sums():
    results(run_group(_premultiplied, 3, dynamic=True, timeout=100))


def _divided(meeting: Meeting) -> dict[str, float]:
    """FSDP2 with a factor of its own. gloo refuses what it asks for: the gradients are compared with one process's."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _join(meeting, 2)
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for factor in (3.0, 2.0, 1.0):
            torch.manual_seed(0)
            net = nn.Linear(6, 4, bias=False)
            weight = net.weight.detach().clone().requires_grad_()
            fully_shard(net, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
            net.set_gradient_divide_factor(factor)
            batches = [torch.ones(2, 6) * (1 + rank) for rank in range(2)]
            net(batches[meeting.rank]).square().sum().backward()
            sum((batch @ weight.T).square().sum() for batch in batches).backward()
            whole, expected = net.weight.grad.full_tensor(), weight.grad / factor
            worst = (whole - expected).abs().max() / expected.abs().max()
            found[f"{dtype} {factor}"] = worst.item()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_fsdp2_with_a_factor_of_its_own():
    for found in results(run_group(_divided, 2, dynamic=True, timeout=100)):
        for name, worst in found.items():
            assert worst < (1e-6 if "float32" in name else 0.02), (name, worst)


def _average(meeting: Meeting) -> tuple[list[float], list[float]]:
    """Gradients of averages, where torch has them."""
    from torch.distributed.nn import functional

    _join(meeting, 2)
    a = torch.full((4,), 2.0 + meeting.rank, requires_grad=True)
    functional.all_reduce(a * a, dist.ReduceOp.AVG).sum().backward()
    b = torch.full((4,), 2.0 + meeting.rank, requires_grad=True)
    functional.reduce_scatter(torch.empty(2), list((b * b).chunk(2)), dist.ReduceOp.AVG).sum().backward()
    dist.destroy_process_group()
    return a.grad.tolist(), b.grad.tolist()


def test_gradients_of_averages():
    for rank, (summed, scattered) in enumerate(results(run_group(_average, 2, dynamic=True, timeout=100))):
        assert summed == scattered == [2.0 * (2.0 + rank)] * 4


def _makers(meeting: Meeting) -> list[float]:
    """Each way makes a group; all of them work at once, beside gloo's."""
    import rdmarpc

    _join(meeting, 2, "gloo")
    rank, groups = meeting.rank, []
    dist.group.WORLD.barrier().wait()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=meeting_port(meeting))
    split = dist.new_group(backend="rdmarpc").split_group([1, 0])
    groups.append(split)
    assert split.split_group([1 - rank]).size() == 1  # ranks are those of the group
    assert (split.split_group([1]) is None) == (rank == 1)

    options = c10d._DistributedBackendOptions()
    options.store = dist.PrefixStore("by hand", dist.FileStore(f"{meeting._place}-hand", -1))
    options.group_rank, options.group_size, options.timeout = rank, 2, LIMIT
    options.group_id, options.global_ranks_in_group = "by hand", []
    groups.append(c10d.Backend._plugins["RDMARPC"].creator_fn(options, rdmarpc.RpcBackendOptions(peer_timeout=30)))
    found = []
    for group in groups:
        x = torch.full((3,), 1.0 + rank)
        group.allreduce([x]).wait()
        found.append(x[0].item())
    for group in groups:
        group.shutdown()
    dist.barrier()
    dist.destroy_process_group()
    return found


def meeting_port(meeting: Meeting) -> str:
    """One that rank 0 has found to be free."""
    from ports import free_port

    if meeting.rank == 0:
        meeting.say("port", str(free_port()))
    return meeting.said("port")


def test_groups_made_in_other_ways():
    for found in results(run_group(_makers, 2, dynamic=True, timeout=100)):
        assert set(found) == {3.0} and len(found) >= 2


def _sharded(meeting: Meeting) -> dict[str, list[str]]:
    """What a tensor that is sharded over another rank says here."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    found = {}
    for backend in ("gloo", "rdmarpc"):
        _join(meeting, 2, backend)
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])  # rank 1 has nothing of it
        whole = sharded_tensor.ones(spec, 3, 4)
        out = torch.zeros(3, 4) if meeting.rank == 0 else None
        whole.gather(0, out)
        found[backend] = [str(whole.device), str(whole.to(torch.float64).dtype), str(whole.cpu().size()), str(out)]
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_a_sharded_tensor_is_where_it_is_with_gloo():
    """Where torch takes whatever is not called gloo for something of GPUs."""
    for found in results(run_group(_sharded, 2, dynamic=True, timeout=100)):
        assert found["rdmarpc"] == found["gloo"] and found["gloo"][0] == "cpu"
