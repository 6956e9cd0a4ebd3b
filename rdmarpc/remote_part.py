"""What is left here of a module that lives at another worker: its names, its flags, and the way to its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .transport import NotSupported

if TYPE_CHECKING:
    from .session import Session


_SETTINGS = (bool, int, float, str, torch.dtype)


class RemotePart(nn.Module):
    """Mirrors one module (and has a mirror for each of its children), with a ``RemoteParameter`` for each parameter.

    ``train``, ``eval`` and ``requires_grad_`` work as ever and travel with the next step. ``entries`` are the shapes of what
    this very module contributes to ``state_dict``.
    """

    def __init__(self, original: nn.Module, session: Session, worker: str, path: str) -> None:
        super().__init__()
        self.training = original.training
        self._version = original._version
        self._kind, self._session, self._worker, self._path = type(original).__name__, session, worker, path
        self._entries = entries_of(original)
        # Settings, for an eager forward that asks for them.
        plain = {k: v for k, v in vars(original).items() if isinstance(v, _SETTINGS) and not k.startswith("_")}
        self.__dict__.update({key: value for key, value in plain.items() if key not in self.__dict__})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._session.eager is None:
            raise self._refuse("call the whole model; a single part cannot be called from here")
        return self._session.eager.call(self._path, args, kwargs)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children())

    def __getitem__(self, at: int) -> nn.Module:
        return list(self.children())[at]

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The owner's values, as of all the steps before, on the CPU."""
        destination = {} if destination is None else destination
        for key, value in self._session.ask_owner(self._worker, "state", self._path).items():
            destination[prefix + key] = value
        if hasattr(destination, "_metadata"):
            for name, module in self.named_modules():
                destination._metadata[(prefix + name).rstrip(".")] = {"version": module._version}
        return destination

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        entries = take_entries(
            self._entries, self._worker, state_dict, prefix, strict, missing_keys, unexpected_keys, error_msgs, [*self._modules]
        )
        if entries and not error_msgs:
            self._session.ask_owner(self._worker, "load", self._path, entries)

    def apply(self, fn: Callable[[nn.Module], Any]) -> RemotePart:
        """``module.apply(fn)`` at the owner; ``fn`` must be picklable."""
        self._session.ask_owner(self._worker, "call", self._path, "apply", (fn,))
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        raise self._refuse("it cannot be converted or moved from here; do that before wrap()")

    def _get_name(self) -> str:
        return f"Remote{self._kind}"

    def extra_repr(self) -> str:
        return f"on {self._worker!r}"

    def _refuse(self, why: str) -> NotSupported:
        return NotSupported(f"{self._path!r} lives on worker {self._worker!r}: {why}", peer=self._worker)


def entries_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what this very module contributes to ``state_dict``, in that order."""
    skipped = module._non_persistent_buffers_set
    tensors = {**module._parameters, **{k: v for k, v in module._buffers.items() if k not in skipped}}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}


def take_entries(
    wanted: Mapping[str, tuple[int, ...]],
    worker: str,
    state_dict: Mapping[str, Any],
    prefix: str,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
    others: Iterable[str],
) -> dict[str, torch.Tensor]:
    """The entries of one module, out of those under its prefix, in host memory; what does not fit goes into the lists as torch
    has it.
    ``others``: names below the prefix that are somebody else's."""
    entries = {}
    for name, shape in wanted.items():
        value = state_dict.get(prefix + name)
        if value is None:
            if strict:
                missing_keys.append(prefix + name)
        elif tuple(value.shape) != shape:
            error_msgs.append(f"size mismatch for {prefix + name}: {tuple(value.shape)} given, {shape} on worker {worker!r}")
        else:
            entries[name] = value.detach().cpu()
    if strict:
        known = {*wanted, *others}
        for key in state_dict:
            if key.startswith(prefix) and key[len(prefix) :].split(".")[0] not in known:
                unexpected_keys.append(key)
    return entries


def mirror(original: nn.Module, session: Session, worker: str, path: str, made: dict[int, Any]) -> RemotePart:
    """The stand-in of a module tree. ``made`` maps what was mirrored already: shared modules and parameters stay shared."""
    part = RemotePart(original, session, worker, path)
    made[id(original)] = part
    for name, parameter in original._parameters.items():
        if parameter is None:
            part.register_parameter(name, None)
            continue
        if id(parameter) not in made:
            made[id(parameter)] = session.new_parameter(parameter, worker, f"{path}.{name}")
        part.register_parameter(name, made[id(parameter)])
    for name, child in original._modules.items():
        if child is None:
            part._modules[name] = None
        else:
            known = id(child) in made
            part._modules[name] = made[id(child)] if known else mirror(child, session, worker, f"{path}.{name}", made)
    return part
