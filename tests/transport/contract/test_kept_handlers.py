"""When handlers of signals run: ``transport/interrupts``."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rdmarpc.transport import interrupts

early = signal.signal  # as libraries bind it that are imported before a device is open


@pytest.fixture(autouse=True)
def own_signal() -> Iterator[None]:
    interrupts.protect()
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def inside(source: str) -> Callable[..., Any]:
    """A function ``work`` of this package, as far as a frame can tell."""
    names: dict[str, Any] = {
        "__name__": "rdmarpc.somewhere",
        "signal": signal,
        "time": time,
        "interruptible": interrupts.interruptible,
    }
    exec(compile(source, "somewhere.py", "exec"), names)
    return names["work"]


def raises(number: int, frame: Any) -> None:
    raise TimeoutError("too long")


def test_the_users_handler_is_what_python_names() -> None:
    for set_handler in (signal.signal, early):
        set_handler(signal.SIGUSR1, raises)
        assert signal.getsignal(signal.SIGUSR1) is raises
        assert set_handler(signal.SIGUSR1, signal.SIG_DFL) is raises
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where the suite was started
    try:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_runs_at_once_in_code_of_the_user() -> None:
    came = []
    signal.signal(signal.SIGUSR1, lambda number, frame: came.append((number, frame.f_code.co_name)))
    signal.raise_signal(signal.SIGUSR1)
    assert came == [(signal.SIGUSR1, "test_a_handler_runs_at_once_in_code_of_the_user")]


@pytest.mark.parametrize("set_handler", [signal.signal, early])
def test_what_this_package_does_is_done_first(set_handler: Any) -> None:
    work = inside(
        "def work(done):\n    signal.raise_signal(10)\n    for part in range(50):\n        done.append(len(str(part)))\n"
    )
    set_handler(signal.SIGUSR1, raises)
    done: list[int] = []
    with pytest.raises(TimeoutError):
        work(done)
        time.sleep(60.0)  # any call of the user's code lets the handler run
    assert len(done) == 50


def test_code_that_this_package_calls_is_the_users() -> None:
    work = inside("def work(call, done):\n    call()\n    done.append(1)\n")
    signal.signal(signal.SIGUSR1, raises)
    done: list[int] = []
    with pytest.raises(TimeoutError):
        work(lambda: signal.raise_signal(signal.SIGUSR1), done)
    assert not done


def test_code_without_a_file_is_the_users() -> None:
    """As that of ``python -c``, and what is typed."""
    work = inside("def work(call, done):\n    call()\n    done.append(1)\n")
    names: dict[str, Any] = {"__name__": "__main__", "signal": signal}
    exec(compile("def call():\n    signal.raise_signal(10)\n", "<string>", "exec"), names)
    signal.signal(signal.SIGUSR1, raises)
    done: list[int] = []
    with pytest.raises(TimeoutError):
        work(names["call"], done)
        time.sleep(60.0)
    assert not done


def test_a_wait_can_be_interrupted() -> None:
    wait = "@interruptible(unless=lambda local: local['busy'])\n"
    source = wait + "def work(busy, done):\n    signal.raise_signal(10)\n    done.append(len(done))\n"
    work = inside(source)
    signal.signal(signal.SIGUSR1, raises)
    done: list[int] = []
    with pytest.raises(TimeoutError):
        work(False, done)
    assert not done
    with pytest.raises(TimeoutError):
        work(True, done)
        time.sleep(60.0)
    assert done == [0]


def test_no_handler_is_kept_for_ever() -> None:
    source = "def work(end):\n    signal.raise_signal(10)\n    while time.monotonic() < end:\n        pass\n"
    signal.signal(signal.SIGUSR1, raises)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        inside(source)(start + 60.0)
    assert interrupts.LIMIT_S <= time.monotonic() - start < 30.0


def test_a_signal_is_handled_once() -> None:
    """Also where the code that it came in ends while the signal is sent again."""
    work = inside("def work(end):\n    signal.raise_signal(10)\n    while time.monotonic() < end:\n        pass\n")
    came: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    for number in range(100):
        work(time.monotonic() + 0.0095 + 0.0001 * (number % 20))
        time.sleep(0.002)
        assert len(came) == number + 1
