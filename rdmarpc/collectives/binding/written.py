"""What autograd is told of a collective: that tensors were written, and that no gradient goes through it.

A tensor that autograd has saved, and that a collective then writes, gives a wrong gradient, silently. Operations of torch raise
a tensor's version, and the backward raises an error. So do these calls, when they are made: a call that a thread runs writes
later, but it is the program that orders the two."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

Tensors = Sequence[torch.Tensor]
_HINT = "torch.distributed.nn.functional and torch.distributed._functional_collectives have collectives with gradients"


def in_place(what: str, tensors: Tensors, *, writes: bool = True) -> None:
    """A collective changes these; without ``writes`` those of other ranks only. ``what``: torch's operator, for the warning of
    a backward that comes to one of them."""
    if writes:
        torch._C._increment_version(tensors)
    for each in tensors:
        if each.requires_grad and torch.is_grad_enabled():
            hook, hooks = _hook(what), each._backward_hooks or {}
            if hook not in hooks.values():  # a parameter keeps its hooks
                each.register_hook(hook)


def from_to(what: str, inputs: Tensors, outputs: Tensors) -> None:
    """A collective writes ``outputs``, which it makes of ``inputs``: no gradient leads back from them. gloo warns of that, or
    fails."""
    in_place(what, outputs)
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        _warn(what)


@lru_cache(64)
def _hook(what: str) -> Callable[[torch.Tensor], None]:
    return lambda _: _warn(what)


def _warn(what: str) -> None:
    warnings.warn(
        f"c10d::{what}: an autograd kernel was not registered to the Autograd key(s) but we are trying to backprop through it. "
        f"This may lead to silently incorrect behavior. {_HINT}.",
        UserWarning,
        stacklevel=2,
    )
