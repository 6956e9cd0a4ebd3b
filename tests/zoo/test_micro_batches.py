"""A model whose writes in place only their own part sees, in micro-batches: the bits of one process."""

from __future__ import annotations

import copy

from group import results, run_group

import rdmarpc as rpc

from .compare import built
from .entry import placed
from .plain_models import ENTRIES
from .sides import Wrapped, closing, difference


def compare(rank: int) -> None:
    entry = ENTRIES["FNO"]
    for rule in ("half", "thirds") if rank == 0 else ():
        net = built(entry)
        twin = copy.deepcopy(net)
        with closing(Wrapped(net, placed(net, rule), chunks=2)) as side:
            for number in range(3):
                (x,), _ = entry.batch(number)
                losses = [entry.loss(twin(part)) * (len(part) / len(x)) for part in x.chunk(2)]
                for loss in losses:
                    loss.backward()
                assert side.model.forward_backward(entry.loss, x).item() == sum(losses).item()
                theirs = {name: parameter.grad for name, parameter in twin.named_parameters()}
                assert not (where := difference(side.gradients(), theirs)), where
    rpc.shutdown()


def test_fno():
    results(run_group(compare, 3))
