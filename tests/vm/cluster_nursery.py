"""Runs on each host of the cluster: imports once what takes half a minute, then forks a process for every order.

    python cluster_nursery.py FOLDER

Who gives the orders need not share a network with us, only the folder: ``NAME/N.order`` (a function of ``cluster_actions``
and its arguments, as JSON) is answered by ``NAME/N.answer``. Each NAME is a process of its own, which keeps what its orders
leave.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import rdmarpc  # noqa: F401


def main(folder: Path) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: they leave no zombies
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ready").touch()
    started: set[str] = set()
    while folder.exists():
        for place in os.listdir(folder):
            if place not in started and (folder / place).is_dir():
                started.add(place)
                if os.fork() == 0:
                    live(folder / place)
                    os._exit(0)
        time.sleep(0.05)


def live(place: Path) -> None:
    """One process: takes its orders one after the other, until it is told to end."""
    import cluster_actions

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    torch.set_num_threads(1)
    state = cluster_actions.State()
    (place / "pid").write_text(str(os.getpid()))
    number = 0
    while True:
        order = place / f"{number}.order"
        if not order.exists():
            time.sleep(0.01)
            continue
        function, arguments = json.loads(order.read_text())
        if function == "end":
            return
        answer: Any
        try:
            answer = [True, getattr(cluster_actions, function)(state, *arguments)]
        except BaseException as error:
            fields = {name: getattr(error, name, "") for name in ("status", "hint", "peer")}
            answer = [False, {"kind": type(error).__name__, "text": str(error), "trace": traceback.format_exc(), **fields}]
        written = place / f"{number}.new"
        written.write_text(json.dumps(answer))
        written.rename(place / f"{number}.answer")
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
