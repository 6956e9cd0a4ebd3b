"""What a mini-batch costs when one parameter server keeps the model: all gradients there and all weights back, beside the
floor, and beside torch RPC and gRPC.

    python -m experiments.minibatch
    python -m experiments.minibatch models='[GRU,LSTM]' rounds=3   # everything in conf/minibatch.yaml can be overridden
    python -m experiments.minibatch --json

The ways take turns, model by model and round by round, in one run, whose folder receives minibatch.json and minibatch.png.
"""

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from .harness.processes import Group, WorkerFailed, run_job
from .harness.versions import versions

CONF = str(Path(__file__).parent / "conf")

# Workers import this module too; what only the launcher or only some of them need is imported where it is needed.


@hydra.main(version_base="1.3", config_path=CONF, config_name="minibatch")
def app(cfg: DictConfig) -> None:
    """One run: the workers measure, what they say is judged, written and shown."""
    from .exchange.picture import draw_minibatch
    from .exchange.report import print_table, summary

    job = checked(cfg)
    folder = Path(HydraConfig.get().runtime.output_dir)
    records: list[dict[str, Any]] = []

    def on_event(group: str, event: tuple[Any, ...]) -> None:
        if event[0] == "measured":
            records.extend(event[1])
        else:
            print(f"{group}: {event[1]}", file=sys.stderr, flush=True)

    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".meeting-") as meeting_place:
            run_job(groups(job), job | {"meeting_place": meeting_place}, on_event, job["timeout_s"])
    except WorkerFailed as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None

    result = summary(records, job) | {"config": job, "versions": versions()}
    (folder / "minibatch.json").write_text(json.dumps(result, indent=2) + "\n")
    draw_minibatch(result, folder / "minibatch.png")
    if job["json"]:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        print_table(result)
        print(f"minibatch.json and minibatch.png are in {folder}")


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

    job: Any = OmegaConf.to_container(cfg, resolve=True)
    unknown = [name for name in job["models"] if name not in MODELS]
    if unknown or not job["models"]:
        raise SystemExit(f"error: models={job['models']} must be some of {', '.join(MODELS)}")
    if job["rounds"] < 1:
        raise SystemExit(f"error: rounds={job['rounds']} must be at least 1")
    if job["grpc"] and importlib.util.find_spec("grpc") is None:
        raise SystemExit("error: grpc=true needs grpcio: pip install 'rdmarpc[bench]', or grpc=false")
    return job


def main() -> None:
    """The app with the ordinary flag `--json` besides hydra's `json=true`."""
    sys.argv[1:] = ["json=true" if argument == "--json" else argument for argument in sys.argv[1:]]
    app()


if __name__ == "__main__":
    main()
