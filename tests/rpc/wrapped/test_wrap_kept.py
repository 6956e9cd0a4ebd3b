"""Parts that keep tensors from one call to the next: the bits of one process, or refused where a gradient would be lost."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_wrap import drive
from torch import nn

import rdmarpc as rpc

SIZE = 8
LOST = "that gradient would be lost"


class Leaky(nn.Module):
    """A neuron whose potential decays. The first call after a reset gives back the very tensor that it is given."""

    def __init__(self, line: bool = False) -> None:
        super().__init__()
        self.line = nn.Linear(SIZE, SIZE) if line else nn.Identity()
        self.mem: Any = None
        self.bias = nn.Parameter(torch.ones(SIZE))

    def forward(self, x):
        x = self.line(x)
        self.mem = x if self.mem is None else 0.5 * self.mem + x + self.bias
        return self.mem


class Storing(nn.Module):
    """Keeps what it computes in a call whose result has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.mem = nn.Linear(SIZE, SIZE), None

    def forward(self, x):
        if self.mem is None:
            self.mem = self.line(x)
            return x.detach().argmax(1, keepdim=True).float().repeat(1, SIZE)
        return x + self.mem


class Looking(Storing):
    """Nobody can trace it."""

    def forward(self, x):
        return super().forward(x) if bool(x.detach().isfinite().all()) else x


class Identity(nn.Module):
    """Gives back what it is given in its first calls, and then computes."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls, self.gain = nn.Linear(SIZE, SIZE), 0, nn.Parameter(torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x if self.calls < 3 else x + self.gain * self.line(x)


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        self.a, self.b = self.b, self.a
        return self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    """``turns``: calls of the part in one forward; ``resets``: the forward makes it forget."""

    def __init__(self, part: nn.Module, turns: int = 1, resets: bool = False) -> None:
        super().__init__()
        self.stem, self.part, self.head = nn.Linear(SIZE, SIZE), part, nn.Linear(SIZE, 2)
        self.turns, self.resets = turns, resets

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        if self.resets:
            self.part.mem = None
        out = self.part(x)
        for turn in range(1, self.turns):
            out = self.head(self.part(x * turn + out.mean().detach())) + out.mean()
        return out if out.shape[1] == 2 else self.head(out)


def inputs(number: int) -> torch.Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(number))


def train(model: Any, forwards: int = 1) -> Iterator[torch.Tensor]:
    """Each loss is of so many forwards, before which the program makes the part forget."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in range(4):
        if isinstance(model.part, (Leaky, Storing)) and not model.resets:
            model.part.mem = None
        loss = sum(model(inputs(number + 10 * at)).square().mean() for at in range(forwards))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()
    yield from model.state_dict().values()


def verdict(
    make: Callable[[], nn.Module], run: Callable[[Any], Iterator[torch.Tensor]], capture: str, place: str = "part"
) -> str:
    torch.manual_seed(1)
    net = make()
    expected = list(run(copy.deepcopy(net)))
    model = rpc.wrap(net, {place: "worker1"}, capture=capture, timeout=20.0)
    try:
        return "equal" if all(map(torch.equal, list(run(model)), expected)) else "wrong"
    except rpc.NotSupported as error:
        return error.message
    finally:
        model.close()


def graphs_that_parts_keep() -> None:
    for line in (False, True):
        for capture in ("fx", "eager"):
            assert verdict(lambda: Net(Leaky(line)), train, capture) == "equal"  # noqa: B023
            assert LOST in verdict(lambda: Net(Leaky(line)), lambda model: train(model, 2), capture)  # noqa: B023
        assert verdict(lambda: Net(Leaky(line)), lambda model: train(model, 2), "here") == "equal"  # noqa: B023
        assert verdict(lambda: Net(Leaky(line), turns=3), train, "here") == "equal"  # noqa: B023
        assert verdict(lambda: Net(Leaky(line), turns=3, resets=True), train, "here") == "equal"  # noqa: B023
    for capture in ("fx", "eager"):
        assert LOST in verdict(lambda: Net(Leaky(True), turns=3), train, capture)
    assert "keeps a tensor with its graph" in verdict(lambda: Net(Looking(), turns=2), train, "eager")
    assert LOST in verdict(lambda: Net(Leaky(), turns=3), train, "eager")
    assert LOST in verdict(lambda: Net(Storing(), turns=2), train, "fx")
    assert "had none when it was captured" in verdict(lambda: Net(Storing(), turns=2), train, "eager")
    assert verdict(lambda: Net(Storing(), turns=2), train, "here") == "equal"


def test_no_gradient_is_lost_in_what_a_part_keeps():
    drive(graphs_that_parts_keep)


