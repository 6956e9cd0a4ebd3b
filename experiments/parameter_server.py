"""The shape of PyTorch's parameter-server benchmark: trainers, servers, DDP whose hook sends gradients to the servers; over
rdmarpc and over torch RPC, by turns, with the same losses and parameters.

    python -m experiments.parameter_server
    python -m experiments.parameter_server quick=true device=tcp    # everything in conf/parameter_server.yaml can be overridden

The run's folder receives parameter_server.json and parameter_server.png.
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
CASES = ("all buckets", "sparse buckets")


@hydra.main(version_base="1.3", config_path=CONF, config_name="parameter_server")
def main(cfg: DictConfig) -> None:
    """All turns, then the table, the file and the picture. Fails if results differ."""
    from .shapes.picture import draw

    config: Any = OmegaConf.to_container(cfg, resolve=True)
    job = checked(config, CASES) | {"program": "parameters"}
    folder = Path(HydraConfig.get().runtime.output_dir)
    findings = Findings("Trainers and parameter servers", "ms")
    turns = Turns(job, folder, findings)
    turns.run([job["trainers"] + job["servers"]])
    note = f"milliseconds of a step, medians: {job['trainers']} trainers, {job['servers']} servers; {job['layers']} dense"
    note += f" layers of width {job['width']}, a table of {job['rows']} rows, {job['batch']} x {job['bag']} of them a batch"
    turns.table("a step", "step", "processes", False, note)
    found = findings.write(folder, "parameter_server", job)
    draw(findings, job, "step", "milliseconds a step", "processes", folder / "parameter_server.png")
    print_findings(found)
    print(f"parameter_server.json and parameter_server.png are in {folder}")
    turns.finish()


if __name__ == "__main__":
    main()
