"""Running one experiment as a program of its own, and keeping it when it has ended well.

A finished experiment is a folder ``kept/NAME-KEY``: what the program wrote, its output, and ``run.json``. The key is made of
the code, the machine, the packages and the arguments. The folder appears by one rename, so an interruption leaves none, and
several reports may be made at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 10.0
"""How long a program has to end its workers after Ctrl-C."""
OUTPUT, RECORD, RUNNING = "output.txt", "run.json", ".running-"

Progress = Callable[[str], None]
"""Takes the newest line of a program's output."""


LAST_LINES = 25


class Failed(Exception):
    """The program failed or took too long; the message is one line, ``output`` the end of what it wrote."""

    output = ""


class TooLate(Failed):
    """It had not ended in time."""


def key(arguments: list[str], surroundings: dict[str, Any]) -> str:
    described = json.dumps([arguments, surroundings], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def kept(place: Path) -> dict[str, Any] | None:
    """The record of a finished experiment, if there is one."""
    try:
        record: dict[str, Any] = json.loads((place / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return record


def run(command: list[str], place: Path, limit_s: float, progress: Progress) -> dict[str, Any]:
    """Run the program, with ``hydra.run.dir`` as its last argument, and move its folder to ``place`` when it has ended well.

    Raises Failed. On KeyboardInterrupt the program is ended, and nothing stays of it.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(place.parent)
    folder = Path(tempfile.mkdtemp(dir=place.parent, prefix=f"{RUNNING}{platform.node()}-{os.getpid()}-"))
    try:
        begin, load, processor_s = time.monotonic(), os.getloadavg()[0], _processor_s()
        with _adopting():
            _execute([*command, f"hydra.run.dir={folder}"], folder / OUTPUT, limit_s, progress)
        record = {
            "command": command,
            "seconds": round(time.monotonic() - begin, 1),
            "processor_s": round(_processor_s() - processor_s, 1),
            "load": round(load, 1),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        with contextlib.suppress(OSError):  # somebody else has just finished the same
            folder.rename(place)
        return record
    except Failed as error:
        error.output = "\n".join((folder / OUTPUT).read_text(errors="replace").splitlines()[-LAST_LINES:])
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(kept_in: Path) -> None:
    """Folders of runs on this host whose launcher was killed."""
    for folder in kept_in.glob(f"{RUNNING}{platform.node()}-*"):
        pid = folder.name.removeprefix(f"{RUNNING}{platform.node()}-").partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _execute(command: list[str], output: Path, limit_s: float, progress: Progress) -> None:
    parent = os.getpid()

    def begin() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # also where our own launcher ignores it
        if os.getppid() != parent:
            os._exit(1)

    with output.open("wb") as log:
        # A session of its own: Ctrl-C reaches it by us, once.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=begin
        )
    deadline = time.monotonic() + limit_s
    try:
        while child.poll() is None:
            if time.monotonic() > deadline:
                raise TooLate(f"it did not end within {limit_s:.0f} s")
            progress(_last_line(output))
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.5)
    finally:
        end(child)
    if child.returncode:
        raise Failed(_reason(output) or f"it ended with exit code {child.returncode}")


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """What a program leaves behind becomes a child of this process, which can then wait for its end and ask for its processor
    time: the server that forks the workers outlives their launcher by a moment."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _processor_s() -> float:
    """Of all programs that have ended and been waited for, with those that they waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def end(child: subprocess.Popen[bytes]) -> None:
    """Ctrl-C first, so that it ends its workers; then everything in its group, until all of that has ended."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-child.pid, 0)


def _reason(output: Path) -> str:
    """The last line that says that it is an error, or else the last line: hydra gives advice below its errors."""
    lines = _last_lines(output)
    return next(
        (line for line in reversed(lines) if "error" in line.lower() and "HYDRA_FULL_ERROR" not in line), _last_line(output)
    )


def _last_line(output: Path) -> str:
    return (_last_lines(output) or [""])[-1]


def _last_lines(output: Path) -> list[str]:
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").replace("\r", "\n").splitlines()
    return [line.strip() for line in lines if line.strip()]


def python(module: str, arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", module, *arguments]
