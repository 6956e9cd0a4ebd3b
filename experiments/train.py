"""The main job: trains a digits model split over worker processes and shows what the split costs.

    python -m experiments.train                                     # cnn, two workers, shared memory
    python -m experiments.train device=tcp workers=3 model=mlp      # everything can be overridden
    python -m experiments.train -m seed=0,1,2                       # several jobs, one after the other
    srun -N2 python -m experiments.train device=verbs               # one worker a task, rank 0 writes the results

The run's folder receives result.json and comm_comp.png, and what crosses: placement.txt, .json (`rdmarpc graph` shows it)
and .png (of a training step).
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig
from rich.console import Console

from rdmarpc import transfers

from .harness import apps, launched
from .harness.processes import Group, run_job
from .harness.targets import of_goal, of_times
from .harness.versions import versions
from .training import digits_data as data
from .training import digits_torch_rpc as torch_rpc
from .training import digits_worker as worker

if TYPE_CHECKING:
    from .training.digits_report import TrainingDisplay

CONF = apps.CONF
AHEAD = "a step, times faster than torch RPC"


@hydra.main(version_base="1.3", config_path=CONF, config_name="train")
def main(cfg: DictConfig) -> None:
    """One job: check the config, run the workers (or be one of them), write and show the results."""
    task = launched.task()
    job = checked(cfg, task)
    if task is not None and task.rank > 0:
        launched.run_here(worker.main, task, job, lambda group, event: None)
        return

    from .harness.findings import of_rich
    from .harness.pictures import draw_comm_comp
    from .training.digits_report import TrainingDisplay, counted, training_table

    folder = apps.run_folder()
    display = TrainingDisplay(job)
    if task is None:
        run_on_this_host(job, display)
    else:
        with display:
            launched.run_here(worker.main, task, job, display.on_event)

    result = result_of(display.records, display.counters) | {"config": job, "versions": versions()}
    result["tables"] = [
        of_rich(training_table(result), f"{NOTE} rdmarpc, a step from the second on: {counted(result['counters'])}")
    ]
    (folder / "placement.txt").write_text("\n\n\n".join(map(str, display.transfers)) + "\n")
    transfers.save(folder / "placement.json", display.transfers)
    display.transfers[0].draw(folder / "placement.png")
    draw_comm_comp(result, folder / "comm_comp.png")
    apps.write_and_show("result", result, job, lambda: Console().print(training_table(result)))


NOTE = (
    "Medians of all steps but the first (p10 to p90). above one process: what a step takes more than the single process, never "
    "below 0; accuracy: held-out digits recognised; losses: beside those of the single process."
)


def run_on_this_host(job: dict[str, Any], display: TrainingDisplay) -> None:
    """All workers as processes of ours; ends the program if one fails."""
    groups = [Group("rdmarpc", worker.main, job["workers"])]
    if job["torch_rpc"]:
        groups.append(Group("torch RPC", torch_rpc.main, job["workers"], freeze=True))
    with apps.ending(), display, apps.meeting(apps.run_folder()) as place:
        meet = place | {"init_method": f"file://{place['meeting_place']}/rdmarpc"}
        run_job(groups, job | meet, display.on_event, job["timeout_s"])


def checked(cfg: DictConfig, task: launched.Task | None) -> dict[str, Any]:
    """The config as plain values, with the placement for this many workers; ends the program if it makes no sense."""
    job = apps.plain(cfg)
    if task is not None:
        job |= {"workers": task.world_size, "torch_rpc": False}
    placements = job["model"].pop("placement")
    job["placement"] = placements.get(job["workers"])
    if job["placement"] is None:
        known = ", ".join(str(count) for count in placements)
        raise SystemExit(
            f"error: model={job['model']['name']} has a placement for {known} workers, not for {job['workers']}. "
            f"Add one: '+model.placement.{job['workers']}={{stem: worker0, features: worker0, classifier: worker1}}'"
        )
    images = data.IMAGES - data.HELD_OUT
    if not 1 <= job["batch_size"] <= images // 2:
        raise SystemExit(f"error: batch_size={job['batch_size']} must lie between 1 and {images // 2} ({images} images)")
    apps.at_least_one(job, "epochs")
    apps.device(job)
    return job


def result_of(records: dict[str, dict[str, Any]], counters: dict[str, int]) -> dict[str, Any]:
    """What result.json says of the records of all ways to train.

    Times are milliseconds a step: medians without the first step, which traces and connects. Communication is what a way
    takes above the single process, never below 0. The counters are those of rdmarpc's steps without the first.
    """
    alone = records["single_process"]
    others = [name for name in records if name != "single_process"]
    count = len(alone["losses"])
    steps = {name: record["step_ms"][1:] for name, record in records.items()}
    step_ms = {name: statistics.median(values) for name, values in steps.items()}
    return {
        "accuracy": records["rdmarpc"]["accuracy"],
        "accuracy_of": {name: record["accuracy"] for name, record in records.items()},
        "equal_to_single_process": {name: records[name]["losses"] == alone["losses"] for name in others},
        "steps": count,
        "step_ms": step_ms,
        "communication_ms": {name: max(0.0, step_ms[name] - step_ms["single_process"]) for name in others},
        "first_step_ms": {name: record["step_ms"][0] for name, record in records.items()},
        "counters": {"steps": count - 1, **counters},
        "losses": {name: record["losses"] for name, record in records.items()},
        "samples": [
            {"case": "step", "size": 0, "what": name, "unit": "ms", "samples": values} for name, values in steps.items()
        ],
        "targets": [of_goal(of_times(AHEAD, steps["torch_rpc"], steps["rdmarpc"], "≥", 1), "end_to_end")]
        if "torch_rpc" in steps
        else [],
    }


if __name__ == "__main__":
    apps.start(main)
