"""Runs PyTorch's tests in groups of real processes, forked from one that has imported everything.

``python suite_server.py MODULE`` loads the tests of ``MODULE``, then reads one JSON line per test from its input (``suite``,
``test``, ``limit`` in seconds) and answers each with a line: ``codes`` (the exit code of every rank, of as many as the suite
wants; ``null`` for one that had to be killed) and ``texts`` (what each wrote, with its traceback). The server has no threads,
so a fork of it is a fresh process. A rank joins its threads and runs what was left for the exit, but does not take down the
interpreter's modules: that takes a second for all that torch has loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import unittest
import weakref
from pathlib import Path
from typing import Any, NoReturn

FAILED, SKIPPED = 10, 87
_STEP_S = 0.005
_DUMP_S = 0.5
_START_S = 60.0


def _run_rank(case: type, test: str, rank: int, folder: Path, start: Any) -> int:
    """One rank (in its own process). Returns the exit code."""
    log = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    import torch

    torch.manual_seed(0)
    try:
        instance = case(test)
        instance.rank, instance.file_name = rank, str(folder / "store")
        around = getattr(case, "around", None)
        with around(instance, test) if around is not None else contextlib.nullcontext():
            start.wait(_START_S)  # a test may allow half a second for all ranks to come
            getattr(instance, test)()
    except unittest.SkipTest as reason:
        print(reason)
        return SKIPPED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    except BaseException:
        traceback.print_exc()
        return FAILED
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def _wait(children: dict[int, int], codes: list[int | None], deadline: float) -> None:
    """Until all have ended, or one has failed and the others had a moment to notice, or time is up."""
    while children and time.monotonic() < deadline:
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                rank = children.pop(pid)
                codes[rank] = os.waitstatus_to_exitcode(status)
                if codes[rank] not in (0, SKIPPED):
                    deadline = min(deadline, time.monotonic() + 3.0)
        time.sleep(_STEP_S)


def _end(code: int) -> NoReturn:
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        code = code or FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_group(case: type, test: str, size: int, limit: float) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="rdmarpc-suite-"))
    children: dict[int, int] = {}
    start = multiprocessing.get_context("fork").Barrier(size)
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _end(_run_rank(case, test, rank, folder, start))
        children[pid] = rank
    codes: list[int | None] = [None] * size
    _wait(children, codes, time.monotonic() + limit)
    for pid in children:
        os.kill(pid, signal.SIGUSR1)
    if children:
        time.sleep(_DUMP_S)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    texts = [(folder / f"rank{rank}").read_text(errors="replace") for rank in range(size)]
    shutil.rmtree(folder)
    return {"codes": codes, "texts": texts}


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.append(str(Path(__file__).parents[1] / "helpers"))
    ancestor = importlib.import_module("ancestor")
    cases = importlib.import_module(sys.argv[1]).load()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # a rank would take torch's operators apart, one by one
    ancestor.prepare()
    print(json.dumps(sorted(cases)), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        case, test = cases[order["suite"]], order["test"]
        answer = _run_group(case, test, case(test).world_size, order["limit"])
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
