"""``torch.distributed.optim``: one optimizer over parameters of many workers. ``servers/local`` is the owners' part."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from .calls import agent as _agent
from .gradients.context import current
from .internal import taken_apart
from .references.handle import RRef, ask, fork_of
from .servers import local as local_optimizer
from .servers.updates import hyperparameters
from .transport import NotSupported

__all__ = ["DistributedOptimizer"]

Hyperparameters = list[dict[str, Any]]
"""The hyperparameters of each group, and its parameters."""


class _Place(NamedTuple):
    """One owner's part: its ``LocalOptimizer``, and for each group the indices (over all groups) of the parameters there."""

    optimizer: RRef[local_optimizer.LocalOptimizer]
    indices: dict[int, list[int]]


class DistributedOptimizer(Optimizer):
    """``optimizer_class`` over parameters that ``params_rref`` refers to: a list of ``RRef``, or of groups (``{"params": [RRef,
    ...], "lr": ...}``), as ``torch.optim`` takes parameters. ``args`` and ``kwargs`` go to the class.

    Each owner makes an optimizer of that class over its own parameters, which lives as long as this object. The constructor
    returns when all are made, and raises what the class raised. ``NotSupported`` for a class whose ``step`` needs a closure
    (LBFGS).

    It is an ``Optimizer``, so learning-rate schedulers take it. Values that are set in ``param_groups`` hold from the next
    ``step`` on. ``param_groups[i]["params"]`` are the references.

    An optimizer that computes over several parameters together (their norm, say) does so on each worker alone.

    Thread-safe, except that no thread may change ``param_groups`` while another steps. It may be sent to other workers by RPC;
    hooks and the state of schedulers stay behind.
    """

    remote_optimizers: list[RRef[local_optimizer.LocalOptimizer]]
    """One an owner."""

    def __init__(
        self, optimizer_class: Callable[..., Optimizer], params_rref: Iterable[Any], *args: Any, **kwargs: Any
    ) -> None:
        given = list(params_rref)
        grouped = any(isinstance(item, dict) for item in given)
        groups = [_group(item) for item in given] if grouped else [_group({"params": given})] if given else []
        options = {at: hyperparameters(group) for at, group in enumerate(groups)} if grouped else None
        members, indices = _by_owner(groups)
        agent = _agent.current()
        made = _wait_for_all(
            agent.call_async(
                owner, *taken_apart(local_optimizer.create, (optimizer_class, there, options, args, kwargs), None), -1.0
            )
            for owner, there in members.items()
        )
        self._places = [_Place(rref, found) for (rref, _), found in zip(made, indices.values())]
        self.remote_optimizers = [place.optimizer for place in self._places]
        defaults: dict[str, Any] = {}
        for _, (their_defaults, theirs) in reversed(made):
            defaults = their_defaults
            for at, group in theirs.items():
                groups[at].update(group)
        for group in groups:
            group |= {key: value for key, value in defaults.items() if key not in group}
        # What ``Optimizer.__init__`` would set up, without its look at the parameters.
        self.__setstate__({"defaults": defaults, "state": {}, "param_groups": groups})
        self._settle()

    # -- steps

    def step(self, context_id: int) -> None:  # type: ignore[override]
        """Step at all owners at once, with the gradients that their parameters have in this autograd context. Parameters
        without one are left alone, and every ``.grad`` is afterwards as it was. From any thread, while the context lasts.
        Steps at one worker run one after the other, whoever asks for them.

        Waits for all owners. Raises the last error if any of them failed; the others have stepped then.
        """
        context, before = _agent.current().contexts.find(context_id), current.context
        changes = self._changes()
        # The calls carry the context even if this thread is not in it: an owner that does not know it has no gradients in it.
        current.context = context
        try:
            self._ask(local_optimizer.step, ((context_id, changes) for _ in self._places))
        finally:
            current.context = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        raise NotSupported("there are no gradients to zero", hint="each context (rdmarpc.autograd.context) begins with none")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        why = "groups cannot be added to a DistributedOptimizer"
        raise NotSupported(why, hint="make another one for them, to step in the same context")

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """The state of all owners, in the form of ``torch.optim``, with parameters counted over all groups: a local optimizer
        over the same parameters can load it. The tensors are copies. Each owner's part is taken between two steps."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        changes = self._changes()
        groups = _numbered(self.param_groups)
        state: dict[int, Any] = {}
        parts = self._ask(local_optimizer.state_dict, ((changes,) for _ in self._places))
        for place, part in reversed(list(zip(self._places, parts))):
            number: dict[int, int] = {}
            for (at, indices), theirs in zip(place.indices.items(), part["param_groups"]):
                number.update(zip(theirs["params"], indices))
                groups[at].update(hyperparameters(theirs))
            for local, entries in part["state"].items():
                if local not in number:
                    name = place.optimizer.owner_name()
                    raise NotSupported(f"the optimizer has state that belongs to no parameter ({local!r})", peer=name)
                state[number[local]] = entries
        made: dict[str, Any] = {"state": dict(sorted(state.items())), "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            made = after(self, made) or made
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the owners their parts of a ``state_dict``, of this or of a local optimizer. Raises ``ValueError``, as
        ``torch.optim`` does and before anything is changed, if the groups differ."""
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        if any(len(new["params"]) != len(old["params"]) for new, old in zip(saved, self.param_groups)):
            raise ValueError("loaded state dict contains a parameter group that doesn't match the size of optimizer's group")
        ids = [number for group in saved for number in group["params"]]
        self._ask(local_optimizer.load_state_dict, ((_part(place, state_dict, ids),) for place in self._places))
        loaded = [copy.deepcopy(hyperparameters(new)) | {"params": old["params"]} for new, old in zip(saved, self.param_groups)]
        self.__setstate__({"param_groups": loaded})
        self._settle()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        mine = ("remote_optimizers", "_places", "_settled", "_sent")
        return super().__getstate__() | {name: self.__dict__[name] for name in mine}

    # -- hyperparameters

    def _settle(self) -> None:
        """The owners have the hyperparameters that are here."""
        self._settled = self._hyperparameters()
        self._sent = self._settled, b""

    def _changes(self) -> bytes:
        """See ``servers/local``. The same bytes again while nothing is set."""
        now = self._hyperparameters()
        sent, changes = self._sent
        if now == sent:
            return changes
        known = pickle.loads(changes) if changes else {}
        for at, (group, settled) in enumerate(zip(now, self._settled)):
            keys = [key for key in group if key in known.get(at, ()) or key not in settled or group[key] != settled[key]]
            known[at] = {key: group[key] for key in keys}
        changes = pickle.dumps(known, 5)
        self._sent = now, changes
        return changes

    def _hyperparameters(self) -> Hyperparameters:
        return [{key: _kept(value) for key, value in hyperparameters(group).items()} for group in self.param_groups]

    # -- calls

    def _ask(self, function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Call ``function(number of its LocalOptimizer, ...)`` at every owner, all at once. Returns the results."""
        return _wait_for_all(
            ask(rref, function, (fork_of(rref).rref, *own), future=True).future
            for (rref, _), own in zip(self._places, arguments)
        )


def _group(given: Any) -> dict[str, Any]:
    """A group of its own. ``TypeError`` if there is anything but references in it."""
    if not isinstance(given, dict):
        raise TypeError(f"params_rref is a list of RRefs, or of groups (dicts) of RRefs; one of the groups is {given!r}")
    rrefs = given["params"]
    rrefs = [rrefs] if isinstance(rrefs, RRef) else list(rrefs)
    strange = next((type(item).__name__ for item in rrefs if not isinstance(item, RRef)), None)
    if strange is not None:
        raise TypeError(f"a DistributedOptimizer can only optimize RRefs of tensors, but one of its parameters is a {strange}")
    return {**given, "params": rrefs}


def _by_owner(groups: Hyperparameters) -> tuple[dict[Any, local_optimizer.Members], dict[Any, dict[int, list[int]]]]:
    """The references by owner and group, and their indices over all groups by owner and group."""
    members: dict[Any, local_optimizer.Members] = {}
    indices: dict[Any, dict[int, list[int]]] = {}
    count = itertools.count()
    for at, group in enumerate(groups):
        for rref, index in zip(group["params"], count):
            owner = rref.owner()
            members.setdefault(owner, {}).setdefault(at, []).append(rref)
            indices.setdefault(owner, {}).setdefault(at, []).append(index)
    return members, indices


def _numbered(groups: Hyperparameters) -> Hyperparameters:
    """Copies of the groups with indices for parameters."""
    count = itertools.count()
    return [{**hyperparameters(group), "params": [next(count) for _ in group["params"]]} for group in groups]


def _part(place: _Place, state_dict: dict[str, Any], ids: list[Any]) -> dict[str, Any]:
    """The part of a ``state_dict`` that belongs to one owner. ``ids``: the numbers of the parameters in it, in their order."""
    groups = [
        {**hyperparameters(state_dict["param_groups"][at]), "params": [ids[index] for index in indices]}
        for at, indices in place.indices.items()
    ]
    state = state_dict["state"]
    return {"state": {i: state[i] for group in groups for i in group["params"] if i in state}, "param_groups": groups}


def _kept(value: Any) -> Any:
    """A copy of a value that may be changed in place, as a scheduler fills a learning rate that is a tensor; else the value."""
    return copy.deepcopy(value) if isinstance(value, torch.Tensor | list | dict) else value


def _wait_for_all(futures: Iterable[Any]) -> list[Any]:
    """The results. Raises the last error, if there are any, when all futures are done."""
    results, failed = [], None
    for future in list(futures):
        try:
            results.append(future.wait())
        except Exception as error:
            failed = error
    try:
        if failed is not None:
            raise failed
        return results
    finally:
        failed = None  # else this frame and the error would keep each other
