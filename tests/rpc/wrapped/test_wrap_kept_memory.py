"""What a part keeps the memory of, and the program or another part writes into: the bits of one process, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from test_wrap import drive
from torch import nn

import rdmarpc as rpc

SIZE = 8
WRITTEN = "was written in place, and a part at another worker keeps its memory"


class Box:
    value: Any = None


class Keeping(nn.Module):
    """Adds half of what it keeps, from call ``first`` on."""

    def __init__(self, how: str, first: int = 0) -> None:
        super().__init__()
        self.line, self.how, self.first, self.calls, self.last = nn.Linear(SIZE, SIZE), how, first, 0, None
        self.box = Box()
        self.register_buffer("state", torch.zeros(4, SIZE))

    def forward(self, x):
        self.calls += 1
        y = self.line(x)
        if self.calls <= self.first or self.how == "nothing":
            return y
        if self.how == "buffer":
            self.state.mul_(0.5).add_(y.detach())
            return self.state
        if self.how == "parameter":
            return self.line.bias
        last = self.box.value if self.how == "object" else self.last
        y = y if last is None else y + 0.5 * last
        kept = x.detach() if self.how == "input" else y.detach()
        if self.how == "object":
            self.box.value = kept
        else:
            self.last = kept
        return y


class Net(nn.Module):
    """``after``: what the forward does with what the part gives."""

    def __init__(self, how: str, first: int = 0, after: nn.Module | None = None) -> None:
        super().__init__()
        self.part, self.after, self.head = Keeping(how, first), after, nn.Linear(SIZE, SIZE)

    def forward(self, x):
        y = self.part(x)
        if self.after is not None:
            y = self.after(y)
        return y, self.head(y)


class Adding(nn.Module):
    def forward(self, x):
        return x.add_(1)


class Late(nn.Module):
    """The forward itself writes."""

    def __init__(self, how: str, first: int) -> None:
        super().__init__()
        self.part, self.head = Keeping(how, first), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        y = self.part(x)
        if self.part.how == "input":
            x.add_(1)
        else:
            y.add_(1)
        return y, self.head(y)


class Unneeded(Net):
    """Its backward does not need what the part gives."""

    def forward(self, x):
        y = self.part(x)
        return y, self.head(torch.relu(y))


def inputs(number: int) -> torch.Tensor:
    return torch.randn(4, SIZE, generator=torch.Generator().manual_seed(number))


def program(model: Any, write: Callable[[torch.Tensor, torch.Tensor], object], grad: bool = True) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for number in range(4):
        x = inputs(number)
        with torch.set_grad_enabled(grad):
            y, out = model(x)
        found.append(y.detach().clone())
        if grad:
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            write(x, y)
    return found


def verdict(net: nn.Module, run: Callable[[Any], list[torch.Tensor]], capture: str, **placement: str) -> str:
    expected = run(copy.deepcopy(net))
    model = rpc.wrap(net, placement or {"part": "worker1"}, capture=capture, timeout=20.0)
    try:
        return "equal" if all(map(torch.equal, run(model), expected)) else "wrong"
    except rpc.NotSupported as error:
        return error.message
    finally:
        model.close()


def keep(module, given, found):
    last = vars(module).get("last")
    found = found if last is None else found + 0.5 * last
    module.last = found.detach()
    return found


class Hooked(Unneeded):
    """A part of torch's own, with a hook that keeps what it gives."""

    def __init__(self) -> None:
        super().__init__("nothing")
        self.part = nn.Linear(SIZE, SIZE)
        self.part.register_forward_hook(keep)


def result(x: torch.Tensor, y: torch.Tensor) -> None:
    y.mul_(2)


def detached(x: torch.Tensor, y: torch.Tensor) -> None:
    y.detach()[:2].add_(1)


def given(x: torch.Tensor, y: torch.Tensor) -> None:
    x.zero_()


def copied(x: torch.Tensor, y: torch.Tensor) -> None:
    y.clone().mul_(2)


