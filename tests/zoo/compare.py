"""A model of the zoo trained beside the same in one process, and what came of it."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from rdmarpc.transport import NotSupported

from .entry import Entry, placed
from .sides import Alone, Served, Wrapped, closing, difference

EQUAL, REFUSED, WRONG, CRASH, BROKEN = "equal", "refused", "wrong", "crash", "broken"


@dataclass
class Row:
    """What became of one model (or loop) under one placement. ``how``: ``wrap`` with its placement, or ``serve``.

    ``outcome``: ``equal``, ``refused`` (with a reason), ``wrong``, ``crash``; ``broken``: nor does it run in one process.
    ``staged``: bytes that were staged after the second step. ``ratio``: time of a step to that of one process."""

    family: str
    name: str
    how: str
    outcome: str
    detail: str = ""
    staged: int = 0
    ratio: float = 0.0
    expected: bool = True


@dataclass
class Trained:
    """What is compared, step by step, and the time of a step."""

    steps: list[Any]
    seconds: float
    staged: int = 0


def train(side: Alone, entry: Entry) -> Trained:
    """Some steps, an evaluation, and another step."""
    model = side.model
    optimizer = side.optimizer(entry.kind, None, lr=entry.rate)
    seen: list[Any] = []
    times = []
    early = 0
    for number in range(entry.steps):
        torch.manual_seed(100 + number)
        args, kwargs = entry.batch(number)
        start = time.perf_counter()
        output = model(*args, **kwargs)
        loss = entry.loss(output)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if isinstance(side, Served):
            model.pull()
        times.append(time.perf_counter() - start)
        if number in (1, entry.steps - 1):
            early, staged = (model.counters()["bytes_staged"] if side.name != "alone" else 0), early
        # The last one is kept as it is: later steps must not write over it.
        kept = _apart_from(output) if number == 0 else output if number == entry.steps - 1 else None
        seen.append({"output": kept, "loss": loss.detach(), "gradients": copied(side.gradients()) if number != 2 else None})
    if entry.evaluated:
        model.eval()
        torch.manual_seed(99)
        args, kwargs = entry.batch(0)
        with torch.no_grad():
            seen.append({"evaluation": model(*args, **kwargs)})
        model.train()
    args, kwargs = entry.batch(1)
    loss = entry.loss(model(*args, **kwargs))
    loss.backward()  # onto the gradients of the last step
    optimizer.step()
    seen.append({"loss": loss.detach(), "state": {**model.state_dict()}})
    return Trained(seen, statistics.median(times[2:] or times), early - staged)


def _apart_from(output: Any) -> Any:
    """The same in memory of its own."""
    return tree_map_only(torch.Tensor, torch.clone, output)


def copied(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: None if tensor is None else tensor.detach().clone() for name, tensor in tensors.items()}


def built(entry: Entry) -> nn.Module:
    torch.manual_seed(1)
    return entry.make().train()


def rows_of(family: str, name: str, entry: Entry, serve: bool = True) -> list[Row]:
    """By every placement, and served."""
    try:
        net = built(entry)
        alone = train(Alone(copy.deepcopy(net)), entry)
    except Exception as error:
        return [Row(family, name, "", BROKEN, said(error), expected=False)]
    rows = []
    for rule in entry.places:
        how = rule if isinstance(rule, str) else ", ".join(sorted(rule))
        rows.append(_row(Row(family, name, f"wrap {how}", EQUAL), net, entry, alone, rule))
    if serve and entry.served:
        rows.append(_row(Row(family, name, "serve", EQUAL), net, entry, alone, None))
    return rows


def _row(row: Row, net: nn.Module, entry: Entry, alone: Trained, rule: Any) -> Row:
    original, net = net, copy.deepcopy(net)
    try:
        side = Served(net) if rule is None else Wrapped(net, placed(net, rule), **entry.options)
        with closing(side):
            ours = train(side, entry)
        row.detail = _apart(ours.steps, alone.steps)
        row.outcome = WRONG if row.detail else EQUAL
        if row.detail and (own := _apart(train(Alone(copy.deepcopy(original)), entry).steps, alone.steps)):
            row.outcome, row.detail = BROKEN, f"one process differs from itself: {own}"
        row.staged, row.ratio = ours.staged, ours.seconds / alone.seconds
    except NotSupported as error:
        row.outcome, row.detail = REFUSED, said(error)
    except Exception as error:
        row.outcome, row.detail = CRASH, said(error)
    gc.collect()
    wanted = entry.refused if rule is not None else ""
    row.expected = row.outcome == (REFUSED if wanted else EQUAL) and wanted in row.detail
    return row


def _apart(ours: list[Any], theirs: list[Any]) -> str:
    for number, (mine, other) in enumerate(zip(ours, theirs)):
        for what in other:
            if text := difference(mine[what], other[what], what):
                return f"step {number}, {text}"
    return ""


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]
