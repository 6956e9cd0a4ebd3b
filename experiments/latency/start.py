"""How long a worker takes to start: two new processes each time, ours and those of torch RPC by turns.

The programs are ordinary ones, not children of `multiprocessing`, so that they import what a user's program would.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..harness.measure import Samples
from ..harness.processes import OnEvent, WorkerFailed

LAYERS = {"rdmarpc": "rdmarpc", "torch_rpc": "torch.distributed.rpc"}
# By its text: as a module of our package it would import the package first.
PROGRAM = Path(__file__).with_name("program.py").read_text()
IMPORT = "import time, torch; begin = time.monotonic(); import rdmarpc; print(time.monotonic() - begin)"
LIMIT_S = 60.0


def measure(job: dict[str, Any], on_event: OnEvent) -> None:
    """Reports ("measured", records) of "import" (`import rdmarpc` after `import torch`), "init" (`init_rpc` alone, both workers
    being ready) and "start" (from the start of the processes until both have joined), microseconds."""
    samples = Samples()
    for number in range(job["start"]):
        on_event("start", ("progress", f"workers that start, round {number + 1}"))
        samples.add("import", 0, "rdmarpc", 1e6 * import_s())
        for what, module in LAYERS.items():
            init_s, whole_s = start_s(module)
            samples.add("init", 2, what, 1e6 * init_s)
            samples.add("start", 2, what, 1e6 * whole_s)
    on_event("start", ("measured", samples.records()))


def import_s() -> float:
    """Seconds that `import rdmarpc` takes after `import torch`."""
    done = subprocess.run([sys.executable, "-c", IMPORT], stdout=subprocess.PIPE, timeout=LIMIT_S, check=True, text=True)
    return float(done.stdout)


def start_s(module: str) -> tuple[float, float]:
    """Seconds of `init_rpc` at the slower one of two workers, and from the start of both processes until it is done."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        begin = time.monotonic()
        deadline = begin + LIMIT_S
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # the workers share few cores
        workers = []
        for rank in range(2):
            command = [sys.executable, "-c", PROGRAM, module, str(rank), f"{folder}/meeting"]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone)
            workers.append(running.enter_context(worker))
            running.callback(worker.kill)
        for worker in workers:
            line(worker, deadline)
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("join\n")
            worker.stdin.flush()
        told = [json.loads(line(worker, deadline)) for worker in workers]
        for worker in workers:
            worker.wait(deadline - time.monotonic())
    return max(each["init_s"] for each in told), max(each["done"] for each in told) - begin


def line(worker: subprocess.Popen[str], deadline: float) -> str:
    """The next line that a worker says; it says one at a time, and then waits or ends."""
    assert worker.stdout is not None
    ready, _, _ = select.select([worker.stdout], [], [], max(0.0, deadline - time.monotonic()))
    text = worker.stdout.readline() if ready else ""
    if not text:
        raise WorkerFailed(f"a worker did not start {'(its error is above)' if ready else f'within {LIMIT_S:g} s'}")
    return text
