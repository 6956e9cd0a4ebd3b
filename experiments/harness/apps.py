"""How the program of an experiment begins and ends: its config, its folder, Ctrl-C, its results."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from .processes import WorkerFailed

DEVICES = ("shm", "tcp", "verbs", "cuda", "auto")
SWITCHES = ("quick", "json")
CONF = str(Path(__file__).parents[1] / "conf")


def start(app: Callable[[], None]) -> None:
    """Runs an app of hydra, with the ordinary flag ``--json`` besides hydra's ``json=true``. What hydra does not understand
    becomes one line, and a disk that is full, too."""
    sys.argv[1:] = ["json=true" if argument == "--json" else argument for argument in sys.argv[1:]]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra raises, rather than prints and ends
    try:
        app()
    except HydraException as error:
        said, *_ = str(error).partition("Config search path")
        raise SystemExit(f"error: {' '.join(said.split())}") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SystemExit(f"error: {error.strerror}: {error.filename or 'of the files of this run'}") from None


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values. Ends the program where one of its switches is neither true nor false."""
    job: Any = OmegaConf.to_container(cfg, resolve=True)
    yes_or_no(job, *(name for name in SWITCHES if name in job))
    return job


def yes_or_no(job: dict[str, Any], *names: str) -> None:
    """Ends the program unless each of these is true or false."""
    for name in names:
        if not isinstance(job[name], bool):
            raise SystemExit(f"error: {name}={job[name]} must be true or false")


def some_of(job: dict[str, Any], **known: Collection[str]) -> None:
    """Ends the program unless each of these names at least one value, and only known ones."""
    for name, values in known.items():
        if not isinstance(job[name], list) or not job[name] or not set(job[name]) <= set(values):
            raise SystemExit(f"error: {name}={job[name]} must be some of {', '.join(values)}")


def at_least_one(job: dict[str, Any], *names: str) -> None:
    """Ends the program unless each of these is a number of at least 1."""
    for name in names:
        if not isinstance(job[name], (int, float)) or job[name] < 1:
            raise SystemExit(f"error: {name}={job[name]} must be at least 1")


def numbers(job: dict[str, Any], least: float, *names: str) -> None:
    """Ends the program unless each of these is a list of numbers, none of them below ``least``."""
    for name in names:
        values = job[name]
        if not isinstance(values, list) or not values or any(not isinstance(v, (int, float)) or v < least for v in values):
            raise SystemExit(f"error: {name}={values} must be a list of numbers from {least:g} on")


def counts(job: dict[str, Any], *names: str) -> None:
    """Ends the program unless each of these is a list of whole numbers from 1 on, each once."""
    for name in names:
        values = job[name]
        known = isinstance(values, list) and values and all(type(value) is int and value > 0 for value in values)
        if not known or len(set(values)) < len(values):
            raise SystemExit(f"error: {name}={values} must be a list of whole numbers from 1 on, each once")


def device(job: dict[str, Any]) -> None:
    """Ends the program unless ``job["device"]`` can be opened here: one of ``DEVICES``, with or without an address."""
    kind = str(job["device"]).partition("://")[0]
    if kind not in DEVICES:
        raise SystemExit(f"error: device={job['device']} must be one of {', '.join(DEVICES)}")
    if kind == "verbs" and not any(Path("/sys/class/infiniband").glob("*")):
        raise SystemExit(f"error: device={job['device']}: there is no RDMA device")


def run_folder() -> Path:
    return Path(HydraConfig.get().runtime.output_dir)


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """A worker that fails ends the program with one line; Ctrl-C ends it silently."""
    try:
        yield
    except WorkerFailed as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@contextlib.contextmanager
def meeting(folder: Path) -> Iterator[dict[str, Any]]:
    """A folder where the workers of a job meet, as a part of the job; it is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".meeting-") as place:
        yield {"meeting_place": place}


_COLUMNS = "120"


def write_and_show(name: str, result: dict[str, Any], job: dict[str, Any], show: Callable[[], None]) -> None:
    """Writes ``NAME.json``, and shows the result or, for ``json=true``, prints it."""
    folder = run_folder()
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    if job.get("json"):
        json.dump(result, sys.stdout, indent=2)
        print()
        return
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", _COLUMNS)  # a file has no width, and rich squeezes tables into 80
    show()
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".png", ".txt"))
    print(f"in {folder}: {', '.join(others)}")
