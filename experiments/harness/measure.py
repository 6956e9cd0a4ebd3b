"""How the benchmark takes times, and the functions that its calls run at the other worker.

Times are microseconds. Where one iteration is too short for the clock, several are taken together. A sample is a median
over one round; what is reported is the median of the samples.
"""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from .findings import Key
from .targets import spread

LARGE = 1 << 20
"""Bytes from which on a tensor fills a good part of a core's own cache, and its bandwidth is of interest."""

IDLE_PARTS = 3
"""In so many parts is the processor time of an idle worker taken, so that it has a spread."""


class Samples:
    """One number a round for every key: microseconds, calls a second for the case "calls", percent for "idle"."""

    def __init__(self) -> None:
        self._values: dict[Key, list[float]] = defaultdict(list)

    def add(self, case: str, size: int, what: str, value: float) -> None:
        self._values[case, size, what].append(value)

    def records(self) -> list[dict[str, Any]]:
        """As plain values, one record for each key, with its spread over the rounds."""
        return [
            {"case": case, "size": size, "what": what, "samples": values, **spread(values)}
            for (case, size, what), values in self._values.items()
        ]


def connected(device: Any, link: Connection, first: bool, timeout: float) -> Any:
    """The channel between the devices of two processes, each of which calls this with its end of ``link``."""
    if first:
        return device.connect(link.recv(), timeout=timeout)
    link.send(device.address)
    return device.accept(timeout=timeout)


def identity(x: Tensor) -> Tensor:
    return x


def nothing(*received: Tensor) -> None:
    return None


def calls_per_s(layer: Any, in_flight: int, times: int) -> float:
    """Calls without tensors over one of the two RPC layers (the module); `in_flight` = 1 waits for each."""
    call, function = layer.rpc_sync, nothing
    start = time.perf_counter()
    if in_flight == 1:
        for _ in range(times):
            call("worker1", function)
    else:
        window(lambda: layer.rpc_async("worker1", function), in_flight, times)
    return times / (time.perf_counter() - start)


def window(start_one: Callable[[], Any], in_flight: int, times: int) -> None:
    """Starts `times` futures with at most `in_flight` unfinished, oldest waited for first."""
    pending: deque[Any] = deque()
    for _ in range(times):
        if len(pending) == in_flight:
            pending.popleft().wait()
        pending.append(start_one())
    while pending:
        pending.popleft().wait()


def per_iteration(run: Callable[[], Any], times: int) -> float:
    """Median microseconds of `run()`, after one that does not count."""
    clock = time.perf_counter_ns
    elapsed = []
    run()
    for _ in range(times):
        start = clock()
        run()
        elapsed.append(clock() - start)
    return statistics.median(elapsed) / 1e3


def iterations(size: int) -> int:
    """How often a case of ours, or of the floor, runs in a round."""
    return min(2000, max(3, int(1.2e9) // size))


def idle_percent(pid: int, seconds: float) -> float:
    """Processor time of a process on this host while this one sleeps, in percent of one core."""
    clock = (~pid << 3) | 2  # the kernel's clock number for the processor time of all threads of `pid`
    time.sleep(0.2)  # what went before may still be cleaned up
    start, begin = time.clock_gettime(clock), time.monotonic()
    time.sleep(seconds)
    return 100 * (time.clock_gettime(clock) - start) / (time.monotonic() - begin)
