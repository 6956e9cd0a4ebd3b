"""The `rdmarpc` command. Each subcommand is a module of its own and is imported only when it is asked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

USAGE = """usage: rdmarpc COMMAND [arguments]

  bench [--json] [--compare OLD.json] [key=value ...]
                                   every latency beside its physical floor and beside torch RPC
  doctor [PEER] [--require rdma] [--json] [--compile]
                                   what this host can do, how a peer is reached, and why not faster
  graph FILE [--draw OUT]          what crosses in a wrapped model, from a file that it saved
  run [--] SCRIPT.py [arguments]   a program that imports torch.distributed.rpc, unchanged (or: run -m MODULE)
  timeline merge FILES [-o OUT]    one timeline of those that several workers wrote
"""

MODULES = {
    "doctor": "rdmarpc.tools.doctor",
    "graph": "rdmarpc.transfers",
    "run": "rdmarpc.tools.run",
    "timeline": "rdmarpc.timeline",
}


def main() -> None:
    """Runs the subcommand that `sys.argv` names; exits with 1 when there is none of that name."""
    command, arguments = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return
    if command in MODULES:
        run = importlib.import_module(MODULES[command]).main
        run(arguments) if command == "run" else _print_by(run, arguments)
        return
    if command != "bench":
        sys.exit(f"rdmarpc: no such command: {command!r}\n\n{USAGE}" if command else USAGE)
    sys.argv = ["rdmarpc bench", *arguments]
    run_bench()


def _print_by(run: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Run a command that prints. Who reads may stop when they have seen enough, as ``head`` does."""
    try:
        try:
            run(arguments)
        finally:
            print(end="", flush=True)  # nothing where stdout is closed
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is written at the exit
        sys.exit(1)


def run_bench() -> None:
    """The experiments stand above this package, so nothing here may need them before this command runs."""
    try:
        bench = importlib.import_module("rdmarpc.experiments.bench")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rdmarpc"):
            raise
        sys.exit(f"rdmarpc bench needs {error.name}: pip install 'rdmarpc[experiments]'")
    bench.main()


if __name__ == "__main__":
    main()
