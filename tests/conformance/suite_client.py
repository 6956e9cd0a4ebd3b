"""Has a ``suite_server`` run tests."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from suite_server import SKIPPED

_START_S, _LIMIT_S, _MARGIN_S = 150.0, 100.0, 20.0


class Server:
    """The process that forks the groups. Made again when it was lost, which fails one test."""

    def __init__(self, module: str) -> None:
        """``module``: whose ``load`` gives the tests."""
        self._module = module
        script = Path(__file__).parent / "suite_server.py"
        self._process = subprocess.Popen(
            [sys.executable, str(script), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"},
        )
        self._receive(_START_S)

    def _receive(self, limit: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit)
        line = self._process.stdout.readline() if ready else b""
        assert line, "the server of the suites died" if ready else "the server of the suites hangs"
        return json.loads(line)

    def run(self, suite: str, test: str) -> tuple[list[int | None], list[str]]:
        """Exit codes and texts of the ranks."""
        assert self._process.stdin is not None
        order = {"suite": suite, "test": test, "limit": _LIMIT_S}
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._receive(_LIMIT_S + _MARGIN_S)
        except BaseException:
            self.close()
            self.__init__(self._module)  # type: ignore[misc]
            raise
        return answer["codes"], answer["texts"]

    def close(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def check(self, suite: str, test: str) -> None:
        """Run a test; fail, or skip, with what its ranks wrote."""
        codes, texts = self.run(suite, test)
        if set(codes) == {SKIPPED}:
            pytest.skip(texts[0].strip().rpartition("\n")[2])
        told = "\n".join(
            f"--- rank {rank}: exit {code}\n{text}" for rank, (code, text) in enumerate(zip(codes, texts)) if code != 0
        )
        assert set(codes) == {0}, told
