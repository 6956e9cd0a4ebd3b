"""Functions that become attributes of remote parts, after ``wrap`` too: what they read from globals and change there is as in
one process, or refused."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_wrap import batches, drive
from torch import nn
from twins import verdict

import rdmarpc as rpc
from rdmarpc import wrap

MANY = bool(os.environ.get("FUNCTIONS"))
LEVEL = 1.0
TOTAL = 0.0
CALLS = 0
GAINS = [1.0]


def reads(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * LEVEL


def reads_deep(x: torch.Tensor) -> torch.Tensor:
    return scaled(x)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * GAINS[0]


def counts(x: torch.Tensor) -> torch.Tensor:
    global TOTAL
    TOTAL += 0.5
    return torch.tanh(x)


def counts_late(x: torch.Tensor) -> torch.Tensor:
    global TOTAL, CALLS
    CALLS += 1
    TOTAL += 0.5 if CALLS > 3 else 0.0
    return torch.tanh(x)


def draws(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * random.random()


class Scaler:
    """An object that is called."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return reads(x)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return counts(x)


class Part(nn.Module):
    """``act`` may be a function, ``acts`` has one."""

    act: Any = staticmethod(torch.tanh)

    def __init__(self) -> None:
        super().__init__()
        self.line, self.acts = nn.Linear(8, 8), [torch.tanh]

    def forward(self, x):
        return self.acts[0](self.act(self.line(x)))


def made_of_torch() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, activation=torch.tanh, batch_first=True)


FORMS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "function": lambda function: function,
    "partial": lambda function: functools.partial(function),
    "object": lambda function: Scaler(),
    "method": lambda function: Scaler().scale,
}


def put(part: Any, where: str, value: Any) -> None:
    if where == "activation":
        part.activation = value
    elif where == "act":
        part.act = value
    elif where == "acts":
        part.acts = [value]
    elif where == "inside":
        part.acts[0] = value


def trained(model: Any, where: str, value: Any, at: int, reader: str) -> list[torch.Tensor]:
    """``value`` is put into the part before step ``at``; a global changes before step 3."""
    global LEVEL
    found = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, (x, y) in enumerate(batches(6, 6, 3, 8)):
        if number == at:
            put(model[0], where, value)
        if number == 3:
            LEVEL, GAINS[0] = 0.5, 0.25
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x)[:, 0], y) * (1.0 + TOTAL if reader == "loop" else 1.0)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *model.state_dict().values()]


def reset() -> None:
    global LEVEL, TOTAL, CALLS
    LEVEL, TOTAL, CALLS, GAINS[0] = 1.0, 0.0, 0, 1.0
    random.seed(1)


def trial(where: str, value: Any, at: int, reader: str, capture: str) -> str:
    torch.manual_seed(1)
    net = nn.Sequential(made_of_torch() if where == "activation" else Part(), nn.Linear(8, 4))
    if at < 0:
        put(net[0], where, value)
    twin = copy.deepcopy(net)
    reset()
    expected = trained(twin, where, value, at, reader)
    reset()
    wrapped = functools.partial(wrap, net, {"0": "worker1"}, capture=capture)
    try:
        return verdict(wrapped, lambda model: trained(model, where, value, at, reader), expected, 6)
    finally:
        reset()


def functions_set() -> dict[str, str]:
    warnings.simplefilter("ignore")
    wrong = {}
    functions = (reads, reads_deep, counts, counts_late, draws)
    drawn = itertools.product(
        ("act", "acts", "inside", "activation"), functions, FORMS, (-1, 0, 2), ("loop", "none"), ("auto", "eager")
    )
    trials = [trial for trial in drawn if trial[2] in ("function", "partial") or trial[1] is reads]
    for where, function, form, at, reader, capture in random.Random(2).sample(trials, len(trials) if MANY else 8):
        came = trial(where, FORMS[form](function), at, reader, capture)
        what = f"{where} {function.__name__} {form} {at} {reader} {capture}"
        print(what, came[:150], flush=True)
        if came.startswith("wrong"):
            wrong[what] = came
    return wrong


def test_functions_that_become_attributes_of_parts() -> None:
    assert not drive(functions_set, timeout=1500.0 if MANY else 250.0)


def gives(function: Callable[..., Any], module: nn.Module) -> None:
    if isinstance(module, Part):
        module.act = function


def functions_given_elsewhere() -> None:
    warnings.simplefilter("ignore")
    x = torch.randn(4, 3, 8)
    for capture in ("auto", "eager"):
        torch.manual_seed(1)
        net = nn.Sequential(Part(), nn.Linear(8, 4))
        twin = copy.deepcopy(net)
        model = wrap(net, {"0": "worker1"}, capture=capture)
        assert torch.equal(model(x), twin(x))
        model[0].apply(functools.partial(gives, F.relu))  # it names nothing of the user's
        twin[0].apply(functools.partial(gives, F.relu))
        assert torch.equal(model(x), twin(x))
        with pytest.raises(rpc.NotSupported, match=r"'0'.*'LEVEL'.*not followed"):
            model[0].apply(functools.partial(gives, reads))
        model.close()


def test_functions_that_apply_gives_to_parts_are_refused_by_what_they_name() -> None:
    drive(functions_given_elsewhere)
