"""Names of torch that are replaced while tensors lie at workers: what passes by ``__torch_dispatch__``, and would read memory
that is not here, or compute something else. With plain tensors each does what torch's own does. And such tensors as arguments
and results of calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as modules
from torch.utils._pytree import tree_leaves

from ..base import here
from ..message.reducers import reduce_parameter
from ..message.serialize import Message, register_reducer
from ..transport import NotSupported
from .geometry import Geometry, view
from .names import DEVICE
from .recording import unseen
from .runners import running
from .tensor import OWN, RemoteTensor
from .wrap import exchange


def _data_with_places(torchs: Any) -> property:
    """``plain.data = remote`` takes a copy home. Torch asks nobody whether the two go together: the plain tensor would point to
    no memory, and its first use end the process."""

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if type(value) is RemoteTensor and type(tensor) is not RemoteTensor:
            value = value.detach().cpu()
        torchs.__set__(tensor, value)

    return property(torchs.__get__, set_data, doc=torchs.__doc__)


def _home(value: Any) -> Any:
    return value.detach().cpu().requires_grad_(value.requires_grad) if type(value) is RemoteTensor else value


def _by_element(torchs: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    """A method that calls Python for each element, which it finds by addresses: on copies here."""
    here.refuse("it calls a function of Python for each element of a tensor")
    found = _home(tensor)
    torchs(found, *map(_home, args))
    return tensor if found is tensor else tensor.copy_(found)


def _one_hot(torchs: Callable[..., torch.Tensor], tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Torch before 2.14 does not look at the classes of a tensor of a subclass."""
    if type(tensor) is RemoteTensor and tensor.numel():
        torch._assert_async(tensor.min() >= 0, "Class values must be non-negative.")
        if num_classes != -1:
            torch._assert_async(tensor.max() < num_classes, "Class values must be smaller than num_classes.")
    return torchs(tensor, num_classes)


