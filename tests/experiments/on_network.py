"""``python on_network.py NUMBER FOLDER -m MODULE ARGUMENTS``: a program on an emulated host, which has a name and a network of
its own, and a cable to the other one. There is no default route. The kernel removes all of it when the programs have ended.
Needs the rights of root."""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
HOSTS = "127.0.0.1 localhost\n10.78.0.1 hosta\n10.78.0.2 hostb\n"
NAMES = ("hosta", "hostb")
LIMIT_S = 120.0


def leave() -> str:
    """Take this thread, and what it starts, to a host of its own; returns why that cannot be, or nothing."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWNET):
        return os.strerror(ctypes.get_errno())
    done = subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, text=True, check=False)
    return done.stderr


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True)


def _wait(path: Path) -> str:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"there is no {path}")
        time.sleep(0.01)
    return path.read_text()


def _say(path: Path, text: str) -> None:
    path.with_name(f".{path.name}").write_text(text)
    path.with_name(f".{path.name}").rename(path)


def main(number: int, folder: Path) -> None:
    if why := leave():
        raise RuntimeError(why)
    socket.sethostname(NAMES[number])
    (folder / f"hosts{number}").write_text(HOSTS)
    _do(f"mount --bind {folder}/hosts{number} /etc/hosts")
    _do("ip link set lo up")
    _say(folder / f"pid{number}", str(os.getpid()))
    other = _wait(folder / f"pid{1 - number}")
    if number == 0:
        _do(f"ip link add ve0 type veth peer name ve0 netns {other}")
        _say(folder / "laid", "")
    _wait(folder / "laid")
    _do(f"ip addr add 10.78.0.{number + 1}/24 dev ve0")
    _do("ip link set ve0 up")
    _say(folder / f"up{number}", "")
    _wait(folder / f"up{1 - number}")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    sys.argv = sys.argv[4:]
    sys.path.insert(0, str(Path(__file__).parents[2]))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
