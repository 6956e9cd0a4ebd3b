"""Runs in a guest: imports once what takes long, then forks a process for each Python program that the host asks for.

    python zygote.py BOX MODULE...

A program is a file ``N.json`` in the box: ``argv`` as they would follow ``python`` (``-m NAME ...``, or a script), ``cwd``,
``env``. The host rings for it on the second serial port; this, its output, session and exit status are as agent.sh tells. The
fork server of a program's own ``multiprocessing`` is forked from here too. No thread runs in here, so a fork is as good as a
fresh process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def serve(box: Path) -> dict[str, Any]:
    """Returns in forked processes only, with what to run."""
    bell = os.open(next(Path("/dev").glob("vport*p2")), os.O_RDONLY)
    ended, ends = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(ends, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ends)
    running: dict[int, Path] = {}
    orders = b""
    while True:
        rung, _, _ = select.select([bell, ended], [], [])
        if ended in rung:
            os.read(ended, 1000)
            reap(running)
        if bell not in rung:
            continue
        *lines, orders = (orders + os.read(bell, 1000)).split(b"\n")
        for line in lines:
            order, number = line.decode().split()
            program = box / number
            if order == "kill":
                with contextlib.suppress(OSError):
                    subprocess.run(["pkill", "-KILL", "-s", program.with_suffix(".pid").read_text()])
                continue
            request: dict[str, Any] = json.loads(program.with_suffix(".json").read_text())
            with contextlib.suppress(OSError):  # what changed on the host is looked at again, as in agent.sh
                Path("/proc/sys/vm/drop_caches").write_text("2")
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                log = os.open(program.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(log, 1)
                os.dup2(log, 2)
                for fd in (log, bell, ended, ends):
                    os.close(fd)
                return request
            running[pid] = program
            program.with_suffix(".pid").write_text(str(pid))


def reap(running: dict[int, Path]) -> None:
    """Writes the exit statuses of programs that have ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if (program := running.pop(ended[0], None)) is not None:
                code = os.waitstatus_to_exitcode(ended[1])
                program.with_suffix(".tmp").write_text(str(code if code >= 0 else 128 - code))
                program.with_suffix(".tmp").rename(program.with_suffix(".rc"))


def fork_server_in_waiting() -> None:
    """Forks, while this process is clean, the one that becomes its ``multiprocessing`` fork server when it wants one."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        words, fds, _, _ = socket.recv_fds(theirs, 1 << 20, 16)
        if not words:
            os._exit(0)
        code, numbers, path = json.loads(words)
        for fd, number in zip([os.dup(fd) for fd in fds], numbers):
            os.dup2(fd, number)
        for place in path:
            if place not in sys.path:
                sys.path.insert(0, place)
        exec(code, {"__name__": "__main__"})
        os._exit(0)
    theirs.close()
    spawn = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]

    def spawn_or_fork(path: bytes, args: list[str], passed: list[int]) -> int:
        if "multiprocessing.forkserver" not in args[-1] or ours.fileno() < 0:
            return spawn(path, args, passed)
        found = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
        given = [*passed, 1, 2]  # what it and its processes print goes where ours goes now
        socket.send_fds(ours, [json.dumps([args[-1], given, found]).encode()], given)
        ours.close()
        return pid

    multiprocessing.util.spawnv_passfds = spawn_or_fork  # type: ignore[attr-defined]


def run(request: dict[str, Any]) -> None:
    """As the interpreter would."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    argv: list[str] = request["argv"]
    first = request["cwd"] if argv[0] == "-m" else str(Path(argv[0]).resolve().parent)
    found = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:1] = [first, *found]  # in the place of our own folder
    importlib.invalidate_caches()
    fork_server_in_waiting()
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def main() -> None:
    box, modules = Path(sys.argv[1]), sys.argv[2:]
    began = time.monotonic()
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
        print(f"{time.monotonic() - began:6.1f} s  {name}", flush=True)
    gc.collect()
    gc.freeze()
    (box / "python.ready").write_text(f"{time.monotonic() - began:.1f}")
    request = serve(box)
    try:
        run(request)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main()
