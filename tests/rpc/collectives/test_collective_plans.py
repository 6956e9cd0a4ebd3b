"""Plans of signatures, and large sums: what is made once, and the same bits whoever is slow."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
import torch.distributed as dist
from group import Meeting, results, run_group
from test_collective_failures import join

from rdmarpc.transport.exchange.streams import COPY_PAST


def _calls(rank: int, size: int) -> list[Any]:
    """Calls over tensors that stay, of every operation."""
    small, large, other = torch.ones(10), torch.ones(300_000), torch.ones(size, 50_000)
    out, rows = torch.empty_like(other), [each + 1 for each in range(size)]
    uneven, mine = [torch.empty(1000 * each) for each in rows], torch.ones(1000 * rows[rank])
    cut, taken = torch.ones(sum(rows)), torch.empty(rows[rank] * size)
    at_root = rank == 1
    return [
        lambda: dist.reduce(small, 1),
        lambda: dist.all_gather(uneven, mine),
        lambda: dist.gather(mine[:1000], list(out[:, :1000]) if at_root else None, 1),
        lambda: dist.scatter(out[0], list(other) if at_root else None, 1),
        lambda: dist.reduce_scatter(out[0], list(other)),
        lambda: dist.all_to_all(list(out), list(other)),
        lambda: dist.all_to_all_single(taken, cut, [rows[rank]] * size, rows),
        dist.barrier,
        lambda: dist.all_reduce(small),
        lambda: dist.all_reduce(large),
        lambda: dist.broadcast(large, 1),
        lambda: dist.all_to_all_single(out, other),
        lambda: dist.all_gather_into_tensor(out, other[0]),
        lambda: dist.reduce_scatter_tensor(out[0], other),
    ]


def _planned(meeting: Meeting) -> None:
    """The first call of a signature makes a plan; later ones register nothing, and tell nobody anything."""
    join(meeting, 3, "planned")
    group: Any = dist.group.WORLD
    calls = _calls(meeting.rank, 3)
    for _ in range(3):  # a large message of a lane is followed by new plans, for its further slots
        for call in calls:
            call()
    before = dict(group.engine._plans), group.members.domain.device.counters()
    assert len(before[0]) >= len(calls)
    for _ in range(3):
        for call in calls:
            call()
    after = group.engine._plans, group.members.domain.device.counters()
    assert after[0] == before[0], "a plan was made again"
    for name in ("posts", "registrations", "segments", "bytes_staged"):
        assert after[1].get(name) == before[1].get(name), f"{name}: {before[1].get(name)}, then {after[1].get(name)}"
    _past_caches(meeting.rank, 3)
    _slow(meeting.rank, 3)
    dist.destroy_process_group()


def _past_caches(rank: int, size: int) -> None:
    """Copies that go past the caches, to and from odd addresses, with a rest."""
    count = COPY_PAST + 77

    def placed(count: int, value: torch.Tensor | None = None) -> torch.Tensor:
        place = torch.zeros(count + 3, dtype=torch.uint8)[3:]
        return place if value is None else place.copy_(value)

    rows = [(torch.arange(count * size) % 251 + other).to(torch.uint8).view(size, count) for other in range(size)]
    everything = torch.cat([each[0] for each in rows])
    out = placed(size * count)
    dist.all_gather_into_tensor(out, placed(count, rows[rank][0]))
    assert torch.equal(out, everything), "all_gather"
    dist.all_to_all_single(out, placed(size * count, rows[rank].flatten()))
    assert torch.equal(out, torch.cat([each[rank] for each in rows])), "all_to_all"
    mine, came = placed(count, rows[rank][0]), placed(count)
    dist.broadcast(mine, 1)
    assert torch.equal(mine, rows[1][0]), "broadcast"
    works = [dist.isend(rows[rank][2], (rank + 1) % size), dist.irecv(came, (rank - 1) % size)]
    for work in works:
        assert work is not None
        work.wait()
    assert torch.equal(came, rows[rank - 1][2]), "a message"


def _slow(rank: int, size: int) -> None:
    """Sums that cross every border of pieces, chunks and slots, while ranks come late, compute between their calls, and have
    several calls under way. Bits are those of sums from the lowest rank to the highest."""
    plan, delays = random.Random(5), random.Random(rank)
    edges = [1, 15, 16_383, 16_384, 16_385, 49_152, 3 * 16_384 * 3 + 1, 700_001, 3_500_003]
    for turn in range(14):
        count = edges[turn] if turn < len(edges) else plan.randrange(1, 400_000)
        kind = plan.choice([torch.float32, torch.float64, torch.bfloat16, torch.int32])
        several = plan.randrange(1, 4) if count < 500_000 else 1
        given = []
        for number in range(several):
            torch.manual_seed(1000 * turn + number)
            given.append([(100 * torch.randn(count)).to(kind) for _ in range(size)])
        works = []
        mine = [parts[rank].clone() for parts in given]
        for each in mine:
            if delays.random() < 0.4:
                time.sleep(delays.random() * 0.01)
            works.append(dist.all_reduce(each, async_op=True))
        for work in works:
            work.wait()
        for each, parts in zip(mine, given, strict=True):
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            assert torch.equal(each, total), f"turn {turn}: {count} of {kind}"


def test_plans_are_made_once_and_sums_have_one_order():
    results(run_group(_planned, 3, dynamic=True))
