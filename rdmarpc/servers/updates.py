"""The numbers of an optimizer's groups as float64, and what is known of classes of optimizers.

Both ends walk the groups in the same way, so the numbers need no names: learning rates of a scheduler travel in the
command that asks for the step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..transport import NotSupported

NOT_SENT = frozenset({"params", "param_names"})

_optim = torch.optim
PER_PARAMETER = {
    *(_optim.SGD, _optim.Adam, _optim.AdamW, _optim.Adagrad, _optim.Adadelta, _optim.Adamax, _optim.RMSprop, _optim.Rprop),
    *(_optim.NAdam, _optim.RAdam, _optim.ASGD, _optim.Adafactor, _optim.SparseAdam, _optim.Muon),
}
"""Classes of which a step updates each parameter from its own gradient and state alone, after one call of a closure: one half
of such an optimizer at each owner does what one optimizer does. Of any other class, and of classes derived from these, nothing
is known: no trial could show what its step does after a thousand others."""


def leaves_gradients(kind: type[Optimizer], groups: Sequence[dict[str, Any]]) -> bool:
    """Whether a step is known to leave gradients as they are. Torch's own with ``foreach=True`` may save memory there (SGD with
    ``nesterov`` does)."""
    return kind in PER_PARAMETER and not any(group.get("foreach") for group in groups)


class Elsewhere(dict[str, Any]):
    """Stands in ``optimizer.state`` for that of a parameter which is at its owner. Where the program has dropped it, or put a
    dictionary into its place, the owner's half drops its state, or gets that one. Code that visits all entries finds none."""

    def _refuse(self, *args: Any) -> Any:
        why = "this optimizer's state of a parameter lies at the worker that updates it"
        hint = "optimizer.state_dict() fetches it; load_state_dict(), and optimizer.state[p] = {...}, set it"
        raise NotSupported(why, hint=hint)

    __getitem__ = __setitem__ = __delitem__ = __contains__ = _refuse
    get = pop = setdefault = update = clear = _refuse  # type: ignore[assignment]


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """What a group says besides its parameters, in a fixed order."""
    return {key: group[key] for key in sorted(group) if key not in NOT_SENT}


def _items(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str, Any]]:
    """(number of a group, key, value) of all; a tuple (Adam's betas) is a value for each of its members."""
    for at, group in enumerate(groups):
        for key, value in hyperparameters(group).items():
            yield from ((at, key, item) for item in (value if isinstance(value, tuple) else (value,)))


def numbers_of(groups: Sequence[dict[str, Any]]) -> tuple[list[float], tuple[Any, ...]]:
    """(all numbers of these groups, everything else about them). Two calls with equal second results are told apart by
    the numbers alone."""
    numbers: list[float] = []
    rest: list[Any] = []
    for at, key, item in _items(groups):
        if isinstance(item, torch.Tensor):
            if item.numel() != 1 or item.dtype.is_complex:
                why = f"the optimizer's {key} is a tensor of shape {tuple(item.shape)}, {item.dtype}"
                raise NotSupported(why, hint="give a number, or a tensor of one real number")
            rest.append((at, key, item.dtype, item.shape))
            numbers.append(float(item))
        elif isinstance(item, int | float):
            rest.append((at, key, type(item), None))
            numbers.append(float(item))
        else:
            rest.append((at, key, type(item), _kept(item)))
    return numbers, tuple(rest)


def _kept(value: Any) -> Any:
    """What may change in place is kept as it is now."""
    return copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value


def refuse_scaling(optimizer: Optimizer) -> None:
    """``NotSupported`` where a ``GradScaler`` has left it to a fused optimizer to scale gradients back: it sets attributes."""
    if getattr(optimizer, "found_inf", None) is not None or getattr(optimizer, "grad_scale", None) is not None:
        why = "a fused optimizer scales gradients by itself under a GradScaler, which does not reach other workers"
        raise NotSupported(why, hint="make the optimizer with fused=False")


def counting_dtype(kind: type[Optimizer]) -> torch.dtype:
    """The dtype in which an optimizer of this class counts, if it is made now: torch's classes have float32, or float64 where
    that is the default; others may have the default itself."""
    default = torch.get_default_dtype()
    return default if kind not in PER_PARAMETER or default is torch.float64 else torch.float32


def read_numbers(groups: Sequence[dict[str, Any]], numbers: Sequence[float]) -> None:
    """Set the numbers of these groups, keeping the types that the values have."""
    left = iter(numbers)

    def renew(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.fill_(next(left))
        return type(value)(next(left)) if isinstance(value, (int, float)) else value

    for group in groups:
        for key, value in hyperparameters(group).items():
            group[key] = tuple(map(renew, value)) if isinstance(value, tuple) else renew(value)
