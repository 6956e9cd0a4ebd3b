"""Distributed autograd, references, optimizers and remote modules over tensors on GPUs: what torch documents as unsupported."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import gpu
import grad_programs
import pytest
import torch
from group import results, run_group
from test_autograd_random import WORKERS, programs
from torch import nn

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.nn import RemoteModule
from rdmarpc.optim import DistributedOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


def programs_on_gpu(seeds: range, rank: int) -> Any:
    grad_programs.DEVICE = str(gpu.device())
    return programs(seeds, rank)


def test_random_programs_on_gpus_give_what_local_autograd_gives() -> None:
    count = 36
    scenario = functools.partial(programs_on_gpu, range(count))
    shaken = {"SOFTCUDA_DELAY_US": "200"}
    found = results(run_group(scenario, WORKERS, timeout=120, num_worker_threads=64, gpu=True, environment=shaken))
    failed = [each for _, some, _ in found for each in some]
    assert not failed, "\n".join(failed)
    assert sum(exact for exact, _, _ in found) > 0.8 * count
    assert sum(each["partial"] for _, _, each in found) > 5


# -- a model over two workers


def made(seed: int, *sizes: int) -> nn.Module:
    """The same wherever it is made."""
    layers = [nn.Linear(i, o) for i, o in itertools.pairwise(sizes)]
    net = nn.Sequential(*itertools.chain.from_iterable((layer, nn.Tanh()) for layer in layers))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return net


class Part:
    def __init__(self, seed: int, device: str, slow: float = 0.0) -> None:
        self.net = made(seed, 16, 16).to(device)
        if slow:  # parameters that are still to be made when the reference is used
            weight = self.net[0].weight.data
            gpu.fill_later(weight, 0.25, slow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def parameters(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.net.parameters()]

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().cpu() for parameter in self.net.parameters()]


def data(step: int, device: Any) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device)


def training(rank: int) -> Any:
    found = None
    if rank == 0:
        here, there = gpu.device(0), gpu.device(gpu.other())
        first, last = made(1, 16, 16).to(here), made(3, 16, 16).to(here)
        far = rpc.remote("worker1", Part, (2, str(there)))
        parameters = [rpc.RRef(p) for p in (*first.parameters(), *last.parameters())] + far.rpc_sync().parameters()
        optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.01)
        losses = []
        for step in range(4):
            with autograd.context() as context:
                loss = last(far.rpc_sync().forward(first(data(step, here)))).square().sum()
                autograd.backward(context, [loss])
                optimizer.step(context)
                losses.append(loss.item())
        whole = [made(seed, 16, 16).to(here) for seed in (1, 2, 3)]
        twin = torch.optim.Adam([p for part in whole for p in part.parameters()], lr=0.01)
        wanted = []
        for step in range(4):
            twin.zero_grad()
            x = data(step, here)
            for part in whole:
                x = part(x)
            loss = x.square().sum()
            loss.backward()
            twin.step()
            wanted.append(loss.item())
        assert losses == wanted
        for mine, theirs in zip(far.rpc_sync().values(), whole[1].parameters(), strict=True):
            assert torch.equal(mine, theirs.detach().cpu())
        found = rpc.rpc_sync("worker0", staged), rpc.rpc_sync("worker1", staged)
    rpc.shutdown()
    return found


def staged() -> int:
    from rdmarpc.calls import agent

    return agent.current().counters()["bytes_staged"]


def test_a_model_over_two_gpus_trains_as_on_one_bit_for_bit() -> None:
    maps = {"worker1": {0: 1, 1: 0}} if gpu.TYPE == "softgpu" else {"worker1": {0: 0}}
    found = results(run_group(training, gpu=True, each={0: {"device_maps": maps}}))[0]
    assert found == (0, 0), "something went through host memory"


def test_training_is_right_whatever_the_streams_do() -> None:
    maps = {"worker1": {0: 1, 1: 0}} if gpu.TYPE == "softgpu" else {"worker1": {0: 0}}
    slow = {"SOFTCUDA_DELAY_US": "300"}
    results(run_group(training, gpu=True, environment=slow, each={0: {"device_maps": maps}}))


# -- references


def value_of(reference: Any) -> torch.Tensor:
    return reference.local_value()


def overwrite(reference: Any, value: float, ms: float) -> None:
    gpu.fill_later(reference.local_value(), value, ms)


def slow_value(value: float, ms: float) -> torch.Tensor:
    made = torch.zeros(64, device=gpu.device())
    gpu.fill_later(made, value, ms)
    return made


def references(rank: int) -> None:
    if rank == 0:
        slow = rpc.remote("worker1", slow_value, (3.0, 40.0))
        assert slow.to_here().eq(3.0).all()
        slow = rpc.remote("worker1", slow_value, (4.0, 40.0))
        assert rpc.rpc_sync("worker1", value_of, (slow,)).eq(4.0).all()
        rpc.rpc_sync("worker1", overwrite, (slow, 8.0, 40.0))
        others = [rpc.rpc_async("worker1", time.sleep, (0.2,)) for _ in range(3)]  # so that another thread takes the next
        assert slow.to_here().eq(8.0).all(), "what a function did was not there for the next"
        assert slow.rpc_sync().add(1).eq(9.0).all()
        torch.futures.wait_all(others)
        own = rpc.RRef(slow_value(5.0, 40.0))
        assert rpc.rpc_sync("worker1", fetched, (own,)).eq(5.0).all()
        assert own.local_value().eq(5.0).all()
        part = rpc.remote("worker1", Part, (1, str(gpu.device()), 40.0))
        assert part.rpc_sync().values()[0].eq(0.25).all()
    rpc.shutdown()


def fetched(reference: Any) -> torch.Tensor:
    return reference.to_here()


def test_values_behind_references_are_there_before_they_are_used() -> None:
    results(run_group(references, gpu=True))


# -- remote modules


def remote_modules(rank: int) -> None:
    if rank == 0:
        here = gpu.device(0)
        twin = made(7, 16, 16)
        module = RemoteModule(f"worker1/{gpu.device(gpu.other())}", made, (7, 16, 16))
        x = data(0, "cpu")
        back = module(x)
        assert back.device.type == "cpu"
        torch.testing.assert_close(back, twin(x))
        also = module.forward_async(x.to(here)).wait()
        assert also.device.type == gpu.TYPE
        torch.testing.assert_close(also.cpu(), twin(x).detach())
        with autograd.context() as context:
            leaf = x.to(here).requires_grad_()
            autograd.backward(context, [module(leaf).sum()])
            gradient = autograd.get_gradients(context)[leaf]
        x.requires_grad_()
        twin(x).sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(gradient.cpu(), x.grad)
    rpc.shutdown()


def test_remote_modules_on_a_gpu() -> None:
    results(run_group(remote_modules, gpu=True))
