"""PyTorch's own RPC tests against rdmarpc: see ``torch_suites``, ``suite_server``; what is left out and why: ``not_run``."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from not_run import STILL_RUN, SUITES, TESTS
from suite_server import SKIPPED
from torch_suites import listed

_START_S, _LIMIT_S, _MARGIN_S = 60.0, 40.0, 10.0


class Server:
    """The process that forks the groups. Made again when it was lost, which fails one test."""

    def __init__(self) -> None:
        script = Path(__file__).parent / "suite_server.py"
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
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
            self.__init__()  # type: ignore[misc]
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


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def _parameters() -> list:
    found = []
    for suite, tests in listed().items():
        for test in tests:
            reason = TESTS.get(test) or (SUITES.get(suite) if test not in STILL_RUN else None)
            marks = []
            if reason:
                marks.append(pytest.mark.skip(reason=reason))
            found.append(pytest.param(suite, test, marks=marks, id=f"{suite}.{test}"))
    return found


@pytest.mark.parametrize(("suite", "test"), _parameters())
def test_torch(server: Server, suite: str, test: str) -> None:
    codes, texts = server.run(suite, test)
    if set(codes) == {SKIPPED}:
        pytest.skip(texts[0].strip())
    told = "\n".join(
        f"--- rank {rank}: exit {code}\n{text}" for rank, (code, text) in enumerate(zip(codes, texts)) if code != 0
    )
    assert set(codes) == {0}, told
