"""The benchmark of CUDA tensors: rdmarpc beside torch RPC (TensorPipe) and beside the copies that the calls need, by turns.

    python -m experiments.cuda                              # everything in conf/cuda.yaml can be overridden
    python -m experiments.cuda rounds=2 grid=false          # the recipe and small calls
    python -m experiments.cuda sizes='[40000,4000000]'      # on a GPU with less than 12 GB

*recipe* is PyTorch's tutorial on direct communication between devices with CUDA RPC, *grid* the measurement that its authors
published with the design (10 calls at once, identity and 200 operations), *small* one call at a time, *step* a training step
of a wrapped model beside one process. One GPU is enough, and both workers use it then; two are used where there are two. Each
library has new processes in each of its turns. Where one fails, or is not there, its part is reported with the reason.

The run's folder receives cuda.json: all samples, the machine, and the targets.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.processes import Group, WorkerFailed, run_job
from .harness.versions import versions

CONF = apps.CONF
LIBRARIES = ("rdmarpc", "torch_rpc")
ORDERS = (["cpu", "cuda"], ["cuda", "cpu"])
GRADIENTS_WITHIN = 1e-5
"""How far gradients may be apart, as a part of the largest element: the error of a float32 sum of a thousand products."""

# Workers import this module too; what only the launcher needs is imported where it is needed.


@hydra.main(version_base="1.3", config_path=CONF, config_name="cuda")
def main(cfg: DictConfig) -> None:
    """All rounds, then the tables and the file. Fails where rdmarpc does, or where its gradients are wrong."""
    from .harness.findings import of_rich
    from .latency.gpu_report import print_tables, summary, tables
    from .latency.gpu_workers import missing

    job = checked(cfg)
    if job["device"] == "cuda" and (why := missing("cuda")):
        raise SystemExit(f"error: {why}")
    with apps.ending():
        found = run(job, apps.run_folder())
    result = summary(found.samples.records(), found.failed, job)
    result |= {"machine": found.machine | machine(), "versions": versions(), "config": job}
    result["tables"] = [of_rich(table) for table in tables(result)]
    apps.write_and_show("cuda", result, job, lambda: print_tables(result))
    if wrong := [each for each in result["failed"] if each["what"] != "torch_rpc"]:
        raise SystemExit(f"error: {wrong[0]['part']} of {wrong[0]['what']} failed: {wrong[0]['reason']}")
    if wrong := [row for row in result["gradients"] if row["what"] == "rdmarpc" and not row["apart"] <= GRADIENTS_WITHIN]:
        raise SystemExit(f"error: gradients differ from those of one process: {wrong}")
    if wrong := [row for row in result["step"] if row["apart"]]:
        raise SystemExit(f"error: losses of the wrapped model are not those of one process: {wrong}")


class Found:
    """The results of the turns so far."""

    def __init__(self) -> None:
        from .harness.measure import Samples

        self.samples = Samples()
        self.machine: dict[str, Any] = {}
        self.failed: dict[tuple[str, str], str] = {}
        """The reasons of failures, by part and library."""

    def on_event(self, what: str, event: tuple[Any, ...]) -> None:
        if event[0] == "machine":
            self.machine = event[1]
        else:
            for case, size, value in event[1]:
                self.samples.add(case, size, what, value)


def run(job: dict[str, Any], folder: Path) -> Found:
    """Run all rounds, with a turn for each library in each. A library that has failed at a part gets no further turn with
    it."""
    found = Found()
    turn("machine", "machine", 1, job, folder, found)
    if found.failed:
        raise SystemExit(f"error: {found.failed['machine', 'machine']}")
    for number in range(job["rounds"]):
        print(f"round {number + 1} of {job['rounds']}", file=sys.stderr, flush=True)
        if job["grid"]:
            turn("copies", "copies", 1, job, folder, found)
        for library in LIBRARIES:
            for part in ("grid", "small"):
                if job[part]:
                    turn(part, library, 2, job, folder, found)
        if job["step"]:
            turn("step", "rdmarpc", 2, job, folder, found)
        for order in ORDERS if job["recipe"] else ():
            for library in LIBRARIES:
                turn("recipe", library, 2, job | {"order": order}, folder, found)
    return found


def turn(program: str, what: str, count: int, job: dict[str, Any], folder: Path, found: Found) -> None:
    """`count` new processes run a program of `cuda_workers`, from start to end."""
    from .latency import gpu_workers as workers

    if (program, what) in found.failed:
        return
    with apps.meeting(folder) as place:
        given = job | place | {"program": program, "library": what}
        try:
            run_job([Group(what, workers.main, count)], given, found.on_event, job["timeout_s"])
        except WorkerFailed as error:
            reasons = [path.read_text() for path in sorted(Path(place["meeting_place"]).glob("failed*"))]
            found.failed[program, what] = "; ".join(dict.fromkeys(reasons)) or str(error)


def machine() -> dict[str, Any]:
    """What the GPUs' own tool and the kernel say."""
    asked = "name,driver_version,memory.total,compute_mode,mig.mode.current"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
        )
        lines = (answer.stdout if not answer.returncode else answer.stderr or answer.stdout).strip().splitlines()
    except (OSError, subprocess.TimeoutExpired) as error:
        lines = [str(error)]
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    environment = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "PYTORCH_", "TP_"))}
    return {
        "nvidia_smi": {"asked": asked, "answer": lines},
        "cpu": cpu[0].partition(":")[2].strip() if cpu else "",
        "environment": environment,
    }


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    if not (job["recipe"] or job["grid"] or job["small"] or job["step"]):
        raise SystemExit("error: recipe=false grid=false small=false step=false leaves nothing to measure")
    apps.at_least_one(job, "rounds", "linear", "iterations", "calls", "batches", "small_times", "steps", "threads")
    if job["layers"] < 2:
        raise SystemExit(f"error: layers={job['layers']}: each of the two workers has one at least")
    for name in ("sizes", "small_sizes"):
        if not job[name] or any(size < 4 or size % 4 for size in job[name]):
            raise SystemExit(f"error: {name}={job[name]} must be numbers of bytes of float32 tensors")
    if job["calls"] > job["threads"]:
        raise SystemExit(f"error: calls={job['calls']} at once need as many threads, not {job['threads']}")
    return job


if __name__ == "__main__":
    apps.start(main)
