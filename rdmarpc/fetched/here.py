"""The forward of a wrapped model in this process, over copies of its parts (``replica``).

All of it is one graph here, so everything works that works in one process: gradients of gradients, a graph that is kept,
gradients of parameters by name, recomputation, any mode of torch's. Random numbers come from this process's generators. It is
as slow as fetching every part in every step.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from ..ground.advice import warn
from ..parts.parameter import Owners, RemoteParameter
from .originals import Originals
from .replica import Replica


def needed() -> str:
    """Why a forward that starts now is right in this process alone; empty: it is not."""
    native = torch._C
    if native._is_any_autocast_enabled():
        return "autocast is on"
    if parametrize._cache_enabled:
        return "torch.nn.utils.parametrize.cached() is on"
    saving: Any = native._autograd._top_saved_tensors_default_hooks(True)
    if saving is not None and (why := _saved_by(saving[0])):
        return why
    if native._current_graph_task_id() != -1:
        return "it is called within a backward"
    if native._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return "it is differentiated or mapped by torch.func, or in forward mode"
    if native._len_torch_dispatch_stack():
        return "a mode of torch follows its operations"
    if native._len_torch_function_stack() and (why := _followed()):
        return why
    if not torch.is_grad_enabled() and _checkpointed():
        return "torch.utils.checkpoint runs it once more in the backward"
    return ""


def _saved_by(pack: Any) -> str:
    """Why these hooks for what the backward needs are to see all of it."""
    module = getattr(pack, "__module__", "")
    if module == "torch.utils.checkpoint":
        return "torch.utils.checkpoint runs it once more in the backward"
    return "" if module == "torch.autograd.graph" else "hooks see what it saves for the backward"  # of torch: ``save_on_cpu``


def _followed() -> str:
    """Why the modes for functions are to see all of it: any does that does more than to choose a device for new tensors, and no
    other worker makes tensors without data because this process does."""
    modes = _get_current_function_mode_stack()
    if any(type(mode) is not DeviceContext for mode in modes):
        return "a mode of torch follows its operations"
    if any(mode.device.type == "meta" for mode in modes):
        return "torch's default device is meta"
    return ""


def _checkpointed() -> bool:
    """Whether ``checkpoint(..., use_reentrant=True)`` calls: nothing but the stack tells."""
    known = sys.modules.get("torch.utils.checkpoint")
    if known is None:
        return False
    code, frame = known.CheckpointFunction.forward.__code__, sys._getframe(2)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class Here:
    """The forward of one model, a ``parts.parameter.EagerForward``. One thread at a time."""

    def __init__(self, owners: Owners, top: nn.Module, originals: Originals) -> None:
        self.steps = 0
        self.calls = 0
        """Of single parts, in a forward that else runs elsewhere or outside of any."""
        self.replica = Replica(owners, top)
        self._owners, self._top, self._originals = owners, top, originals
        self._said: set[str] = set()

    def forward(self, args: Any, kwargs: Any, why: str) -> Any:
        """``why``: what makes it run here; said once, unless it is empty."""
        if why and why not in self._said:
            self._said.add(why)
            warn(f"a wrapped model runs in this process, over fetched parts: {why}")
        self.replica.refresh()
        self._owners.eager = self
        try:
            result = self._top.forward(*args, **kwargs)
            self._originals.check_graph(result, (args, kwargs))
        finally:
            self._owners.eager = None
            self.replica.give_back()  # also of a recomputation that ends early
        self.steps += 1
        self._watch(result)
        return result

    def _watch(self, result: Any) -> None:
        """Before the backward of a result, copies of weights that have changed since are made to say so to autograd."""

        def look(grads: Any) -> None:
            if self._owners.eager is None:
                self.replica.refresh()

        found = [leaf.grad_fn for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for function in dict.fromkeys(function for function in found if function is not None):
            function.register_prehook(look)

    def call(self, path: str, args: Any, kwargs: Any) -> Any:
        """A remote part is called: by the forward that runs, or outside of any."""
        running = self._owners.eager
        if running is self:
            return self._call(path, args, kwargs)
        if running is None:
            self._owners.settings.push()
        self.calls += 1
        self.replica.refresh()
        self._owners.eager = self
        try:
            return self._call(path, args, kwargs)
        finally:
            self._owners.eager = running
            self.replica.give_back()

    def _call(self, path: str, args: Any, kwargs: Any) -> Any:
        def real(leaf: Any) -> Any:
            return self.replica.leaf(leaf) if isinstance(leaf, RemoteParameter) else leaf

        if any(isinstance(leaf, RemoteParameter) for leaf in pytree.tree_leaves((args, kwargs))):
            args, kwargs = pytree.tree_map(real, (args, kwargs))
        self.replica.flag(self._top.get_submodule(path))
        return self.replica.parts[path](*args, **kwargs)

    def copy_of(self, path: str) -> nn.Module | None:
        """The copy of a module that a forward computes with which runs here; else while it is what its owner has."""
        return self.replica.parts.get(path) if self._owners.eager is self else self.replica.part(path)

    def changed(self, path: str, name: str) -> AbstractContextManager[nn.Module | None]:
        """Around what changes an attribute at its owner: gives the copy that a forward computes with here, which is to change,
        too."""
        if self._owners.eager is self:
            return self.replica.changed(path, name)
        self.replica.graphs.pop((path, name), None)
        return nullcontext()

    def fetch(self, path: str) -> Any:
        """A parameter or buffer that lies elsewhere."""
        above, _, name = path.rpartition(".")
        parameter = self._top.get_submodule(above)._parameters.get(name)
        if isinstance(parameter, RemoteParameter):
            self.replica.flag_leaf(parameter)
        if path in self.replica.tensors:
            return self.replica.tensors[path]
        return getattr(self.replica.parts[above], name)
