"""A wrapped model and the same model in one process, trained side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import rdmarpc as rpc

Batch = tuple[torch.Tensor, torch.Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def plain_step(network: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(network(x), y)
    loss.backward()
    optimizer.step()
    return loss


def train_both(
    model: nn.Module,
    twin: nn.Module,
    data: Iterable[Batch],
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    step: Callable[..., torch.Tensor] = plain_step,
) -> None:
    """``step(network, optimizer, x, y)`` for each batch gives the same loss, and in the end their states are the same."""
    sides = [(network, make(network.parameters())) for network in (model, twin)]
    for number, batch in enumerate(data):
        ours, theirs = (step(network, optimizer, *batch).detach() for network, optimizer in sides)
        assert torch.equal(ours, theirs), f"step {number}: {ours} for {theirs}"
    assert_same_state(model, twin)


def assert_same_state(model: nn.Module, twin: nn.Module) -> None:
    """Entries, their order, and their bits."""
    ours, theirs = model.state_dict(), twin.state_dict()
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key


def verdict(
    wrapped: Callable[[], Any], train: Callable[[Any], list[torch.Tensor]], expected: list[torch.Tensor], shown: int
) -> str:
    """Of a model that is wrapped here, trained and closed: "equal", "refused: why", or "wrong", with so many of what came."""
    model = wrapped()
    try:
        found = train(model)
    except rpc.NotSupported as error:
        return f"refused: {error}"
    finally:
        model.close()
    return "equal" if all(map(torch.equal, found, expected)) else f"wrong: {found[:shown]} for {expected[:shown]}"
