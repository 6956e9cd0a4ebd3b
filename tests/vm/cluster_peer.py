"""A process on a host of the cluster that takes orders by a folder, so that it can be asked while the network is down.

    python cluster_peer.py FOLDER

``FOLDER/N.order``, a function of ``cluster_actions`` and its arguments as JSON, is answered by ``FOLDER/N.answer``; one after
the other, until the order ``end``.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import time
import traceback
from pathlib import Path

import cluster_actions
import torch


def main(folder: Path) -> None:
    faulthandler.register(signal.SIGUSR1)  # says where it hangs
    torch.set_num_threads(1)
    state = cluster_actions.State()
    number = 0
    while True:
        order = folder / f"{number}.order"
        if not order.exists():
            time.sleep(0.01)
            continue
        function, arguments = json.loads(order.read_text())
        if function == "end":
            return
        try:
            answer = [True, getattr(cluster_actions, function)(state, *arguments)]
        except BaseException as error:
            fields = {name: getattr(error, name, "") for name in ("status", "hint", "peer")}
            answer = [False, {"kind": type(error).__name__, "text": str(error), "trace": traceback.format_exc(), **fields}]
        written = folder / f"{number}.new"
        written.write_text(json.dumps(answer))
        written.rename(folder / f"{number}.answer")
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
