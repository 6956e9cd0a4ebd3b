"""The state of a served model's optimizer: what is loaded is what one process would have."""

from __future__ import annotations

import copy
import tempfile
from functools import partial

import torch
import torch.nn.functional as F
from group import results, run_group
from test_served import assert_same, assert_same_optimizer, batch, on_driver, twins

import rdmarpc as rpc


def goes_back_to_the_first_state() -> None:
    """The optimizer loads a state without entries, and one whose parameters have other numbers: as in one process."""
    net, twin = twins()
    served = rpc.serve(net, ["worker1", "worker2"], torch.optim.SGD, lr=0.1, momentum=0.9)
    alone = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for model, optimizer in ((served, served.optimizer), (twin, alone)):
        first = copy.deepcopy(optimizer.state_dict())
        for number in range(6):
            if number == 2:
                optimizer.load_state_dict(first)
            if number == 4:
                state = copy.deepcopy(optimizer.state_dict())
                state["state"] = {100 + index: entries for index, entries in state["state"].items()}
                for group in state["param_groups"]:
                    group["params"] = [100 + index for index in group["params"]]
                optimizer.load_state_dict(state)
            x, y = batch(number)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert_same(served.state_dict(), twin.state_dict())
    assert_same_optimizer(served.optimizer.state_dict(), alone.state_dict())
    other = twins()[1]
    loaded = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        rpc.save_checkpoint({"model": served, "optimizer": served.optimizer}, folder)
        rpc.load_checkpoint({"model": other, "optimizer": loaded}, folder)
    assert_same(other.state_dict(), twin.state_dict())
    assert_same_optimizer(loaded.state_dict(), alone.state_dict())


def test_an_optimizer_goes_back_to_its_first_state():
    results(run_group(partial(on_driver, goes_back_to_the_first_state), 3))
