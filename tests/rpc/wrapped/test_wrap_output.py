"""What a forward prints, logs, writes, sends or waits for happens as often as in one process."""

from __future__ import annotations

import copy
import csv
import functools
import io
import logging
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_wrap import drive
from torch import nn

import rdmarpc as rpc

LOG, ADAPTED = logging.getLogger("a model"), logging.LoggerAdapter(logging.getLogger("a model"), {})
TEXT, TABLE = io.StringIO(), io.StringIO()
ROWS = csv.writer(TABLE)
HERE, THERE = socket.socketpair()
SIGNALS: list[int] = []
QUEUES = [queue.Queue(), queue.SimpleQueue()]
PIPE = multiprocessing.Pipe()


@functools.lru_cache
def warning_once(text: str) -> None:
    LOG.warning(text)


def forward_once() -> None:
    """A common name in models of pairs."""
    LOG.info("x")


def print_once() -> None:
    print("x", file=TEXT)


def opens() -> None:
    with open(os.environ["A_FILE"], "a") as file:
        file.write("x\n")


def descriptor() -> None:
    number = os.open(os.environ["A_FILE"], os.O_APPEND | os.O_WRONLY | os.O_CREAT)
    try:
        os.write(number, b"x\n")
    finally:
        os.close(number)


def new_file() -> str:
    folder = Path(os.environ["A_FILE"]).parent
    return str(folder / f"{len(os.listdir(folder))}.x")


def thread() -> None:
    teller = threading.Thread(target=TEXT.write, args=("x",))
    teller.start()
    teller.join()


class Report:
    """As of a library that draws curves."""

    def __init__(self) -> None:
        self.lines = io.StringIO()

    def add(self, name: str) -> None:
        self.lines.write(f"{name}\n")


REPORT = Report()
EFFECTS: dict[str, Callable[[], object]] = {
    "print": lambda: print("x", file=TEXT),
    "log": lambda: LOG.info("x"),
    "adapted": lambda: ADAPTED.info("x"),
    "once": lambda: warning_once("x"),
    "forward once": forward_once,
    "print once": print_once,
    "debug": lambda: LOG.debug("nobody hears this"),
    "write": lambda: TEXT.write("x\n"),
    "row": lambda: ROWS.writerow("x"),
    "opens": opens,
    "descriptor": descriptor,
    "send": lambda: HERE.send(b"x"),
    "report": lambda: REPORT.add("x"),
    "queue": lambda: QUEUES[0].put("x"),
    "simple queue": lambda: QUEUES[1].put("x"),
    "pipe": lambda: PIPE[0].send("x"),
    "thread": thread,
    "process": lambda: subprocess.run(["touch", new_file()], check=True),
    "path": lambda: Path(new_file()).write_text(""),
    "save": lambda: torch.save(torch.ones(1), new_file()),
    "signal": lambda: signal.raise_signal(signal.SIGUSR1),
    "sleep": lambda: time.sleep(0.01),
}
CAPTURED = ("once", "debug")


class Net(nn.Module):
    def __init__(self, effect: str, inside: bool) -> None:
        super().__init__()
        self.first, self.last, self.effect, self.inside = nn.Linear(8, 8), nn.Linear(8, 2), effect, inside

    def forward(self, x):
        x = self.first(x)
        if not self.inside:
            EFFECTS[self.effect]()
        return self.last(x)


def heard() -> int:
    """How much there is of all of it."""
    path = Path(os.environ["A_FILE"])
    texts = [TEXT, TABLE, REPORT.lines, LOG.handlers[0].stream]
    total = sum(text.getvalue().count("x") for text in texts) + (path.read_text().count("x") if path.exists() else 0)
    try:
        total += len(THERE.recv(1000, socket.MSG_DONTWAIT))
    except BlockingIOError:
        pass
    while PIPE[1].poll():
        total += len(PIPE[1].recv())
    return total + len(SIGNALS) + sum(each.qsize() for each in QUEUES) + len(list(path.parent.glob("*.x")))


def of(net: Any) -> tuple[int, list[torch.Tensor]]:
    """How much four steps add, and their results."""
    torch.manual_seed(1)
    warning_once.cache_clear()
    SIGNALS.clear()
    before, found = heard(), []
    for _ in range(4):
        found.append(net(torch.randn(3, 8)))
        found[-1].sum().backward()
    return heard() - before, found


def as_in_one_process() -> None:
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    LOG.addHandler(logging.StreamHandler(io.StringIO()))
    signal.signal(signal.SIGUSR1, lambda number, frame: SIGNALS.append(number))
    for effect in EFFECTS:
        net = Net(effect, inside=False)
        expected, outputs = of(copy.deepcopy(net))
        model = rpc.wrap(net, {"first": "worker1"})
        times, found = of(model)
        assert times == expected, (effect, times, expected, model.captured)
        assert all(map(torch.equal, found, outputs))
        assert expected == (0 if effect in ("sleep", "debug") else 1 if effect == "once" else 4), (effect, expected)
        assert model.captured.startswith("fx" if effect in CAPTURED else "eager"), (effect, model.captured)
        assert ("at test_wrap_output.py:" in model.captured) == (effect not in CAPTURED), (effect, model.captured)
        model.close()


def another_thread_prints() -> None:
    """While this one traces."""
    stop, lines = threading.Event(), io.StringIO()

    def say() -> None:
        while not stop.wait(0.001):
            print("x", file=lines)
            LOG.info("x")

    teller = threading.Thread(target=say)
    teller.start()
    try:
        model = rpc.wrap(Net("debug", inside=True), {"first": "worker1"})
        model(torch.randn(3, 8))
        assert model.captured == "fx"
        model.close()
    finally:
        stop.set()
        teller.join(timeout=30)
    assert lines.getvalue().count("x") > 0


def everything(path: str) -> None:
    os.environ["A_FILE"] = path
    as_in_one_process()
    another_thread_prints()


@pytest.mark.timeout(200)
def test_it_happens_as_often(tmp_path: Path) -> None:
    drive(functools.partial(everything, str(tmp_path / "written")), 2, timeout=150.0)
