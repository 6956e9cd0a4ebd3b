"""What the processes of the benchmark of CUDA tensors run: the same lines over rdmarpc and over torch RPC.

worker0 drives and uses the first GPU; worker1 uses the second, or the first too where there is one only. Times are
milliseconds unless they are named otherwise, and each ends when the GPU has done the work, not when Python has asked for it.
"""

import importlib
import logging
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..harness.measure import identity, per_iteration
from ..harness.processes import Launcher
from .gpu_wrapped import wrapped

LIBRARIES = {
    "rdmarpc": ("rdmarpc", "rdmarpc.autograd"),
    "torch_rpc": ("torch.distributed.rpc", "torch.distributed.autograd"),
}
WARM_SMALL = 20
"""Small calls before those that count."""
MPS_ENABLED = 133
"""cuda.h: ``CU_DEVICE_ATTRIBUTE_MPS_ENABLED``. A driver too old to know it counts as one without MPS."""

Figure = tuple[str, int, float]
"""Case, bytes of a tensor, and a number."""


class Library(NamedTuple):
    """Two modules with the same names in them, whichever the library is."""

    rpc: Any
    autograd: Any


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A process from its first line to its last; that of rank 0 tells ("measured", figures) or ("machine", description)."""
    logging.captureWarnings(True)  # torch warns of its own deprecated parts
    try:
        if job["prepare"]:
            module, _, function = job["prepare"].partition(":")
            getattr(importlib.import_module(module), function)()
        if why_not := missing(job["device"]):
            raise RuntimeError(why_not)
        PROGRAMS[job["program"]](rank, job, launcher)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        (Path(job["meeting_place"]) / f"failed{rank}").write_text(reason)
        raise


def missing(kind: str) -> str:
    """Nothing, or why there is no device of that type."""
    if kind == "cuda" and torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.get_device_module(kind).is_available():
        return f"torch {torch.__version__} finds no {kind} device"
    return ""


def devices(kind: str) -> tuple[torch.device, torch.device]:
    """worker0's and worker1's."""
    return torch.device(kind, 0), torch.device(kind, min(1, torch.get_device_module(kind).device_count() - 1))


def synchronize(device: torch.device) -> None:
    """Wait for everything that this process has given to a device."""
    torch.get_device_module(device).synchronize(device)


# -- programs of one process


def machine(_: int, job: dict[str, Any], launcher: Launcher) -> None:
    """What the GPUs are, as the driver and torch describe them."""
    from rdmarpc.transport import cuda_driver

    module = torch.get_device_module(job["device"])
    name = getattr(module, "get_device_name", lambda _: job["device"])
    torch.ones(1, device=devices(job["device"])[0])  # the driver answers about MPS once there is a context
    driver = cuda_driver.driver()
    description = {
        "gpus": [name(index) for index in range(module.device_count())],
        "cuda": torch.version.cuda,
        "driver_cuda": f"{driver.version() // 1000}.{driver.version() % 1000 // 10}",
        "mps": bool(driver.attribute(0, MPS_ENABLED)),
    }
    launcher.tell(("machine", description))


def copies(_: int, job: dict[str, Any], launcher: Launcher) -> None:
    """The copies from device to device that the identity calls of `grid` need, in a row: each tensor there, and back."""
    here, there = devices(job["device"])
    figures: list[Figure] = []
    for size in job["sizes"]:
        x = floats(size, here)
        places = [(torch.empty_like(x, device=there), torch.empty_like(x)) for _ in range(job["calls"])]
        elapsed = []
        for _ in range(1 + job["batches"]):
            begin = now(here)
            for at_callee, back in places:
                at_callee.copy_(x)
                back.copy_(at_callee)
            end = now(here)
            synchronize(here)
            elapsed.append(begin.elapsed_time(end))
        figures.append(("identity_total", size, statistics.median(elapsed[1:])))
    launcher.tell(("measured", figures))


def floats(size: int, device: torch.device) -> Tensor:
    return torch.ones(size // 4, device=device)


def now(device: torch.device) -> torch.Event:
    """An event that is taking its time, behind what the current stream has been given."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


