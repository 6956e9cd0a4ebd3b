"""What a command stream has to know of an operator of torch, read from its schema and tags once, and what these do not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch._ops import OpOverload

aten = torch.ops.aten
_TAGS = torch.Tag
_HIDDEN_WRITES = {"aten::native_batch_norm": (3, 4), "aten::cudnn_batch_norm": (3, 4), "aten::miopen_batch_norm": (3, 4)}
"""Operators that write operands which their schema calls read: positions of these. ``tests/rpc/places`` compares the table with
torch's operator database."""
_VALUE_SIZED = (
    "aten::_ctc_loss", "aten::_pack_padded_sequence", "aten::_pad_packed_sequence", "aten::_padded_dense_to_jagged_forward",
    "aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::segment_reduce", "aten::nested_to_padded_tensor",
    "aten::_to_dense", "aten::_new_zeros_with_same_feature_meta", "aten::_linalg_check_errors",
)  # fmt: skip
"""Operators whose results have sizes, or a memory order, that depend on values, though no tag says so; or, of
``_new_zeros_with_same_feature_meta``, on where its operands begin. ``_linalg_check_errors`` raises by values: programs catch
that, and try again with another matrix."""
_READ_HERE = {"aten::_pack_padded_sequence": 1}
"""Results whose values torch reads through their address, whatever they are results of: they are brought here."""
_FILLS = ("bernoulli_.float", "uniform_", "normal_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_")
"""Random operators in place that do not read what they write."""
_CHANCE = {
    "aten::native_dropout": lambda args: args[2] is not False and args[1] > 0.0,
    "aten::rrelu_with_noise": lambda args: len(args) > 4 and args[4],
    "aten::rrelu_with_noise_": lambda args: len(args) > 4 and args[4],
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda args: len(args) > 3 and args[3] > 0.0,
    "aten::_scaled_dot_product_flash_attention": lambda args: len(args) > 3 and args[3] > 0.0,
    "aten::_scaled_dot_product_efficient_attention": lambda args: len(args) > 5 and args[5] > 0.0,
    "aten::_scaled_dot_product_cudnn_attention": lambda args: len(args) > 5 and args[5] > 0.0,
    "aten::_scaled_dot_product_attention_math": lambda args: len(args) > 4 and args[4] > 0.0,
    "aten::_scaled_dot_product_attention_math_for_mps": lambda args: len(args) > 4 and args[4] > 0.0,
    "aten::_scaled_dot_product_fused_attention_overrideable": lambda args: len(args) > 4 and args[4] > 0.0,
    "aten::_fused_sdp_choice": lambda args: False,
    "aten::lstm.input": lambda args: False,
}
"""Operators that draw random numbers only with these positional arguments."""
_GEOMETRY_IN_PLACE = ("t_", "squeeze_", "unsqueeze_", "transpose_", "as_strided_", "swapaxes_", "swapdims_", "detach_")
_NO_DATA = (aten._unsafe_view.default,)
"""Views in all but their schema."""
_NOT_KEPT = (aten.as_strided.default, aten.view.dtype, aten.view_as_real.default, aten.view_as_complex.default)
"""Views whose offset is not that of their operand plus a constant."""
REPLACED = "what a tensor at a worker lies over cannot be replaced (`.data =` does that)"
RESIZED = "a tensor that lies at a worker is not resized in place: give it its shape before it is moved"
TURNED = "torch would run a view at a worker again over another shape than this one: gradients would be wrong"
REFUSED = {
    "aten::set_": REPLACED,
    "aten::shallow_copy_data_": REPLACED,
    "aten::resize_": RESIZED,
    "aten::resize_as_": RESIZED,
    "aten::_make_dual": "forward-mode AD is not known to tensors that lie at workers",
    "aten::_fw_primal": "forward-mode AD is not known to tensors that lie at workers",
}
"""Operators that are refused, and why."""
_IDENTITY = ("_native_multi_head_attention",)
"""Operators that read only, and compute otherwise where operands are one object."""
_NUMBERS = ("number", "float", "Optional[number]", "Optional[float]", "Tensor", "List[number]", "List[float]")


