"""A program for a wrapped model and for the same model in one process: what it shows of itself is equal in every bit."""

from __future__ import annotations

import dataclasses
import random
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rdmarpc import places

Program = Callable[[Any], Iterable[Any]]
"""What it yields is compared. It gets the model, and may raise: then type and text are compared."""
_TEXT = 60
"""Characters of an error that are compared: what follows may be numbers of versions, or classes of tensors."""
_models: weakref.WeakSet[Any] = weakref.WeakSet()


def home(value: Any) -> Any:
    """The same with its tensors in this process, as they are now: copies without a graph."""
    if isinstance(value, torch.Tensor):
        here = value.detach().cpu()
        return (here.to_dense() if here.layout != torch.strided else here).clone()
    if isinstance(value, Mapping):
        return {key: home(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [home(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {type(value).__name__: home(vars(value))}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value


def difference(ours: Any, theirs: Any, where: str = "") -> str:
    """Where two values from ``home`` differ, in structure, dtype or any bit; empty if they do not."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, torch.Tensor) or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            return f"{where}: {ours!r} for {theirs!r}"
        same = (ours == theirs) | ((ours != ours) & (theirs != theirs))
        return (
            "" if bool(same.all()) else f"{where}: {int((~same).sum())} of {same.numel()} elements, {ours} for {theirs}"[:600]
        )
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        if list(ours) != list(theirs):
            return f"{where}: {list(ours)} for {list(theirs)}"
        return next(filter(None, (difference(ours[key], theirs[key], f"{where}[{key!r}]") for key in theirs)), "")
    if isinstance(theirs, list) and isinstance(ours, list):
        if len(ours) != len(theirs):
            return f"{where}: {len(ours)} for {len(theirs)} items: {str(ours)[:300]} for {str(theirs)[:300]}"
        found = (difference(one, other, f"{where}[{at}]") for at, (one, other) in enumerate(zip(ours, theirs)))
        return next(filter(None, found), "")
    same = ours == theirs or (ours != ours and theirs != theirs)
    return "" if same and type(ours) is type(theirs) else f"{where}: {ours!r} for {theirs!r}"


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    text = difference(home(ours), home(theirs), where)
    assert not text, text


def wrap(net: nn.Module, placement: Any, **options: Any) -> Any:
    """A model that is closed after the test."""
    model = places.wrap(net, placement, **options)
    _models.add(model)
    return model


def close_all() -> None:
    for model in list(_models):
        places.WrappedModel.close(model)
    _models.clear()


def forget() -> None:
    """Close none of them: what they had is lost."""
    _models.clear()


def both(make: Callable[[], nn.Module], placement: Any, **options: Any) -> tuple[Any, nn.Module]:
    """A wrapped model and its twin in this process: made, not copied, because a copy has no hooks of tensors."""
    nets = []
    for _ in range(2):
        torch.manual_seed(1)
        nets.append(make())
    return wrap(nets[0], placement, **options), nets[1]


def shown(program: Program, model: Any) -> list[Any]:
    """What a program yields or raises, then the gradients and the state that it leaves."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    seen: list[Any] = []
    try:
        seen.extend(home(value) for value in program(model))
    except Exception as error:
        seen.append(error)
    seen.append({name: home(p.grad) for name, p in model.named_parameters()})
    seen.append(home(model.state_dict()))
    return seen


def beside(program: Program, make: Callable[[], nn.Module], placement: Any, **options: Any) -> None:
    """Run it with both. An error of ours has the type, and the beginning of the text, of that of one process."""
    model, twin = both(make, placement, **options)
    theirs, ours = shown(program, twin), shown(program, model)
    for one, other in zip(ours, theirs):
        if isinstance(one, Exception) and not isinstance(other, Exception):
            raise one
        if isinstance(other, Exception) and isinstance(one, Exception):
            assert isinstance(one, type(other)) and str(other)[:_TEXT] in str(one), f"{one!r} for {other!r}"
    plain = [[item for item in seen if not isinstance(item, Exception)] for seen in (ours, theirs)]
    text = difference(*plain)
    assert not text, text


def batches(count: int, *shape: int, classes: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(shape, generator=generator), torch.randint(0, classes, shape[:1], generator=generator))
        for _ in range(count)
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def spread(net: nn.Module, how: str) -> dict[str, str]:
    """A placement of the children: all of them at one worker (``all``), at two in turns (``turns``), every second one here
    (``half``)."""
    names = [name for name, child in net.named_children() if [*child.parameters(), *child.buffers()]]
    homes = {"all": ["worker1"], "turns": ["worker1", "worker2"], "half": ["worker1", ""]}[how]
    return {name: homes[at % len(homes)] for at, name in enumerate(names) if homes[at % len(homes)]}
