"""A training step over a chain of workers, beside its computation and its floor.

    python -m experiments.bench_pipeline
    python -m experiments.bench_pipeline --workers 2 3 --size 64 --batch 16 --device tcp

Part k of a chain of small layers is at worker k, the first part and the loss are at worker 0, which drives. *Step* is zeroing,
forward, loss, backward and optimizer; *computation* what the same layers take in the same processes in the same order with
nothing crossing, each timed where it runs (of the optimizers, which run at the same time, the longest counts). *Floor* is, for
each tensor that crosses, half of a flag's way to another process and back and a warm memcpy of its bytes. *Overhead* is what
is left, a worker. The three take turns in one run; times are microseconds, over rounds the median.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness.floor import Floor
from .harness.processes import Group, Launcher, run_job

NAMES = ("step", "forward_backward")


def work(count: int, rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last; worker 0 tells ("round", numbers)."""
    import rdmarpc as rpc

    options = rpc.RpcBackendOptions(transport=job["device"], init_method=f"file://{job['meeting_place']}/chain{count}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=count, rpc_backend_options=options)
    if rank == 1:
        _state["floor"] = Floor(job["links"][1], False, job["batch"] * job["size"] * 4)
    if rank == 0:
        measure(rpc, count, job, launcher)
    rpc.shutdown()


_state: dict[str, Any] = {}


def part(size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(size, size), nn.ReLU())


def measure(rpc: Any, count: int, job: dict[str, Any], launcher: Launcher) -> None:
    size, batch = job["size"], job["batch"]
    floor = Floor(job["links"][0], True, batch * size * 4)
    torch.manual_seed(0)
    layers = [part(size) for _ in range(count)]
    x, y = torch.randn(batch, size), torch.randn(batch, size)
    model = rpc.wrap(nn.Sequential(*layers), {str(rank): f"worker{rank}" for rank in range(1, count)})
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        loss.item()

    def forward_backward() -> None:
        optimizer.zero_grad()
        loss = model.forward_backward(F.mse_loss, x, target=y)
        optimizer.step()
        loss.item()

    steps: dict[str, Callable[[], None]] = {"step": step, "forward_backward": forward_backward}
    apart = partial(computation, rpc, count, size, batch, y)
    for _ in range(20):
        step()
        forward_backward()
        apart()
    for _ in range(job["rounds"]):
        launcher.wait_for_turn()
        numbers = {name: timed(run, job["steps"], job["quantile"]) for name, run in steps.items()}
        numbers["computation"] = quantile([apart() for _ in range(job["steps"])], job["quantile"]) / 1e3
        floor.clear_flags()
        answer = rpc.rpc_async("worker1", ping_pong)
        flag = floor.ping_pong() / 2
        answer.wait()
        copy = timed(partial(floor.copy, batch * size * 4, 100), 20) / 100
        numbers["floor"] = 2 * count * (flag + copy)
        launcher.tell(("round", numbers))


def quantile(values: list[int], at: float) -> float:
    return sorted(values)[int(at * (len(values) - 1))]


def timed(run: Callable[[], Any], times: int, at: float = 0.5) -> float:
    """Microseconds of one: the quantile ``at`` of so many."""
    elapsed = []
    for _ in range(times):
        begin = time.perf_counter_ns()
        run()
        elapsed.append(time.perf_counter_ns() - begin)
    return quantile(elapsed, at) / 1e3


def ping_pong() -> None:
    _state["floor"].ping_pong()


def computation(rpc: Any, count: int, size: int, batch: int, y: Tensor) -> int:
    """Nanoseconds that the parts compute in one step."""
    forwards = [alone("forward", size, batch)]
    forwards += [rpc.rpc_sync(f"worker{rank}", alone, args=("forward", size, batch)) for rank in range(1, count)]
    out = torch.ones_like(y, requires_grad=True)
    begin = time.perf_counter_ns()
    F.mse_loss(out, y).backward()
    loss = time.perf_counter_ns() - begin
    others = reversed(range(1, count))
    backwards = [rpc.rpc_sync(f"worker{rank}", alone, args=("backward", size, batch)) for rank in others]
    backwards.append(alone("backward", size, batch))
    steps = [alone("step", size, batch)]
    steps += [rpc.rpc_sync(f"worker{rank}", alone, args=("step", size, batch)) for rank in range(1, count)]
    return sum(forwards) + loss + sum(backwards) + max(steps)


def alone(what: str, size: int, batch: int) -> int:
    """Nanoseconds of one phase of this worker's part, on tensors that it has."""
    if "module" not in _state:
        module = _state["module"] = part(size)
        _state["x"] = torch.randn(batch, size, requires_grad=True)
        _state["gradient"] = torch.randn(batch, size)
        _state["optimizer"] = torch.optim.SGD(module.parameters(), 1e-3)
    begin = time.perf_counter_ns()
    if what == "forward":
        _state["out"] = _state["module"](_state["x"])
    elif what == "backward":
        _state["optimizer"].zero_grad()
        _state["out"].backward(_state["gradient"])
    else:
        _state["optimizer"].step()
    return time.perf_counter_ns() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--size", type=int, default=64, help="inputs and outputs of each layer")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200, help="in a round")
    parser.add_argument("--quantile", type=float, default=0.5, help="of the times of a round; below 0.5 on a busy machine")
    parser.add_argument("--device", default="shm")
    job = vars(parser.parse_args())
    print(f"{'workers':>7} {'':18}{'us':>8}{'computation':>13}{'floor':>8}{'overhead a worker':>19}{'best round':>12}")
    for count in job["workers"]:
        rounds: list[dict[str, float]] = []
        links = multiprocessing.get_context("spawn").Pipe()
        with tempfile.TemporaryDirectory() as folder:
            group = Group(f"chain of {count}", partial(work, count), count)
            here = job | {"meeting_place": folder, "links": links}
            run_job([group], here, partial(note, rounds), 600)
        for link in links:
            link.close()
        show(count, rounds)


def note(rounds: list[dict[str, float]], group: str, event: tuple[Any, ...]) -> None:
    rounds.append(event[1])


def show(count: int, rounds: list[dict[str, float]]) -> None:
    middle = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    for name in NAMES:
        above = [(each[name] - each["computation"] - each["floor"]) / count for each in rounds]
        print(
            f"{count:7} {name:18}{middle[name]:8.0f}{middle['computation']:13.0f}{middle['floor']:8.1f}"
            f"{statistics.median(above):19.1f}{min(above):12.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
