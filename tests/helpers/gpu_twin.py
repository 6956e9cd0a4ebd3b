"""One process that computes with the devices of a placement: what a model with stages on GPUs is compared with. A GPU rounds
otherwise than a processor, so where a part computes is a part of the question."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only


def to(device: torch.device | None, values: Any) -> Any:
    return values if device is None else tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)


class Together(TorchFunctionMode):
    """An operation that stands between parts computes where its first tensor is. Scalars may be anywhere."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if len({tensor.device for tensor in tensors}) > 1:
            args = to(tensors[0].device, args)
        return function(*args, **(kwargs or {}))


def computing_at(
    net: nn.Module, devices: dict[str, torch.device | None], *, traced: bool = True, cut: Collection[str] = ()
) -> nn.Module:
    """This model, with these parts on these devices (``None``: where they lie), whatever they are given; every other module
    computes where its own parameters are. What stands between parts computes where its input is, if the model is ``traced``.
    Where Python runs the forward, that computes where the model's input is, also in the parts of which another is ``cut`` out.
    The result is where the model's input is."""
    input_at = [torch.device("cpu")]
    together = Together()
    whole = devices.keys() - set(cut)

    def begin(_: nn.Module, args: Any) -> None:
        input_at[0] = args[0].device
        together.__enter__()

    def end(_: nn.Module, __: Any, result: Any) -> Any:
        together.__exit__(None, None, None)
        return to(input_at[0], result)

    def at(path: str) -> torch.device | None:
        """Where a module computes, now: somebody may have moved it. ``None``: where its input is."""
        return next((parameter.device for parameter in net.get_submodule(path).parameters()), devices.get(path))

    def around(path: str) -> str:
        """The part around a module, if that computes elsewhere than the model's input is."""
        ends = (dot for dot in reversed(range(len(path))) if path[dot] == ".")
        return next((path[:end] for end in ends if path[:end] in whole), "")

    for path, device in devices.items():
        if device is not None:
            net.get_submodule(path).to(device)
    for path, module in net.named_modules():
        layer = bool(path) and not list(module.children()) and bool(list(module.parameters()))
        if path in whole or layer:
            module.register_forward_pre_hook(lambda _, args, path=path: to(at(path), args))
        outer = around(path)
        if (path in whole and (outer or not traced)) or (layer and cut and not outer):
            module.register_forward_hook(lambda _, __, result, outer=outer: to(at(outer) if outer else input_at[0], result))
    net.register_forward_pre_hook(begin, prepend=True)
    net.register_forward_hook(end, always_call=True)
    return net
