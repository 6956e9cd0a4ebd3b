"""Lines of code: the same four programs over gRPC, torch RPC and rdmarpc, run, compared with one process, and counted.

    python -m experiments.lines
    python -m experiments.lines programs=[pipeline] libraries=[rdmarpc,torch_rpc]

The programs are in ``experiments/programs``. What they compute is in ``tasks.py`` and is not counted. The run's folder receives
lines.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.findings import Findings
from .harness.turns import Turns, run_app
from .programs.counting import size_of_file

CONF = apps.CONF
PROGRAMS = {
    "parameter_server": "parameter server, 2 trainers",
    "reinforcement": "reinforcement learning, 2 observers",
    "pipeline": "pipeline of 2 stages",
    "federated": "federated averaging, 2 clients",
}
LIBRARIES = {"grpc": "gRPC", "torch_rpc": "torch RPC", "rdmarpc": "rdmarpc"}
TOLERANCE = 1e-6
"""How far results may be apart: sums of gradients have no order that torch RPC promises."""


@hydra.main(version_base="1.3", config_path=CONF, config_name="lines")
def main(cfg: DictConfig) -> None:
    """Runs and counts everything; fails if a program fails, or gives other results than one process."""
    run_app("lines", Findings("Lines of code", "lines"), checked(cfg), run, judge)


def run(job: dict[str, Any], turns: Turns) -> None:
    """All programs, each in processes of its own."""
    from .programs import running

    for library in job["libraries"]:
        for name in job["programs"]:
            title = f"{name} of {LIBRARIES[library]}"
            given = job | {"library": library, "device": "tcp", "program": name, "processes": running.processes(name)}
            turns.take(given, library, title, running.main)
            apart = turns.findings.median(f"{name}: apart from one process", 0, library)
            if apart is not None and not apart <= TOLERANCE:
                turns.fail(f"{title} is {apart:g} apart from one process")


def judge(findings: Findings, job: dict[str, Any], folder: Path) -> None:
    """The table: lines and tokens of each program."""
    rows = []
    for name in job["programs"]:
        row = [PROGRAMS[name]]
        for library in job["libraries"]:
            size = size_of_file(Path(__file__).parent / "programs" / library / f"{name}.py")
            findings.add(f"{name}: lines", 0, library, size.lines)
            findings.add(f"{name}: tokens", 0, library, size.tokens)
            apart = findings.median(f"{name}: apart from one process", 0, library)
            results = "not run" if apart is None else "same bits" if apart == 0 else f"within {apart:.0e}"
            row += [str(size.lines), str(size.tokens), results]
        rows.append(row)
    columns = [f"{LIBRARIES[each]}: {what}" for each in job["libraries"] for what in ("lines", "tokens", "results")]
    note = (
        "Whole programs but for what they compute: without comments, docstrings and empty lines; gRPC with pickled messages and"
        " no generated code. results: beside one process. The paper counts 52 lines of communication for gRPC (270 generated"
        " beside) and 10 for torch RPC in its example of reinforcement learning."
    )
    findings.table(
        "Lines and tokens of the same programs", ["program", *columns], rows, note, better="Fewer lines and tokens are better."
    )


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    apps.some_of(job, programs=PROGRAMS, libraries=LIBRARIES)
    return job


if __name__ == "__main__":
    apps.start(main)