# -- programs of two workers


def joined(
    drive: Callable[[Library, dict[str, Any]], list[Figure]], rank: int, job: dict[str, Any], launcher: Launcher
) -> None:
    """Two workers; worker0 measures."""
    library = Library(*map(importlib.import_module, LIBRARIES[job["library"]]))
    if not library.rpc.is_available():
        raise RuntimeError(f"torch {torch.__version__} is built without {library.rpc.__name__}")
    here, there = devices(job["device"])
    options = library.rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{job['meeting_place']}/store", num_worker_threads=job["threads"], rpc_timeout=job["timeout_s"]
    )
    if rank == 0:
        options.set_device_map("worker1", {here.index: there.index})
    library.rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        launcher.tell(("measured", drive(library, job)))
    library.rpc.shutdown()
    for left in Path("/dev/shm").glob(f"cuda.shm.*.{os.getpid():x}.*"):  # by torch RPC, which does not close what it mapped
        left.unlink(missing_ok=True)


class MyModule(nn.Module):
    """The remote part of `recipe`."""

    def __init__(self, device: str, comm_mode: str, size: int = 1000) -> None:
        super().__init__()
        self.device = device
        self.linear = nn.Linear(size, size).to(device)
        self.comm_mode = comm_mode

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.to(self.device))
        return y.cpu() if self.comm_mode == "cpu" else y

    def weights(self) -> list[Tensor]:
        return [parameter.detach().cpu() for parameter in self.linear.parameters()]

    def gradients(self, autograd: str, context: int) -> list[Tensor]:
        """The gradients that module `autograd` has for our parameters."""
        found = importlib.import_module(autograd).get_gradients(context)
        return [found[parameter].cpu() for parameter in self.linear.parameters()]


def recipe(library: Library, job: dict[str, Any]) -> list[Figure]:
    """Both ways of communication, in the order `job` says: from the first call on, and once all has been used. The gradients'
    figure is how far they are from those of one process (``apart``)."""
    figures: list[Figure] = []
    first = job["order"][0]
    for state, warm_up in (("cold", 0), ("warm", job["iterations"])):
        for mode in job["order"]:
            figures.append((f"{first}_first_{state}_{mode}", 0, measure(library, mode, job, warm_up)))
    figures += [(f"gradients_{mode}", 0, apart(library, mode, job)) for mode in job["order"]]
    return figures


def measure(library: Library, mode: str, job: dict[str, Any], warm_up: int) -> float:
    """The recipe as it was published, with the warm-up that it has not."""
    here, there = devices(job["device"])
    size = job["linear"]
    lm = nn.Linear(size, size).to(here)
    rm = library.rpc.remote("worker1", MyModule, args=(str(there), mode, size))
    x = torch.randn(size, size).to(here)
    iterate(library, lm, rm, x, warm_up)
    synchronize(here)
    begin = time.perf_counter()
    iterate(library, lm, rm, x, job["iterations"])
    torch.accelerator.current_stream(here).synchronize()
    return 1e3 * (time.perf_counter() - begin)


def iterate(library: Library, lm: nn.Module, rm: Any, x: Tensor, times: int) -> None:
    for _ in range(times):
        with library.autograd.context() as context:
            y = rm.rpc_sync().forward(lm(x))
            library.autograd.backward(context, [y.sum()])


def apart(library: Library, mode: str, job: dict[str, Any]) -> float:
    """The largest difference between a gradient of the recipe and the same one of a single process, as a part of the largest
    element of that gradient."""
    here, there = devices(job["device"])
    size = job["linear"]
    lm = nn.Linear(size, size).to(here)
    rm = library.rpc.remote("worker1", MyModule, args=(str(there), mode, size))
    x = torch.randn(size, size).to(here)
    with library.autograd.context() as context:
        library.autograd.backward(context, [rm.rpc_sync().forward(lm(x)).sum()])
        mine = library.autograd.get_gradients(context)
        found = [mine[parameter].cpu() for parameter in lm.parameters()]
        found += rm.rpc_sync().gradients(library.autograd.__name__, context)
    second = nn.Linear(size, size)
    with torch.no_grad():
        for parameter, value in zip(second.parameters(), rm.rpc_sync().weights()):
            parameter.copy_(value)
    second.to(here)
    wanted = torch.autograd.grad(second(lm(x)).sum(), [*lm.parameters(), *second.parameters()])
    return max(float((one - other.cpu()).abs().max() / other.cpu().abs().max()) for one, other in zip(found, wanted))


