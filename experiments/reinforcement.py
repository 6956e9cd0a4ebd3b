"""The shape of PyTorch's reinforcement-learning benchmark: observers ask one agent for actions, one by one or in batches;
over rdmarpc and over torch RPC, by turns, with the same rewards, losses and policy.

    python -m experiments.reinforcement
    python -m experiments.reinforcement quick=true observers=[4]    # everything in conf/reinforcement.yaml can be overridden

The run's folder receives reinforcement.json and reinforcement.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from .harness.findings import Findings, print_findings
from .shapes.runs import Turns, checked

CONF = str(Path(__file__).parent / "conf")
CASES = ("one by one", "in batches")


@hydra.main(version_base="1.3", config_path=CONF, config_name="reinforcement")
def main(cfg: DictConfig) -> None:
    """All turns, then the tables, the file and the picture. Fails if results differ."""
    from .shapes.picture import draw

    config: Any = OmegaConf.to_container(cfg, resolve=True)
    job = checked(config, CASES) | {"program": "observers"}
    if not job["observers"] or min(job["observers"]) < 1:
        raise SystemExit(f"error: observers={job['observers']} must be numbers of observers")
    if job["quick"]:
        job["observers"] = job["observers"][:2]
    folder = Path(HydraConfig.get().runtime.output_dir)
    findings = Findings("An agent and its observers", "ms, or actions a second")
    turns = Turns(job, folder, findings)
    turns.run([1 + count for count in job["observers"]])
    note = "milliseconds from an observer's question to the agent's answer, medians"
    turns.table("an action", "latency", "processes", False, note)
    turns.table("actions a second", "actions", "processes", True, "of all observers together, medians of the episodes")
    found = findings.write(folder, "reinforcement", job)
    draw(
        findings,
        job,
        "latency",
        "milliseconds an action",
        "processes: an agent and its observers",
        folder / "reinforcement.png",
    )
    print_findings(found)
    print(f"reinforcement.json and reinforcement.png are in {folder}")
    turns.finish()


if __name__ == "__main__":
    main()
