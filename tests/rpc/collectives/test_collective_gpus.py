"""Collectives of tensors on GPUs: gloo's values for the CPU, in the order of streams."""

from __future__ import annotations

import os
import time
from typing import Any

import gpu
import pytest
import test_collectives
import torch
import torch.distributed as dist
from group import Meeting, die, results, run_group
from test_collectives import groups
from torch import nn

import rdmarpc as rpc

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


def programs(meeting: Meeting) -> int:
    size, device = int(os.environ["TEST_SIZE"]), gpu.device(meeting.rank % gpu.count())
    torch.accelerator.set_device_index(device.index)
    ours, gloo = groups(meeting, size)
    for seed in range(2):
        test_collectives.program(seed, meeting.rank, size, ours, gloo, 25, device)
    staged = ours.members.domain.device.counters()["bytes_staged"]
    dist.destroy_process_group()
    return staged


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("shm", 3), ("tcp", 2)])
def test_random_programs_give_what_gloo_gives_on_the_cpu(transport: str, size: int) -> None:
    environment = {"TEST_SIZE": str(size), "RDMARPC_COLLECTIVES_DEVICE": transport, "SOFTCUDA_DELAY_US": "50"}
    assert all(results(run_group(programs, size, dynamic=True, gpu=True, environment=environment)))


# -- the order of streams


def slow_streams(meeting: Meeting) -> None:
    groups(meeting, 2)
    device, side = gpu.device(), torch.Stream(gpu.device())
    for asynchronous in (False, True):
        for stream in (torch.accelerator.current_stream(device), side):
            with stream:
                x, kept = torch.zeros(5000, device=device), torch.empty(5000, device=device)
                gpu.fill_later(x, meeting.rank + 1.0, 20)  # is made when the call has long been made
                gpu.sleep(20)
                kept.copy_(x)  # still to read what the call writes over
                work = dist.all_reduce(x, async_op=asynchronous)
            if work is not None:
                work.wait()
            assert x.eq(3.0).all(), "on another stream than the call was made on"
            assert kept.eq(meeting.rank + 1.0).all()
    x, y = torch.zeros(1000, device=device), torch.zeros(1000, device=device)
    if meeting.rank == 0:
        gpu.fill_later(x, 7.0, 20)
        dist.send(x, 1)
    else:
        gpu.fill_later(y, 5.0, 20)
        before = y.clone()
        dist.recv(y, 0)
        assert y.eq(7.0).all() and before.eq(5.0).all()
    works = []
    for number in range(8):  # each behind a kernel, none of which the caller waits for
        part = torch.zeros(100, device=device)
        gpu.fill_later(part, float(number), 2)
        works.append((dist.all_reduce(part, async_op=True), part, number))
    for work, part, number in works:
        (found,) = work.get_future().wait()
        assert found is part and found.eq(2.0 * number).all()
    dist.destroy_process_group()


def test_calls_are_in_the_order_of_streams() -> None:
    results(run_group(slow_streams, dynamic=True, gpu=True))


def beside(meeting: Meeting) -> None:
    """CPU and GPU tensors in one call, several devices, and a group of one."""
    groups(meeting, 2)
    here, there = gpu.device(), gpu.device(gpu.other())
    x = torch.full((10,), meeting.rank + 1.0, device=here if meeting.rank else "cpu")
    dist.all_reduce(x)
    assert x.cpu().eq(3.0).all()
    several = [torch.full((3,), meeting.rank + 1.0, device=device) for device in (here, "cpu", there)]
    dist.all_reduce_coalesced(several)
    assert all(each.cpu().eq(3.0).all() for each in several)
    out = [torch.empty(3, device=there), torch.empty(3, device=here)]
    dist.all_gather(out, several[meeting.rank] + meeting.rank)
    assert [float(each.sum()) for each in out] == [9.0, 12.0]
    found: list[Any] = [None, None]
    dist.all_gather_object(found, torch.ones(2, device=here))
    assert [each.device.type for each in found] == [gpu.TYPE] * 2
    alone = [dist.new_group([rank]) for rank in range(2)][meeting.rank]
    dist.all_reduce(x, group=alone)
    assert x.cpu().eq(3.0).all()
    shared = torch.zeros(4, device=here)
    with pytest.raises(ValueError, match="share memory"):
        dist.all_gather([shared[:2], shared[1:3]], torch.ones(2, device=here))
    with gpu.capture(), pytest.raises(rpc.NotSupported, match="captures a CUDA graph"):
        dist.all_reduce(shared)
    if gpu.TYPE == "cuda":
        with pytest.raises(rpc.NotSupported, match="sparse"):
            dist.all_reduce(torch.eye(2, device=here).to_sparse())
    dist.destroy_process_group()


