"""Capture methods of other packages, by entry points."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import packages
import pytest
import torch
from test_capture import specs_of
from torch import nn

from rdmarpc.graph.trace.capture import skeleton
from rdmarpc.graph.trace.export import export
from rdmarpc.graph.trace.methods import capture_by, methods_of, names
from rdmarpc.transport import NotSupported

MINE = """
from rdmarpc.graph.trace.record import record

def mine(model, inputs, join, whole):
    found = record(model, inputs, join, whole)
    found.how = "mine"
    return found
"""


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def install(folder: Path) -> None:
    """A package ``others`` that brings ``mine``, ``broken`` (which does not exist), and an ``fx`` that is not taken."""
    (folder / "other_captures.py").write_text(MINE)
    points = {"mine": "other_captures:mine", "broken": "other_captures:gone", "fx": "other_captures:gone"}
    packages.install(folder, "others", "rdmarpc.captures", points)


def test_a_method_of_another_package_is_found_by_its_name(other_package: None) -> None:
    net, x = nn.Linear(4, 3), torch.randn(2, 4)
    methods = methods_of("mine")
    found, refused = capture_by(methods, skeleton(net), specs_of([x]), lambda *given: (given, {}), lambda path: True)
    assert (list(methods), found.how, refused) == (["mine"], "mine", [])
    assert list(methods_of("auto")) == ["fx", "export"] and list(methods_of("fx")) == ["fx"]


def test_what_cannot_be_had_says_so(other_package: None) -> None:
    assert names() == ["'auto'", "'fx'", "'export'", "'eager'", "'here'", "'mine' (of others)", "'broken' (of others)"]
    with pytest.raises(ValueError, match=r"one of 'auto', .*, 'mine' \(of others\), .*, got 'yours'"):
        methods_of("yours")
    with pytest.raises(NotSupported, match=r"'broken' of others cannot be loaded(.|\n)*other_captures:gone"):
        methods_of("broken")


TOTAL = torch.zeros(3)


class Counts(nn.Module):
    def forward(self, x):
        TOTAL.add_(1)
        return x + TOTAL


class CountsByOperator(nn.Module):
    def forward(self, x):
        global TOTAL
        TOTAL += 1
        return x + TOTAL


@pytest.mark.parametrize("how", ["fx", "export"])
@pytest.mark.parametrize("make", [Counts, CountsByOperator])
def test_a_capture_writes_into_no_global_tensor(make: type[nn.Module], how: str) -> None:
    before = TOTAL.clone()
    said = "a tensor that is neither" if make is Counts else None
    with pytest.raises(NotSupported, match=said):
        capture_by(methods_of(how), skeleton(make()), specs_of([torch.ones(3)]), lambda x: ((x,), {}), lambda path: True)
    assert torch.equal(TOTAL, before)


class Freezes(nn.Module):
    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.line, self.assigns = nn.Linear(3, 3), assigns

    def forward(self, x):
        if self.assigns:
            self.line.weight.requires_grad = False
        else:
            self.line.weight.requires_grad_(False)
        return self.line(x)


class FreezesAll(nn.Module):
    """By the parameters themselves, which a symbolic trace does not see as values of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)

    def forward(self, x):
        self.line.requires_grad_(False)
        return self.line(x)


@pytest.mark.parametrize("make", [partial(Freezes, True), partial(Freezes, False), FreezesAll])
@pytest.mark.parametrize("how", ["fx", "export"])
def test_no_capture_forgets_a_freezing(make: Callable[[], nn.Module], how: str) -> None:
    with pytest.raises(NotSupported, match="requires_grad"):
        capture_by(methods_of(how), skeleton(make()), specs_of([torch.ones(2, 3)]), lambda x: ((x,), {}), lambda path: True)


class Compiled(nn.Module):
    """Its forward can be read, and not run."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.line, self.act = nn.Linear(3, 3), act

    def forward(self, x):
        if not torch.compiler.is_dynamo_compiling():
            raise ValueError("this runs no Python")
        if self.act == "global":
            TOTAL.add_(1)
        elif self.act == "data":
            self.line.weight.data.mul_(2)
        result = self.line(x) + TOTAL
        if self.act == "hook":
            result.register_hook(print)
        return result


@pytest.mark.parametrize("act", ["global", "data", "hook"])
def test_an_export_runs_the_forward(act: str) -> None:
    """Reading its code, as a strict export does, would forget hooks, and take tensors that are written for constants."""
    with pytest.raises(NotSupported, match="not strict: this runs no Python"):
        export(skeleton(Compiled(act)), specs_of([torch.ones(2, 3)]), lambda x: ((x,), {}))


class Finder:
    """An import hook, as of editable packages, that compares by identity and keeps something."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        self.asked.append(name)
        assert self is not name


def test_what_imports_run_is_not_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward, or torch within a trace, may import something for the first time."""
    finder = Finder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])

    class Imports(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import colorsys  # noqa: F401

            return nn.functional.dropout(self.layer(x))

    for method in ("fx", "export"):
        monkeypatch.delitem(sys.modules, "colorsys", raising=False)
        given = skeleton(Imports()), specs_of([torch.randn(2, 4)]), lambda *given: (given, {})
        found, _ = capture_by(methods_of(method), *given, lambda path: True)
        assert found.how == method
    assert finder.asked.count("colorsys") == 2
