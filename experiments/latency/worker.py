"""The workers of the benchmark: worker0 measures the floor and rdmarpc, worker1 answers.

They and the workers of torch RPC (`bench_torch.py`) take turns, one for each round of each size, so that whatever else the
machine does meets all. A turn measures the floor first, then what stands on it.
"""

import os
from multiprocessing.connection import Connection
from typing import Any

import torch

import rdmarpc as rpc

from ..harness.measure import IDLE_PARTS, LARGE, Samples, calls_per_s, identity, idle_percent, iterations, per_iteration
from ..harness.processes import Launcher
from .cells import CELLS, turns
from .end import End

CALLS = 20_000


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last; worker0 tells ("progress", text) and ("measured", samples)."""
    torch.set_num_threads(1)  # the threads of torch's own pool spin for a while after each use
    options = rpc.RpcBackendOptions(init_method=f"file://{job['meeting_place']}/rdmarpc", transport=job["device"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    link: Connection = job["links"][rank]
    end = End(link, first=rank == 0, job=job)
    if rank == 0:
        measure(end, job, launcher)
    else:
        end.serve()
        end.close()
    rpc.shutdown()  # worker1 waits in here, idle, while worker0 measures that


def measure(end: End, job: dict[str, Any], launcher: Launcher) -> None:
    """The benchmark as worker0 drives it."""
    samples = Samples()
    for size in job["sizes"]:
        end.tell("prepare", size)
        end.prepare(size)
        for number in range(job["rounds"]):
            launcher.wait_for_turn()
            launcher.tell(("progress", f"{size} bytes, round {number + 1}"))
            measure_size(end, size, samples)
    for case, size, number in turns(job):
        launcher.wait_for_turn()
        launcher.tell(("progress", f"{case}, {size} bytes, round {number + 1}"))
        measure_cell(end, case, size, samples)
    end.tell("stop")
    end.close()
    for in_flight in job["targets"]["calls"]:
        for number in range(job["rounds"]):
            launcher.wait_for_turn()
            launcher.tell(("progress", f"{in_flight} calls in flight, round {number + 1}"))
            samples.add("calls", in_flight, "rdmarpc", calls_per_s(rpc, in_flight, CALLS))
    launcher.wait_for_turn()
    launcher.tell(("progress", "an idle worker"))
    idle = rpc.rpc_sync("worker1", os.getpid)
    for _ in range(IDLE_PARTS):
        samples.add("idle", 0, "rdmarpc", idle_percent(idle, job["idle_s"] / IDLE_PARTS))
    launcher.tell(("measured", samples.records()))


def measure_size(end: End, size: int, samples: Samples) -> None:
    """One round at one size."""
    flag_us, copy_us = flags(end), copies(end, size)
    samples.add("flag", 0, "floor", flag_us)
    samples.add("one_way", size, "floor", copy_us + flag_us / 2)
    samples.add("one_way", size, "rdmarpc", prepared_one_way(end, size))
    for what, us in plain_sockets(end, size).items():
        samples.add("one_way", size, what, us)

    x = torch.ones(size, dtype=torch.uint8)
    samples.add("identity", size, "floor", 2 * copy_us + flag_us)
    samples.add("identity", size, "echo", echoed(end, size))
    call_us = per_iteration(lambda: rpc.rpc_sync("worker1", identity, args=(x,)), iterations(size))
    samples.add("identity", size, "rdmarpc", call_us)

    if size >= LARGE:
        samples.add("stream", size, "floor", copy_us)
        samples.add("stream", size, "rdmarpc", prepared_stream(end, size))


def measure_cell(end: End, case: str, size: int, samples: Samples) -> None:
    """One round of a cell, beside the floor of an identity call."""
    floor_us = 2 * copies(end, size) + flags(end)
    device = rpc._get_current_rpc_agent().device
    x = device.empty((size,), dtype=torch.uint8).fill_(1) if case == "arena" else torch.ones(size, dtype=torch.uint8)
    if case == "result":
        local_us = per_iteration(lambda: x + 1, iterations(size))
        samples.add(case, size, "local", local_us)
        floor_us += local_us
    staged = device.counters()["bytes_staged"]
    for name, us in CELLS[case](rpc, x, iterations(size)).items():
        samples.add(name, size, "rdmarpc", us)
    samples.add(case, size, "staged", device.counters()["bytes_staged"] - staged)
    samples.add(case, size, "floor", floor_us)


def flags(end: End) -> float:
    """The flag to the other process and back."""
    end.floor.clear_flags()
    end.tell("flags")
    with end.own_core():
        return end.floor.ping_pong()


def copies(end: End, size: int) -> float:
    """One warm memcpy of `size` bytes into the shared mapping."""
    together = max(1, (1 << 20) // size)
    with end.own_core():
        copy_us = per_iteration(lambda: end.floor.copy(size, together), max(5, iterations(size) // together))
    return copy_us / together


def prepared_one_way(end: End, size: int) -> float:
    """A prepared WRITE and its notification, seen by the Python code that waits for it.

    Small ones go there and back, and one way is half of it. A large one going back would also evict from the cache what
    is to go there next; so it is answered by a notification, whose own way is taken off.
    """
    together = max(1, min(50, (1 << 20) // size))
    groups = max(3, iterations(size) // together)
    with end.own_core():
        if size < LARGE:
            end.tell("pong", (groups + 1) * together)  # one group does not count
            return per_iteration(lambda: end.ping(together), groups) / together / 2
        end.tell("answer", groups + 1)
        answered = per_iteration(lambda: end.send_answered(1), groups)
        end.tell("answer", 21 * 50)
        return answered - per_iteration(lambda: end.announce_answered(50), 20) / 50 / 2


def plain_sockets(end: End, size: int) -> dict[str, float]:
    """One way over a plain connection, half of there and back, compiled and in Python; for tcp alone."""
    found, times = {}, max(1, min(50, iterations(size) // 20))
    if end.sockets is not None:
        for what, measured in (("compiled", end.sockets.compiled), ("python", end.sockets.python)):
            end.tell(what, size, times)
            with end.own_core():
                found[f"{what}_socket"] = measured(size, times)
    return found


def echoed(end: End, size: int) -> float:
    """A prepared WRITE, and what has landed written back: what an identity call has to move. Unlike the floor's copies
    these meet in the caches of two cores, and cost what that costs on this machine at this moment."""
    times = min(200, iterations(size))
    end.tell("return_all", times + 1)
    with end.own_core():
        return per_iteration(lambda: end.send_answered(1), times)


def prepared_stream(end: End, size: int) -> float:
    """A prepared WRITE when many are posted one after the other, until the last has arrived."""
    times = iterations(size)

    def stream() -> None:
        end.tell("receive_stream", times)
        end.send_stream(times)

    with end.own_core():
        return per_iteration(stream, 1) / times
