"""What a mini-batch costs when one parameter server keeps the model: all gradients there and all weights back, beside the
floor, and beside torch RPC and gRPC.

    python -m experiments.minibatch
    python -m experiments.minibatch models='[GRU,LSTM]' rounds=3   # everything in conf/minibatch.yaml can be overridden
    python -m experiments.minibatch --json

The ways take turns, model by model and round by round, in one run, whose folder receives minibatch.json and minibatch.png.
"""

import importlib.util
import sys
from typing import Any

import hydra
from omegaconf import DictConfig

from .harness import apps
from .harness.processes import Group, run_job
from .harness.versions import versions

CONF = apps.CONF

# Workers import this module too; what only the launcher or only some of them need is imported where it is needed.


@hydra.main(version_base="1.3", config_path=CONF, config_name="minibatch")
def main(cfg: DictConfig) -> None:
    """One run: the workers measure, what they say is judged, written and shown."""
    from .exchange.picture import draw_minibatch
    from .exchange.report import print_tables, summary, tables
    from .harness.findings import of_rich

    job = checked(cfg)
    records: list[dict[str, Any]] = []

    def on_event(group: str, event: tuple[Any, ...]) -> None:
        if event[0] == "measured":
            records.extend(event[1])
        else:
            print(f"{group}: {event[1]}", file=sys.stderr, flush=True)

    with apps.ending(), apps.meeting(apps.run_folder()) as place:
        run_job(groups(job), job | place, on_event, job["timeout_s"])
    result = summary(records, job) | {"config": job, "versions": versions()}
    result["tables"] = [of_rich(table, note) for table, note in tables(result)]
    draw_minibatch(result, apps.run_folder() / "minibatch.png")
    apps.write_and_show("minibatch", result, job, lambda: print_tables(result))


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
    """The config as plain values; ends the program if it makes no sense."""
    from .exchange.models import MODELS

    job = apps.plain(cfg)
    apps.device(job)
    apps.some_of(job, models=MODELS)
    apps.at_least_one(job, "rounds")
    if job["grpc"] and importlib.util.find_spec("grpc") is None:
        raise SystemExit("error: grpc=true needs grpcio: pip install 'rdmarpc[bench]', or grpc=false")
    return job


if __name__ == "__main__":
    apps.start(main)
