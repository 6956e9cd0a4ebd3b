"""What a mini-batch costs when parameter servers keep the model, beside torch RPC and gRPC.

    python -m experiments.minibatch
    python -m experiments.minibatch models='[GRU,LSTM]' rounds=3   # everything in conf/minibatch.yaml can be overridden
    python -m experiments.minibatch parts='[end_to_end]' workers='[1,2,4]' servers='[1,2,4]'
    python -m experiments.minibatch --json

``communication``: all gradients to one server and all weights back, without a step, beside the floor; ways take turns, model
by model and round by round. ``end_to_end``: several workers compute their batches, several servers add up their gradients and
take the step; every turn has processes of its own, and its losses and weights have to be those of one process.
The run's folder receives minibatch.json, minibatch.png and minibatch_workers.png.
"""

import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.findings import Findings
from .harness.processes import Group, run_job
from .harness.turns import Turns, missing
from .harness.versions import versions

CONF = apps.CONF
PARTS = ("communication", "end_to_end")
PLACEMENTS = ("round_robin", "balanced")
QUICK = {"models": ["GRU"], "rounds": 2, "end_to_end_rounds": 1, "steps": 2, "placements": ["balanced"]}
QUICK_BATCH = 4

# Workers import this module too; what only the launcher or only some of them need is imported where it is needed.


@hydra.main(version_base="1.3", config_path=CONF, config_name="minibatch")
def main(cfg: DictConfig) -> None:
    """Both parts, one after the other; what they found is judged, written and shown. Fails where losses or weights differ."""
    from .exchange.report import print_tables

    job, folder = checked(cfg), apps.run_folder()
    turns = Turns(Findings("Mini-batches", "ms"), folder)
    result: dict[str, Any] = {"config": job, "versions": versions(), "rows": [], "records": [], "targets": [], "tables": []}
    with apps.ending():
        if "communication" in job["parts"]:
            result |= communication(job, folder)
        if "end_to_end" in job["parts"]:
            end_to_end(job, turns, folder)
    found = turns.findings.as_dict(job)
    for name, theirs in (("records", "samples"), ("targets", "targets"), ("tables", "tables")):
        result[name] = result[name] + found[theirs]
    result["left_out"] = found["left_out"]
    apps.write_and_show("minibatch", result, job, lambda: print_tables(result, found))
    if turns.failed:
        raise SystemExit(f"error: {turns.failed}")


def communication(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One worker, one server, and nothing but what crosses."""
    from .exchange.picture import draw_minibatch
    from .exchange.report import summary, tables
    from .harness.findings import of_rich

    records: list[dict[str, Any]] = []

    def on_event(group: str, event: tuple[Any, ...]) -> None:
        if event[0] == "measured":
            records.extend({"unit": "us", **each} for each in event[1])
        else:
            print(f"{group}: {event[1]}", file=sys.stderr, flush=True)

    with apps.meeting(folder) as place:
        run_job(groups(job), job | place, on_event, job["timeout_s"])
    result = summary(records, job) | {"config": job, "versions": versions()}
    result["tables"] = [of_rich(table, note) for table, note in tables(result)]
    draw_minibatch(result, folder / "minibatch.png")
    return result


def end_to_end(job: dict[str, Any], turns: Turns, folder: Path) -> None:
    """Every number of workers with every number of servers."""
    from .exchange import sweep

    sweep.run(job, turns)
    sweep.judge(turns.findings, job, folder)


def groups(job: dict[str, Any]) -> list[Group]:
    """The pairs of processes that take turns."""
    from .exchange import others, worker

    found = [Group("rdmarpc", worker.main, 2)]
    if job["torch_rpc"]:
        found.append(Group("torch RPC", others.torch_rpc, 2, freeze=True))
    if job["grpc"]:
        found.append(Group("gRPC", others.grpc, 2, freeze=True))
    return found


def checked(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, with `quick` applied; ends the program if it makes no sense."""
    from .exchange.models import MODELS

    job = apps.plain(cfg)
    if job["quick"]:
        job |= QUICK
    apps.device(job)
    apps.some_of(job, models=MODELS, parts=PARTS, placements=PLACEMENTS)
    apps.at_least_one(job, "rounds", "end_to_end_rounds", "steps")
    apps.counts(job, "workers", "servers")
    apps.yes_or_no(job, "torch_rpc", "grpc")
    for model, samples in job["batch"].items():
        if model not in MODELS:
            raise SystemExit(f"error: batch.{model} is of none of {', '.join(MODELS)}")
        if not isinstance(samples, int) or samples < 0:
            raise SystemExit(f"error: batch.{model}={samples} must be a whole number of samples, or 0")
    fewest = min(job["models"], key=lambda model: MODELS[model].tensors)
    if max(job["servers"]) > MODELS[fewest].tensors:
        raise SystemExit(f"error: servers={max(job['servers'])}: {fewest} has {MODELS[fewest].tensors} tensors only")
    if job["quick"]:
        job["batch"]["GRU"] = min(job["batch"]["GRU"], QUICK_BATCH)
        for name in ("workers", "servers"):
            job[name] = [count for count in job[name] if count == min(2, max(job[name]))] or [min(job[name])]
    if job["grpc"] and missing("grpc", job["device"]):
        raise SystemExit("error: grpc=true needs grpcio: pip install 'rdmarpc[bench]', or grpc=false")
    return job


if __name__ == "__main__":
    apps.start(main)
