"""Programs that ``torch.compile`` compiles, beside the same over gloo."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from group import Meeting, results, run_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZE = 2


def _program(x: torch.Tensor, group: Any, rank: int) -> list[torch.Tensor]:
    """Collectives that torch has in a graph, and such that break one."""
    total = x * 2
    dist.all_reduce(total, group=group)
    dist.broadcast(total, 1, group=group)
    gathered = [torch.zeros_like(x) for _ in range(SIZE)]
    dist.all_gather(gathered, total + rank, group=group)
    exchanged = torch.zeros_like(x)
    dist.all_to_all_single(exchanged, x + rank, group=group)
    work = dist.all_reduce(exchanged, group=group, async_op=True)
    work.wait()
    came = torch.zeros_like(x)
    if rank == 0:
        dist.send(x + 1, 1, group=group)
    else:
        dist.recv(came, 0, group=group)
    dist.barrier(group)
    return [total + 1, *gathered, exchanged * 2, came]


def _trained(group: Any, rank: int) -> list[torch.Tensor]:
    """DDP, compiled: its buckets are summed between the graphs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    model = torch.compile(DistributedDataParallel(net, process_group=group), backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((3, 6), float(rank + step))).pow(2).sum().backward()
        optimizer.step()
    return [each.detach() for each in net.parameters()]


def _compiled(meeting: Meeting) -> None:
    import rdmarpc  # noqa: F401

    store = dist.FileStore(meeting._place + "-group", -1)
    dist.init_process_group("rdmarpc", store=store, rank=meeting.rank, world_size=SIZE, timeout=timedelta(seconds=120))
    found = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(seconds=120))):
        torch._dynamo.reset()
        program = torch.compile(_program, backend="eager")
        found.append(program(torch.arange(4.0), group, meeting.rank) + _trained(group, meeting.rank))
    for number, (ours, gloos) in enumerate(zip(*found, strict=True)):
        assert torch.equal(ours, gloos), f"result {number}: {ours} for {gloos}"
    dist.destroy_process_group()


def test_as_over_gloo():
    results(run_group(_compiled, SIZE, dynamic=True, timeout=240))


LATER = """
import sys, torch, rdmarpc
import torch.distributed as dist
dist.init_process_group("rdmarpc", store=dist.HashStore(), rank=0, world_size=1)
assert "torch._dynamo.trace_rules" not in sys.modules
def program(x):
    dist.broadcast(x, 0)
    return x + 1
assert torch.compile(program, backend="eager")(torch.ones(3)).tolist() == [2.0] * 3
assert not any(getattr(finder, "name", "") == "torch._dynamo.trace_rules" for finder in sys.meta_path)
dist.destroy_process_group()
"""


def test_the_compiler_is_imported_after_the_group_was_made():
    subprocess.run([sys.executable, "-c", LATER], check=True, timeout=200)
