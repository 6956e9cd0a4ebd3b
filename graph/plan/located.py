"""On which device each value of a captured forward is, and what its operations must be told of that.

Every value has two devices: its *own*, which it had in the capture (where the model alone would have it), and the one where it
*is*. An operation has one such pair, (own, real), for all of it: tensors that are its own are taken from the real one, and so
are its results. The pair comes from

* what the placement gives its module, or the module in whose forward it runs;
* else, for a module, from where its tensors lie;
* else from where its first tensor is, at this worker; one that comes here from another worker is, at the caller, where the
  model's input is, and elsewhere on its own device;

and for the model's inputs and results from the first input: so the result is on the device of the first input, if that is
where the model alone would have it. A tensor that is elsewhere is moved in front of the operation, by one of its own, through
which gradients come back; one that comes from another worker lands where its first reader there wants it.

A device that the forward names (``device=x.device``, ``.cpu()``) is own, and becomes the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._device import _device_constructors

from ..trace.devices import CPU, Devices
from .program import Instruction, Ref, Segment

Pair = tuple[torch.device, torch.device]
At = Callable[[str], torch.device | None]
"""Where a value is at one worker; ``None``: it is not there yet."""
_MOVES = ("cpu", "cuda")


class Located:
    """Of one capture. ``inputs``: pairs of the tensor inputs, ``path`` the module that is captured. Filled by ``analyze``, from
    front to back."""

    def __init__(self, devices: Devices, inputs: Sequence[Pair], path: str = "", default: torch.device | None = None) -> None:
        self.devices, self.inputs = devices, list(inputs)
        base = devices.single(path)
        first = next((pair for pair in inputs if pair[0] == base), inputs[0] if inputs else None)
        own = base or devices.own(path) or CPU
        self.caller: Pair = first or (own, default or own)
        """Own and real device of what the caller has, unless something else says otherwise."""
        self.own: dict[str, torch.device] = {}
        self.made: dict[str, torch.device] = {}
        """Where a value is at the worker that makes it."""
        self.landing: dict[tuple[str, str], torch.device] = {}
        """Value and worker that receives it -> where it lands."""
        self._moved: dict[tuple[str, str, int, torch.device], str] = {}

    def fresh(self) -> Located:
        """Of the same capture, not filled."""
        made = copy(self)
        made.own, made.made, made.landing, made._moved = {}, {}, {}, {}
        return made

    def define(self, name: str, own: torch.device, pair: Pair) -> None:
        """A value, made by an operation of that pair."""
        self.own[name] = own
        self.made[name] = pair[1] if own == pair[0] else own

    def attribute(self, name: str, path: str, own: torch.device) -> None:
        """A parameter, buffer or constant."""
        given = self.devices.given(path)
        self.own[name], self.made[name] = own, given if given is not None and self.devices.own(path) is not None else own

    def at(self, name: str, worker: str, home: str) -> torch.device | None:
        """Where a value made at ``home`` is at this worker; ``None``: it is not there yet."""
        return self.made[name] if home == worker else self.landing.get((name, worker))

    def pair(
        self, node: fx.Node, tensors: Sequence[str], here: At, result: torch.device, scoped: bool, at_caller: bool
    ) -> Pair:
        """Of an operation with these tensor arguments, whose result is its own on ``result``. ``scoped``: it runs at the worker
        that the placement gives the module in whose forward it is."""
        module = node.op == "call_module"
        path = str(node.target) if module else str(node.meta.get("scope", ""))
        given = self.devices.given(path) if module or scoped else None
        lies = self.devices.own(path) if module or scoped else None
        # Scalars may be on the CPU whatever they are combined with.
        lead = next((name for name in tensors if self.own[name].type != "cpu"), tensors[0] if tensors else None)
        own = lies if module and lies is not None else result if lead is None else self.own[lead]
        if given is not None and (lies is None or own == lies):
            return own, given
        if module and lies is not None:
            return own, own
        found = None if lead is None else here(lead)
        if found is None and at_caller and own == self.caller[0]:
            return self.caller
        return own, found or own

    def place(
        self,
        node: fx.Node,
        target: Any,
        arguments: tuple[Any, Any],
        pair: Pair,
        here: At,
        result: torch.device,
        move: Callable[[str, torch.device], str],
    ) -> tuple[Any, Any, Any]:
        """(target, args, kwargs) of an operation whose tensors are where its pair has them; the others as in ``pair``.
        ``move(name, device)`` gives the name under which that value is there."""
        own, real = pair

        def settle(leaf: Any) -> Any:
            if isinstance(leaf, Ref) and leaf.name in self.own:
                mine = self.own[leaf.name]
                return Ref(move(leaf.name, real if mine == own else here(leaf.name) or mine))
            return self._real(leaf, pair) if isinstance(leaf, torch.device) else leaf

        args, kwargs = map_aggregate(arguments, settle)
        kwargs = dict(kwargs)
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = self._real(torch.device(kwargs["device"]), pair)
        if node.op == "call_function" and real != result == own and "device" not in kwargs and target in _device_constructors():
            kwargs["device"] = real
        if node.op == "call_method" and target in _MOVES:
            return "to", (args[0], self._real(torch.device(target, *args[1:2]), pair)), kwargs
        if node.op == "call_method" and target == "to" and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], self._real(torch.device(args[1]), pair), *args[2:])
        return target, args, kwargs

    @staticmethod
    def _real(device: torch.device, pair: Pair) -> torch.device:
        own, real = pair
        return real if device == own or (device.type == own.type and device.index is None) else device

    def moved(self, name: str, segment: Segment, device: torch.device) -> tuple[str, bool]:
        """The name of a value on another device in this segment, and whether it is new: made by an instruction that is added
        now."""
        key = (name, segment.worker, segment.level, device)
        known = self._moved.get(key)
        if known is not None:
            return known, False
        new = self._moved[key] = f"{name} on {device} at {segment.worker}, level {segment.level}"
        segment.instructions.append(Instruction("method", "to", (Ref(name), device), {}, (new,), False))
        self.own[new], self.made[new] = self.own[name], device
        return new, True
