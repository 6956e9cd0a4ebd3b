"""Lines of code: the same four programs over gRPC, torch RPC and rdmarpc, run, compared with one process, and counted.

    python -m experiments.lines
    python -m experiments.lines programs=[pipeline] libraries=[rdmarpc,torch_rpc]

The programs are in ``experiments/programs``. What they compute is in ``tasks.py`` and is not counted. The run's folder receives
lines.json.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from .harness.findings import Findings, print_findings
from .harness.processes import Group, WorkerFailed, run_job
from .programs.counting import size_of_file

CONF = str(Path(__file__).parent / "conf")
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
    job = checked(cfg)
    folder = Path(HydraConfig.get().runtime.output_dir)
    findings = Findings("Lines of code", "lines")
    wrong: list[str] = []
    try:
        for library in job["libraries"]:
            wrong += run(library, job, findings)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    count(job, findings)
    found = findings.write(folder, "lines", job)
    print_findings(found)
    print(f"lines.json is in {folder}")
    if wrong:
        raise SystemExit(f"error: {'; '.join(wrong)}")


def run(library: str, job: dict[str, Any], findings: Findings) -> list[str]:
    """All programs of a library, each in processes of its own. Returns what was wrong."""
    from .peers.turns import missing
    from .programs import running

    if reason := missing(library, "tcp"):
        findings.left_out(f"running the programs of {LIBRARIES[library]}", reason)
        return []
    wrong = []
    for name in job["programs"]:
        title = f"{name} of {LIBRARIES[library]}"
        print(f"running {title}", flush=True)
        result: list[float] = []

        def on_event(group: str, event: tuple[Any, ...], into: list[float] = result) -> None:
            into += event[1]

        # Not in the run's folder: paths of Unix sockets must be short.
        with tempfile.TemporaryDirectory(prefix="lines-") as place:
            given = job | {"library": library, "program": name, "place": place}
            try:
                run_job([Group(title, running.main, running.processes(name))], given, on_event, job["timeout_s"])
            except WorkerFailed as error:
                wrong.append(str(error))
                continue
        apart = max(abs(one - other) for one, other in zip(result, running.alone(name), strict=True))
        findings.add(f"{name}: apart from one process", 0, library, apart)
        if not apart <= TOLERANCE:
            wrong.append(f"{title} is {apart:g} apart from one process")
    return wrong


def count(job: dict[str, Any], findings: Findings) -> None:
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
    findings.table("Lines and tokens of the same programs", ["program", *columns], rows, note)


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values; ends the program if it makes no sense."""
    job: Any = OmegaConf.to_container(cfg, resolve=True)
    for name, known in (("programs", PROGRAMS), ("libraries", LIBRARIES)):
        if not job[name] or not set(job[name]) <= set(known):
            raise SystemExit(f"error: {name}={job[name]} must be some of {', '.join(known)}")
    return job


if __name__ == "__main__":
    main()
