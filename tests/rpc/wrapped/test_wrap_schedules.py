"""Every schedule gives the bits of one micro-batch after another, for pipelines that are drawn."""

from __future__ import annotations

import copy
import random
import traceback
from collections import Counter
from functools import partial

import pytest
import torch
from drawn_pipelines import CLASSES, SIZE, drawn
from test_wrap import batches, drive
from test_wrap_pipeline import train

from rdmarpc import wrap

SEEDS = ((0, 1, 2), (3, 4, 5), (27, 35, 39))
"""The last ones have a stage without gradients behind a stage of the caller's."""
SCHEDULES = ("zero_bubble", "interleaved", "1f1b")


def one(seed: int) -> list[str]:
    """The schedules that ran, in a row on one model, whose placement says that no sum of gradients has another order."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    found = drawn(dice)
    twin = copy.deepcopy(found.net)
    model = wrap(found.net, found.placement, depth=found.depth, timeout=100)
    data = [batches(1, size, SIZE, classes=CLASSES)[0] for size in found.sizes]
    ran = []
    for schedule in SCHEDULES:
        if schedule == "interleaved" and not found.interleaved:
            continue
        train(model, twin, data, found.chunks, schedule=schedule)
        ran.append(schedule)
    assert model.counters()["sums_reordered"] == 0
    model.close()
    return ran


def some(seeds: tuple[int, ...]) -> tuple[Counter[str], dict[int, str]]:
    """How often each schedule has run, and what seeds raised."""
    ran: Counter[str] = Counter()
    raised = {}
    for seed in seeds:
        try:
            ran.update(one(seed))
        except Exception:
            raised[seed] = traceback.format_exc()
    return ran, raised


@pytest.mark.parametrize("seeds", SEEDS)
def test_drawn_pipelines(seeds: tuple[int, ...]) -> None:
    ran, raised = drive(partial(some, seeds), 4, timeout=280.0)
    assert not raised, "\n".join(f"seed {seed}: {text}" for seed, text in raised.items())
    assert ran["1f1b"] == ran["zero_bubble"] == len(seeds), ran


def test_the_seeds_draw_every_kind() -> None:
    pipelines = []
    for seed in (seed for seeds in SEEDS for seed in seeds):
        torch.manual_seed(seed)
        pipelines.append(drawn(random.Random(seed)))
    assert {True, False} == {found.interleaved for found in pipelines}
    assert any(found.net.skips for found in pipelines) and any(found.net.without for found in pipelines)
    tied = [found for found in pipelines if len([*found.net.parameters()]) < len(found.net.state_dict())]
    assert tied and {len(set(found.placement.values())) for found in pipelines} == {2, 3, 4}
