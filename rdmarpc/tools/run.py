"""``rdmarpc run [--] script.py ARGUMENTS`` (or ``-m MODULE``): the program, with this package for ``torch.distributed.rpc``."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NoReturn

from . import hook

USAGE = """usage: rdmarpc run [--] SCRIPT.py [arguments]
       rdmarpc run -m MODULE [arguments]
       rdmarpc run -c CODE [arguments]

Runs the program as Python would, but with rdmarpc for torch.distributed.rpc, .autograd, DistributedOptimizer and
RemoteModule: in its process and in all Python processes that it starts. The program is not changed.
"""


def main(arguments: list[str]) -> NoReturn:
    """Become the program: a fresh interpreter in this process, so it starts as it does without us."""
    program = arguments[1:] if arguments[:1] == ["--"] else arguments
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        sys.exit(0)
    if not program:
        sys.exit(USAGE)
    if sys.flags.ignore_environment or sys.flags.no_site:
        sys.exit("rdmarpc run: Python's options -E, -I and -S keep programs from knowing (PYTHONPATH)")
    hook.tell_children(os.environ)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *flags, *program])
