"""``several.py FOLDER PROGRAM ...``: one program after the other, each in a fork of this process, which has imported torch and
the RPC that they will use. ``FOLDER/PROGRAM`` is what it leaves, ``FOLDER/PROGRAM.log`` what it prints."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import programs
import torch
import torch.distributed.rpc as rpc

PROGRAMS = Path(__file__).parent / "programs"


def run(program: str, folder: Path) -> None:
    log = os.open(folder / f"{program}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    programs.execute([str(PROGRAMS / f"{program}.py"), str(folder / program)])


if __name__ == "__main__":
    assert rpc.init_rpc  # its module is loaded
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).step()  # torch imports its compiler with the first optimizer
    for name in sys.argv[2:]:
        process = multiprocessing.get_context("fork").Process(target=run, args=(name, Path(sys.argv[1])))
        process.start()
        process.join()
