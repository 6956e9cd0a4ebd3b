"""For every test: nothing may be left behind."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import ancestor
import gpu
import hypothesis
import psutil
import pytest
from lasting import lasting, ownerless

HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes of Python's own that live as long as the test run."""

# An example that takes longer than usual says nothing about the code on a busy machine; and a run draws what the last one drew.
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

gc.disable()  # until all tests are there: nothing is forked from this process itself


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: needs seconds, or gigabytes")
    config.addinivalue_line("markers", "gpu: needs a GPU, CUDA's or the one in software (gpu.py)")
    config.addinivalue_line("markers", "rdma: needs an RDMA device, as the guest of `make vm-test` has one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if why := gpu.why_not():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=why))
    ports = Path("/sys/class/infiniband").glob("*/ports/*/state")
    if any("ACTIVE" in port.read_text() for port in ports):
        return
    skip = pytest.mark.skip(reason="no RDMA device with an active port on this host: `make vm-test` has one")
    for item in items:
        if item.get_closest_marker("rdma"):
            item.add_marker(skip)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What takes long, and once, is done before the first test's limit of time begins."""
    ancestor.settle()
    gc.enable()
    if session.config.option.collectonly:
        return
    uses = (item.get_closest_marker("gpu") or hasattr(getattr(item, "module", None), "softgpu") for item in session.items)
    if any(uses) and not gpu.why_not():
        gpu.build()
    if "forks" in sys.modules:  # some of these tests may start processes
        if session.config.option.capture != "no":
            sys.modules["forks"].keep_output()
        sys.modules["forks"].warm_up()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if "forks" in sys.modules:
        sys.modules["forks"].forget_output()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What worker processes have printed is shown when the test has failed; with ``-s``, always and at once."""
    report = yield
    if report.failed and "forks" in sys.modules and (text := sys.modules["forks"].output()):
        report.sections.append(("Captured output of worker processes", text))
    return report


def _descendants() -> set[int]:
    """All of them. The kernel lists the children of a thread; to look at every process of the machine would take ten times as
    long, twice a test."""
    found: set[int] = set()
    asked = [os.getpid()]
    while asked:
        threads = Path(f"/proc/{asked.pop()}/task")
        try:
            born = {int(pid) for thread in os.listdir(threads) for pid in (threads / thread / "children").read_text().split()}
        except OSError:  # it has ended
            continue
        asked += born - found
        found |= born
    return found


def _left(before: set[int]) -> dict[int, str]:
    """Our living descendants that are new, without the helpers and what lasts on purpose."""
    left = {}
    for pid in _descendants() - before - lasting:
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            helper = any(name in command for name in HELPERS) and process.ppid() == os.getpid()
        except psutil.Error:
            continue
        if not helper:
            left[pid] = command
    return left


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    processes, shared = _descendants(), set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + 10.0  # a process that was told to end may need a moment
    while (left := _left(processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"processes left behind: {left}"
    while (appeared := ownerless(shared)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not appeared, f"left in /dev/shm: {appeared}"
