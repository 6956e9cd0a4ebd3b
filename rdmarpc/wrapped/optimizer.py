"""Any torch optimizer over ``model.parameters()``: its local half steps here, its remote halves where the parameters live.

A global hook sees every optimizer's ``step``. Those with remote parameters get a half of the same class at each owner, over
the real parameters; from then on a step is one command with the numbers of the parameter groups.
"""

from __future__ import annotations

import itertools
import struct
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_map_only

from ..graph.work.command import STEP, Command
from ..graph.work.remote_update import hyperparameters, numbers_of
from ..parts.parameter import Owners, RemoteParameter
from ..transport import NotSupported

_numbers = itertools.count(1)
_known: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[int, ...], list[RemoteHalves]]] = weakref.WeakKeyDictionary()
_installed = False


class RemoteHalves:
    """The halves of one optimizer at the owners of one model's parameters."""

    def __init__(self, optimizer: Optimizer, owners: Owners) -> None:
        self.number, self.owners = next(_numbers), owners
        self._optimizer = weakref.ref(optimizer)
        self._rest: dict[str, Any] = {}
        self._sent: dict[str, list[float]] = {}  # what each worker has
        self._known: dict[str, tuple[list[list[Any]], list[float]]] = {}  # the groups' values, and their numbers
        self._members: dict[str, dict[int, list[int]]] = {}
        self.adopt()

    def adopt(self) -> None:
        """Look at the groups again: which of our parameters are in which group, per worker."""
        self._members = {}
        for at, parameter in self._parameters():
            self._members.setdefault(parameter.worker, {}).setdefault(at, []).append(parameter.position)
        self._rest.clear()
        self._sent.clear()
        self._known.clear()

    def step(self) -> None:
        commands, sent = {}, {}
        for worker, members in self._members.items():
            numbers = sent[worker] = self._tell(worker, members)
            changed = self._sent.get(worker) != numbers
            commands[worker] = Command(STEP, self.number, struct.pack(f"<{len(numbers)}d", *numbers) if changed else b"")
        self.owners.step(commands)
        self._sent.update(sent)

    def ensure(self) -> None:
        """Have the halves exist."""
        for worker, members in self._members.items():
            self._tell(worker, members)

    def _tell(self, worker: str, members: dict[int, list[int]]) -> list[float]:
        """The numbers of this worker's groups; whatever else is new about them, the worker is told at once."""
        every = self._groups()
        groups = [every[at] for at in members]
        values = [[value for key, value in group.items() if key != "params"] for group in groups]
        known = self._known.get(worker)
        if known is not None and known[0] == values:
            return known[1]
        numbers, rest = numbers_of(groups)
        if self._rest.get(worker) != rest:
            optimizer = self._optimizer()
            assert optimizer is not None
            described = [{**hyperparameters(group), "params": positions} for group, positions in zip(groups, members.values())]
            defaults = {key: value for key, value in optimizer.defaults.items() if key != "params"}
            self.owners.ask_owner(worker, "optimizer", self.number, type(optimizer), defaults, described)
            self._rest[worker] = rest
            self._sent.pop(worker, None)
        self._known[worker] = (values, numbers)
        return numbers

    # -- state

    def fill(self, state: dict[str, Any]) -> None:
        """Put the owners' state into the optimizer's ``state_dict``."""
        self.ensure()
        states = {w: self.owners.ask_owner(w, "optimizer_state", self.number) for w in self._members}
        for index, parameter in self._indexed():
            found = states[parameter.worker].get(parameter.position)
            if found:
                state["state"][index] = found

    def unload(self, state: dict[str, Any]) -> dict[str, Any]:
        """Send a ``state_dict``'s entries to the owners; what is left is for the local half."""
        self.ensure()
        mine = dict(state["state"])
        there: dict[str, dict[int, Any]] = {worker: {} for worker in self._members}
        for index, parameter in self._indexed():
            if index in mine:
                there[parameter.worker][parameter.position] = tree_map_only(torch.Tensor, torch.Tensor.cpu, mine.pop(index))
        for worker, entries in there.items():
            self.owners.ask_owner(worker, "load_optimizer_state", self.number, entries)
        return {**state, "state": mine}

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        return [] if optimizer is None else optimizer.param_groups

    def _parameters(self) -> Iterator[tuple[int, RemoteParameter]]:
        for at, group in enumerate(self._groups()):
            for parameter in group["params"]:
                if isinstance(parameter, RemoteParameter) and parameter.owner is self.owners:
                    yield at, parameter

    def _indexed(self) -> Iterator[tuple[int, RemoteParameter]]:
        everything = (parameter for group in self._groups() for parameter in group["params"])
        for index, parameter in enumerate(everything):
            if isinstance(parameter, RemoteParameter) and parameter.owner is self.owners:
                yield index, parameter


def install() -> None:
    """Watch every optimizer's step from now on. Idempotent; costs optimizers without remote parameters a dictionary look-up."""
    global _installed
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)


def attach(optimizer: Optimizer) -> list[RemoteHalves]:
    """The remote halves of an optimizer, one for each wrapped model that it trains; none for an ordinary one."""
    shape = tuple(len(group["params"]) for group in optimizer.param_groups)
    known, halves = _known.get(optimizer, (None, []))
    if known == shape:
        return halves
    first = known is None
    remote = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, RemoteParameter)]
    models = list({id(parameter.owner): parameter.owner for parameter in remote}.values())
    if first and any(optimizer.state.get(parameter) for parameter in remote):
        raise NotSupported(
            "this optimizer's state was loaded before its remote parameters were known, and is lost",
            hint="call model.attach(optimizer) before optimizer.load_state_dict()",
        )
    for half in halves:
        half.adopt()
    halves = halves + [RemoteHalves(optimizer, m) for m in models if m not in [half.owners for half in halves]]
    _known[optimizer] = (shape, halves)
    if first and remote:
        optimizer.register_state_dict_post_hook(_after_state_dict)
        optimizer.register_load_state_dict_pre_hook(_before_load)
    return halves


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    halves = attach(optimizer)
    if not halves:
        return
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is not None:
        raise NotSupported(
            "step(closure) does not work where parameters are remote", hint="call backward() yourself, then step()"
        )
    for half in halves:
        half.step()
        half.owners.in_step = True


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for half in _known.get(optimizer, ((), []))[1]:
        half.owners.in_step = False


def _after_state_dict(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    for half in attach(optimizer):
        half.fill(state)
    return state


def _before_load(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    for half in attach(optimizer):
        state = half.unload(state)
    return state
