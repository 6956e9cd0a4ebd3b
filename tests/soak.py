"""What takes minutes to say anything, so it is not part of the test-suite:

    python -m tests.soak calls SECONDS [shm|tcp] [WORKERS]
    python -m tests.soak training STEPS [shm|tcp]

``calls``: mixed calls between a few workers. After a warm-up (a fifth of the time) memory, arena, descriptors and threads of
every worker are sampled; the run fails if the last third of the samples lies above the first. ``training``: so many steps of a
wrapped model whose workers are stopped now and then (``test_wrap_long.py``).
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import tempfile
import time
from typing import Any

import psutil
import torch
from forks import forks

import rdmarpc as rpc
from rdmarpc.calls import agent

_SLACK = {"anonymous_mib": 8.0, "rss_mib": 48.0, "arena_mib": 4.0, "fds": 4.0, "threads": 4.0, "rrefs": 8.0, "pending": 8.0}
"""How far the last samples may lie above the first: allocators are not exact, and the resident set counts pages of the peers'
arenas as they are touched for the first time."""


def anonymous_bytes() -> int:
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("RssAnon:"))


def identity(value: Any) -> Any:
    return value


def fails(text: str) -> None:
    raise ValueError(text)


def nested(path: list[str], value: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(path[0], nested, (path[1:], value + 1)) if path else value


@rpc.functions.async_execution
def later(to: str, value: torch.Tensor) -> torch.futures.Future[Any]:
    return rpc.rpc_async(to, identity, (value,)).then(lambda future: future.value() * 2)


def length_of(reference: Any) -> int:
    return len(reference.to_here())


def one_round(names: list[str], draw: random.Random) -> int:
    """Some of everything, with every result checked. Returns how many calls that was."""
    to = draw.choice(names)
    kind = draw.randrange(8)
    if kind == 0:
        futures = [rpc.rpc_async(draw.choice(names), identity, (n,)) for n in range(200)]
        assert [future.wait() for future in futures] == list(range(200))
        return 200
    if kind == 1:
        size = draw.choice((1, 100, 5_000, 100_000, 1_000_000))
        assert int(rpc.rpc_sync(to, identity, (torch.full((size,), size),)).sum()) == size * size
        return 1
    if kind == 2:
        path = [draw.choice(names) for _ in range(3)]
        assert rpc.rpc_sync(to, nested, (path, torch.zeros(2000))).sum() == 6000
        return 4
    if kind == 3:
        try:
            rpc.rpc_sync(to, fails, ("on purpose",))
        except ValueError as error:
            assert "on purpose" in str(error)
            return 1
        raise AssertionError("no error came")
    if kind == 4:
        references = [rpc.remote(to, torch.full, ((n + 1, 50), 1.0)) for n in range(20)]
        assert [int(reference.to_here().sum()) for reference in references] == [50 * (n + 1) for n in range(20)]
        return 40
    if kind == 5:
        reference = rpc.RRef(list(range(100)))
        assert rpc.rpc_sync(to, length_of, (reference,)) == 100
        return 2
    if kind == 6:
        futures = [rpc.rpc_async(to, later, (draw.choice(names), torch.full((n + 1,), n))) for n in range(20)]
        assert [int(future.wait().sum()) for future in futures] == [2 * n * (n + 1) for n in range(20)]
        return 40
    try:
        rpc.rpc_sync(to, time.sleep, (0.03,), timeout=0.01)
    except RuntimeError as error:
        assert "timeout" in str(error), error
    return 1


def sample(process: psutil.Process) -> dict[str, float]:
    gc.collect()
    me = agent.current()
    counters = me.counters()
    return {
        "anonymous_mib": anonymous_bytes() / 2**20,
        "rss_mib": process.memory_info().rss / 2**20,
        "arena_mib": counters["arena_used"] / 2**20,
        "fds": float(process.num_fds()),
        "threads": float(process.num_threads()),
        "rrefs": float(counters["rrefs"]),
        "pending": float(len(me.caller.pending)),
    }


def work(rank: int, size: int, place: str, device: str, seconds: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=f"file://{place}", transport=device)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    names = [f"worker{other}" for other in range(size)]
    draw, process = random.Random(rank), psutil.Process()
    start = time.monotonic()
    samples: list[dict[str, float]] = []
    calls, next_sample = 0, start + seconds / 5
    while (now := time.monotonic()) < start + seconds:
        calls += one_round(names, draw)
        if now >= next_sample:
            samples.append(sample(process))
            next_sample += seconds / 75
    rpc.shutdown(timeout=60)
    pipe.send((calls, samples))
    pipe.close()


def grew(samples: list[dict[str, float]]) -> list[str]:
    third = len(samples) // 3
    found = []
    for name, slack in _SLACK.items():
        first, last = (statistics.median(entry[name] for entry in part) for part in (samples[:third], samples[-third:]))
        print(f"    {name:10} {first:9.1f} -> {last:9.1f}")
        if last > first + slack:
            found.append(f"{name} grew from {first:.1f} to {last:.1f}")
    return found


def training(steps: int, device: str = "shm") -> int:
    import test_wrap_long

    begin = time.monotonic()
    done = test_wrap_long.train_for_long(device, steps, 1e6)
    print(f"{done:,} steps equal to the twin's, {time.monotonic() - begin:.0f} s")
    return 0


def calls(seconds: float, device: str = "shm", size: int = 3) -> int:
    context = forks()
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(rank, size, f"{folder}/store", device, seconds, theirs), daemon=True)
            process.start()
            theirs.close()
            running.append((process, ours))
        for rank, (_, pipe) in enumerate(running):
            try:
                if not pipe.poll(seconds + 120):
                    raise EOFError
                calls, samples = pipe.recv()
            except EOFError:
                problems.append(f"worker {rank} failed or hung")
                continue
            print(f"worker {rank}: {calls} calls in {seconds:g} s over {device}")
            problems += [f"worker {rank}: {text}" for text in grew(samples)]
        for process, _ in running:
            process.join(10)
            if process.is_alive():
                process.kill()
    print("\n".join(problems) or "nothing grew")
    return 1 if problems else 0


if __name__ == "__main__":
    what, *arguments = sys.argv[1:] or [""]
    run = {"calls": calls, "training": training}.get(what)
    if run is None or not 1 <= len(arguments) <= 3:
        sys.exit(__doc__)
    sys.exit(run(int(arguments[0]), *arguments[1:2], *map(int, arguments[2:3])))
