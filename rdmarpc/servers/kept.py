"""The parameters that a server keeps of one model, and the optimizers that step them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..transport import NotSupported, RdmaError
from .bundle import PRESENT, Room, padded
from .updates import counting_dtype, hyperparameters, leaves_gradients, numbers_of, read_numbers

ASKED = frozenset(("changed_gradients", "fill", "load", "load_optimizer_state", "optimizer", "optimizer_state"))
"""The methods of ``Kept`` that workers may call."""


class Kept:
    """The parameters of a server and their optimizers. Empty until the first worker has come (``hold``). Belongs to the
    server's thread."""

    def __init__(self) -> None:
        self.filled = False
        self._store: Room | None = None
        self._parameters: list[nn.Parameter] = []
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._numbers: dict[int, bytes] = {}
        self._set: tuple[int, bytes] | None = None
        self.changed: dict[int, tuple[bool, torch.Tensor] | None] = {}
        """Of the last step: what it has left of the gradients that it has changed, by position. ``None``, or (whether it is
        the same tensor still, its value)."""

    @property
    def store(self) -> Room:
        """The room where the parameters lie, in the order of the bundles."""
        if self._store is None:
            raise RdmaError("no worker of this model has come yet")
        return self._store

    def hold(self, store: Room, learns: int) -> None:
        """Take the tensors of a room as the parameters. The first ``learns`` of them need gradients."""
        self._store = store
        self._parameters = [nn.Parameter(tensor, at < learns) for at, tensor in enumerate(store.tensors)]

    def fill(self, values: list[torch.Tensor]) -> None:
        """The values of the start, from the first worker."""
        for place, value in zip(self.store.tensors, values):
            place.copy_(value)
        self.filled = True

    def optimizer(
        self, number: int, kind: type[torch.optim.Optimizer], given: dict[str, Any], groups: list[Any], counting: torch.dtype
    ) -> None:
        """Build an optimizer over these parameters; one that is there keeps its state and gets the new groups. ``given``: the
        arguments of its class. A group's ``params`` are their positions; ``counting``: see ``counting_dtype``. Every worker
        says the same; the first one builds. A hyperparameter that a group lacks, as after loading one of another class, is not
        made up: the step raises what it raises in one process."""
        if counting is not (mine := counting_dtype(kind)):
            why = f"{kind.__name__} counts in {counting} where the model is, and in {mine} at its server"
            raise NotSupported(why, hint="call torch.set_default_dtype in every process")
        real = [{**group, "params": [self._parameters[at] for at in group["params"]]} for group in groups]
        optimizer = self._optimizers.get(number)
        if optimizer is None:
            optimizer = self._optimizers[number] = kind(real, **given)
        del optimizer.param_groups[len(real) :]
        for group, new in zip(optimizer.param_groups, real):
            for key in hyperparameters(group).keys() - new.keys():
                del group[key]
            group.update(new)
        for new in real[len(optimizer.param_groups) :]:
            optimizer.add_param_group(new)
        self._members[number] = tuple(sorted(at for group in groups for at in group["params"]))
        self._numbers.pop(number, None)
        self._set = None

    def forget(self, number: int) -> None:
        """No worker has this optimizer any more."""
        for table in (self._optimizers, self._members, self._numbers):
            table.pop(number, None)
        if self._set is not None and self._set[0] == number:
            self._set = None

    def optimizer_state(self, number: int) -> dict[int, dict[str, Any]]:
        """Copies, per position of a parameter, in the optimizer's order; in host memory."""
        positions = {id(parameter): at for at, parameter in enumerate(self._parameters)}
        return {
            positions[id(parameter)]: tree_map_only(torch.Tensor, lambda t: t.clone() if t.is_cpu else t.cpu(), entries)
            for parameter, entries in self._optimizers[number].state.items()
        }

    def load_optimizer_state(self, number: int, state: dict[int, dict[str, Any]]) -> None:
        """The inverse, as ``Optimizer.load_state_dict`` has it. A parameter without entries has no state then."""
        optimizer = self._optimizers[number]
        numbers = {id(p): at for at, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        whole = optimizer.state_dict()
        whole["state"].update({numbers[id(self._parameters[at])]: entries for at, entries in state.items()})
        whole["state"] = {at: entries for at, entries in whole["state"].items() if entries}
        optimizer.load_state_dict(whole)

    def changed_gradients(self) -> dict[int, tuple[bool, torch.Tensor] | None]:
        """See ``changed``."""
        return self.changed

    def load(self, values: dict[int, torch.Tensor]) -> None:
        """Replace values. Every worker loads the same ones, here and in its own memory, before it sends gradients again."""
        with torch.no_grad():
            for at, value in values.items():
                self._parameters[at].copy_(value)

    def step(self, number: int, gradients: Sequence[tuple[Room, int]]) -> tuple[int, ...]:
        """One step of an optimizer, by the gradients of all workers: where they have landed, and the bytes of their notes.
        Returns the positions of the parameters that may have changed."""
        optimizer = self._optimizers.get(number)
        if optimizer is None:
            raise RdmaError(f"a step of optimizer {number}, which is not known here")
        self._take_numbers(number, optimizer, gradients)
        rooms = [room for room, _ in gradients]
        self.changed = {}
        if leaves_gradients(type(optimizer), optimizer.param_groups):
            self._set_gradients(number, rooms)
            optimizer.step()
        else:
            self._step_unknown(number, optimizer, rooms)
        return self._members[number]

    def _step_unknown(self, number: int, optimizer: torch.optim.Optimizer, rooms: list[Room]) -> None:
        """A class that may drop, change or keep gradients as it steps: it gets copies, each time anew."""
        self._set = None
        self._set_gradients(number, rooms, own=True)
        before = numbers_of(optimizer.param_groups)
        given = {at: (grad, grad._version) for at in self._members[number] if (grad := self._parameters[at].grad) is not None}
        optimizer.step()
        for at, (grad, version) in given.items():
            now = self._parameters[at].grad
            if now is not grad or grad._version != version:
                self.changed[at] = None if now is None else (now is grad, now.detach())
        if numbers_of(optimizer.param_groups) != before:
            why = f"a step of {type(optimizer).__name__} changes its groups, which its workers would not see"
            hint = "keep such values in its state, or make the optimizer without serve(): over the model's parameters"
            raise NotSupported(why, hint=hint)

    def _take_numbers(self, number: int, optimizer: torch.optim.Optimizer, gradients: Sequence[tuple[Room, int]]) -> None:
        numbers = {bytes(room.note[padded(len(room.bundle)) : note_bytes]) for room, note_bytes in gradients}
        if len(numbers) > 1:
            why = "the workers ask for steps with different hyperparameters, or of different parameters"
            raise NotSupported(why, hint="run the same schedule, and change groups in the same step, everywhere")
        (packed,) = numbers
        if self._numbers.get(number) != packed:
            read_numbers(optimizer.param_groups, struct.unpack(f"<{len(packed) // 8}d", packed))
            self._numbers[number] = packed

    def _set_gradients(self, number: int, rooms: list[Room], own: bool = False) -> None:
        marks = bytes(rooms[0].note[: len(rooms[0].bundle)])
        if len(rooms) == 1 and self._set == (number, marks):
            return  # the gradients are where they were
        self._set = (number, marks)
        # A frozen parameter among the members has no place for a gradient, hence no mark.
        members = [at for at in self._members[number] if at < len(marks)]
        for at in members:
            self._parameters[at].grad = None
        for room in rooms:
            for at in members:
                if room.note[at] == PRESENT:
                    parameter, gradient = self._parameters[at], room.tensors[at]
                    if parameter.grad is None:
                        parameter.grad = gradient.clone() if own else gradient
                    else:
                        parameter.grad.add_(gradient)
