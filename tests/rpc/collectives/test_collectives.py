"""Random programs of collectives beside gloo's results, over shared memory and over tcp."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group import Meeting, results, run_group

SUMS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
TYPES += (torch.int16,)
GLOOS = {torch.bfloat16: torch.float32, torch.int16: torch.int32}
"""Types that gloo has not got everywhere, and what the oracle computes in."""


def groups(meeting: Meeting, size: int) -> tuple[Any, Any]:
    """Ours, which is the default group, and gloo's."""
    import rdmarpc  # noqa: F401

    store = dist.FileStore(meeting._place + "-group", -1)
    dist.init_process_group("rdmarpc", store=store, rank=meeting.rank, world_size=size, timeout=timedelta(seconds=20))
    return dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(seconds=20))


def drawn(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, gaps: bool, device: torch.device
) -> torch.Tensor:
    """Small whole numbers: sums of them are exact in every order."""
    whole = torch.randint(-3, 4, (*shape, 2) if gaps else shape, generator=generator)
    if dtype in (torch.uint8, torch.bool):
        whole = whole.abs()
    made = whole.to(dtype).to(device)
    return made[..., 0] if gaps else made


def same(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    assert torch.equal(ours, theirs), f"{what}: {ours.flatten()[:8]} for {theirs.flatten()[:8]}"


CPU = torch.device("cpu")


def program(seed: int, rank: int, size: int, ours: Any, gloo: Any, steps: int, device: torch.device = CPU) -> None:
    """The same calls at all ranks, drawn from ``seed``: each by both groups. Data are the rank's own, ours
    on ``device``."""
    plan, data = random.Random(seed), torch.Generator().manual_seed(1000 * seed + rank)
    for step in range(steps):
        name, dtype = plan.choice(sorted(CALLS)), plan.choice(TYPES)
        shape = plan.choice([(), (1,), (7,), (0,), (16, 3), (1000,), (33, 65), (40_000,), (300_001,)])
        gaps, root, asynchronous = plan.random() < 0.2, plan.randrange(size), plan.random() < 0.4
        operation = getattr(dist.ReduceOp, plan.choice(SUMS[:4] if dtype.is_floating_point else SUMS))
        slow, later = plan.randrange(size), plan.random() < 0.05
        state = data.get_state()
        found = []
        for group in (ours, gloo):
            data.set_state(state)
            kind = GLOOS.get(dtype, dtype) if group is gloo else dtype
            plain = group is gloo  # it takes memory for contiguous that is not

            def draw(shape: Any, kind: torch.dtype = kind, plain: bool = plain, gaps: bool = gaps) -> torch.Tensor:
                made = drawn(data, shape, kind, gaps, CPU if plain else device)
                return made.contiguous() if plain else made

            if later and rank == slow:
                time.sleep(0.01)
            outputs = CALLS[name](draw, shape, rank, size, root, operation, group, asynchronous)
            found.append(outputs)
        for one, other in zip(*found, strict=True):
            assert one.device == device
            what = f"seed {seed}, step {step}: {name} of {shape}, {dtype}, {operation}, gaps {gaps}"
            same(one.cpu().to(other.dtype), other, what)


def _ended(work: Any) -> None:
    if work is not None:
        work.wait()


def _all_reduce(draw: Any, shape: Any, rank: int, size: int, root: int, op: Any, group: Any, later: bool) -> list[torch.Tensor]:
    x = draw(shape)
    _ended(dist.all_reduce(x, op, group, async_op=later))
    return [x]


def _reduce(draw: Any, shape: Any, rank: int, size: int, root: int, op: Any, group: Any, later: bool) -> list[torch.Tensor]:
    x = draw(shape)
    _ended(dist.reduce(x, root, op, group, async_op=later))
    return [x] if rank == root else []


def _broadcast(draw: Any, shape: Any, rank: int, size: int, root: int, op: Any, group: Any, later: bool) -> list[torch.Tensor]:
    x = draw(shape)
    _ended(dist.broadcast(x, root, group, async_op=later))
    return [x]


def _all_gather(draw: Any, shape: Any, rank: int, size: int, root: int, op: Any, group: Any, later: bool) -> list[torch.Tensor]:
    x = draw(shape)
    out = [torch.zeros_like(x, memory_format=torch.contiguous_format) for _ in range(size)]
    _ended(dist.all_gather(out, x, group, async_op=later))
    return out


def _all_gather_single(
    draw: Any, shape: Any, rank: int, size: int, root: int, op: Any, group: Any, later: bool
) -> list[torch.Tensor]:
    x = draw(shape or (1,)).contiguous()
    out = x.new_zeros((size * x.shape[0], *x.shape[1:]))
    _ended(getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(out, x, group, async_op=later))
    return [out]


def _gather(draw: Any, shape: Any, rank: int, size: int, root: int, op: Any, group: Any, later: bool) -> list[torch.Tensor]:
    x = draw(shape).contiguous()
    out = [torch.zeros_like(x) for _ in range(size)] if rank == root else None
    _ended(dist.gather(x, out, root, group, async_op=later))
    return out or []


def _scatter(draw: Any, shape: Any, rank: int, size: int, root: int, op: Any, group: Any, later: bool) -> list[torch.Tensor]:
    parts = [draw(shape).contiguous() for _ in range(size)]
    out = torch.zeros_like(parts[0])
    _ended(dist.scatter(out, parts if rank == root else None, root, group, async_op=later))
    return [out]


def _reduce_scatter(
    draw: Any, shape: Any, rank: int, size: int, root: int, op: Any, group: Any, later: bool
) -> list[torch.Tensor]:
    parts = [draw(shape).contiguous() for _ in range(size)]
    out = torch.zeros_like(parts[0])
    if group is not dist.group.WORLD:  # by sums that gloo has
        for other, part in enumerate(parts):
            dist.all_reduce(part, op, group)
            if other == rank:
                out.copy_(part)
        return [out]
    _ended(dist.reduce_scatter(out, parts, op, group, async_op=later))
    return [out]


def _all_to_all(draw: Any, shape: Any, rank: int, size: int, root: int, op: Any, group: Any, later: bool) -> list[torch.Tensor]:
    """Uneven: rank ``r`` sends ``r + 2 * s`` rows to rank ``s``."""
    rows = [rank + 2 * other for other in range(size)]
    comes = [other + 2 * rank for other in range(size)]
    x = draw((sum(rows), *shape[1:])).contiguous()
    out = x.new_zeros((sum(comes), *shape[1:]))
    _ended(dist.all_to_all_single(out, x, comes, rows, group, async_op=later))
    return [out]


def _pairs(draw: Any, shape: Any, rank: int, size: int, root: int, op: Any, group: Any, later: bool) -> list[torch.Tensor]:
    """Everybody sends to the next, twice, with tags that the receiver asks for the other way round."""
    first, second = draw(shape).contiguous(), draw(shape).contiguous()
    one, two = torch.zeros_like(first), torch.zeros_like(first)
    right, left = (rank + 1) % size, (rank - 1) % size
    works = [dist.isend(first, right, group, tag=1), dist.isend(second, right, group, tag=2)]
    works += [dist.irecv(two, left, group, tag=2), dist.irecv(one, left, group, tag=1)]
    for work in works if later else reversed(works):
        work.wait()
    return [one, two]


def _objects(draw: Any, shape: Any, rank: int, size: int, root: int, op: Any, group: Any, later: bool) -> list[torch.Tensor]:
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * (rank * 1000)}, group)
    assert [each["rank"] for each in found] == list(range(size)) and len(found[-1]["text"]) == 1000 * (size - 1)
    dist.barrier(group)
    return []


