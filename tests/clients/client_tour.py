"""All programs in both ways, as a table: ``python -m tests.clients.client_tour [PROGRAM ...]`` (``make clients``)."""

from __future__ import annotations

import sys

from .both import NEEDS, absent, both, differences


def main(programs: list[str]) -> int:
    """Prints a line for each; the number of those that failed or differ."""
    print("| program | torch RPC, s | rdmarpc, s | result |\n|---|---|---|---|", flush=True)
    wrong = 0
    for program in programs:
        if missing := absent(program):
            print(f"| {program} | | | not run: {', '.join(missing)} not installed |", flush=True)
            continue
        try:
            plain, ours = both(program)
        except AssertionError as error:
            wrong += 1
            print(f"| {program} | | | failed |\n{error}", flush=True)
            continue
        found = differences(plain.found, ours.found)
        wrong += bool(found)
        print(f"| {program} | {plain.seconds:.1f} | {ours.seconds:.1f} | {'; '.join(found) or 'same bits'} |", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(NEEDS)) > 0)
