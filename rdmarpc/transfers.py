"""What crosses in a step, saved: the command ``rdmarpc graph``, and ``load`` and ``save`` for programs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .graph import Transfers, load, save
from .transport import NotSupported

__all__ = ["Transfers", "load", "save"]


def main(arguments: list[str]) -> None:
    """``rdmarpc graph FILE [--draw OUT]``: of several steps in the file the second is drawn into ``OUT-2``, and so on."""
    parser = argparse.ArgumentParser(prog="rdmarpc graph", description="What crosses in a wrapped model.")
    parser.add_argument("file", type=Path, help="written by WrappedModel.transfers()[0].save(FILE)")
    parser.add_argument("--draw", type=Path, metavar="OUT", help="a picture: png, svg or pdf")
    given = parser.parse_args(arguments)
    try:
        found = load(given.file)
        print("\n\n\n".join(map(str, found)))
        for at, step in enumerate(found if given.draw else []):
            step.draw(given.draw if at == 0 else given.draw.with_stem(f"{given.draw.stem}-{at + 1}"))
    except (OSError, ValueError, NotSupported) as error:
        sys.exit(f"rdmarpc graph: {error}")
