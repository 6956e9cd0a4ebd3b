"""Distributed autograd gives what local autograd gives: random programs, run both ways. ``grad_programs`` makes them."""

from __future__ import annotations

import functools
import traceback
from collections import Counter
from typing import Any

import torch
from grad_programs import TABLES, Run, Table, by_value, program
from group import results, run_group

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.calls import agent
from rdmarpc.gradients import graph
from rdmarpc.gradients.local import Pass

WORKERS = 3
WEIGHTS = torch.arange(9, dtype=torch.float64).reshape(3, 3) - 3
EXACT = 2.0**52
paths: Counter[str] = Counter()
"""How often this worker took the ways that only some programs lead to."""


def watch() -> None:
    part, everything, expect, quiet = Pass._run_part, Pass._run_all, Pass.expect, graph._Quiet.__call__

    def run_part(self: Pass, taken: Any, nodes: Any) -> None:
        paths["partial"] += 1
        part(self, taken, nodes)
        paths["partial, several held"] += len(self.held) > 1

    def run_all(self: Pass, taken: Any, behind: Any) -> None:
        paths["whole"] += 1
        paths["collecting"] += bool(self.collected)
        everything(self, taken, behind)

    def expecting(self: Pass, messages: set[int]) -> None:
        paths["settled"] += 1
        paths["settled, some to come"] += bool(messages)
        expect(self, messages)

    def called(self: Any, gradient: Any) -> Any:
        run = graph.engaged.run
        paths["quiet hooks"] += run is not None and self._leaf_id in run.collected
        return quiet(self, gradient)

    Pass._run_part, Pass._run_all, Pass.expect, graph._Quiet.__call__ = run_part, run_all, expecting, called


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    return sum((tensor * WEIGHTS.to(tensor.device)).sum() for tensor in tensors)


def alone(seed: int) -> Table:
    made, table = program(seed, WORKERS), Table()
    found = Run(seed, 0, table).run([])
    for number, roots in enumerate(made.passes):
        if number == 0 and made.remote_root >= 0:
            losses = [total(by_value([found[root] for root in roots]))]
        else:
            losses = [total([found[root]]) for root in roots]
        losses = [loss for loss in losses if loss.requires_grad]
        if losses:
            torch.autograd.backward(losses, retain_graph=number + 1 < len(made.passes))
    return table


def spread(seed: int) -> list[Any]:
    made = program(seed, WORKERS)
    with autograd.context() as context_id:
        run = Run(seed, 0)
        found = run.run([])
        if not made.hurried:
            run.finish()
        for number, roots in enumerate(made.passes):
            retain = number + 1 < len(made.passes)
            if number == 0 and made.remote_root >= 0:
                if any(found[root].requires_grad for root in roots):
                    loss = rpc.remote(f"worker{made.remote_root}", total, ([found[root] for root in roots],))
                    loss.backward(context_id, retain_graph=retain)
                continue
            losses = [total([found[root]]) for root in roots]
            losses = [loss for loss in losses if loss.requires_grad]
            if losses:
                autograd.backward(context_id, losses, retain_graph=retain)
        if made.hurried:
            run.finish()
        return [rpc.rpc_sync(f"worker{worker}", collect, (context_id, seed)) for worker in range(WORKERS)]


def collect(context_id: int, seed: int) -> Any:
    table = TABLES.pop(seed, None)
    if table is None:
        return {}, {}, {}, True
    found = autograd.get_gradients(context_id)
    gradients = {key: found.pop(leaf) for key, leaf in table.leaves.items() if leaf in found}
    assert not found, "gradients of what is no leaf"
    untouched = all(leaf.grad is None for leaf in table.leaves.values())
    return gradients, dict(table.ran), dict(table.saw), untouched


def compare(seed: int) -> bool:
    """Whether it was compared bit by bit."""
    want = alone(seed)
    gradients, ran, saw = {}, {}, {}
    for some, nodes, hooks, untouched in spread(seed):
        assert untouched, "a .grad was written"
        gradients |= some
        ran |= nodes
        saw |= hooks
    expected = {key: leaf.grad for key, leaf in want.leaves.items() if leaf.grad is not None}
    assert gradients.keys() == expected.keys(), (set(gradients), set(expected))
    seen = [abs(value) for calls in want.saw.values() for call in calls for value in call]
    exact = max([*seen, *(float(each.abs().max()) for each in expected.values())], default=0) < EXACT
    for key, gradient in gradients.items():
        if exact:
            assert torch.equal(gradient, expected[key]), (key, gradient, expected[key])
        else:
            torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-9 * float(expected[key].abs().max()))
    assert ran == want.ran, (ran, dict(want.ran))
    if exact:
        for name in saw.keys() | want.saw:
            ours, theirs = saw.get(name, []), want.saw.get(name, [])
            assert sorted(filter(None, ours)) == sorted(filter(None, theirs)), (name, ours, theirs)
            assert ours.count([]) <= theirs.count([]), (name, ours, theirs)
    return exact


def programs(seeds: range, rank: int) -> tuple[int, list[str], dict[str, int]]:
    """Of ``seeds``, those that this worker drives: how many were compared bit by bit, what failed, and the ways taken here."""
    watch()
    exact, failed = 0, []
    for seed in seeds:
        if seed % WORKERS == rank and len(failed) < 3:
            try:
                exact += compare(seed)
            except Exception as error:
                failed.append(f"program {seed}: {type(error).__name__}: {error}\n{traceback.format_exc()}")
    paths["surveys"] = agent.current().counters()["autograd_surveys"]
    rpc.shutdown()
    return exact, failed, dict(paths)


def test_random_programs_give_what_local_autograd_gives():
    count = 200
    found = results(run_group(functools.partial(programs, range(count)), WORKERS, timeout=90, num_worker_threads=64))
    failed = [each for _, some, _ in found for each in some]
    assert not failed, "\n".join(failed)
    assert sum(exact for exact, _, _ in found) > 0.8 * count
    taken = sum((Counter(each) for _, _, each in found), Counter())
    # The ways that need care were taken, often:
    assert taken["partial"] > 30 and taken["partial, several held"] > 5, taken
    assert taken["collecting"] > 5 and taken["quiet hooks"] > 5, taken
    assert taken["surveys"] > 30 and taken["settled, some to come"] > 10, taken
