"""What one module contributes to ``state_dict``, and what it takes out of one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ..transport import NotSupported
from .parameter import Owners

EXTRA = "_extra_state"
"""The name of ``get_extra_state`` in a state."""


def entries_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what this very module contributes to ``state_dict``, in that order."""
    skipped = module._non_persistent_buffers_set
    tensors = {**module._parameters, **{k: v for k, v in module._buffers.items() if k not in skipped}}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}


def loads_itself(module: nn.Module) -> bool:
    """Whether something in a module takes part in ``load_state_dict``: hooks, methods of its own, extra state."""
    return any(
        inner._load_state_dict_pre_hooks
        or inner._load_state_dict_post_hooks
        or (loads_by_method(type(inner)) and not type(inner)._load_from_state_dict.__module__.startswith("torch.nn.modules."))
        or type(inner).set_extra_state is not nn.Module.set_extra_state
        for inner in module.modules()
    )


def loads_by_method(kind: type[nn.Module]) -> bool:
    """Whether a class has a way of its own to load what lies in its modules."""
    return kind._load_from_state_dict is not nn.Module._load_from_state_dict


class Loading:
    """What ``load_state_dict`` gives the modules of a part that is loaded as a whole: it calls each of them, with the metadata
    of that one. ``left``: the prefixes of those that it has still to call."""

    def __init__(self, part: Any, path: str, prefix: str, state: Mapping[str, Any]) -> None:
        self.part, self.path, self.prefix = part, path, prefix
        self.state = {key: v.detach().cpu() if isinstance(v, torch.Tensor) else v for key, v in state.items()}
        self.metadata: dict[str, dict[str, Any]] = {}
        self.left = set(_prefixes(part, prefix))

    def called(self, prefix: str, metadata: Mapping[str, Any]) -> bool:
        """A module has been called. Returns whether it was the last."""
        self.left.discard(prefix)
        self.metadata[prefix] = dict(metadata)
        return not self.left


def _prefixes(module: nn.Module, prefix: str) -> Iterator[str]:
    yield prefix
    for name, child in module._modules.items():
        if child is not None:
            yield from _prefixes(child, f"{prefix}{name}.")


class Home(Protocol):
    """Where the tensors of one module are, and what they contribute to ``state_dict`` (``entries_of``)."""

    owners: Owners
    worker: str
    path: str
    entries: dict[str, tuple[int, ...]]

    def refusal(self, why: str) -> NotSupported:
        """The error for what cannot be done from here."""


def load_entries(
    home: Home,
    others: Collection[str],
    state_dict: Mapping[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """``nn.Module._load_from_state_dict`` of a module whose tensors are elsewhere: its entries, out of those under its prefix,
    go to the owner; what does not fit goes into the lists as torch has it. ``others``: names below the prefix that are somebody
    else's."""
    if metadata.get("assign_to_params_buffers"):
        raise home.refusal("load_state_dict(..., assign=True) cannot put other tensors there")
    entries = {}
    for name, shape in home.entries.items():
        key = prefix + name
        if key in state_dict:
            value, wrong = _fitting(key, state_dict[key], shape)
            if wrong:
                error_msgs.append(wrong)
            else:
                entries[name] = value
        elif strict:
            missing_keys.append(key)
    for key in state_dict if strict else ():
        if key.startswith(prefix):
            name, below, _ = key[len(prefix) :].partition(".")
            if not (name in others if below else name in home.entries or (name == EXTRA and name in others)):
                unexpected_keys.append(key)
    if entries:
        home.owners.state_copies.settle({prefix + name for name in entries})
        home.owners.ask_owner(home.worker, "load", home.path, entries)


def _fitting(key: str, value: Any, shape: tuple[int, ...]) -> tuple[torch.Tensor, str]:
    """A value for an entry of this shape, and why it is none, in the words of ``nn.Module``."""
    if not isinstance(value, torch.Tensor):
        return torch.empty(0), (
            f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like object from checkpoint but '
            f"received {type(value)}"
        )
    if not shape and value.shape == (1,):  # of states from before torch 0.4
        value = value[0]
    if value.shape != shape:
        return value, (
            f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
            f"the shape in current model is {torch.Size(shape)}."
        )
    return value.detach().cpu(), ""
