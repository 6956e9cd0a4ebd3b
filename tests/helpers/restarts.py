"""``python restarts.py PROGRAM ARGUMENTS``: torchrun's agent, two workers and two restarts, but workers are forked from it."""

import runpy
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def _worker() -> None:
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:  # the agent would wait for a result
        if end.code:
            raise


if __name__ == "__main__":
    del sys.argv[0]
    given = {"run_id": "restarts", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    elastic_launch(LaunchConfig(1, 1, 2, max_restarts=2, monitor_interval=0.1, start_method="fork", **given), _worker)()
