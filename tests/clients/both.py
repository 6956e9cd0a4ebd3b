"""One program in both ways: plainly, and by ``python -m rdmarpc run``; what it left is compared bit for bit."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import programs
import torch

PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 100.0

# The modules that a program needs besides torch.
NEEDS: dict[str, tuple[str, ...]] = {
    "parameter_server": (),
    "reinforcement": (),
    "recurrent": (),
    "ddp_rpc": (),
    "torchrl_replay": ("torchrl",),
    "torchrl_collector": ("torchrl",),
    "pippy_stages": ("pippy",),
    "fedml_messages": ("fedml",),
    "machin_world": ("machin",),
}


@dataclass
class Run:
    """What a program left, and the seconds that it took, with all its processes."""

    found: dict[str, Any]
    seconds: float


def absent(program: str) -> list[str]:
    """Modules that it needs and that are not installed."""
    return [name for name in NEEDS[program] if importlib.util.find_spec(name) is None]


def run(program: str, ours: bool, fresh: bool = True) -> Run:
    """``python PROGRAM``, through ``rdmarpc run`` if ``ours``. Not ``fresh``: forked from the server of all tests, where
    ``rdmarpc.install()`` does what ``rdmarpc run`` does. AssertionError, with what it printed, if it fails or hangs."""
    with tempfile.TemporaryDirectory() as folder:
        path, out, log = PROGRAMS / f"{program}.py", Path(folder, "found"), Path(folder, "log")
        start = time.perf_counter()
        if fresh:
            through = ("-m", "rdmarpc", "run", "--") if ours else ()
            code = interpreted([sys.executable, "-W", "ignore", *through, str(path), str(out)], log)
        else:
            code = forked([*([str(PROGRAMS / "stood_in.py")] if ours else []), str(path), str(out)], log)
        seconds = time.perf_counter() - start
        assert code == 0, f"{program}, {'rdmarpc' if ours else 'torch RPC'}: exit code {code}\n{log.read_text()[-6000:]}"
        return Run(torch.load(out, weights_only=False), seconds)


def interpreted(command: list[str], log: Path) -> int | None:
    """Its exit code; None if it did not end. Nothing that it started is left."""
    with log.open("w") as printed:
        process = subprocess.Popen(command, cwd=programs.ROOT, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait(10)


def forked(arguments: list[str], log: Path) -> int:
    process = programs.Program(arguments, log)
    try:
        return process.wait(LIMIT_S)
    finally:
        process.kill()


def both(program: str, fresh: bool = True) -> tuple[Run, Run]:
    """Plainly and through rdmarpc; each has to have used the RPC that it should."""
    plain, ours = run(program, False, fresh), run(program, True, fresh)
    used = plain.found.pop("rpc"), ours.found.pop("rpc")
    assert used[0].startswith("torch.") and used[1].startswith("rdmarpc"), used
    return plain, ours


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two results differ: tensors in any bit, shape or dtype; anything else by ``==``."""
    if type(a) is not type(b):
        return [f"{path}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{path}: keys {list(a)} and {list(b)}"]
        return [line for key in a for line in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: lengths {len(a)} and {len(b)}"]
        return [line for i, (x, y) in enumerate(zip(a, b)) for line in differences(x, y, f"{path}[{i}]")]
    return [] if a == b else [f"{path}: {a!r} and {b!r}"]
