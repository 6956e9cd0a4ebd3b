"""A turn: one library over one device, in new processes that exist for this turn alone. So nothing else polls, sleeps or holds
memory while a library is measured, and no turn profits from another."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..harness.processes import Group, Launcher, WorkerFailed, run_job
from .libraries import PACKAGES, TITLES, serve_or_drive

Figure = tuple[str, int, float]
"""Case, size (bytes, clients, ...), and a number."""
Entry = Callable[[int, dict[str, Any], Launcher], None]


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A process of a turn; client 0 tells ("figures", list of them)."""
    logging.captureWarnings(True)  # torch warns of its own deprecated parts
    warnings.simplefilter("ignore")
    module, _, name = job["drive"].partition(":")
    try:
        found = serve_or_drive(getattr(importlib.import_module(module), name), rank, job)
        if rank == 0:
            launcher.tell(("figures", found))
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        (Path(job["meeting_place"]) / f"failed{rank}").write_text(reason)
        raise


def turn(job: dict[str, Any], folder: Path, take: Callable[[list[Figure]], None], entry: Entry = main) -> str:
    """One turn as ``job`` says: "library", "device", "drive" (module:function), "functions", "clients", "servers", "calls"
    under way from a client, "threads" of a server, "timeout_s". Returns nothing, or why it failed.
    ``entry``: the first function of its processes."""

    def on_event(group: str, event: tuple[Any, ...]) -> None:
        take(event[1])

    with tempfile.TemporaryDirectory(dir=folder, prefix=".meeting-") as place:
        group = Group(TITLES.get(job["library"], job["library"]), entry, job["clients"] + job["servers"])
        try:
            run_job([group], job | {"meeting_place": place}, on_event, job["timeout_s"])
        except WorkerFailed as error:
            reasons = [path.read_text() for path in sorted(Path(place).glob("failed*"))]
            return "; ".join(dict.fromkeys(reasons)) or str(error)
    return ""


def missing(library: str, device: str) -> str:
    """Why this library cannot be measured over this device here; nothing if it can."""
    needed = PACKAGES.get(library)
    if needed is not None and importlib.util.find_spec(needed) is None:
        return f"the package {needed} is missing (pip install 'rdmarpc[bench]')"
    if device == "verbs" and not any(Path("/sys/class/infiniband").glob("*")):
        return "there is no RDMA device"
    return ""