def test_devices_of_all_kinds() -> None:
    results(run_group(beside, dynamic=True, gpu=True))


# -- what ends a call


def loses_a_rank(meeting: Meeting) -> float:
    groups(meeting, 2)
    x = torch.ones(1000, device=gpu.device())
    dist.all_reduce(x)
    if meeting.rank == 1:
        die()
    begun = time.monotonic()
    with pytest.raises(rpc.PeerLost):
        dist.all_reduce(x)
    assert x.eq(2.0).all(), "what did not come is not written"
    return time.monotonic() - begun


def test_a_rank_that_ends() -> None:
    assert run_group(loses_a_rank, dynamic=True, gpu=True)[0].result < 15


def breaks_a_gpu(meeting: Meeting) -> str:
    groups(meeting, 2)
    x = torch.ones(1000, device=gpu.device())
    dist.all_reduce(x)
    if meeting.rank == 1:
        gpu.fail()
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_gpu_that_fails_ends_the_call_at_every_rank() -> None:
    texts = results(run_group(breaks_a_gpu, dynamic=True, gpu=True))
    assert all(texts), texts


# -- training


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def trains(meeting: Meeting) -> None:
    """DDP with the gradients of both ranks, and by hand the mean of the gradients of their halves."""
    groups(meeting, 2)
    device = gpu.device()
    net = nn.parallel.DistributedDataParallel(made().to(device))
    twin = made().to(device)
    mine, theirs = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (net, twin))
    for step in range(4):
        halves = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(step)).to(device)
        net(halves[meeting.rank]).square().mean().backward()
        found = []
        for half in halves:
            twin.zero_grad()
            twin(half).square().mean().backward()
            found.append([parameter.grad.clone() for parameter in twin.parameters()])
        for parameter, one, other in zip(twin.parameters(), *found):
            parameter.grad = one / 2 + other / 2
        for ours, wanted in zip(net.parameters(), twin.parameters()):
            assert torch.equal(ours.grad, wanted.grad), step
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for ours, wanted in zip(net.parameters(), twin.parameters()):
        assert torch.equal(ours, wanted)
    dist.destroy_process_group()


def test_ddp_on_gpus_trains_as_by_hand() -> None:
    results(run_group(trains, dynamic=True, gpu=True))


def shards(meeting: Meeting) -> None:
    """FSDP2, whose gathers and scatters torch makes on streams of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    groups(meeting, 2)
    device = gpu.device(meeting.rank % gpu.count())
    torch.accelerator.set_device_index(device.index)
    net, twin = made().to(device), made().to(device)
    mesh = init_device_mesh(gpu.TYPE, (2,))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    mine, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (net, twin))
    for step in range(4):
        halves = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(step)).to(device)
        net(halves[meeting.rank]).square().mean().backward()
        twin(halves.flatten(0, 1)).square().mean().backward()
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for ours, wanted in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(ours.full_tensor(), wanted.detach())
    dist.destroy_process_group()


def test_fsdp2_on_gpus_trains_as_one_process() -> None:
    results(run_group(shards, dynamic=True, gpu=True, environment={"SOFTCUDA_DELAY_US": "100"}))
