"""A process of the GPT pipeline, for each library. Everybody's first loss, and the loss after one step of SGD, must be those
of one process; then batches are timed, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..harness.libraries import TENSORPIPE
from ..harness.meeting import init_method
from ..harness.processes import Launcher
from .gpt import Gpt, WithLoss, batch, loss_of, stages

APART = 1e-4
"""How far a loss may be from that of one process, as a part of it: libraries add up micro-batches in orders of their own."""


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """Rank 0 tells ("figures", ...): milliseconds of a batch, and how far the losses are apart."""
    library = {"rdmarpc": rdmarpc, "torch_rpc": torch_rpc, "pipelining": pipelining, "alone": alone}[job["library"]]
    found = library(rank, job)
    if found is not None:
        launcher.tell(("figures", [(job["case"], job["stages"], ms) for ms in found]))


def measured(job: dict[str, Any], lr_step: Callable[[], float], step: Callable[[], float], leads: bool) -> list[float]:
    """``step`` runs a batch and returns its loss, ``lr_step`` one of SGD behind it. All ranks run as many."""
    losses = [lr_step(), step()]
    if leads:
        check(job, losses)
    taken = []
    for _ in range(job["steps"]):
        begin = time.perf_counter()
        step()
        taken.append(1e3 * (time.perf_counter() - begin))
    return taken


def check(job: dict[str, Any], losses: list[float]) -> None:
    """Against one process that runs the same micro-batches one after the other."""
    twin = Gpt(job)
    wanted = [run_alone(twin, job, job["lr"]), run_alone(twin, job)]
    if any(not abs(one - other) <= APART * abs(other) for one, other in zip(losses, wanted)):
        raise RuntimeError(f"losses {losses} are not those of one process, {wanted}")


def run_alone(model: Gpt, job: dict[str, Any], lr: float = 0.0) -> float:
    model.zero_grad()
    loss, count = 0.0, job["chunks"]
    for x, y in zip(*(each.chunk(count) for each in batch(job))):
        part = model(x, y) / count
        part.backward()
        loss += part.item()
    if lr:
        torch.optim.SGD(model.parameters(), lr).step()
    return loss


def alone(rank: int, job: dict[str, Any]) -> list[float]:
    """One process that computes all stages."""
    model = Gpt(job)
    return measured(job, lambda: run_alone(model, job, job["lr"]), lambda: run_alone(model, job), True)


def rdmarpc(rank: int, job: dict[str, Any]) -> list[float] | None:
    import rdmarpc as rpc

    options = rpc.RpcBackendOptions(transport=job["device"], init_method=init_method(rank, job), rpc_timeout=job["timeout_s"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=job["stages"], rpc_backend_options=options)
    found = None
    if rank == 0:
        placement = {f"stages.{number}": f"worker{number}" for number in range(job["stages"])}
        model = rpc.wrap(Gpt(job), placement)
        optimizer = torch.optim.SGD(model.parameters(), job["lr"])
        x, y = batch(job)

        def step(lr: bool = False) -> float:
            model.zero_grad()
            loss = model.forward_backward(lambda loss: loss, x, y, chunks=job["chunks"])
            if lr:
                optimizer.step()
            return loss.item()

        found = measured(job, lambda: step(True), step, True)
    rpc.shutdown()
    return found


# -- torch RPC: stages behind RRefs, as in PyTorch's tutorial of pipelines over RPC


def make_stage(number: int, job: dict[str, Any]) -> nn.Module:
    made = stages(job)[number]
    return WithLoss(made) if number == job["stages"] - 1 else made


def through(stage: Any, x: Any) -> Tensor:
    found: Tensor = stage.local_value()(x.to_here())
    return found


def to_loss(stage: Any, x: Any, y: Tensor) -> Tensor:
    found: Tensor = stage.local_value()(x.to_here(), y)
    return found


def parameters_of(stage: Any) -> list[Any]:
    from torch.distributed import rpc

    return [rpc.RRef(parameter) for parameter in stage.local_value().parameters()]


def torch_rpc(rank: int, job: dict[str, Any]) -> list[float] | None:
    from torch.distributed import autograd, rpc
    from torch.distributed.optim import DistributedOptimizer

    options = rpc.TensorPipeRpcBackendOptions(
        init_method=init_method(rank, job),
        num_worker_threads=16,
        rpc_timeout=job["timeout_s"],
        **TENSORPIPE[job["device"]],
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=job["stages"], rpc_backend_options=options)
    found = None
    if rank == 0:
        last, count = job["stages"] - 1, job["chunks"]
        placed = [rpc.remote(f"worker{number}", make_stage, args=(number, job)) for number in range(job["stages"])]
        parameters = [each for stage in placed for each in rpc.rpc_sync(stage.owner(), parameters_of, args=(stage,))]
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=job["lr"])
        x, y = batch(job)

        def forward(x: Tensor, y: Tensor) -> Any:
            here = rpc.RRef(x)
            for stage in placed[:last]:
                here = rpc.remote(stage.owner(), through, args=(stage, here))
            return rpc.rpc_async(placed[last].owner(), to_loss, args=(placed[last], here, y))

        def step(lr: bool = False) -> float:
            with autograd.context() as context:
                futures = [forward(*part) for part in zip(x.chunk(count), y.chunk(count))]
                loss = torch.stack([future.wait() for future in futures]).sum() / count
                autograd.backward(context, [loss])
                if lr:
                    optimizer.step(context)
            return loss.item()

        found = measured(job, lambda: step(True), step, True)
    rpc.shutdown()
    return found


# -- torch.distributed.pipelining over gloo


def pipelining(rank: int, job: dict[str, Any]) -> list[float] | None:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    dist.init_process_group("gloo", init_method=init_method(rank, job), rank=rank, world_size=job["stages"])
    last, part = job["stages"] - 1, stages(job)[rank]
    kind: Any = Schedule1F1B if job["chunks"] >= job["stages"] else ScheduleGPipe  # 1F1B refuses fewer
    schedule = kind(PipelineStage(part, rank, job["stages"], torch.device("cpu")), job["chunks"], loss_of)
    optimizer = torch.optim.SGD(part.parameters(), job["lr"])
    x, y = batch(job)

    def step(lr: bool = False) -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = {"target": y, "losses": losses} if rank == last else {}
        schedule.step(*((x,) if rank == 0 else ()), **given, return_outputs=False)
        if lr:
            optimizer.step()
        return sum(loss.item() for loss in losses) / job["chunks"]

    found = measured(job, lambda: step(True), step, rank == last)
    dist.barrier()
    dist.destroy_process_group()
    return found if rank == 0 else None
