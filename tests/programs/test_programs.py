"""Random and chosen programs do the same over a placed model as in one process. ``python -m tests.programs`` runs more."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import callers
import collective_programs
import distributed_programs
import drawn_programs
import judge
import mixed_programs
import probes
import pytest
import replayed_programs
import served_pairs
import served_programs
import tensor_programs
import torch
import wrapped_programs
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

TARGET = "remote"

REGRESSIONS = (65, 68, 76, 109, 156, 169, 190, 321, 496, 1037, 1329, 1871, 1980, 2143, 2584, 5172)
"""Seeds that failed, besides the first ones: hooks of before placing, ``p.data = plain``, copies that kept gradients,
conjugates, sparse gradients, packed sequences, stale places, autocast in kernels, operands that are one object, views and
composites in inference mode."""

REFUSED = {"lazy_module", "strange_kinds", "pointers", "arrays", "forward_mode", "user_subclasses"}
"""Chosen programs of which a part may be refused by name."""


def failures(target: str, jobs: dict[str, callers.Job], refused: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    with callers.Callers(target, limit=40.0) as judging:
        verdicts = {name: judging.judge(job) for name, job in jobs.items()}
    good = {name: (*judge.GOOD, *(["refused"] if name.split("/")[0] in refused else [])) for name in jobs}
    return [f"{name}: {verdict.kind}: {verdict.detail}" for name, verdict in verdicts.items() if verdict.kind not in good[name]]


def drawn(*seeds: int) -> dict[str, callers.Job]:
    return {str(seed): ("text", drawn_programs.source(drawn_programs.recipe(seed))) for seed in seeds}


def chosen(*variants: int) -> dict[str, callers.Job]:
    return {f"{name}/{variant}": ("probe", name, variant) for name in probes.NAMES for variant in variants}


KNOWN = {31: "torch's fused SGD reads momentum in bfloat16 that nobody has written: it differs from itself"}
"""Seeds that differ. The chosen programs run by ``python -m tests.programs --probes``: some of them differ, too."""
ALLOWED = {"23", "26", "43"}
"""Seeds whose views have another node, or that keep a view of what moves, which is refused by name."""


def test_drawn_programs():
    found = failures(TARGET, drawn(*(seed for seed in (*range(30), *REGRESSIONS) if seed not in KNOWN)), ALLOWED)
    assert not [text for text in found if ": metadata: " not in text]


def test_drawn_steps_without_python():
    """Steps as graphs (``rdmarpc.graphed``): those that can be are posted again in the last three calls."""
    recipes = {str(seed): drawn_programs.recipe(seed) for seed in (*range(12), 272, 329, 938)}
    jobs = {name: ("text", drawn_programs.graphed_source(made, calls=6)) for name, made in recipes.items()}
    found = failures("graphed", jobs, ALLOWED)
    assert not [text for text in found if ": metadata: " not in text]


def test_mixed_programs():
    """Calls, references, distributed autograd, tensors and models at workers, graphs, threads and modes in one program."""
    recipes = {str(seed): mixed_programs.recipe(seed) for seed in range(12)}
    found = failures("mixed", {name: ("mixed", mixed_programs.source(made)) for name, made in recipes.items()}, set(recipes))
    assert not [text for text in found if ": rounded: " not in text]  # gradients of several messages come in any order


def test_tensor_programs():
    """Single tensors here and at two workers: views, dtypes, indices, random numbers, gradients. ``out=`` of another shape is
    refused by name."""
    recipes = {str(seed): tensor_programs.recipe(seed) for seed in range(16)}
    jobs = {name: ("mixed", tensor_programs.source(made)) for name, made in recipes.items()}
    assert not failures("tensors", jobs, set(recipes))


SERVED_REFUSED = {"28"}
"""Seeds that give a parameter data of other strides: refused by name."""


def test_served_programs():
    """Trained over servers, with all that users do to models, parameters, gradients and optimizers between steps."""
    recipes = {str(seed): served_programs.recipe(seed) for seed in range(18)}
    jobs = {name: ("text", served_programs.source(made)) for name, made in recipes.items()}
    assert not failures("served", jobs, SERVED_REFUSED)


def test_served_programs_of_two_trainers():
    recipes = {str(seed): served_pairs.recipe(seed) for seed in range(12)}
    assert not failures("paired", {name: ("text", served_pairs.source(made)) for name, made in recipes.items()})


def test_wrapped_programs():
    """Trained at workers, with all that users do to models and places between steps."""
    recipes = {str(seed): wrapped_programs.recipe(seed) for seed in range(10)}
    jobs = {name: ("text", wrapped_programs.source(made)) for name, made in recipes.items()}
    assert not failures("wrapped", jobs)


def test_replayed_programs():
    """Steps that are graphed, with all that users do around and between their calls."""
    recipes = {str(seed): replayed_programs.recipe(seed) for seed in range(4)}
    assert not failures("replayed", {name: ("text", replayed_programs.source(made)) for name, made in recipes.items()})


def test_distributed_programs():
    """Trained by distributed autograd, with all that users do to contexts, references and optimizers."""
    recipes = {str(seed): distributed_programs.recipe(seed) for seed in range(12)}
    assert not failures("distributed", {name: ("mixed", distributed_programs.source(made)) for name, made in recipes.items()})


def test_collective_programs():
    """``torch.distributed`` over this backend beside gloo, over shared memory and tcp in turn."""
    recipes = {str(seed): collective_programs.recipe(seed) for seed in range(6)}
    jobs = {name: ("collective", collective_programs.source(made), made.size, made.seed) for name, made in recipes.items()}
    assert not failures("collective", jobs)


def test_programs_repeat():
    """Else a difference would say nothing."""
    assert not failures("identity", {**drawn(*range(100, 110)), **chosen(0)})


class Drops(TorchDispatchMode):
    """A target that is wrong: write number ``count`` of the placed program has no effect."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left: int | None = None
        self.count = count

    def place(self, net: nn.Module, placement: Any) -> nn.Module:
        self.left = self.count
        return net

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left is not None and func._schema.name.endswith("_") and torch.is_tensor(args[0]):
            self.left -= 1
            if self.left == -1:
                return args[0]
        return func(*args, **(kwargs or {}))