class Operator:
    """``func``'s rules. ``written``: positions, or names of keyword arguments, of the operands that it writes."""

    def __init__(self, func: OpOverload) -> None:
        schema, tags = func._schema, func.tags
        self.func, self.name = func, func.name()
        base = self.name.partition(".")[0]
        space, _, bare = base.partition("::")
        self.foreign = space != "aten"
        """Not one of torch's own, whose tags are complete but for what this file says."""
        arguments, returns = schema.arguments, schema.returns
        written: list[int | str] = []
        for position, argument in enumerate(arguments):
            if _written(argument):
                written.append(argument.name if argument.kwarg_only else position)
        written += _HIDDEN_WRITES.get(base, ())
        self.written = tuple(written)
        self.mutable = schema.is_mutable
        self.geometry = bare in _GEOMETRY_IN_PLACE
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        self.composite = has_kernel(self.name, "CompositeImplicitAutograd") and not has_kernel(self.name, "CPU")
        """Made of others: it comes here as itself only where autograd is out of the way (inference mode)."""
        self.tracked = has_kernel(self.name, "ADInplaceOrView")
        """Whether torch itself sees to the versions of what it writes, and makes its result a view, then too."""
        own = self.name.replace("::", "/")
        in_python = any(f"{own}/{key}" in torch.library._impls for key in ("CPU", "CompositeExplicitAutograd"))
        self.in_python = in_python and space != "rdmarpc"
        """Registered from Python (``torch.library``): workers do not know it, and it is made of operators that they know."""
        aliased = any(r.alias_info is not None for r in returns)
        self.view = not self.mutable and not self.composite and (aliased or func in _NO_DATA)
        self.kept = func not in _NOT_KEPT
        sets = [a.alias_info.before_set for a in arguments if _written(a)]
        self.returned = tuple(
            next((p for p, a in zip(self.written, sets) if _written(r) and r.alias_info.before_set == a), None) for r in returns
        )
        """For each result the written operand that it is."""
        self.foreach = bare.startswith(("_foreach_", "_fused_ad", "_fused_sgd"))
        self.foreach |= bare == "_amp_foreach_non_finite_check_and_unscale_"
        self.raises_versions = bare.startswith("_foreach_") and self.mutable
        """Whether its kernel, not autograd, raises the version of what it writes."""
        self.dynamic = _TAGS.dynamic_output_shape in tags or _TAGS.data_dependent_output in tags or base in _VALUE_SIZED
        self.dynamic |= self.name in _VALUE_SIZED
        self.random = _TAGS.nondeterministic_seeded in tags
        self.chance = _CHANCE.get(self.name) or _CHANCE.get(base)
        self.fills = self.random and (self.name[6:] in _FILLS or (bare in _FILLS and bare != "bernoulli_"))
        pointwise = _TAGS.pointwise in tags or self.mutable
        self.numbers = tuple(pointwise and str(a.type) in _NUMBERS for a in arguments)
        """For each argument whether its number travels as a word: results depend on it by nothing but value."""
        self.named_numbers = frozenset(a.name for a, number in zip(arguments, self.numbers) if number)
        self.refused = REFUSED.get(self.name) or REFUSED.get(base)
        self.read_here = _READ_HERE.get(base)
        self.identity = bare in _IDENTITY or (self.mutable and not self.foreach)
        """Whether it asks if operands share memory, and, where memory has gaps, if they are one object."""
        self.named_at = 3 if self.written == (0,) else -2 if self.written == ("out",) else 0
        """Which word of a post is the name of the single operand that it writes; 0: there are more, or none."""
        self.precise = "conv" in bare or "rnn" in bare
        """Whether it asks for precisions of its own (``flags.precisions``)."""
        placing = any(argument.name == "device" for argument in arguments)
        otherwise = self.refused or self.in_python or self.composite
        self.plain_view = self.view and not otherwise
        """Whether its results are views of a tensor, which need no post."""
        self.collective = space in ("c10d", "_c10d_functional", "_c10d_functional_autograd")
        special = otherwise or placing or self.collective or self.read_here
        self.plain = not (special or self.view or self.geometry or self.foreach or self.random)
        """Whether it is posted as it is."""
        self.first_written = self.written == (0,) and self.returned == (0,)

    def draws(self, args: tuple[Any, ...]) -> bool:
        """Whether it takes random numbers with these arguments."""
        return self.random and (self.chance is None or bool(self.chance(args)))

    def sized_by_values(self, args: tuple[Any, ...]) -> bool:
        if not self.dynamic:
            return False
        if self.func is aten.index.Tensor:
            return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        return True

    def argument(self, where: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument with this position or name, however it is given; ``None``: it is not."""
        if isinstance(where, str):
            return kwargs.get(where)
        return args[where] if where < len(args) else kwargs.get(self.func._schema.arguments[where].name)

    def raise_versions(self, args: tuple[Any, ...]) -> None:
        """Of what it has written, where its kernel would: not below autograd."""
        if not self.raises_versions:
            return
        torch.autograd.graph.increment_version([each for each in args[0] if not each.is_inference()])
        if not torch.is_inference_mode_enabled() and any(each.is_inference() for each in args[0]):  # as in torch, it is written
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode is not allowed.")

    def operands_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        found: list[Any] = []
        for where in self.written:
            value = self.argument(where, args, kwargs)
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, list | tuple):
                found += [each for each in value if isinstance(each, torch.Tensor)]
        return found


def _written(value: Any) -> TypeGuard[Any]:
    return value.alias_info is not None and value.alias_info.is_write


known_operators: dict[int, Operator] = {}
"""By ``id`` of the function, which an ``Operator`` keeps: functions have a hash in Python."""


def operator(func: OpOverload) -> Operator:
    """The rules of ``func``."""
    found = known_operators.get(id(func))
    if found is None:
        found = known_operators[id(func)] = Operator(func)
    return found


# -- what runs where the memory is a GPU's

# PyTorch chooses operators for the CPU, which is what the caller's tensors say they lie on. In the place of some runs the
# function that they were chosen for, so that PyTorch chooses again. Their backward runs that forward once more, because what it
# would keep differs from device to device.

Tensor = torch.Tensor


def at_device(func: Any, device: torch.device) -> Any:
    """What runs for an operator on this device."""
    return func if device.type == "cpu" else _CHOSEN.get(func, func)


@contextmanager
def with_autograd(*keys: str) -> Iterator[None]:
    """Autograd, where a kernel or a stream's thread does without it, and these dispatch keys."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", *keys):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def _gradients(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """The gradients of ``inputs``; zeros where there is none."""
    with with_autograd():
        leaves = [each.detach().requires_grad_() for each in inputs]
        given = [(out, grad) for out, grad in zip(function(*leaves), grads) if grad is not None]
        outs, grads = zip(*given)
        return torch.autograd.grad(outs, leaves, grads, allow_unused=True, materialize_grads=True)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, *, attn_mask: Any = None, scale: Any = None
) -> Any:
    return F.scaled_dot_product_attention(q, k, v, attn_mask, p, causal, scale=scale), q.new_zeros(0, dtype=torch.float32)


