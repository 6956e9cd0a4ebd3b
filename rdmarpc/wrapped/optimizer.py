"""Any torch optimizer over ``model.parameters()``.

A global hook sees every optimizer's ``step``. Those with remote parameters, of a class that updates each parameter by itself
(``PER_PARAMETER``), get a half of the same class at each owner, over the real parameters: the local half steps here, the others
by one command with the numbers of the parameter groups.

An optimizer of any other class may combine parameters, so it runs here as it is, over remote tensors: what it reads is
fetched, what it writes goes back, its state lies here.
"""

from __future__ import annotations

import copy
import itertools
import struct
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from ..graph.servers.updates import PER_PARAMETER, Elsewhere, hyperparameters, merged, numbers_of, refuse_scaling
from ..graph.work.command import STEP, Command
from ..ground.advice import warn
from ..parts.parameter import Owners, RemoteParameter
from ..transport import NotSupported

_numbers = itertools.count(1)
_known: weakref.WeakKeyDictionary[Optimizer, tuple[tuple[tuple[int, ...], ...], list[RemoteHalves]]] = (
    weakref.WeakKeyDictionary()
)
_hooks: weakref.WeakKeyDictionary[Optimizer, tuple[int, int, int, int]] = weakref.WeakKeyDictionary()
_named: set[type[Optimizer]] = set()
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
        self._mine = [parameter for _, parameter in self._parameters()]
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
        values = [_comparable(group) for group in groups]
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
        indices = {(parameter.worker, parameter.position): index for index, parameter in self._indexed()}
        theirs = set(indices.values())
        found = [{index: entries for index, entries in state["state"].items() if index not in theirs}]
        for worker in self._members:
            entries = self.owners.ask_owner(worker, "optimizer_state", self.number)
            found.append({indices[worker, at]: entry for at, entry in entries.items() if entry and (worker, at) in indices})
        state["state"] = merged(found)

    def unload(self, state: dict[str, Any]) -> dict[str, Any]:
        """Send a ``state_dict``'s entries to the owners, where parameters without any lose theirs; the rest is for the local
        half."""
        self.ensure()
        saved = [index for group in state["param_groups"] for index in group["params"]]
        theirs = {saved[at]: parameter for at, parameter in self._indexed()}
        self._load({parameter: state["state"].get(index, {}) for index, parameter in theirs.items()})
        return {**state, "state": {index: entries for index, entries in state["state"].items() if index not in theirs}}

    def take(self, states: dict[RemoteParameter, dict[str, Any]]) -> None:
        """The state of parameters that was loaded here, before it was known that they are remote."""
        self.ensure()
        self._load({parameter: entries for parameter, entries in states.items() if parameter.owner is self.owners})

    def renew(self) -> None:
        """Send what the program has put into ``optimizer.state``, or has dropped there."""
        optimizer = self._optimizer()
        assert optimizer is not None
        state = optimizer.state
        if any(kind is not Elsewhere for kind in map(type, map(state.get, self._mine))):
            self.take({p: state.get(p, {}) for p in self._mine if type(state.get(p)) is not Elsewhere})
            self.mark()

    def mark(self) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        for parameter in self._mine:
            optimizer.state[parameter] = Elsewhere()

    def _load(self, states: dict[RemoteParameter, dict[str, Any]]) -> None:
        there: dict[str, dict[int, Any]] = {worker: {} for worker in self._members}
        for parameter, entries in states.items():
            there[parameter.worker][parameter.position] = tree_map_only(torch.Tensor, torch.Tensor.cpu, entries)
        for worker, found in there.items():
            self.owners.ask_owner(worker, "load_optimizer_state", self.number, found)

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


def attach(optimizer: Optimizer) -> list[RemoteHalves]:
    """The remote halves of an optimizer, one for each wrapped model that it trains; none for an ordinary one, and none for a
    class of which it is not known that it updates each parameter by itself."""
    shape = tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups)
    known, halves = _known.get(optimizer, (None, []))
    if known == shape:
        return halves
    first = known is None
    remote = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, RemoteParameter)]
    if type(optimizer) not in PER_PARAMETER:
        _known[optimizer] = (shape, [])
        if remote:
            _name(type(optimizer))
        return []
    models = list({id(parameter.owner): parameter.owner for parameter in remote}.values())
    loaded = {
        p: entries for p, entries in optimizer.state.items() if isinstance(p, RemoteParameter) and first and _used(entries)
    }
    for half in halves:
        half.renew()
    for parameter in remote:
        optimizer.state.pop(parameter, None)  # the other halves make theirs
    for half in halves:
        half.adopt()
    halves = halves + [RemoteHalves(optimizer, m) for m in models if m not in [half.owners for half in halves]]
    _known[optimizer] = (shape, halves)
    if halves and optimizer not in _hooks:
        optimizer.register_load_state_dict_post_hook(_mark)
        _hooks[optimizer] = (
            optimizer.register_step_pre_hook(_send).id,
            optimizer.register_step_post_hook(_after_step).id,
            optimizer.register_state_dict_post_hook(_after_state_dict).id,
            optimizer.register_load_state_dict_pre_hook(_before_load).id,
        )
        _order_hooks(optimizer)
    _mark(optimizer)
    if loaded:
        for half in halves:
            half.take(loaded)
    return halves


