"""PyTorch's own RPC tests against rdmarpc: see ``torch_suites``, ``suite_server``; what is left out and why: ``not_run``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from not_run import STILL_RUN, SUITES, TESTS
from suite_client import Server
from torch_suites import listed


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("torch_suites")
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
    server.check(suite, test)
