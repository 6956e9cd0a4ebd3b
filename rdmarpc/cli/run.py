"""``rdmarpc run [--] script.py ARGUMENTS`` (or ``-m MODULE``): the program, with this package for ``torch.distributed.rpc``."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NoReturn

from ..standing_in import children


def main(arguments: list[str]) -> NoReturn:
    """Become the program: a fresh interpreter in this process, so it starts as it does without us."""
    program = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not program:
        sys.exit("usage: rdmarpc run [--] SCRIPT.py [arguments] | -m MODULE [arguments]")
    if sys.flags.ignore_environment or sys.flags.no_site:
        sys.exit("rdmarpc run: Python's options -E, -I and -S keep programs from knowing (PYTHONPATH)")
    children.tell(os.environ)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *flags, *program])
