"""Traces beside other threads of the process, which trace too, or just run models."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_capture import specs_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from rdmarpc.graph.trace import watch
from rdmarpc.graph.trace.capture import Capture, skeleton
from rdmarpc.graph.trace.methods import capture_by, methods_of
from rdmarpc.graph.trace.watch import Busy

WAIT_S = 60


class Flag:
    """An event of a lock: a forward that sets a real one, or waits for it, is refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        if self._lock.locked():
            self._lock.release()

    def is_set(self) -> bool:
        return not self._lock.locked()

    def wait(self, timeout: float) -> bool:
        had = self._lock.acquire(timeout=timeout)
        if had:
            self._lock.release()
        return had


BEGAN: dict[str, Flag] = {}
GO: dict[str, Flag] = {}
"""A forward has begun, and may go on, by the model's name."""


class Meeting(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.lin, self.name, self.late = nn.Linear(4, 4), name, 2.0

    def forward(self, x):
        BEGAN[self.name].set()
        GO[self.name].wait(WAIT_S)
        return self.lin(x) * self.late


def trace(shape: nn.Module, method: str) -> tuple[Capture, list[str]]:
    return capture_by(methods_of(method), shape, specs_of([torch.ones(2, 4)]), lambda *given: (given, {}), bool)


def patched() -> list[object]:
    functions = vars(torch.autograd.function._SingleLevelFunction).get("apply")
    return [nn.Module.__call__, nn.Module.__setattr__, nn.Module.__getattribute__, functions]


class Lock:
    """A lock that says when it must be waited for."""

    def __init__(self, lock: object, asked: threading.Event) -> None:
        self._lock, self._asked, self.release = lock, asked, lock.release

    def acquire(self, timeout: float) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        self._asked.set()
        return self._lock.acquire(timeout=timeout)


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = patched()
    for name in ("first", "second"):
        BEGAN[name], GO[name] = Flag(), Flag()
    yield
    assert all(now is then for now, then in zip(patched(), before))


@pytest.mark.parametrize("method", ["fx", "export"])
def test_two_threads_trace_one_after_another(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trace ends after the second one was asked for, which must not have begun."""
    asked = threading.Event()
    shapes = {name: skeleton(Meeting(name)) for name in ("first", "second")}  # before: a draw would refuse a trace

    monkeypatch.setattr(watch, "_tracing", Lock(watch._tracing, asked))
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(trace, shapes["first"], method)
        assert BEGAN["first"].wait(WAIT_S)
        two = pool.submit(trace, shapes["second"], method)
        assert asked.wait(WAIT_S)
        assert not BEGAN["second"].is_set()
        GO["first"].set()
        found = [one.result(WAIT_S)[0]]
        GO["second"].set()
        found.append(two.result(WAIT_S)[0])
    for capture, name in zip(found, ("first", "second")):
        assert any("'late'" in root.label for root in capture.roots(Meeting(name)))


def test_a_trace_that_waits_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE_S", 0.01)
    GO["second"].set()
    first, second = (skeleton(Meeting(name)) for name in ("first", "second"))
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(trace, first, "fx")
        assert BEGAN["first"].wait(WAIT_S)
        with pytest.raises(Busy, match="another thread of this process has been capturing"):
            trace(second, "auto")
        assert not BEGAN["second"].is_set()
        GO["first"].set()
        one.result(WAIT_S)
    trace(second, "auto")


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("method", ["fx", "export"])
def test_other_threads_run_models_while_one_traces(method: str) -> None:
    """Modules that are no part of the trace, and checkpoints that a trace would refuse."""
    lin, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)

    def run() -> list[torch.Tensor]:
        result = checkpoint(doubled, lin(x), use_reentrant=True)
        result.sum().backward()
        found = [result.detach(), x.grad]
        x.grad = None
        return found

    expected = run()
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(trace, skeleton(Meeting("first")), method)
        try:
            assert BEGAN["first"].wait(WAIT_S)
            found = run()
        finally:
            GO["first"].set()
        assert one.result(WAIT_S)[1] == []
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
