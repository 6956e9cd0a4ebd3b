"""A worker that died, or is to leave, is replaced by another: its parts are built there again and filled from a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..parts.placing import Places
from ..parts.remote_part import TABLES_OF_HOOKS, RemotePart
from ..parts.stand_in import Shell
from ..parts.tables import TABLES
from ..transport import NotSupported
from . import optimizer as remote_optimizer
from .checkpoint import load_checkpoint
from .session import Session
from .state import State, is_wrapped, state_of


def replace(model: Any, old: str, new: str) -> dict[str, Any]:
    """Give the parts of worker ``old`` to ``new``, and go back to the last checkpoint that was saved or loaded: models,
    optimizers and generators of all workers, so that training goes on as it did after that checkpoint. Returns the state of
    that call, with its plain data as they were saved.

    The model's modules and remote parameters are new objects; ``model`` and its optimizers stay. The model must be the only
    wrapped one in that state. Raises ``ValueError`` for workers that are not in the group or have parts, ``NotSupported`` where
    there was no checkpoint or where settings of remote parts were changed after ``wrap``."""
    held = state_of(model)
    session, places = held.session, held.session.places
    if held.saved is None:
        raise NotSupported("there is no checkpoint of this model", hint="call rdmarpc.save_checkpoint() in the training loop")
    if old not in session.workers or (new != old and new in (*session.workers, places.caller)):
        raise ValueError(f"{old!r} must be a worker with parts of this model and {new!r} one without")
    if new not in session.agent.worker_names():
        raise ValueError(f"worker {new!r} is not in this group")
    if session.settings.number:
        raise NotSupported("attributes of remote parts were set after wrap(): a new owner would not have them")
    state, folder = held.saved
    if sum(is_wrapped(value) for value in state.values()) > 1:
        raise NotSupported("several wrapped models share the checkpoint: wrap them again and load it")
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    before = session.stand_in
    session.close()
    homes = {path: new if worker == old else worker for path, worker in places.homes.items()}
    renewed = Session(held.net, Places(homes, places.caller, places.devices), session.agent, *held.options)
    _carry_over(before, renewed.stand_in)
    state_now = State(held.net, renewed, held.method, held.chunks, held.options)
    state_now.saved = held.saved
    model._stand_over(state_now)
    _exchange(model, names, state)
    load_checkpoint(state, folder, successors={new: old})
    return state


def _carry_over(before: nn.Module, now: nn.Module) -> None:
    """Flags, hooks and attributes that were set here since ``wrap``."""
    known = dict(before.named_modules(remove_duplicate=False))
    for name, module in now.named_modules(remove_duplicate=False):
        then = known[name]
        if module is then:
            continue
        if isinstance(module, RemotePart):
            kept = (*TABLES_OF_HOOKS, "_is_full_backward_hook")
            vars(module).update({key: value for key, value in vars(then).items() if key in kept or key.endswith("_hooks")})
            module._place.prepended = then._place.prepended
            object.__setattr__(module, "training", then.training)
        elif name == "" or isinstance(module, Shell) or type(module) is type(then):
            own = {key: value for key, value in vars(then).items() if key not in (*TABLES, "_away")}
            vars(module).update({key: value for key, value in own.items() if not _has_modules(value)})
    flags = dict(before.named_parameters(remove_duplicate=False))
    for name, parameter in now.named_parameters(remove_duplicate=False):
        if parameter is not flags[name] and parameter.requires_grad != flags[name].requires_grad:
            parameter.requires_grad_(flags[name].requires_grad)


def _has_modules(value: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(value)
    return any(isinstance(leaf, nn.Module) for leaf in leaves)


def _exchange(model: Any, names: dict[int, str], state: dict[str, Any]) -> None:
    """Give the optimizers the parameters that stand for the old ones now."""
    now = dict(model.named_parameters(remove_duplicate=False))
    for value in state.values():
        if isinstance(value, torch.optim.Optimizer):
            for old in [p for p in value.state if id(p) in names and p is not now[names[id(p)]]]:
                value.state.pop(old)
            for group in value.param_groups:
                group["params"] = [now[names[id(p)]] if id(p) in names else p for p in group["params"]]
            remote_optimizer.forget(value)
