"""A job whose workers tell their launcher nothing: one group is stopped, the other one sleeps. ``python silent_job.py FOLDER``;
each worker makes a file there when it has come so far."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from rdmarpc.experiments.harness.processes import Group, Launcher, run_job


def stopped(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    Path(job["folder"], "stopped.here").touch()
    launcher.wait_for_turn()


def sleeping(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    Path(job["folder"], f"sleeping{rank}.here").touch()
    time.sleep(600.0)


if __name__ == "__main__":
    groups = [Group("stopped", stopped, 1, freeze=True), Group("sleeping", sleeping, 2)]
    run_job(groups, {"folder": sys.argv[1]}, lambda name, event: None, 600.0)
