"""What ``rdmarpc.places.operators`` says of operators, beside what they do on plain tensors: hidden writes, random numbers,
sizes that depend on values."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from operators import bits, operators, samples, seed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rdmarpc.places.geometry import geometry
from rdmarpc.places.operators import operator


class Watch(TorchDispatchMode):
    """Notes every operator below autograd that does what its table does not say. ``found``: texts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}
        self.calls = 0
        self._forms: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, op = kwargs or {}, operator(func)
        if op.composite or op.in_python or op.geometry or op.refused:
            return func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        form = (func, torch.is_grad_enabled(), _form(args, op.numbers), tuple((k, _form(v, ())) for k, v in kwargs.items()))
        declared = {_memory(each) for each in op.operands_written(args, kwargs)}
        draws, sized = op.draws(args), op.dynamic and op.sized_by_values(args)
        before, state = [bits(each) for each in tensors], bytes(torch.get_rng_state().numpy())
        out = func(*args, **kwargs)
        self.calls += 1
        for position, (each, old) in enumerate(zip(tensors, before)):
            if _memory(each) not in declared and bits(each) != old:
                self.found[f"{op.name} writes its operand {position}"] = None
        if not draws and bytes(torch.get_rng_state().numpy()) != state:
            self.found[f"{op.name} draws random numbers"] = None
        if not sized:
            made = [geometry(each) if isinstance(each, torch.Tensor) else type(each) for each in tree_leaves(out)]
            if self._forms.setdefault(form, made) != made:
                self.found[f"{op.name} has results of sizes that depend on values"] = None
        return out


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _form(value: Any, numbers: Any) -> Any:
    """As posts see arguments (``tensor.post``)."""
    if isinstance(value, list | tuple):
        words = [*numbers, *[False] * len(value)]
        return tuple(type(each) if word and _number(each) else _form(each, ()) for each, word in zip(value, words))
    if isinstance(value, torch.Tensor):
        return geometry(value)
    return type(value), repr(value)


def _number(value: Any) -> bool:
    return type(value) in (int, float)


def watch(names: list[str], dtypes: list[torch.dtype], count: int) -> Watch:
    """Operators of the database, forward and with gradients, and in place, under watch; twice, with other values."""
    warnings.filterwarnings("ignore")
    seen = Watch()
    for name in names:
        op = operators()[name]
        for dtype in dtypes:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            for sample in samples(op, dtype, grad, count):
                for function in (op.op, op.inplace_variant):
                    if function is not None:
                        _both_values(function, sample, grad and function is op.op, seen)
    return seen


def _both_values(function: Any, sample: Any, grad: bool, seen: Watch) -> None:
    for other in (False, True):
        args, kwargs = tree_map_only(
            torch.Tensor, _copy if not other else _other, ((sample.input, *sample.args), sample.kwargs)
        )
        seed(3)
        try:
            with seen:
                results = [each for each in tree_leaves(function(*args, **kwargs)) if isinstance(each, torch.Tensor)]
                out = [each.real if each.is_complex() else each for each in results if each.requires_grad]
                wanted = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.requires_grad]
                if grad and out and wanted:
                    torch.autograd.grad(sum(each.sum() for each in out), wanted, allow_unused=True)
        except Exception:
            if not other:
                return  # other values may be none that it takes


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with other values."""
    copy = tensor.detach().clone()
    if copy.layout is torch.strided and (copy.is_floating_point() or copy.is_complex()):
        copy = (copy.flip(0) if copy.dim() else copy) * random.uniform(0.5, 0.9)
    return copy.requires_grad_(tensor.requires_grad)
