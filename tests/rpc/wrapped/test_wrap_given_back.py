"""Parts that give back what they are given in one step and compute in another, and parts that keep what they give: the bits of
one process, or refused by name."""

from __future__ import annotations

import torch
from test_wrap import drive
from test_wrap_kept import SIZE, train, verdict
from torch import nn

GIVES_OWN = "part gives a tensor of its own, and gave back what it was given when it was captured"
GIVES_BACK = "part gives back what it is given, and gave a tensor of its own when it was captured"
OTHER_SUMS = "gradients of it would be summed in another order"
WRITES = "the forward writes into one of them"
KEEPS = "part 'part' keeps what it gives, and the forward writes into that"


class Sometimes(nn.Module):
    """Computes in its first calls, or in all others."""

    def __init__(self, first: bool, calls: int = 2) -> None:
        super().__init__()
        self.line, self.first, self.few, self.calls = nn.Linear(SIZE, SIZE), first, calls, 0

    def forward(self, x):
        self.calls += 1
        return self.line(x) if (self.calls <= self.few) == self.first else x


class Always(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return x


class Keeping(nn.Module):
    """Adds half of what it gave the last time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.line, self.how, self.last, self.table = nn.Linear(SIZE, SIZE), how, None, {}
        self.register_buffer("state", torch.zeros(4, SIZE))

    def forward(self, x):
        y = self.line(x)
        if self.how == "buffer":
            self.state = (0.5 * self.state + y).detach()
            return self.state
        last = self.table.get("last") if self.how == "dict" else self.last
        y = y if last is None else y + 0.5 * last
        if self.how == "dict":
            self.table["last"] = y.detach()
        else:
            self.last = y.detach()
        return y


class Net(nn.Module):
    """``how``: what the forward does with what it gives the part, and with what comes back."""

    def __init__(self, part: nn.Module, how: str) -> None:
        super().__init__()
        self.stem, self.part, self.head, self.how = nn.Linear(SIZE, SIZE), part, nn.Linear(SIZE, 2), how

    def forward(self, x):
        x = self.stem(x)
        y = self.part(x)
        if self.how == "writes":
            y += 1
            return self.head(torch.tanh(y))
        if self.how == "writes, reads":
            y += 1
            return self.head(torch.tanh(y)) + x.mean()
        if self.how == "view, reads":
            y[:, :2].add_(1)
            return self.head(torch.tanh(y)) + x.mean()
        if self.how == "reads":
            return self.head(torch.tanh(y)) + x.mean()
        return self.head(torch.tanh(y) * torch.sigmoid(x) * x + y * 1.7)


def at_times() -> None:
    for place in ("part", "head"):
        found = {
            (first, how, capture): verdict(lambda: Net(Sometimes(first), how), train, capture, place)  # noqa: B023
            for first in (True, False)
            for how in ("writes", "writes, reads", "view, reads", "reads", "sums")
            for capture in ("fx", "eager")
        }
        for (first, how, capture), came in found.items():
            if capture == "eager" or how == "writes" or (first and how == "reads"):
                assert came == "equal", (first, how, capture, came)
            elif first:
                assert GIVES_BACK in came and (OTHER_SUMS if how == "sums" else WRITES) in came, (how, came)
            else:
                assert GIVES_OWN in came, (how, came)
        assert verdict(lambda: Net(Always(), "sums"), train, "fx", place) == "equal"


def test_a_part_may_give_back_what_it_is_given_at_times_or_is_refused():
    drive(at_times, timeout=200.0)


def each_run_finds_the_same() -> None:
    for calls in (1, 2, 3):
        assert verdict(lambda: Net(Sometimes(True, calls), "reads"), train, "fx") == "equal"  # noqa: B023


def test_a_capture_runs_parts_several_times_from_the_same_state():
    drive(each_run_finds_the_same)


def kept() -> None:
    for how in ("attribute", "dict", "buffer"):
        assert verdict(lambda: Net(Keeping(how), "writes"), train, "fx") == "equal"  # noqa: B023
        assert KEEPS in verdict(lambda: Net(Keeping(how), "writes"), train, "eager")  # noqa: B023
        assert verdict(lambda: Net(Keeping(how), "reads"), train, "eager") == "equal"  # noqa: B023


def test_what_a_part_keeps_is_not_written_elsewhere():
    drive(kept)