def forgotten(model: Any) -> Iterator[torch.Tensor]:
    """Nobody resets: the second backward goes through what the first has freed."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model(inputs(0)).square().mean().backward()
    optimizer.step()
    loss = model(inputs(1)).square().mean()
    with pytest.raises(RuntimeError, match=r"second time|modified by an inplace operation"):
        loss.backward()
    yield loss.detach()


def stale(model: Any) -> Iterator[torch.Tensor]:
    """A backward after a step that has changed what it needs."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    before, after = model(inputs(0)).square().mean(), model(inputs(1)).square().mean()
    after.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()
    yield before.detach()


def here_as_in_one_process() -> None:
    assert verdict(lambda: Net(Leaky(True)), forgotten, "here") == "equal"
    torch.manual_seed(1)
    net = nn.Sequential(nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 2))
    list(stale(copy.deepcopy(net)))
    model = rpc.wrap(net, {"1": "worker1", "2": "worker1"}, capture="here")
    list(stale(model))
    model.close()
    assert "exchanges 'a' of 'part'" in verdict(lambda: Net(Turning()), train, "here")
    assert verdict(lambda: Net(Turning()), train, "fx") == "equal"


def test_a_forward_here_keeps_what_one_process_keeps():
    drive(here_as_in_one_process)


def identity_at_first() -> None:
    for capture in ("fx", "eager", "here"):
        assert verdict(lambda: Net(Identity()), train, capture) == "equal"
    assert verdict(lambda: Net(Leaky()), unlike, "eager") == "equal"


def unlike(model: Any) -> Iterator[torch.Tensor]:
    with torch.no_grad():
        for number in range(3):
            yield model(inputs(number))


def test_a_part_may_give_back_its_input_at_times():
    drive(identity_at_first)


def threads_at_once() -> None:
    """Forwards that run in Python take turns."""
    for capture in ("eager", "here"):
        torch.manual_seed(1)
        net = Net(Leaky(True), turns=2, resets=True)
        twin = copy.deepcopy(net)
        model = rpc.wrap(net, {"part": "worker1"}, capture=capture)
        found: dict[int, torch.Tensor] = {}

        def infer(first: int) -> None:
            for number in range(first, first + 4):
                with torch.no_grad():
                    found[number] = model(inputs(number))  # noqa: B023

        threads = [threading.Thread(target=infer, args=(first,)) for first in (0, 10, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert len(found) == 12
        assert all(torch.equal(value, twin(inputs(number))) for number, value in found.items())
        model.close()


def test_forwards_of_several_threads_take_turns():
    drive(threads_at_once)


class Following(nn.Module):
    """A parameter that its forward writes into, as codebooks do that follow averages."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        y = self.line(x)
        self.line.weight.data.lerp_(x.detach().T @ x.detach() / len(x), 0.1)
        return y


def written_data() -> None:
    for capture in ("auto", "eager", "here"):
        assert verdict(lambda: Net(Following()), train, capture) == "equal"


def test_a_part_may_write_into_the_data_of_its_parameters():
    drive(written_data)


class Flagged(Net):
    """Switches flags of its part, and of a parameter of that, while it runs."""

    def forward(self, x):
        self.part.eval()
        with torch.no_grad():
            fixed = self.part(x)
        self.part.train(self.training)
        self.part.requires_grad_(False)
        still = self.part(self.stem(x)).mean()
        self.part.requires_grad_(True)
        weight = self.part[0].weight
        weight.requires_grad_(False)
        still = still + nn.functional.linear(x, weight).mean()
        weight.requires_grad_(True)
        return self.head(self.part(x) + fixed) + still


def flags_of_now() -> None:
    part = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE))
    assert verdict(lambda: Flagged(part), train, "here") == "equal"


def test_a_forward_here_sees_the_flags_that_it_switches():
    drive(flags_of_now)


class CountsBack(nn.Module):
    """Counts backwards, by a hook of its own, and computes with that."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls = nn.Linear(SIZE, SIZE), 0

    def forward(self, x):
        y = self.line(x)
        if y.requires_grad:
            y.register_hook(self.count)
        return y

    def count(self, grad):
        self.calls += 1
        return grad * (1 + 0.1 * self.calls)


def counted(model: Any) -> Iterator[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in range(4):
        optimizer.zero_grad()
        loss = model(inputs(number)).square().mean()
        loss.backward()
        yield torch.tensor(model.part.calls)
        optimizer.step()
        yield loss.detach()
        if number == 1:
            model.part.calls = 7


def changed_in_backward() -> None:
    for capture in ("fx", "eager", "here"):
        assert verdict(lambda: Net(CountsBack()), counted, capture) == "equal"


def test_what_a_backward_changes_in_a_part_stays():
    drive(changed_in_backward)
