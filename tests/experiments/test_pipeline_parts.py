"""The table of what a step does, by part: it counts the same in every run, and its parts are of files that exist."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from rdmarpc.experiments.pipelines import parts


def work() -> list[int]:
    return [number * number for number in range(10)]


def test_instructions_are_counted_alike_and_belong_to_one_part() -> None:
    once, functions = parts.count(work, 1)
    often, _ = parts.count(work, 7)
    assert once == often
    assert sum(once.values()) == functions.total() > 50
    assert once[parts.REST] == sum(once.values()), "nothing here is of a step"


def test_what_is_counted_is_no_more_than_what_was_asked_for() -> None:
    def twice() -> None:
        work()
        work()

    one, two = (sum(parts.count(step, 3)[0].values()) for step in (work, twice))
    assert 2 * one < two < 2 * one + 30


@pytest.mark.parametrize(
    "name, part",
    [
        ("/x/rdmarpc/wrapped/session.py:Session.mode", "guards, arguments, plan"),
        ("/x/rdmarpc/wrapped/optimizer.py:_send", "optimizer"),
        ("/x/torch/optim/optimizer.py:Optimizer.zero_grad", "zeroing"),
        ("/x/graph/caller/stage.py:Cross.backward", "autograd functions"),
        ("/x/python/json.py:loads", parts.REST),
    ],
)
def test_the_longest_name_decides(name: str, part: str) -> None:
    assert parts.part_of(name) == part


def test_the_names_of_parts_are_those_of_files() -> None:
    roots = [Path(importlib.import_module(each).__path__[0]) for each in ("rdmarpc", "rdmarpc.graph", "rdmarpc.transport")]
    roots.append(Path(torch.__path__[0]))
    files = {str(path) for root in roots for path in root.rglob("*.py")}
    wanted = [text for texts in parts.PARTS.values() for text in texts if not text.startswith("Optimizer")]
    assert [text for text in wanted if not any(text in file for file in files)] == []