def heavy(x: Tensor) -> Tensor:
    """200 operations."""
    for _ in range(100):
        x *= 2
        x /= 2
    return x


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"identity": identity, "heavy": heavy}


def grid(library: Library, job: dict[str, Any]) -> list[Figure]:
    """Calls all at once: the time of all together, and the mean time of a call from its issue to its done-callback, by the
    GPU's clock. How much of it went which way is at the end, where the library counts that."""
    here, _ = devices(job["device"])
    figures: list[Figure] = []
    for size in job["sizes"]:
        x = floats(size, here)
        for name, function in FUNCTIONS.items():
            check(library, function, x, job["calls"])
            found = [batch(library, function, x, job["calls"]) for _ in range(job["batches"])]
            totals, delays = zip(*found)
            figures += [(f"{name}_total", size, statistics.median(totals)), (f"{name}_delay", size, statistics.median(delays))]
    if hasattr(library.rpc, "counters"):
        both = [library.rpc.counters(), library.rpc.rpc_sync("worker1", library.rpc.counters)]
        for name in ("gpu_bytes_direct", "bytes_staged"):
            figures.append((name, 0, float(sum(each.get(name, 0) for each in both))))
    return figures


def check(library: Library, function: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> None:
    """The warm-up batch, whose results are looked at."""
    for back in [library.rpc.rpc_async("worker1", function, args=(x,)) for _ in range(calls)]:
        found = back.wait()
        if found.device != x.device or not torch.equal(found, x):
            raise RuntimeError(f"{function.__name__} of {x.nbytes} bytes came back with other contents, or elsewhere")


def batch(library: Library, function: Callable[[Tensor], Tensor], x: Tensor, calls: int) -> tuple[float, float]:
    """Milliseconds of all calls together, and of one in the mean."""
    synchronize(x.device)
    ends: list[torch.Event | None] = [None] * calls

    def done(number: int, future: Any) -> None:
        future.wait()
        ends[number] = now(x.device)

    begins, pending = [], []
    begin = time.perf_counter()
    for number in range(calls):
        begins.append(now(x.device))
        pending.append(library.rpc.rpc_async("worker1", function, args=(x,)).then(partial(done, number)))
    torch.futures.wait_all(pending)
    synchronize(x.device)
    total = 1e3 * (time.perf_counter() - begin)
    return total, statistics.mean(one.elapsed_time(other) for one, other in zip(begins, ends) if other is not None)


def small(library: Library, job: dict[str, Any]) -> list[Figure]:
    """One identity call after the other: microseconds until its result can be used, the median."""
    here, _ = devices(job["device"])
    figures: list[Figure] = []
    for size in job["small_sizes"]:
        x = floats(size, here)
        call = partial(call_and_wait, library, x)
        per_iteration(call, WARM_SMALL)
        figures.append(("small", size, per_iteration(call, job["small_times"])))
    return figures


def call_and_wait(library: Library, x: Tensor) -> None:
    library.rpc.rpc_sync("worker1", identity, args=(x,))
    torch.accelerator.current_stream(x.device).synchronize()


def step(library: Library, job: dict[str, Any]) -> list[Figure]:
    """See ``wrapped``."""
    return wrapped(library.rpc, *devices(job["device"]), job)


PROGRAMS: dict[str, Callable[[int, dict[str, Any], Launcher], None]] = {
    "machine": machine,
    "copies": copies,
    **{drive.__name__: partial(joined, drive) for drive in (recipe, grid, small, step)},
}
