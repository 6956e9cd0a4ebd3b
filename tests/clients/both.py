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
HELPERS = str(Path(programs.__file__).parent)
LIMIT_S = 250.0

# The modules that a program needs besides torch.
NEEDS: dict[str, tuple[str, ...]] = {
    "parameter_server": (),
    "reinforcement": (),
    "recurrent": (),
    "ddp_rpc": (),
    "pipeline_shards": (),
    "remote_model": (),
    "torchrl_replay": ("torchrl",),
    "torchrl_collector": ("torchrl",),
    "pippy_stages": ("pippy",),
    "fedml_messages": ("fedml",),
    "machin_world": ("machin",),
    "fairscale_pipeline": ("fairscale",),
    "torchopt_tasks": ("torchopt",),
    "geometric_loader": ("torch_geometric", "pyg_lib"),
}


@dataclass
class Run:
    """What a program left, and the seconds that it took, with all its processes."""

    found: dict[str, Any]
    seconds: float


def absent(program: str) -> list[str]:
    """Modules that it needs and that are not installed."""
    return [name for name in NEEDS[program] if importlib.util.find_spec(name) is None]


def run(program: str, ours: bool) -> Run:
    """``python PROGRAM``, through ``rdmarpc run`` if ``ours``. AssertionError, with what it printed, if it fails or hangs."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "found"), Path(folder, "log")
        start = time.perf_counter()
        code = interpreted([*through(ours), str(PROGRAMS / f"{program}.py"), str(out)], log)
        seconds = time.perf_counter() - start
        assert code == 0, f"{program}, {'rdmarpc' if ours else 'torch RPC'}: exit code {code}\n{log.read_text()[-6000:]}"
        return Run(torch.load(out, weights_only=False), seconds)


def through(ours: bool) -> list[str]:
    return [sys.executable, "-W", "ignore", *(("-m", "rdmarpc", "run", "--") if ours else ())]


def interpreted(command: list[str], log: Path) -> int | None:
    """Its exit code; None if it did not end. Nothing that it started is left."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [HELPERS, os.environ.get("PYTHONPATH")]))}
    with log.open("w") as printed:
        process = subprocess.Popen(
            command, cwd=programs.ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
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


def several(names: list[str], ours: bool, folder: Path) -> None:
    """Programs in one tree of processes (``several.py``): plainly, forked from the server of all tests; or, if ``ours``, by
    the command, in an interpreter of its own. ``found`` reads what they left."""
    arguments = [str(Path(__file__).with_name("several.py")), str(folder), *names]
    if ours:
        interpreted([*through(True), *arguments], folder / "log")
        return
    process = programs.Program(arguments, folder / "log")
    try:
        process.wait(LIMIT_S)
    finally:
        process.kill()


def found(program: str, folder: Path) -> dict[str, Any]:
    """What a program of ``several`` left there. AssertionError, with what was printed, if it left nothing."""
    if not (folder / program).exists():
        logs = [path for path in (folder / f"{program}.log", folder / "log") if path.exists()]
        raise AssertionError(f"{program} in {folder.name}:\n" + "\n".join(path.read_text()[-6000:] for path in logs))
    left: dict[str, Any] = torch.load(folder / program, weights_only=False)
    return left


def both(program: str) -> tuple[Run, Run]:
    """Plainly and through rdmarpc, as a user starts it."""
    plain, ours = run(program, False), run(program, True)
    check_used(plain.found, ours.found)
    return plain, ours


def check_used(plain: dict[str, Any], ours: dict[str, Any]) -> None:
    """Each has used the RPC that it should."""
    used = plain.pop("rpc"), ours.pop("rpc")
    assert used[0].startswith("torch.") and used[1].startswith("rdmarpc"), used


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
