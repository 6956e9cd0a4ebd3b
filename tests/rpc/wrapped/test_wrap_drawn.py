"""Drawn models in drawn training loops, wrapped and served: step by step the bits of one process, or refused with the reason.
``DRAWN=300`` draws so many, from seed ``FIRST``; ``SEEDS=1,7`` these."""

from __future__ import annotations

import copy
import os
import random
import traceback
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from drawn_loops import Loop
from drawn_models import drawn_net
from test_wrap import drive

import rdmarpc as rpc

STEPS = 5
MANY, FIRST, SEEDS = int(os.environ.get("DRAWN", "0")), int(os.environ.get("FIRST", "0")), os.environ.get("SEEDS", "")


def alike(ours: Any, theirs: Any, close: float) -> bool:
    """``close``: what they may differ by; 0: nothing."""
    if isinstance(theirs, torch.Tensor):
        if close and theirs.is_floating_point():
            return torch.allclose(ours, theirs, close, 0.1 * close, equal_nan=True)
        return ours.dtype == theirs.dtype and torch.equal(torch.nan_to_num(ours), torch.nan_to_num(theirs))
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(alike(a, b, close) for a, b in zip(ours, theirs))
    if close and isinstance(theirs, float):
        return abs(ours - theirs) <= close * (1 + abs(theirs))
    return ours == theirs or (ours != ours and theirs != theirs)


def apart(ours: Any, theirs: Any) -> str:
    """Where they differ first."""
    if isinstance(theirs, list) and isinstance(ours, list) and len(ours) == len(theirs):
        return next(f"{at}: {apart(a, b)}" for at, (a, b) in enumerate(zip(ours, theirs)) if not alike(a, b, 0))
    return f"{ours} for {theirs}"


def plainly(kind: Any, parameters: Any, **settings: Any) -> Any:
    return kind(parameters, **settings)


def trial(seed: int, serve: bool) -> tuple[str, str]:
    """``right``, ``rounded``, ``draws``, ``refused``, ``wrong`` or ``broken`` (nor does it run in one process), and why."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    net, placement = drawn_net(dice)
    twin = copy.deepcopy(net)
    capture, rolls = dice.choice(["auto", "auto", "eager"]), dice.randrange(1 << 30)
    try:
        expected = list(Loop(twin, plainly, random.Random(rolls), not serve).run(STEPS))
    except Exception as error:
        return "broken", f"one process: {error}"
    what = " ".join(type(block).__name__ for block in twin.blocks) + f" {'served' if serve else placement} {capture}"
    where, rounded = "", 0.0
    model: Any = None
    try:
        model = rpc.serve(net, ("worker1", "worker2")) if serve else rpc.wrap(net, placement, capture=capture)
        make = model.new_optimizer if serve else plainly
        loop = Loop(model, make, random.Random(rolls), not serve)
        for (where, value), (_, other) in zip(loop.run(STEPS), expected, strict=True):
            if not alike(value, other, rounded):
                counts = {} if serve else model.counters()
                rounded = 0.0 if not counts.get("sums_reordered") else 0.1 if loop.rounds_more else 1e-3
                if counts.get("draws_elsewhere"):
                    return "draws", what
                if not alike(value, other, rounded):
                    said = "" if serve else model.captured.replace("\n", " | ")
                    return "wrong", f"{what}: {where}: {apart(value, other)} by {said}"
    except rpc.NotSupported as error:
        return "refused", f"{what}: after {where}: {error}{traceback.format_exc(limit=-16) if MANY else ''}"
    except Exception:
        return "wrong", f"{what}: after {where}: {traceback.format_exc(limit=-6)}"
    finally:
        if model is not None:
            model.close()
    return ("rounded" if rounded else "right"), what


def drawn(seeds: Iterable[int]) -> list[str]:
    warnings.simplefilter("ignore")
    wrong = []
    for seed in seeds:
        came, said = trial(seed, seed % 4 == 3)
        if MANY:
            print(f"SEED {seed} {came} {said}", flush=True)
        if came == "wrong":
            wrong.append(f"{seed}: {said}")
    return wrong


def trials() -> list[str]:
    return drawn(range(FIRST, FIRST + (MANY or 5)) if not SEEDS else map(int, SEEDS.split(",")))


def test_drawn_models_in_drawn_loops() -> None:
    assert not drive(trials, 3, timeout=580.0 if MANY else 250.0)