TRAINS = """
import torch
def program(place, keep):
    torch.manual_seed(0)
    net = place(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), {})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for step in range(2):
        optimizer.zero_grad()
        net(torch.ones(3, 4) + torch.eye(3, 4)).pow(3).sum().backward()
        optimizer.step()
    keep("first", net[0].weight[0])
"""


@pytest.mark.parametrize("count", range(9))
def test_a_lost_write_is_seen(count: int):
    program = drawn_programs.loaded(TRAINS).program
    with Drops(count) as drops:
        assert judge.judged(program, drops.place).kind == "WRONG"
    assert judge.judged(program, lambda net, _: net).kind == "equal"


class NotSupported(Exception):
    pass


def raising(error: Exception | None, step: int = 1) -> judge.Program:
    def program(place: Any, keep: Any) -> None:
        for n in range(3):
            keep("n", n)
            if n == step and error is not None:
                raise error

    return program


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (raising(ValueError("a")), raising(ValueError("a")), "same error"),
        (raising(ValueError("a")), raising(ValueError("b")), "other text"),
        (raising(ValueError("a")), raising(RuntimeError("line 3: a"), 2), "late error"),
        (raising(ValueError("a")), raising(TypeError("b")), "other error"),
        (raising(ValueError("a")), raising(None), "WRONG"),
        (raising(None), raising(ValueError("a")), "other error"),
        (raising(None), raising(NotSupported("a")), "refused"),
        (lambda _, keep: keep("x", torch.ones(2)), lambda _, keep: keep("x", torch.ones(2) + 1e-7), "rounded"),
        (lambda _, keep: keep("x", torch.zeros(2)), lambda _, keep: keep("x", -torch.zeros(2)), "rounded"),
        (lambda _, keep: keep("x", torch.ones(2)), lambda _, keep: keep("x", torch.ones(2).double()), "WRONG"),
        (lambda _, keep: keep("x", torch.ones(2, 2)), lambda _, keep: keep("x", torch.ones(2, 2).t()), "metadata"),
        (lambda _, keep: keep("x", 1), lambda _, keep: keep("x", True), "WRONG"),
        (lambda _, keep: keep("x", 1), lambda _, keep: keep("x", NotSupported("no")), "refused"),
        (lambda _, keep: None, lambda _, keep: torch.rand(1), "WRONG"),
    ],
)
def test_verdicts(one: judge.Program, other: judge.Program, kind: str):
    here = lambda net, _: net  # noqa: E731
    assert judge.compared(judge.outcome(one, here), judge.outcome(other, here)).kind == kind


def test_a_crash_and_a_hang_end_one_program():
    texts = {
        "CRASH": "import os\ndef program(place, keep): os._exit(3)",
        "HANG": "import time\ndef program(place, keep): time.sleep(100)",
        "equal": "def program(place, keep): keep('n', 1)",
    }
    with callers.Callers("identity", limit=1.0) as judging:
        for kind, text in texts.items():
            assert judging.judge(("text", text)).kind == kind


def test_a_failing_program_shrinks():
    seed = next(n for n in range(1000) if "experts" in kinds(drawn_programs.recipe(n)))
    least = judge.shrunk(drawn_programs.recipe(seed), drawn_programs.smaller, lambda made: "experts" in kinds(made))
    assert kinds(least) == ["experts"] and not least.features and not least.placement and least.steps == 1


def kinds(made: drawn_programs.Recipe) -> list[str]:
    return [kind for _, kind, _ in made.blocks]


def test_a_printed_program_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "script.py").write_text(drawn_programs.source(drawn_programs.recipe(1)))
    runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    assert "optimizer: " in capsys.readouterr().out
