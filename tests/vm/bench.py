"""``make vm-bench``: ``experiments.bench_verbs`` in a guest with a Soft-RoCE device. Arguments are passed on."""

from __future__ import annotations

import signal
import sys

from guest import FAILED, Guest, GuestFailed, show
from image import Unavailable
from suite import HELPERS, ROOT, prewarm

LIMIT_S = 1200.0


def main(arguments: list[str]) -> int:
    prewarm()
    with Guest() as guest:
        guest.preload(("warm",), path=[HELPERS])
        guest.wait_preloaded(600.0)
        program = [str(HELPERS / "programs.py"), "-m", "experiments.bench_verbs", *arguments]
        return guest.run(program, show, python=True, cwd=ROOT, timeout=LIMIT_S)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main(sys.argv[1:]))
    except (GuestFailed, Unavailable) as error:
        print(error, file=sys.stderr)
        sys.exit(FAILED)
