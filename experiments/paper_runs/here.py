"""What a result belongs to: the code, and the machine with its packages; and why an experiment cannot run here."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

from ..harness.findings import available_gib, machine
from ..harness.versions import ROOT, commit, versions
from .catalogue import Experiment

SOURCES = ("transport", "graph", "rdmarpc", "experiments")


def sources() -> str:
    """A digest of all code and configs, so that a change that is not committed makes results old, too."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".yaml"):
                digest.update(f"{path.relative_to(ROOT)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def gpus() -> list[str]:
    """The names of NVIDIA's GPUs, as their driver lists them."""
    folders = Path("/proc/driver/nvidia/gpus")
    if not folders.is_dir():
        return []
    lines = [line for path in sorted(folders.glob("*/information")) for line in path.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]


def surroundings() -> dict[str, Any]:
    """Everything but the config that a finished experiment belongs to."""
    identity = {"host": platform.node(), **machine(), "gpus": gpus(), "packages": versions()}
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ}
    return {"commit": commit(), "sources": sources(), "machine": identity | threads}


def why_not(experiment: Experiment, package: str, quick: bool) -> str:
    """Why it cannot run here, as one clause; nothing if it can. ``package`` is where experiments are imported from."""
    if importlib.util.find_spec(f"{package}.{experiment.name}") is None:
        return "this version of the package does not have it"
    for needed in experiment.packages:
        if importlib.util.find_spec(needed) is None:
            return f"the package {needed} is missing"
    if experiment.gpu and not gpus():
        return "there is no GPU"
    needs, has = experiment.needs_gib(quick), available_gib()
    if has < needs:
        return f"too little memory: it needs {needs:g} GiB, {has:.1f} GiB are available"
    return ""
