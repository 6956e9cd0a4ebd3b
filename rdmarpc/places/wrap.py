"""``wrap``: parts of a model lie at workers, and the program goes on as if they were here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from ..calls import agent as _agent
from ..transport import NotSupported
from .placement import Where, home, resolve
from .stream import Stream, stream_to
from .tensor import RemoteTensor, at_place


def wrap(net: nn.Module, placement: Mapping[str, str | Sequence[str]], *, outputs: str = "there") -> Any:
    """Move the parameters and buffers of parts of ``net`` to workers."""
    if outputs not in ("there", "here"):
        raise ValueError(f'outputs={outputs!r} is not known; use "there" or "here"')
    agent = _agent.current()
    workers = agent.worker_names()
    places = resolve(net, placement, workers, lambda rank: agent.resolve(rank).name)
    move(net, places)
    if outputs == "here":
        net.register_forward_hook(lambda module, args, found: bring_home(found))
    return net


def bring_home(value: Any) -> Any:
    """A value of lists, tuples and dictionaries, with its remote tensors copied here."""
    return tree_map_only(RemoteTensor, lambda tensor: tensor.cpu(), value)


def move(net: nn.Module, places: Mapping[str, list[Where]]) -> None:
    """Move tensors to their places, in place: who holds a parameter holds it afterwards. What shares memory moves together, to
    where the first of them goes."""
    found: dict[int, tuple[Where, list[torch.Tensor]]] = {}
    loose: dict[int, list[torch.Tensor]] = {}
    for path, module in net.named_modules(remove_duplicate=False):
        where = home(places, path)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or type(tensor) is RemoteTensor:
                continue
            if is_lazy(tensor):
                raise NotSupported(f"{path or type(net).__name__} has a parameter that has no shape yet: run it once first")
            key = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
            if where is None and key not in found:
                loose.setdefault(key, []).append(tensor)
                continue
            entry = found.setdefault(key, (where, loose.pop(key, [])))  # type: ignore[arg-type]
            if not any(tensor is each for each in entry[1]):
                entry[1].append(tensor)
    for where, tensors in found.values():
        place = stream_to(*where)
        if place is not None:
            move_tensors(tensors, place)


def move_tensors(tensors: list[torch.Tensor], place: Stream) -> None:
    """Move tensors over one storage to a place; these very objects lie there then."""
    first, memo = tensors[0], {}
    if len(tensors) > 1 and first.layout is torch.strided:
        whole = torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
        memo["whole"] = at_place(whole, place)
    for tensor in tensors:
        _exchange(tensor, _moved(tensor, place, memo.get("whole")))


def _moved(tensor: torch.Tensor, place: Stream, whole: torch.Tensor | None) -> torch.Tensor:
    from .geometry import geometry
    from .stream import meta_of
    from .tensor import wrapper

    if whole is None:
        found = at_place(tensor.detach(), place)
    else:
        found = wrapper(whole._handle, meta_of(geometry(tensor)), tensor.storage_offset(), tensor.storage_offset())
    found._handle.anchor = True
    return found


def _exchange(tensor: torch.Tensor, found: torch.Tensor) -> None:
    """Make ``tensor`` the remote one, with its attributes, hooks and gradient."""
    if isinstance(tensor, nn.Parameter):
        made: torch.Tensor = nn.Parameter(found, tensor.requires_grad)
    else:
        made = found.requires_grad_(tensor.requires_grad)
    made._handle, made._meta, made._offset, made._at = found._handle, found._meta, found._offset, found._at
    made.__dict__.update(tensor.__dict__)
    gradient, hooks, after = tensor.grad, tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    tensor.grad = tensor._backward_hooks = tensor._post_accumulate_grad_hooks = None
    try:
        torch._C._swap_tensor_impl(tensor, made)
    except RuntimeError as error:
        tensor.grad, tensor._backward_hooks, tensor._post_accumulate_grad_hooks = gradient, hooks, after
        raise NotSupported(
            f"a tensor of shape {tuple(tensor.shape)} cannot be moved: {error}",
            hint="wrap a model while no graph of an earlier forward is kept",
        ) from error
    tensor.__class__, made.__class__ = made.__class__, tensor.__class__
    tensor.__dict__, made.__dict__ = made.__dict__, tensor.__dict__
    if gradient is not None:
        tensor.grad = at_place(gradient, found._handle.stream)
    if hooks is not None:
        tensor._backward_hooks = hooks
    if after is not None:
        tensor._post_accumulate_grad_hooks = after