def _attention_backward(*args: Any, attn_mask: Any = None, scale: Any = None) -> Any:
    """(grad, q, k, v, out, kept, p, causal)"""
    grad, *inputs, _, _, p, causal = args
    return _gradients(
        lambda q, k, v: _attention(q, k, v, p, causal, attn_mask=attn_mask, scale=scale)[:1], tuple(inputs), (grad,)
    )


def _lstm(x: Tensor, w: Tensor, u: Tensor, b: Tensor, c: Tensor, hx: Tensor, cx: Tensor, reverse: bool, biases: bool) -> Any:
    """One layer in one direction; ``x``: (time, batch, features)."""
    weights = [w, u, b, c] if biases else [w, u]
    x = x.flip(0) if reverse else x
    out, hy, cy = torch.lstm(x, (hx[None], cx[None]), weights, biases, 1, 0.0, True, False, False)
    return out.flip(0) if reverse else out, hy[0], cy[0]


def _rnn_layer(*args: Any) -> Any:
    """(x, four weights, hx, cx, reverse, batch_sizes, mode, hidden_size, num_layers, has_biases, ...)"""
    x, w, u, b, c, hx, cx, reverse = args[:8]
    return *_lstm(x, w, u, b, c, hx, cx, reverse, args[12]), x.new_zeros(0)


def _rnn_layer_backward(*args: Any) -> Any:
    """(x, four weights, hx, cx, out, hy, cy, their gradients, reverse, mode, hidden_size, num_layers, has_biases, ...)"""
    reverse, biases = args[13], args[17]
    return _gradients(lambda x, w, u, b, c, hx, cx: _lstm(x, w, u, b, c, hx, cx, reverse, biases), args[:7], args[10:13])


_CHOSEN: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.mkldnn_rnn_layer.default: _rnn_layer,
    aten.mkldnn_rnn_layer_backward.default: _rnn_layer_backward,
}