CALLS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "pairs": _pairs,
    "objects": _objects,
}
STEPS = int(os.environ.get("RDMARPC_COLLECTIVES_STEPS", 40))


def _programs(meeting: Meeting) -> None:
    size = int(os.environ["TEST_SIZE"])
    ours, gloo = groups(meeting, size)
    for seed in range(3):
        program(seed, meeting.rank, size, ours, gloo, STEPS)
    _kinds(meeting.rank, size)
    _own_ways(meeting.rank, size)
    dist.destroy_process_group()


def _kinds(rank: int, size: int) -> None:
    """What gloo has not got: averages, complex numbers, bools, coalesced and sparse calls."""
    x = torch.tensor([rank + 1.0, 2.0])
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert torch.equal(x, torch.tensor([(size + 1) / 2, 2.0]))
    for count in (2, 100_000):  # integers are rounded towards zero: Lightning averages counters
        whole = torch.tensor([5, -5]).repeat(count // 2) + torch.tensor([1, -1]).repeat(count // 2) * (rank == 0)
        dist.all_reduce(whole, dist.ReduceOp.AVG)
        assert torch.equal(whole, torch.tensor([5, -5]).repeat(count // 2))
    z = torch.full((5,), complex(rank, 1))
    dist.all_reduce(z)
    assert torch.equal(z, torch.full((5,), complex(size * (size - 1) // 2, size)))
    b = torch.tensor([rank == 0, False, True])
    dist.all_reduce(b, dist.ReduceOp.BAND)
    assert b.tolist() == [False, False, True]
    several = [torch.full((n,), float(rank)) for n in (1, 10, 100_000)]
    dist.all_reduce_coalesced(several)
    assert all(torch.equal(each, torch.full_like(each, size * (size - 1) / 2)) for each in several)
    sparse = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (size + 1,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [float(size), *[2.0] * size]
    uneven = [torch.empty(other + 1) for other in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [each.tolist() for each in uneven] == [[float(other)] * (other + 1) for other in range(size)]
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        torch.manual_seed(0)
        parts = torch.randn(size, 70_001).to(kind)
        mine, total = parts[rank].clone(), parts[0].clone()
        dist.all_reduce(mine)
        for part in parts[1:]:
            total = total + part  # the order of sums that is promised
        assert torch.equal(mine, total), kind


def _own_ways(rank: int, size: int) -> None:
    """Several threads, several groups, futures whose callbacks call."""
    others = [dist.new_group(timeout=timedelta(seconds=20)) for _ in range(3)]
    errors: list[BaseException] = []

    def use(group: Any, start: int) -> None:
        try:
            for turn in range(20):
                x = torch.full((start * 1000 + turn,), float(rank))
                dist.all_reduce(x, group=group)
                assert not x.numel() or x[-1] == size * (size - 1) / 2
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(group, number)) for number, group in enumerate(others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors, errors
    x = torch.ones(10)
    works = [dist.all_reduce(torch.ones(n), async_op=True) for n in (1, 1000, 1_000_000)]
    first = dist.all_reduce(x, async_op=True).get_future()

    def again(done: Any) -> torch.Tensor:
        (found,) = done.value()
        return dist.all_reduce(found.clone(), async_op=True).get_future().wait()[0]

    assert torch.equal(first.then(again).wait(), torch.full((10,), float(size * size)))
    assert all(work.wait(timedelta(seconds=10)) and work.is_completed() for work in works)
    for _ in range(100):
        work = dist.all_reduce(torch.ones(3), async_op=True)
        future = work.get_future()
        assert work.wait() and torch.equal(future.value()[0], torch.full((3,), float(size)))
    half = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        dist.barrier(half)
        assert half.size() == 2
    for group in others:
        dist.destroy_process_group(group)


@pytest.mark.parametrize(("device", "size"), [("shm", 2), ("shm", 3), ("tcp", 3)])
def test_random_programs_as_gloo(device: str, size: int):
    environment = {"TEST_SIZE": str(size), "RDMARPC_COLLECTIVES_DEVICE": device}
    results(run_group(_programs, size, dynamic=True, environment=environment))


def _mixed(meeting: Meeting) -> None:
    """Strings that name a backend for each kind of device: the group takes CPU tensors, whatever they name for GPUs."""
    import rdmarpc
    from rdmarpc.collectives.backend import ProcessGroup

    for number, text in enumerate(("cpu:rdmarpc,cuda:nccl", "cpu:rdmarpc", "cpu:gloo,cuda:rdmarpc")):
        store = dist.FileStore(f"{meeting._place}-mixed{number}", -1)
        dist.init_process_group(text, store=store, rank=meeting.rank, world_size=2, timeout=timedelta(seconds=20))
        for group in (dist.group.WORLD, dist.new_group(timeout=timedelta(seconds=20))):
            assert isinstance(group, ProcessGroup), text
            x = torch.full((1000,), meeting.rank + 1.0)
            dist.all_reduce(x, group=group)
            assert torch.equal(x, torch.full((1000,), 3.0)), text
            found: list[Any] = [None, None]
            dist.all_gather_object(found, meeting.rank, group)
            assert found == [0, 1], text
            with pytest.raises(rdmarpc.NotSupported, match="on meta"):  # as one on a GPU
                dist.all_reduce(torch.empty(3, device="meta"), group=group)
        dist.monitored_barrier()
        dist.destroy_process_group()


def test_strings_that_name_several_backends():
    results(run_group(_mixed, 2, dynamic=True))


ALONE = """
import sys
from rdmarpc.tools import hook
hook.register()  # waits for torch, too
assert "torch" not in sys.modules
import torch.distributed as dist
assert "rdmarpc" in dist.Backend.backend_list and "rdmarpc.collectives.backend" not in sys.modules
assert dist.distributed_c10d.__spec__.loader is dist.distributed_c10d.__loader__
assert not any(getattr(finder, "name", "") == "torch.distributed.distributed_c10d" for finder in sys.meta_path)
dist.init_process_group("rdmarpc", store=dist.HashStore(), rank=0, world_size=1)
x = dist.distributed_c10d.torch.ones(3)
dist.all_reduce(x)
assert x.tolist() == [1.0] * 3
"""


def test_imported_before_torch():
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=60)


UNNAMED = """
import sys, torch
import torch.distributed as dist
assert "rdmarpc.collectives.backend" not in sys.modules
dist.init_process_group("rdmarpc", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
dist.all_reduce(x)
assert x.tolist() == [1.0] * 3
assert not any(name.startswith("rdmarpc.places") for name in sys.modules)  # which replace names of torch
"""


def test_a_program_that_only_names_it(tmp_path):
    """Beside a clone, which Python would take for a package of that name."""
    (tmp_path / "rdmarpc").mkdir()
    subprocess.run([sys.executable, "-c", UNNAMED], check=True, timeout=60, cwd=tmp_path)


HELD = """
import faulthandler, sys, torch, rdmarpc
import torch.distributed as dist
sys.setswitchinterval(1e-5)  # the thread that runs the call may let go of it at any moment
faulthandler.dump_traceback_later(80, exit=True)
dist.init_process_group("rdmarpc", store=dist.HashStore(), rank=0, world_size=1)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 3))
with net.join(divide_by_initial_world_size=False):  # C++ alone holds the call that counts the ranks
    for _ in range(3):
        net(torch.ones(2, 2)).sum().backward()
dist.destroy_process_group()
"""


def test_a_call_that_only_cpp_holds():
    subprocess.run([sys.executable, "-c", HELD], check=True, timeout=100)
