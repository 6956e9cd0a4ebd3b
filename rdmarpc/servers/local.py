"""The owner's part of a ``DistributedOptimizer``: an optimizer of the class over the real parameters, and the functions that
the holder of the ``DistributedOptimizer`` calls here.

Each call brings *changes*: every hyperparameter that its holder ever set, with the value it has there now. So a call depends on
no earlier call, whatever order they run in and whichever other holder steps. Hyperparameters that the holder never set belong
to the optimizer itself (some optimizers count steps in their groups).
"""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any

import torch

from .. import autograd
from ..base.futures import mapped
from ..base.streams import use_here
from ..calls import agent as _agent
from ..functions import MAY_DEFER
from ..gradients.behind import undisturbed
from ..message import permits
from ..references.handle import RRef, fork_of
from ..transport import NotSupported
from .updates import hyperparameters

Members = dict[int, list[RRef[torch.Tensor]]]
"""The parameters that live here, by the number of their group."""
Given = tuple[dict[str, Any], dict[int, dict[str, Any]]]
"""The defaults, and the hyperparameters of the groups, that the optimizer's class made of its arguments."""

_ABSENT = object()
_stepping = threading.Lock()
"""Held while an optimizer of this worker steps. A step replaces every ``.grad``, and two optimizers may have the same
parameters."""


class LocalOptimizer:
    """An optimizer over the parameters that live here (by the number of the holder's group), in as many groups. Thread-safe.
    As with torch, its class need not be an ``Optimizer``: without groups of its own it has no hyperparameters to change."""

    def __init__(self, optimizer: torch.optim.Optimizer, members: dict[int, list[torch.Tensor]]) -> None:
        self.optimizer, self._members = optimizer, members
        self._changes = b""
        self._own: list[tuple[dict[str, Any], str, Any]] = []
        """The values that the changes have replaced: group, key, value (``_ABSENT``: there was none)."""

    def groups(self) -> dict[int, dict[str, Any]]:
        return dict(zip(self._members, getattr(self.optimizer, "param_groups", ())))

    def step(self, context: int, changes: bytes) -> None:
        """Step with the gradients of ``context``. Parameters without one are left alone, and so is every ``.grad``."""
        gradients = autograd.get_gradients(context)
        use_here(gradients.values())
        parameters = [parameter for tensors in self._members.values() for parameter in tensors]
        with _stepping, undisturbed(parameters):
            self._apply(changes)
            before = [parameter.grad for parameter in parameters]
            try:
                for parameter in parameters:
                    parameter.grad = gradients.get(parameter)
                self.optimizer.step()
            finally:
                for parameter, grad in zip(parameters, before):
                    parameter.grad = grad

    def state_dict(self, changes: bytes) -> dict[str, Any]:
        """A copy of the optimizer's state. Parameters have the numbers of the optimizer here."""
        with _stepping:
            self._apply(changes)
            return copy.deepcopy(self.optimizer.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with _stepping:
            self.optimizer.load_state_dict(state)
            self._changes, self._own = b"", []

    def _apply(self, changes: bytes) -> None:
        if changes == self._changes:
            return
        for group, key, value in self._own:
            if value is _ABSENT:
                del group[key]
            else:
                group[key] = value
        wanted = permits.loads(changes) if changes else {}
        changed = [(group, wanted[number]) for number, group in self.groups().items() if number in wanted]
        self._own = [(group, key, group.get(key, _ABSENT)) for group, new in changed for key in new]
        for group, new in changed:
            group.update(new)
        self._changes = changes


# The functions that the holder calls.


def create(*described: Any) -> Any:
    """The result of ``_create``; if parameters are still to be made, a future of it, as a waiting thread might be needed to
    make them."""
    values = _agent.current().rrefs.future
    parameters = [values(fork_of(rref).rref) for rrefs in described[1].values() for rref in rrefs]
    if all(value.done() for value in parameters):
        return _create(*described)
    return mapped(torch.futures.collect_all(parameters), lambda _: _create(*described))


create._wrapped_async_rpc_function = MAY_DEFER  # type: ignore[attr-defined]


def _create(kind: Any, members: Members, options: Any, args: Any, kwargs: Any) -> tuple[RRef[LocalOptimizer], Given]:
    """Make the optimizer. ``options``: the options of the groups by number; ``None`` for parameters given without groups."""
    local = {number: [rref.local_value() for rref in rrefs] for number, rrefs in members.items()}
    parameters: list[Any]
    if options is None:
        (parameters,) = local.values()
    else:
        parameters = [{**options[number], "params": tensors} for number, tensors in local.items()]
    optimizer = kind(parameters, *args, **kwargs)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        why = f"{type(optimizer).__name__}.step needs a closure, and cannot be distributed"
        raise NotSupported(why, hint="an optimizer that works on gradients, such as Adam")
    made = LocalOptimizer(optimizer, local)
    defaults = getattr(optimizer, "defaults", {})
    return RRef(made), (defaults, {number: hyperparameters(group) for number, group in made.groups().items()})


def step(rref: int, context: int, changes: bytes) -> None:
    _find(rref).step(context, changes)


def state_dict(rref: int, changes: bytes) -> dict[str, Any]:
    return _find(rref).state_dict(changes)


def load_state_dict(rref: int, state: dict[str, Any]) -> None:
    _find(rref).load_state_dict(state)


def _find(rref: int) -> LocalOptimizer:
    # By its number: a reference among the arguments would have to be forked and deleted for every step.
    found = _agent.current().rrefs.future(rref).wait()
    if not isinstance(found, LocalOptimizer):
        raise TypeError(f"reference {rref:#x} is to a {type(found).__name__}, which is no part of a DistributedOptimizer")
    return found
