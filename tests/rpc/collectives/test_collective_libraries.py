"""What torch builds on groups, over ours and over gloo, compared bit for bit at two ranks: hooks, ``join`` and optimizers of
DistributedDataParallel, FSDP2 in mixed precision, pipelines, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from group import Meeting, results, run_group
from test_collective_training import _bits, _model, _steps
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as DDP

Tensors = list[torch.Tensor]
SIZE = 2


def _flat(bits: tuple[Tensors, Tensors]) -> Tensors:
    return [*bits[0], *bits[1]]


def _power_sgd(group: Any, mesh: DeviceMesh, rank: int, place: Path) -> Tensors:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    model = DDP(_model(), process_group=group)
    model.register_comm_hook(PowerSGDState(group, 2, start_powerSGD_iter=2, min_compression_rate=0.5), powerSGD_hook)
    return _flat(_bits(model, _steps(model, rank)))


def _compressed(group: Any, mesh: DeviceMesh, rank: int, place: Path) -> Tensors:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper

    model = DDP(_model(), process_group=group, static_graph=True)
    model.register_comm_hook(group, fp16_compress_wrapper(allreduce_hook))
    return _flat(_bits(model, _steps(model, rank)))


def _post_local_sgd(group: Any, mesh: DeviceMesh, rank: int, place: Path) -> Tensors:
    """Gradients are averaged for two steps, then parameters in every second step."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DDP(_model(), process_group=group)
    alone = [dist.new_group([each], backend=dist.get_backend(group)) for each in range(SIZE)][rank]
    model.register_comm_hook(PostLocalSGDState(group, alone, start_localSGD_iter=2), post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2, process_group=group)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    return _trained(model, optimizer, rank, 5)


def _trained(model: nn.Module, optimizer: Any, rank: int, steps: int) -> Tensors:
    data, losses = torch.Generator().manual_seed(rank), []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(torch.randn(8, 20, generator=data)), torch.randint(5, (8,), generator=data))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(each.detach().clone() for each in model.parameters())]


def _joined(group: Any, mesh: DeviceMesh, rank: int, place: Path) -> Tensors:
    """Rank 1 has more batches than rank 0, with the optimizer's shards joining, too."""
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(_model(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
    with Join([model, optimizer]):
        return _trained(model, optimizer, rank, 2 + 2 * rank)


def _zero(group: Any, mesh: DeviceMesh, rank: int, place: Path) -> Tensors:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(_model(), process_group=group, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
    found = _trained(model, optimizer, rank, 3)
    optimizer.consolidate_state_dict(to=0)
    states = optimizer.state_dict()["state"] if rank == 0 else {}
    return found + [each for state in states.values() for each in state.values()]


def _averaged(group: Any, mesh: DeviceMesh, rank: int, place: Path) -> Tensors:
    """Buffers that are broadcast, branches that one rank alone takes, gradients that are accumulated."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1 + rank
            return self.first(x) if rank else self.second(x)

    torch.manual_seed(1)
    model = DDP(Branches(), process_group=group, find_unused_parameters=True)
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    for turn in range(3):
        model(torch.full((2, 4), float(turn))).sum().backward()
    grads = [torch.zeros(1) if each.grad is None else each.grad for each in model.parameters()]
    return [*grads, *model.buffers()]


def _fsdp(group: Any, mesh: DeviceMesh, rank: int, place: Path) -> Tensors:
    """Mixed precision, gradients that are accumulated, the whole state dict, and a checkpoint that is loaded again."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = _model()
    del model[1]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 20)).sum().backward()
    model.set_requires_gradient_sync(True)
    losses = _steps(model, rank)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    state, folder = model.state_dict(), str(place / dist.get_backend(group))
    checkpoint.save(state, checkpoint_id=folder, process_group=group)
    again = {name: torch.zeros_like(each) for name, each in state.items()}
    checkpoint.load(again, checkpoint_id=folder, process_group=group)
    assert all(torch.equal(again[name].to_local(), each.to_local()) for name, each in state.items())
    return [*losses, *whole.values()]


def _pipelined(group: Any, mesh: DeviceMesh, rank: int, place: Path) -> Tensors:
    """The schedules of torch's pipelines, with one stage a rank or several."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleLoopedBFS

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x - y) ** 2).mean()

    found: Tensors = []
    for kind in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble):
        torch.manual_seed(2)
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2 * SIZE)]
        several = kind not in (ScheduleGPipe, Schedule1F1B)
        parts = layers if several else [nn.Sequential(*layers[2 * each : 2 * each + 2]) for each in range(SIZE)]
        mine = range(rank, len(parts), SIZE)
        stages = [PipelineStage(parts[at], at, len(parts), torch.device("cpu"), group=group) for at in mine]
        schedule: Any = kind(stages if several else stages[0], 4, loss_fn=loss)  # type: ignore[arg-type]
        x, y = torch.randn(8, 8), torch.randn(8, 8)
        losses: Tensors = []
        for _ in range(2):
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y, losses=losses)
        found += [*losses, *(each.grad for at in mine for each in parts[at].parameters())]
    return found


CASES: dict[str, Callable[..., Tensors]] = {
    case.__name__: case for case in (_power_sgd, _compressed, _post_local_sgd, _joined, _zero, _averaged, _fsdp, _pipelined)
}


def _beside_gloo(meeting: Meeting) -> None:
    import rdmarpc  # noqa: F401

    rank, place = meeting.rank, Path(meeting._place).parent
    store = dist.FileStore(meeting._place + "-group", -1)
    dist.init_process_group("rdmarpc", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=20))
    groups = dist.group.WORLD, dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    meshes = [DeviceMesh.from_group(group, "cpu") for group in groups]
    for name, case in CASES.items():
        ours, theirs = (case(group, mesh, rank, place) for group, mesh in zip(groups, meshes, strict=True))
        assert len(ours) == len(theirs) > 0, name
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other), f"{name}: {one.flatten()[:4]} for gloo's {other.flatten()[:4]}"
    dist.destroy_process_group()


def test_as_over_gloo():
    results(run_group(_beside_gloo, SIZE, dynamic=True, timeout=100))
