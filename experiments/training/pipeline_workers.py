"""The workers of the experiment: ours, and those of torch.distributed.pipelining as its tutorial writes them. Rank 0 leads: of
ours it is the caller, which has no stage, so there is a process more; of theirs it has the first stage, whose last backward
ends the batch."""

import copy
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..harness.processes import Launcher
from .pipeline_layers import ROUNDS, Case, chunks, stages

OURS = {
    "gpipe": ("gpipe", False, False),
    "1f1b": ("1f1b", False, False),
    "zero_bubble": ("zero_bubble", False, False),
    "interleaved": ("gpipe", True, False),
    "interleaved zero_bubble": ("zero_bubble", True, False),
    "graphed gpipe": ("gpipe", False, True),
    "graphed interleaved": ("gpipe", True, True),
}
"""Schedules, whether stages go round the workers, and whether a batch is ``rpc.graphed``."""
THEIRS = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")

MOST_RUNS = 10
"""Calls of a graphed batch until one is replayed."""

Step = Callable[[], None]


def turns(job: dict[str, Any], launcher: Launcher, steps: dict[tuple[str, str], Step], pids: list[int]) -> None:
    """Rounds of all cases; in each, the schedules take turns, and between two cases the other library has its own. Tells
    ("measured", records): milliseconds of each batch, and of processor time of all workers, the mean of a round."""
    batches: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    processor: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for _ in range(job["rounds"]):
        for name, case in job["cases"].items():
            launcher.wait_for_turn()
            for key, step in steps.items():
                if key[0] == name:
                    step()
                    before = processor_ms(pids)
                    batches[key] += [milliseconds(step) for _ in range(case["steps"])]
                    processor[key].append((processor_ms(pids) - before) / case["steps"])
    records = [
        {"case": name, "schedule": schedule, "batches": batches[name, schedule], "processor": processor[name, schedule]}
        for name, schedule in steps
    ]
    launcher.tell(("measured", records))


def milliseconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def processor_ms(pids: list[int]) -> float:
    """Of all threads of these processes of this host."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids) * 1e3


def alone(layers: list[Any], x: Tensor, y: Tensor, count: int) -> float:
    """The loss of one process."""
    with torch.no_grad():
        return sum(F.mse_loss(nn.Sequential(*layers)(a), b).item() for a, b in zip(x.chunk(count), y.chunk(count))) / count


# -- ours


def ours(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last."""
    import rdmarpc as rpc

    options = rpc.RpcBackendOptions(transport=job["device"], init_method=f"file://{job['meeting_place']}/ours")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=job["count"] + 1, rpc_backend_options=options)
    if rank == 0:
        steps = {
            (name, schedule): our_step(rpc, Case(**case), job, schedule)
            for name, case in job["cases"].items()
            for schedule in OURS
        }
        others = [f"worker{other}" for other in range(1, job["count"] + 1)]
        turns(job, launcher, steps, [os.getpid(), *(rpc.rpc_sync(other, os.getpid) for other in others)])
    rpc.shutdown()


def our_step(rpc: Any, case: Case, job: dict[str, Any], name: str) -> Step:
    """The model is wrapped, and has run once, with the loss and gradients of one process, bit for bit."""
    count, workers = chunks(job), job["count"]
    layers, (x, y) = case.layers(workers), case.batch(count)
    schedule, interleaved, graphed = OURS[name]
    twin = nn.Sequential(*copy.deepcopy(layers))
    placement = {str(at): f"worker{worker}" for at, worker in enumerate(stages(workers, interleaved))}
    model = rpc.wrap(nn.Sequential(*layers), placement)
    ends = [model.get_submodule(str(at)).linear.bias for at in range(0, ROUNDS * workers, 1 if interleaved else ROUNDS)]

    def batch(x: Tensor, y: Tensor) -> Any:
        model.zero_grad()
        return model.forward_backward(F.mse_loss, x, target=y, chunks=count, schedule=schedule)

    run: Any = rpc.graphed(batch) if graphed else batch

    def step() -> None:
        run(x, y)
        for last in ends:
            last.grad[0].item()  # when all is done

    loss = model.forward_backward(F.mse_loss, x, target=y, chunks=count, schedule=schedule)
    total: Any = 0.0
    for a, b in zip(x.chunk(count), y.chunk(count)):
        some = F.mse_loss(twin(a), b) * (len(a) / len(x))
        some.backward()
        total = total + some.detach()
    assert loss.item() == total.item(), (loss, total)
    while graphed and not run.replays:
        assert run.runs < MOST_RUNS, run
        step()
    step()
    torch.optim.SGD(model.parameters(), 1.0).step()
    torch.optim.SGD(twin.parameters(), 1.0).step()
    for key, value in model.state_dict().items():
        assert torch.equal(value.cpu(), twin.state_dict()[key]), f"{schedule}: {key} is not that of one process"
    return step


# -- torch.distributed.pipelining over gloo


def theirs(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last. All ranks take the same steps."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{job['meeting_place']}/theirs", rank=rank, world_size=job["count"])
    steps = {
        (name, schedule): their_step(rank, Case(**case), job, schedule)
        for name, case in job["cases"].items()
        for schedule in THEIRS
    }
    pids: list[Any] = [None] * job["count"]
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        turns(job, launcher, steps, pids)
    else:
        for _ in range(job["rounds"]):
            for name in job["cases"]:
                for (where, _), step in steps.items():
                    for _ in range((1 + job["cases"][name]["steps"]) * (where == name)):  # one that does not count
                        step()
    dist.barrier()
    dist.destroy_process_group()


def their_step(rank: int, case: Case, job: dict[str, Any], schedule: str) -> Step:
    """The schedule has run once, with the loss of one process up to rounding."""
    from torch.distributed import pipelining

    count, workers = chunks(job), job["count"]
    layers, (x, y) = case.layers(workers), case.batch(count)

    def part_of(at: int, parts: list[Any], of: int) -> Any:
        return pipelining.PipelineStage(nn.Sequential(*parts), at, of, torch.device("cpu"))

    runs: Any
    kind: Any = getattr(pipelining, f"Schedule{schedule}")
    first, last = rank == 0, rank == workers - 1
    if schedule.startswith(("Interleaved", "ZBV")):
        mine = [rank, 2 * workers - 1 - rank] if schedule == "ZBVZeroBubble" else [*range(rank, len(layers), workers)]
        parts = [layers[at] for at in mine]
        runs = kind([part_of(at, [layers[at]], len(layers)) for at in mine], count, F.mse_loss)
        last = len(layers) - 1 in mine
    else:
        parts = layers[ROUNDS * rank : ROUNDS * (rank + 1)]
        runs = kind(part_of(rank, parts, workers), count, F.mse_loss)
    parameters = [parameter for part in parts for parameter in part.parameters()]
    losses: list[Tensor] = []

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        losses.clear()
        given = (x,) if first else ()
        runs.step(*given, **({"target": y, "losses": losses} if last else {}), return_outputs=False)

    step()
    if last:
        expected = alone(layers, x, y, count)
        assert abs(sum(loss.item() for loss in losses) / count - expected) < 1e-5 * expected, (schedule, losses, expected)
    return step