def by_the_program() -> None:
    for capture in ("auto", "eager"):
        for grad in (True, False):
            for how in ("attribute", "object", "buffer", "parameter"):
                for write in (result, detached):
                    came = verdict(Net(how), lambda model: program(model, write, grad), capture)  # noqa: B023
                    assert WRITTEN in came, (capture, grad, how, write, came)
                for write in (given, copied):
                    came = verdict(Net(how), lambda model: program(model, write, grad), capture)  # noqa: B023
                    assert came == "equal", (capture, grad, how, write, came)
            assert WRITTEN in verdict(Hooked(), lambda model: program(model, result, grad), capture)  # noqa: B023
            assert verdict(Hooked(), lambda model: program(model, copied, grad), capture) == "equal"  # noqa: B023
            assert WRITTEN in verdict(Net("input"), lambda model: program(model, given, grad), capture)  # noqa: B023
            for how, write in (("input", result), ("nothing", result), ("nothing", given)):
                assert verdict(Net(how), lambda model: program(model, write, grad), capture) == "equal"  # noqa: B023


def test_what_a_part_keeps_and_the_program_writes_into_is_refused():
    drive(by_the_program, timeout=250.0)


def by_others() -> None:
    for capture in ("fx", "eager"):
        for first in (0, 2):
            came = verdict(
                Net("attribute", first, Adding()),
                lambda model: program(model, copied, grad=False),
                capture,
                part="worker1",
                after="worker2",
            )
            assert "keeps" in came or "writes into its input" in came, (capture, first, came)
    for how in ("attribute", "input"):
        for first in (0, 2):
            came = verdict(Late(how, first), lambda model: program(model, copied, grad=False), "eager")
            assert "keeps" in came, (how, first, came)


def test_what_a_part_keeps_and_others_write_into_is_refused():
    drive(by_others, 3, timeout=250.0)


def in_batches() -> None:
    def run(model: Any, write: Callable[[torch.Tensor], object]) -> None:
        for number in range(3):
            x = inputs(number)

            def loss(output: Any) -> torch.Tensor:
                y, out = output
                with torch.no_grad():
                    write(y)
                return out.square().mean()

            model.forward_backward(loss, x, chunks=2)
            with torch.no_grad():
                write(x)

    for how in ("attribute", "input"):
        model = rpc.wrap(Unneeded(how), {"part": "worker1"}, timeout=20.0)
        try:
            run(model, lambda tensor: tensor.add_(1))
        except rpc.NotSupported as error:
            assert WRITTEN in error.message, error.message
        else:
            raise AssertionError(how)
        finally:
            model.close()


def test_what_a_part_keeps_of_micro_batches_is_not_written_into():
    drive(in_batches)


class First(Keeping):
    """Keeps the first input, and no other."""

    def forward(self, x):
        self.last = x if self.last is None else self.last
        return self.line(x) + 0.5 * self.last


class OfFirst(Net):
    def __init__(self) -> None:
        super().__init__("nothing")
        self.part = First("nothing")


def again(model: Any, grad: bool) -> list[torch.Tensor]:
    """One input, which is written in place between the steps, beside others."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found, first = [], inputs(0)
    for number in range(5):
        with torch.set_grad_enabled(grad):
            y, out = model(inputs(number) if number else first)
        found.append(y.detach().clone())
        if grad:
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
        first.add_(number)
    return found


def read_and_loaded(model: Any, grad: bool) -> list[torch.Tensor]:
    """A state that is taken, and one that is loaded, right after the program has written."""
    found = []
    for number in range(4):
        y, _ = model(inputs(number))
        with torch.no_grad():
            y.mul_(2)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        found += [y.detach().clone(), state["part.state"]]
        if number == 2:
            with torch.no_grad():
                y.mul_(2)
            model.load_state_dict(state)
    return found


def in_this_process() -> None:
    for grad in (True, False):
        for how in ("attribute", "object", "buffer", "parameter", "input"):
            for write in (result, detached, given, copied):
                came = verdict(Net(how), lambda model: program(model, write, grad), "here")  # noqa: B023
                stepped = how == "parameter" and grad and write in (result, detached)  # what is written is from before the step
                expected = "cannot be set there" if how == "object" else WRITTEN if stepped else "equal"
                assert expected in came, (grad, how, write, came)
        assert verdict(OfFirst(), lambda model: again(model, grad), "here") == "equal"  # noqa: B023
        assert verdict(Hooked(), lambda model: program(model, result, grad), "here") == "equal"  # noqa: B023
        assert verdict(Net("buffer"), lambda model: read_and_loaded(model, grad), "here") == "equal"  # noqa: B023


def test_in_this_process_all_of_it_is_as_in_one():
    drive(in_this_process, timeout=250.0)