def forget(optimizer: Optimizer) -> None:
    """Its remote parameters are others now: their halves are made at its next step, or by ``attach``."""
    if optimizer in _known:
        _known[optimizer] = ((), [])


def _used(state: dict[str, Any]) -> bool:
    """Whether it is more than what a constructor makes (Adagrad's)."""
    return bool(state) and float(state.get("step", 1)) != 0


def _name(kind: type[Optimizer]) -> None:
    if kind not in _named:
        _named.add(kind)
        warn(
            f"{kind.__name__} may combine parameters in one step, so it runs in this process: gradients and values of remote "
            "parameters are fetched for it, and new values sent back, in every step"
        )


def _mark(optimizer: Optimizer) -> None:
    for half in _known[optimizer][1]:
        half.mark()


_PLAIN = frozenset([bool, int, float, complex, str, type(None)])
"""Types of hyperparameters that are compared as they are; so are tuples of them."""


def _comparable(group: dict[str, Any]) -> list[Any]:
    """The values of a group without its parameters, to be compared in every step: so plain ones are not looped over."""
    values = list({**group, "params": None}.values())
    kinds = set(map(type, values))
    if tuple in kinds:
        kinds |= {type(item) for value in values if type(value) is tuple for item in value}
    return values if kinds <= {*_PLAIN, tuple} else [_number(value) for value in values]


def _number(value: Any) -> Any:
    """A tensor may be changed in place, so its number is kept instead of it, and of a list or the like a copy."""
    if isinstance(value, tuple):
        return tuple(map(_number, value))
    if isinstance(value, (list, dict, set)):
        return copy.deepcopy(value)
    return ("tensor", float(value)) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if attach(optimizer):
        _order_hooks(optimizer)


def _order_hooks(optimizer: Optimizer) -> None:
    """Ours come after every hook of the user's that looks at gradients, or changes a state to load, and before every one that
    looks at what is new, or at the state."""
    before, after, saved, loading = _hooks[optimizer]
    cast("OrderedDict[int, Any]", optimizer._optimizer_step_pre_hooks).move_to_end(before)
    cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks).move_to_end(after, last=False)
    cast("OrderedDict[int, Any]", optimizer._optimizer_state_dict_post_hooks).move_to_end(saved, last=False)
    cast("OrderedDict[int, Any]", optimizer._optimizer_load_state_dict_pre_hooks).move_to_end(loading)


def _send(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    halves = attach(optimizer)
    if halves:
        refuse_scaling(optimizer)
    for half in halves:
        half.renew()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _step(halves)
        return None
    told = _and_step(closure, halves)
    return (args, {**kwargs, "closure": told}) if "closure" in kwargs else ((args[0], told, *args[2:]), kwargs)


def _and_step(closure: Callable[[], Any], halves: list[RemoteHalves]) -> Callable[[], Any]:
    def told() -> Any:
        loss = closure()
        _step(halves)
        return loss

    return told


def _step(halves: list[RemoteHalves]) -> None:
    for half in halves:
        half.step()
        half.owners.values.bring_back()
    for half in halves:
        half.owners.in_step = True


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for half in _known.get(optimizer, ((), []))[1]:
        half.owners.in_step = False


def _after_state_dict(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    halves = attach(optimizer)
    if halves and next(iter(optimizer._optimizer_state_dict_post_hooks)) != _hooks[optimizer][2]:
        raise _late("state_dict()", "before the state is whole")
    for half in halves:
        half.renew()
        half.fill(state)
    return state


def _before_load(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    halves = attach(optimizer)
    if halves and next(reversed(optimizer._optimizer_load_state_dict_pre_hooks)) != _hooks[optimizer][3]:
        raise _late("load_state_dict()", "after the state has gone to the workers of remote parameters")
    now, saved = ([len(group["params"]) for group in groups] for groups in (optimizer.param_groups, state["param_groups"]))
    for half in halves if now == saved else ():  # torch refuses other groups after this hook, and changes nothing
        state = half.unload(state)
    return state


def _late(what: str, when: str) -> NotSupported:
    return NotSupported(
        f"a hook of {what}, registered since the last step of this optimizer, would run {when}",
        hint="register it before the optimizer's first step",
    )
