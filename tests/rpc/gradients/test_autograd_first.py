"""The first backward passes of a process, when one begins while the other, in the midst of its call, collects garbage."""

from __future__ import annotations

import subprocess
import sys

PASSES = """
import gc, os, signal, threading, time
import torch
from torch.autograd.graph import get_gradient_edge
from rdmarpc.gradients import local

local.first_call()

leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
pairs = [(get_gradient_edge(leaf * 2), get_gradient_edge(leaf)) for leaf in leaves]
calls = [((edge,), (torch.ones(2),), False, False, (leaf,), True, True) for edge, leaf in pairs]
backward = torch.autograd.variable.Variable._execution_engine.run_backward


def both(moment):
    collections, begun = iter(range(1000)), threading.Event()

    def collecting(phase, _):
        if phase == "start" and next(collections) == moment:
            begun.set()
            time.sleep(0.05)  # as whatever is collected may: it lets go of the GIL

    def second():
        begun.wait()
        backward(*calls[1])

    gc.callbacks.append(collecting)
    thread = threading.Thread(target=second)
    thread.start()
    gc.set_threshold(1)
    backward(*calls[0])
    gc.set_threshold(0)
    begun.set()
    thread.join()


for moment in range(16):
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # a thread that waits with the GIL held leaves nothing else
        both(moment)
        os._exit(0)
    print(moment, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_they_do_not_wait_for_each_other() -> None:
    done = subprocess.run([sys.executable, "-c", PASSES], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == [f"{moment} 0" for moment in range(16)], done.stderr