def _lists(torchs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A collective on a list of tensors and one more. To the dispatcher it is a list of lists, into which it does not look: a
    backend would get null pointers."""
    operands = [*args, *kwargs.values()]
    if not any(type(each) is RemoteTensor for each in operands) and any(
        type(each) is RemoteTensor for each in tree_leaves(operands)
    ):
        why = f"torch.distributed.{torchs.__name__} of a plain tensor, and a list of tensors that lie at workers"
        raise NotSupported(why, hint="give it plain tensors, or such ones, alone")
    return torchs(*args, **kwargs)


def _apply(
    torchs: Callable[..., nn.Module], module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """``net.to(rpc.device(...))`` and ``net.cpu()`` set ``data`` of parameters, which changes no place. With
    ``set_swap_module_params_on_conversion`` torch would exchange them, but ``load_state_dict`` of any model as well, whose
    gradients and hooks are then lost."""

    def applied(tensor: torch.Tensor) -> torch.Tensor:
        found = fn(tensor)
        moved = (type(tensor) is RemoteTensor) is not (type(found) is RemoteTensor)
        if not moved or not isinstance(tensor, nn.Parameter) or found.device.type == "meta":
            return found
        if tensor.grad is not None and tensor.grad.device.type == "meta":  # it has nothing to be moved
            gradient, tensor.grad = fn(tensor.grad), None
            exchange(tensor, found.detach())
            tensor.grad = gradient
        else:
            exchange(tensor, found.detach())
        return tensor.data

    return torchs(module, applied, recurse)


def _to_dlpack(torchs: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The old way to share a tensor with other libraries does not ask its class, and would give them no memory."""
    return tensor.__dlpack__() if type(tensor) is RemoteTensor else torchs(tensor, *args, **kwargs)


def _save(torchs: Callable[..., Any], script: Any, *args: Any, **kwargs: Any) -> Any:
    """TorchScript writes memory into files, which a tensor at a worker does not have: they would be full of zeros."""
    if any(type(each) is RemoteTensor for each in _of_script(script)):
        why = "a file of what torch.jit has made over tensors that lie at a worker would not have them"
        raise NotSupported(why, hint="script or trace the model after close() or net.cpu(), or a copy of it")
    return torchs(script, *args, **kwargs)


def _of_script(script: Any) -> list[Any]:
    """What a scripted module or function keeps: attributes, and constants of its code."""
    found, codes = [], [script]
    if not isinstance(script, torch._C.ScriptFunction):
        modules = torch.jit._recursive.wrap_cpp_module(script).modules()
        found = [each._c.getattr(name) for each in modules for name in each._concrete_type.get_attributes()]
        codes = [script._get_method(name) for name in script._method_names()]
    graphs = [code.inlined_graph for code in codes]  # nodes do not keep them
    constants = [node.output().toIValue() for graph in graphs for node in graph.findAllNodes("prim::Constant")]
    return tree_leaves([*found, *constants])


def _on_the_cpu(torchs: Callable[..., None], made: Any, *args: Any, **kwargs: Any) -> None:
    """``torch.autocast(device.type)`` of a worker's device is that of the CPU, which is the device of its tensors."""
    torchs(
        made,
        *["cpu" if value == DEVICE else value for value in args],
        **{name: "cpu" if value == DEVICE else value for name, value in kwargs.items()},
    )


def _any_hook(torchs: Callable[[], Any]) -> bool:
    """Whether the program has global hooks of modules. ``torch.compile`` warns of these, since they are called for the module
    that it makes, too. To those of a recorder that is no matter."""
    hooks = [*modules._global_forward_pre_hooks.values(), *modules._global_forward_hooks.values()]
    if hooks and all(getattr(hook, "func", None) is unseen for hook in hooks):
        return bool(modules._global_backward_pre_hooks or modules._global_backward_hooks)
    return bool(torchs())


def _replace(ours: Callable[..., Any], names: str, *owners: Any) -> None:
    """In the place of these names ``ours`` is called, with torch's own and what that was called with."""

    def replacing(torchs: Any) -> Any:
        @functools.wraps(torchs)
        def call(*args: Any, **kwargs: Any) -> Any:
            return ours(torchs, *args, **kwargs)

        return call

    for owner in owners:
        for name in names.split():
            if hasattr(owner, name):  # functions of TorchScript lack some
                setattr(owner, name, replacing(getattr(owner, name)))


torch.Tensor.data = _data_with_places(torch.Tensor.data)  # type: ignore[assignment]
_replace(_by_element, "apply_ map_ map2_", torch.Tensor)
_replace(_one_hot, "one_hot", torch.nn.functional)
_replace(_to_dlpack, "to_dlpack", torch, torch.utils.dlpack)
_replace(
    _save, "save save_to_buffer _save_for_mobile _save_to_buffer_for_mobile", torch._C.ScriptModule, torch._C.ScriptFunction
)
_replace(_on_the_cpu, "__init__", torch.amp.autocast, torch.amp.GradScaler)
_replace(_apply, "_apply", nn.Module)
_replace(_any_hook, "_has_any_global_hook", modules)
if dist.is_available():
    _replace(_lists, "all_gather gather reduce_scatter scatter", dist, dist.distributed_c10d)


# -- as arguments and results of calls


def _reduce(value: RemoteTensor, message: Message) -> Any:
    """What lies at the receiver of a call does not cross: it arrives there as a copy of what it is there, and is kept here
    until the call is answered. Anything else comes here first; so do results, as nobody would keep them."""
    if isinstance(value, nn.Parameter):
        made, (plain, requires_grad, had) = reduce_parameter(value, message)
        return made, (plain, requires_grad, {name: had[name] for name in had if name not in (*OWN, "_is_param")})
    stream = value._handle.stream
    if message.reply or message.to != stream.info.number or value._meta.geometry.layout is not torch.strided:
        found = value.cpu()  # gradients go back through it
        return message.reduce(found if torch.is_grad_enabled() else found.requires_grad_(value.requires_grad))
    stream.synchronize()
    if not value.requires_grad:
        message.parts.append(value)
    where = stream.key, *value._words, value._meta.geometry.plain(), value.requires_grad
    return message.in_parts(value, (lying, where))


def lying(key: str, name: int, at: int, geometry: tuple[Any, ...], requires_grad: bool) -> torch.Tensor:
    """A copy of a tensor that lies here, in the memory that the stream ``key`` of the sender has names for."""
    found = running(key).values[name]
    return (found if at == -1 else view(found, Geometry.of_plain(geometry), at)).clone().requires_grad_(requires_grad)


register_reducer(RemoteTensor, _reduce)
