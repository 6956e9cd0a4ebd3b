"""A training step of a wrapped model beside the same step in one process: small layers, where posting is all, and twelve
transformer blocks, where computing is.

    python -m experiments.steps
    python -m experiments.steps --only blocks --rounds 9 --device tcp

All models are driven by worker 0 and take turns, round by round. *read*: the loss is asked for in every step; *not read*: after
the last of a round only. *graphed*: the same step by ``rdmarpc.graphed``, read and not read, "-" where it runs as Python.
Times are medians of the rounds, least ones in brackets, one thread a process; *first* is the first step of all, in steps of
one process.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .harness.processes import Group, Launcher, run_job

Optimizer = Callable[[Any], torch.optim.Optimizer]
WIDTH, SAMPLES, TOKENS, BLOCKS = 256, 8, 64, 12


class Case(NamedTuple):
    """``steps``: of a round. ``chunks``: micro-batches, or 0."""

    kind: str
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    placement: dict[str, str]
    steps: int
    optimizer: Optimizer
    chunks: int = 0


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def blocks() -> nn.Module:
    block = partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
    return nn.Sequential(*[block() for _ in range(BLOCKS)])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def adamw_foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, foreach=True)


def adamw_fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, fused=True)


ALL, HALVES = {"": "worker1"}, {"0-5": "worker1", "6-11": "worker2"}
CASES = (
    Case("layers", "two layers at a worker, SGD", layers, (8, 16), ALL, 40, sgd),
    Case("layers", "one of two layers at a worker, SGD", layers, (8, 16), {"2": "worker1"}, 40, sgd),
    Case("layers", "two layers at a worker, AdamW", layers, (8, 16), ALL, 40, adamw),
    Case("layers", "two layers at a worker, AdamW of lists", layers, (8, 16), ALL, 40, adamw_foreach),
    Case("layers", "two layers at a worker, fused AdamW", layers, (8, 16), ALL, 40, adamw_fused),
    Case("blocks", "12 blocks at a worker, SGD", blocks, (SAMPLES, TOKENS, WIDTH), ALL, 2, sgd),
    Case("blocks", "12 blocks at two workers, SGD", blocks, (SAMPLES, TOKENS, WIDTH), HALVES, 2, sgd),
    Case("blocks", "12 blocks at two workers, 4 micro-batches", blocks, (SAMPLES, TOKENS, WIDTH), HALVES, 2, sgd, 4),
)


def loss_of(out: Tensor) -> Tensor:
    return out.pow(2).mean()


def stepper(net: Any, x: Tensor, optimizer: torch.optim.Optimizer, chunks: int) -> Callable[[], Tensor]:
    def step() -> Tensor:
        optimizer.zero_grad()
        if chunks:
            loss: Tensor = net.forward_backward(loss_of, x, chunks=chunks)
        else:
            loss = loss_of(net(x))
            loss.backward()
        optimizer.step()
        return loss

    return step


def work(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last; worker 0 tells ("measured", numbers)."""
    import rdmarpc as rpc

    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(transport=job["device"], init_method=f"file://{job['meeting_place']}/steps")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    for case in CASES if rank == 0 else ():
        if job["only"] in (None, case.kind):
            launcher.tell(("measured", case.name, measure(rpc, case, job["rounds"])))
    rpc.shutdown()


def measure(rpc: Any, case: Case, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, one number a round; of the first steps, one each."""
    torch.manual_seed(0)
    alone, x = case.make(), torch.randn(case.shape)
    model = rpc.wrap(copy.deepcopy(alone), case.placement)
    there = x.to(rpc.device("worker1")) if case.placement == ALL else x
    one = stepper(alone, x, case.optimizer(alone.parameters()), 0)
    ours = stepper(model, there, case.optimizer(model.parameters()), case.chunks)

    def read_one() -> float:
        return one().item()

    def read_ours() -> float:
        return ours().item()

    def read_graph() -> float:
        return graph().item()

    found: dict[str, list[float]] = {"first": [seconds(read_ours, 1)]}
    graph = rpc.graphed(ours)
    for _ in range(5):
        graph()
    runs: dict[str, Callable[[], float]] = {
        "one process": lambda: seconds(read_one, case.steps),
        "read": lambda: seconds(read_ours, case.steps),
        "not read": lambda: seconds(ours, case.steps, read_ours),
    }
    if graph.replays:
        runs["graphed"] = lambda: seconds(read_graph, case.steps)
        runs["graphed, not read"] = lambda: seconds(graph, case.steps, read_graph)
    for key, run in [*runs.items()] * (rounds + 1):
        found.setdefault(key, []).append(run())
    for key in runs:
        del found[key][0]  # a warm-up
    model.close()
    return found


def seconds(run: Callable[[], Any], times: int, last: Callable[[], Any] | None = None) -> float:
    """Of one of ``times`` runs, the last one of which is ``last`` if that is given."""
    begin = time.perf_counter()
    for _ in range(times - 1):
        run()
    (last or run)()
    return (time.perf_counter() - begin) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted({case.kind for case in CASES}))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="shm")
    job = vars(parser.parse_args())
    print(f"{'':42}{'one process':>13}{'read':>15}{'not read':>15}{'graphed':>15}{'.. not read':>15}{'first':>7}")
    with tempfile.TemporaryDirectory() as folder:
        run_job([Group("steps", work, 3)], job | {"meeting_place": folder}, show, 1800)


def show(group: str, event: tuple[Any, ...]) -> None:
    _, name, found = event
    one, least = statistics.median(found["one process"]), min(found["one process"])
    times = [
        f"{statistics.median(found[key]) / one:.2f}x ({min(found[key]) / least:.2f})" if key in found else "-"
        for key in ("read", "not read", "graphed", "graphed, not read")
    ]
    columns = "".join(f"{each:>15}" for each in times)
    print(f"{name:42}{1e6 * one:10.0f} us{columns}{found['first'][0] / one:7.1f}", flush=True)


if __name__ == "__main__":
    main()
