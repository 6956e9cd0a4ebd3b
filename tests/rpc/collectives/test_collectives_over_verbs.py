"""Collectives over ``verbs``, on an RDMA device: every operation and type beside sums and copies that a rank makes for itself,
what later calls of a signature post, training beside gloo, a rank that is killed."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import packets
import pytest
import torch
import torch.distributed as dist
from group import Meeting, results, run_group

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(400)]

SIZE = 3
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
TYPES += (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SUMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def join(meeting: Meeting, size: int) -> Any:
    import rdmarpc

    store = dist.FileStore(meeting._place + "-group", -1)
    options = rdmarpc.RpcBackendOptions(transport="verbs")
    limit = timedelta(seconds=60)
    dist.init_process_group("rdmarpc", store=store, rank=meeting.rank, world_size=size, timeout=limit, pg_options=options)
    group: Any = dist.group.WORLD
    assert group.members.domain.device.name.startswith("verbs")
    return group


def counters(group: Any) -> dict[str, int]:
    found: dict[str, int] = group.members.domain.device.counters()
    return found


def over_verbs(scenario: Callable[[Meeting], int], size: int, record: Callable[[str, object], None]) -> None:
    """``scenario`` returns how many bytes the device of its rank has written: so many packets have left."""
    before = packets.counters()
    nbytes = sum(results(run_group(scenario, size, dynamic=True, timeout=300.0)))
    sent = packets.counters() - before
    record("bytes_direct", nbytes)
    assert nbytes > 0 and sent["sent_pkts"] >= packets.needed(nbytes)


# -- operations and types


def drawn(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Numbers that every rank can draw for every other."""
    made = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if dtype is torch.bool:
        return made > 0
    if dtype.is_complex:
        return torch.complex(made, made.flip(0)).to(dtype)
    return made.to(dtype) if dtype.is_floating_point else (3 * made).abs().to(dtype)


def summed(parts: list[torch.Tensor], name: str) -> torch.Tensor:
    """From the lowest rank to the highest."""
    total = parts[0]
    for part in parts[1:]:
        total = SUMS[name](total, part).to(total.dtype)
    return total / len(parts) if name == "AVG" else total


def has(name: str, dtype: torch.dtype) -> bool:
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if name in ("BAND", "BOR", "BXOR"):
        return whole
    if dtype.is_complex:  # torch takes no others
        return name in ("SUM", "AVG")
    return name != "AVG" or not whole


def same(one: Any, other: Any, what: Any) -> None:
    ours, theirs = (each if isinstance(each, list) else [each] for each in (one, other))
    for mine, right in zip(ours, theirs, strict=True):
        text = f"{what}: {mine[:6]} for {right[:6]}"
        if "AVG" in what and mine.is_complex():  # torch rounds its division by the place in the tensor
            torch.testing.assert_close(mine, right, msg=text)
        else:
            assert mine.dtype == right.dtype and torch.equal(mine, right), text


def _sums(rank: int, dtype: torch.dtype, count: int, name: str) -> None:
    operation, what = getattr(dist.ReduceOp, name), (name, dtype, count)
    parts = [drawn(dtype, SIZE * count, 7 * count + each) for each in range(SIZE)]
    total, mine = summed(parts, name), parts[rank].clone()
    dist.all_reduce(mine, operation)
    same(mine, total, ("all_reduce", *what))
    if name not in ("SUM", "MAX"):
        return
    mine = parts[rank].clone()
    dist.reduce(mine, 1, operation)
    if rank == 1:
        same(mine, total, ("reduce", *what))
    out = torch.empty(count, dtype=dtype)
    dist.reduce_scatter_tensor(out, parts[rank], operation)
    same(out, total[rank * count : (rank + 1) * count], ("reduce_scatter_tensor", *what))
    out.zero_()
    dist.reduce_scatter(out, list(parts[rank].view(SIZE, count)), operation)
    same(out, total[rank * count : (rank + 1) * count], ("reduce_scatter", *what))


def _gathered(rank: int, dtype: torch.dtype, count: int) -> None:
    parts = [drawn(dtype, count, 13 * count + each) for each in range(SIZE)]
    out = torch.empty(SIZE * count, dtype=dtype)
    dist.all_gather_into_tensor(out, parts[rank])
    same(out, torch.cat(parts), ("all_gather_into_tensor", dtype, count))


