"""Programs started as a user starts them, ``python ARGUMENTS``; but forked from the server of all tests rather than in an
interpreter of their own, so that importing torch costs nothing: neither there nor in the processes that they start."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from forks import forks

ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1


def _main(arguments: list[str], out: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the tests, however they end
    os.setsid()  # a process group of its own, as a shell gives it one
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background, which ignores it
    os.chdir(ROOT)
    log = os.open(out, os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    execute(arguments)


def execute(arguments: list[str]) -> None:
    """As the interpreter would, here. Children of the program are its forks. They run the same code: it never knows how its
    context starts a process."""
    fork = mp.get_context("fork")
    fork.set_forkserver_preload = lambda names: None  # type: ignore[attr-defined]
    mp.context._concrete_contexts.update(spawn=fork, forkserver=fork)  # type: ignore[attr-defined]
    if arguments[0] == "-m":
        sys.path.insert(0, str(ROOT))
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(ROOT / Path(arguments[0]).parent))
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


class Program:
    """Both outputs go to the file ``out``. ``wait`` for it or ``kill`` it. ``environment``: besides that of the tests."""

    def __init__(self, arguments: list[str], out: Path, environment: dict[str, str] | None = None) -> None:
        out.touch()
        self._process = forks().Process(target=_main, args=(arguments, str(out), environment or {}))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Its exit code, negative for a signal."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            self.kill()
            raise AssertionError(f"it did not end within {timeout} s")
        return code

    def signal(self, number: signal.Signals, everybody: bool) -> None:
        """To the program alone, or to its process group, as a terminal does it."""
        (os.killpg if everybody else os.kill)(self.pid, number)

    def kill(self) -> None:
        """Everybody in its group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()  # it has not come to be a group yet
        self._process.join(10)


def run(
    *arguments: str, fresh: bool = False, timeout: float = 250.0, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A program from start to end. ``fresh``: really in an interpreter of its own. ``environment``: of one that is not, besides
    that of the tests."""
    if fresh:
        command = [sys.executable, *arguments]
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run(command, cwd=ROOT, text=True, timeout=timeout, check=False, **both)  # type: ignore[call-overload]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        program = Program(list(arguments), out, environment)
        try:
            code = program.wait(timeout)
        except BaseException:
            program.kill()
            raise
        return subprocess.CompletedProcess(arguments, code, out.read_text())


if __name__ == "__main__":  # in a process that has imported everything (tests/vm/zygote.py)
    execute(sys.argv[1:])
