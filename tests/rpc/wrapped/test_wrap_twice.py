"""A tensor that is given twice, to a model or a part, or that a part gives twice: it is one object there, as in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from test_wrap import drive
from torch import nn

from rdmarpc import wrap

SIZE = 8


class Asks(nn.Module):
    """Does otherwise with one tensor than with two; ``probed``: looks at values, too."""

    def __init__(self, probed: bool = False) -> None:
        super().__init__()
        self.probed, self.linear = probed, nn.Linear(SIZE, SIZE)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        factor = 2.0 if a is b else 3.0
        if self.probed and a.sum() > 1e9:
            factor *= 2.0
        return self.linear(a) * factor + torch.sin(b) + torch.cos(a)


class Whole(nn.Module):
    """Gets two tensors, asks whether they are one, and gives them to a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Asks(), nn.Linear(SIZE, SIZE)

    def forward(self, a: torch.Tensor, other: dict[str, torch.Tensor]) -> torch.Tensor:
        b = other["b"]
        return self.head(self.part(a, b)) * (1.0 if a is b else 5.0) + b


class Within(nn.Module):
    """Gives one tensor twice or three times to its part; in Python, if ``eager``."""

    def __init__(self, part: nn.Module, times: int, eager: bool) -> None:
        super().__init__()
        self.enter, self.part, self.times, self.eager = nn.Linear(SIZE, SIZE), part, times, eager

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(self.enter(x))
        if self.eager and x.sum() > 1e9:
            x = x * 2
        found = self.part(*[x] * self.times)
        return found[0] if isinstance(found, tuple) else found


def alike(net: nn.Module, placement: dict[str, str], given: list[Any], chunks: int = 0, **options: Any) -> str:
    """Bits are those of one process; how the model was captured. ``given``: arguments of each step."""
    twin = copy.deepcopy(net)
    model = wrap(net, placement, timeout=20.0, **options)
    for args in given:
        with torch.set_grad_enabled(not chunks):
            results = [each(*args) for each in (model, twin)]
        assert torch.equal(*results)
        for each in (model, twin):
            each.zero_grad()
        if chunks:
            model.forward_backward(lambda found: found.pow(2).mean(), *args, chunks=chunks)
            twin_batches(twin, args, chunks)
        else:
            for found in results:
                found.pow(2).sum().backward()
        mine = dict(model.named_parameters())
        for name, parameter in twin.named_parameters():
            assert torch.equal(mine[name].grad, parameter.grad), name
    assert model.counters()["sums_reordered"] == 0
    how = model.captured.partition("\n")[0]
    model.close()
    return how


def twin_batches(twin: nn.Module, args: Any, chunks: int) -> None:
    a, b = args[0], args[1]["b"]
    for one, other in zip(a.chunk(chunks), b.chunk(chunks)):
        one = one.clone()
        piece = twin(one, {"b": one if a is b else other.clone()})
        (piece.pow(2).mean() * (len(one) / len(a))).backward()


def inputs() -> list[Any]:
    """One tensor twice, two tensors, one again, and other shapes."""
    found = []
    for count, same in ((4, True), (4, False), (4, True), (6, True), (6, False), (6, True)):
        a = torch.randn(count, SIZE)
        found.append((a, {"b": a if same else torch.randn(count, SIZE)}))
    return found


def given_to_models() -> None:
    for capture in ("auto", "export", "eager"):
        for placement in ({"part": "worker1"}, {"head": "worker1"}, {"part": "worker1", "head": "worker1"}):
            torch.manual_seed(1)
            assert alike(Whole(), placement, inputs(), capture=capture).startswith(capture.replace("auto", "fx"))
    for placement in ({"part": "worker1"}, {"head": "worker1"}):
        torch.manual_seed(1)
        alike(Whole(), placement, inputs(), chunks=2)


def given_to_parts() -> None:
    for eager in (False, True):
        for part, times in ((Asks(), 2), (Asks(True), 2), (nn.MultiheadAttention(SIZE, 2, batch_first=True), 3)):
            torch.manual_seed(2)
            shape = (3, 5, SIZE) if times == 3 else (3, SIZE)
            net = Within(copy.deepcopy(part), times, eager)
            how = alike(net, {"part": "worker1"}, [(torch.randn(shape),) for _ in range(3)])
            assert how.startswith("eager" if eager or getattr(part, "probed", False) else "fx")


class Gives(nn.Module):
    """One tensor, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        x = torch.tanh(self.linear(x))
        return {"one": x, "all": [x.sin(), x]}


class Takes(nn.Module):
    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.eager, self.part, self.head = eager, Gives(), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.part(x)
        a, b = found["one"], found["all"][1]
        if self.eager and a.sum() > 1e9:
            return a
        return self.head(found["all"][0] * (2.0 if a is b else 3.0)) * b + a


def given_by_parts() -> None:
    for eager in (False, True):
        for placement in ({"part": "worker1"}, {"head": "worker1"}, {"part": "worker1", "head": "worker1"}):
            torch.manual_seed(3)
            how = alike(Takes(eager), placement, [(torch.randn(3, SIZE),) for _ in range(3)])
            assert how.startswith("eager" if eager else "fx")


def test_a_part_that_gives_a_tensor_twice():
    drive(given_by_parts)


def test_a_model_that_is_given_a_tensor_twice():
    drive(given_to_models)


def test_a_part_that_is_given_a_tensor_twice():
    drive(given_to_parts)