def _copies(rank: int, dtype: torch.dtype, count: int) -> None:
    parts = [drawn(dtype, SIZE * count, 11 * count + each) for each in range(SIZE)]
    rows = [part.view(SIZE, count) for part in parts]
    what, mine, root = (dtype, count), rows[rank], 2
    whole = parts[rank].clone()
    dist.broadcast(whole, root)
    same(whole, parts[root], ("broadcast", *what))
    uneven = [torch.empty(count + other, dtype=dtype) for other in range(SIZE)]
    longer = [torch.cat([rows[other][0], parts[other].new_ones(other)]) for other in range(SIZE)]
    dist.all_gather(uneven, longer[rank])
    same(uneven, longer, ("all_gather", *what))
    places = [torch.empty(count, dtype=dtype) for _ in range(SIZE)]
    dist.gather(mine[1].clone(), places if rank == root else None, root)
    if rank == root:
        same(places, [each[1] for each in rows], ("gather", *what))
    dist.scatter(places[0], list(mine) if rank == root else None, root)
    same(places[0], rows[root][rank], ("scatter", *what))
    out = torch.empty(SIZE * count, dtype=dtype)
    dist.all_to_all_single(out, parts[rank])
    same(out, torch.cat([each[rank] for each in rows]), ("all_to_all_single", *what))
    dist.all_to_all(places, list(mine))
    same(places, [each[rank] for each in rows], ("all_to_all", *what))
    _messages(rank, rows, what)


def _messages(rank: int, rows: list[torch.Tensor], what: tuple[object, ...]) -> None:
    """To the next, with two tags that are asked for the other way round; to rank 0, which takes them from anybody."""
    left, mine = (rank - 1) % SIZE, rows[rank]
    one, two = torch.empty_like(mine[0]), torch.empty_like(mine[0])
    works = [dist.isend(mine[tag].clone(), (rank + 1) % SIZE, tag=tag) for tag in range(2)]
    works += [dist.irecv(two, left, tag=1), dist.irecv(one, left, tag=0)]
    for work in works:
        assert work is not None
        work.wait()
    same([one, two], [rows[left][0], rows[left][1]], ("messages", *what))
    if rank:
        dist.send(mine[2], 0, tag=9)
    else:
        sources = [dist.recv(one, tag=9) for _ in range(SIZE - 1)]
        assert sorted(sources) == [1, 2]
        same(one, rows[sources[-1]][2], ("recv from anybody", *what))


def _seldom(rank: int) -> None:
    """Objects, sparse tensors, tensors with gaps, calls in one, and a group of some ranks."""
    found: list[Any] = [None] * SIZE
    dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank})
    assert [(each["rank"], len(each["text"])) for each in found] == [(other, 1000 * other) for other in range(SIZE)]
    sparse = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (SIZE + 1,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [float(SIZE), *[2.0] * SIZE]
    gaps = torch.full((50, 2), float(rank))
    dist.all_reduce(gaps[:, 0])
    assert gaps.tolist() == [[3.0, float(rank)]] * 50
    several = [torch.full((count,), float(rank)) for count in (1, 10, 100_000)]
    dist.all_reduce_coalesced(several)
    same(several, [torch.full_like(each, 3.0) for each in several], "all_reduce_coalesced")
    dist.monitored_barrier()
    ends = dist.new_group([0, SIZE - 1])
    if rank != 1:
        both = torch.full((5,), float(rank))
        dist.all_reduce(both, group=ends)
        assert both.tolist() == [2.0] * 5


def _operations(meeting: Meeting) -> int:
    group, rank = join(meeting, SIZE), meeting.rank
    for dtype in TYPES:
        for name in (name for name in SUMS if has(name, dtype)):
            _sums(rank, dtype, 101, name)
        _gathered(rank, dtype, 101)
    for dtype in (torch.bool, torch.bfloat16, torch.int32, torch.float64, torch.complex128):  # of each size of an element
        _copies(rank, dtype, 101)
    for count in (0, 1):
        _sums(rank, torch.float32, count, "MAX")
        _gathered(rank, torch.bool, count)
        _copies(rank, torch.bool, count)
    _sums(rank, torch.float32, 140_001, "SUM")  # of several blocks, and below of several pieces
    _copies(rank, torch.float32, 70_003)
    large = torch.full((1_200_001,), float(rank))  # more than the slots of a lane hold
    dist.broadcast(large, 1)
    assert torch.equal(large, torch.ones(1_200_001))
    _seldom(rank)
    dist.barrier()
    nbytes = counters(group)["bytes_direct"]
    dist.destroy_process_group()
    return nbytes


def test_every_operation_and_type(record_property: Callable[[str, object], None]) -> None:
    over_verbs(_operations, SIZE, record_property)


# -- what later calls post


def _calls(rank: int) -> list[tuple[Callable[[], object], int]]:
    """Calls over tensors that stay, and the bytes that this rank has to write in each."""
    small, large, rows = torch.ones(10), torch.ones(90_000), torch.ones(SIZE, 20_000)
    out, uneven = torch.empty_like(rows), [torch.empty(1000 * (other + 1)) for other in range(SIZE)]
    lists = list(out) if rank == 0 else None
    row, to_all, part = 4 * 20_000, SIZE - 1, 4 * 30_000
    return [
        (dist.barrier, 0),
        (lambda: dist.all_reduce(small), to_all * 40),
        (lambda: dist.all_reduce(large), 2 * to_all * part),
        (lambda: dist.reduce(large, 0), 3 * part if rank else 0),
        (lambda: dist.broadcast(large, 1), to_all * 3 * part if rank == 1 else 0),
        (lambda: dist.all_to_all_single(out, rows), to_all * row),
        (lambda: dist.all_to_all(list(out), list(rows)), to_all * row),
        (lambda: dist.all_gather_into_tensor(out, rows[0]), to_all * row),
        (lambda: dist.all_gather(uneven, torch.ones(1000 * (rank + 1))), to_all * 4000 * (rank + 1)),
        (lambda: dist.reduce_scatter_tensor(out[0], rows), to_all * row),
        (lambda: dist.gather(rows[0], lists, 0), row if rank else 0),
        (lambda: dist.scatter(out[1], lists and list(rows), 0), 0 if rank else to_all * row),
        (partial(_passed_on, rank, large, torch.empty_like(large)), 3 * part),
    ]


def _passed_on(rank: int, given: torch.Tensor, came: torch.Tensor) -> None:
    pair = [dist.P2POp(dist.isend, given, (rank + 1) % SIZE), dist.P2POp(dist.irecv, came, (rank - 1) % SIZE)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()


def _planned(meeting: Meeting) -> int:
    """Calls after the second register nothing, and send no control message: they write pieces, and credits for pieces."""
    from rdmarpc.transport.verbs.control import ControlStream

    told: list[int] = []
    send = ControlStream.send

    def counted(stream: ControlStream, kind: int, *fields: Any, **named: Any) -> None:
        told.append(kind)
        send(stream, kind, *fields, **named)

    group, calls = join(meeting, SIZE), _calls(meeting.rank)
    for _ in range(2):
        for call, _ in calls:
            call()
    ControlStream.send = counted  # type: ignore[method-assign]
    for number, (call, least) in enumerate(calls):
        dist.barrier()
        before = counters(group)
        call()
        after = counters(group)
        for name in ("registrations", "segments", "bytes_staged"):
            assert after.get(name) == before.get(name), f"call {number}: {name}"
        assert after["bytes_direct"] - before["bytes_direct"] >= least, f"call {number}: {before}, then {after}"
    assert not told, f"control messages: {told}"
    nbytes = counters(group)["bytes_direct"]
    assert nbytes >= 3 * sum(least for _, least in calls)
    dist.barrier()
    ControlStream.send = send  # type: ignore[method-assign]
    dist.destroy_process_group()
    return nbytes


def test_later_calls_only_write(record_property: Callable[[str, object], None]) -> None:
    over_verbs(_planned, SIZE, record_property)


# -- memory


def _registered() -> int:
    """Memory regions that this process holds at the adapters, as the kernel counts them."""
    told = subprocess.run(["rdma", "-j", "resource", "show", "mr"], capture_output=True, check=True, timeout=60.0).stdout
    return sum(entry.get("pid") == os.getpid() for entry in json.loads(told or "[]"))


def _mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:rdmarpc" in line for line in maps)


def _growing_group(rank: int) -> None:
    """Small calls, then large ones, for which its lanes and their slots grow, then small ones."""
    group: Any = dist.new_group()
    lanes = [lanes[1 - rank] for lanes in group.members.lanes]
    few = [lane.in_depth for lane in lanes]
    for count in (10, 3 << 18, 10):
        x = torch.arange(float(count))
        total, found = x + rank, [torch.empty(count) for _ in range(2)]
        dist.all_reduce(total, group=group)
        dist.all_gather(found, x * (rank + 2), group=group)
        same([total, *found], [2 * x + 1, 2 * x, 3 * x], ("grown", count))
        other = torch.empty(count)
        pair = [dist.P2POp(dist.isend, x - rank, 1 - rank, group), dist.P2POp(dist.irecv, other, 1 - rank, group)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        same(other, x - (1 - rank), ("grown, message", count))
    for lane, before in zip(lanes, few, strict=True):
        assert lane.in_depth == lane.most > before, (lane.in_depth, lane.most, before)
    dist.destroy_process_group(group)


def _held(group: Any) -> dict[str, int]:
    from timing import eventually

    domain = group.members.domain
    dist.barrier()
    eventually(lambda: domain.keep(()) or not domain._kept)
    found = counters(group)
    return {"registered": _registered(), "mapped": _mapped(), **{name: found[name] for name in ("segments", "arena_used")}}


def _grown(meeting: Meeting) -> int:
    """Further groups that grow take what earlier ones have given back; the last one gives all back to the system."""
    from timing import eventually

    group, rank = join(meeting, 2), meeting.rank
    first = _held(group)
    _growing_group(rank)
    grown = _held(group)
    assert 0 < first["registered"] < grown["registered"], (first, grown)
    for _ in range(3):
        _growing_group(rank)
        assert _held(group) == grown
    nbytes = counters(group)["bytes_direct"]
    dist.barrier()
    del group
    dist.destroy_process_group()
    gc.collect()
    eventually(lambda: (_registered(), _mapped()), (0, 0))
    return nbytes


def test_groups_that_grow_give_their_memory_back(record_property: Callable[[str, object], None]) -> None:
    over_verbs(_grown, 2, record_property)


# -- training


def _accumulated(group: Any, mesh: Any, rank: int) -> Any:
    """Several buckets; gradients of two batches, the first without synchronisation."""
    from test_collective_training import DDP, _bits, _model, _steps

    model = DDP(_model(), process_group=group, bucket_cap_mb=0.1)
    with model.no_sync():
        model(torch.ones(4, 20) * rank).sum().backward()
    return _bits(model, _steps(model, rank))


def _trained(meeting: Meeting) -> int:
    """Each case over ours and over gloo: the same bits at two ranks."""
    import test_collective_training as training
    from torch.distributed.device_mesh import DeviceMesh

    group, rank = join(meeting, 2), meeting.rank
    gloo: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    meshes = [DeviceMesh.from_group(each, "cpu") for each in (group, gloo)]
    for case in (_accumulated, training._static, training._fsdp):
        ours, theirs = case(group, meshes[0], rank), case(gloo, meshes[1], rank)
        for one, other in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
            assert torch.equal(one, other), f"{case.__name__}: {one.flatten()[:4]} for gloo's {other.flatten()[:4]}"
    nbytes = counters(group)["bytes_direct"]
    dist.destroy_process_group()
    return nbytes


def test_training_is_equal_to_the_bit(record_property: Callable[[str, object], None]) -> None:
    over_verbs(_trained, 2, record_property)


# -- failures


def _killed(meeting: Meeting) -> None:
    """Rank 2 is killed while the others wait for it in a collective, and for a message."""
    join(meeting, SIZE)
    dist.barrier()
    if meeting.rank == 2:
        meeting.hear("waits/0", "waits/1", timeout=60.0)
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.all_reduce(torch.ones(1_000_000), async_op=True), dist.irecv(torch.empty(4), 2)]
    meeting.say(f"waits/{meeting.rank}")
    for work in works:
        assert work is not None
        with pytest.raises(dist_error(), match="rank 2"):
            work.wait()
    dist.destroy_process_group()


def dist_error() -> type[Exception]:
    from rdmarpc import PeerLost

    return PeerLost


def test_a_killed_rank_is_named() -> None:
    outcomes = run_group(_killed, SIZE, dynamic=True, timeout=200.0)
    results(outcomes[:2])
    assert outcomes[2].exit_code == -signal.SIGKILL
