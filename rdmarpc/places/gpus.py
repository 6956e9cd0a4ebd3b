"""Operators that PyTorch chooses for the CPU, which is what the caller's tensors say they lie on, and what runs in their place
where the memory is a GPU's: the function they were chosen for, so that PyTorch chooses again. Their backward runs that forward
once more, because what it would keep differs from device to device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def at_device(func: Any, device: torch.device) -> Any:
    """What runs for an operator on this device."""
    return func if device.type == "cpu" else _CHOSEN.get(func, func)


@contextmanager
def _autograd() -> Iterator[None]:
    """Autograd, where a stream's thread does without it."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def _gradients(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """The gradients of ``inputs``; zeros where there is none."""
    with _autograd():
        leaves = [each.detach().requires_grad_() for each in inputs]
        given = [(out, grad) for out, grad in zip(function(*leaves), grads) if grad is not None]
        outs, grads = zip(*given)
        return torch.autograd.grad(outs, leaves, grads, allow_unused=True, materialize_grads=True)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, *, attn_mask: Any = None, scale: Any = None
) -> Any:
    return F.scaled_dot_product_attention(q, k, v, attn_mask, p, causal, scale=scale), q.new_zeros(0, dtype=torch.float32)


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kept: Tensor,
    p: float,
    causal: bool,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> Any:
    return _gradients(
        lambda q, k, v: (F.scaled_dot_product_attention(q, k, v, attn_mask, p, causal, scale=scale),), (q, k, v), (grad,)
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


_aten = torch.ops.aten
_CHOSEN: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _aten.mkldnn_rnn_layer.default: _rnn_layer,
    _aten.mkldnn_rnn_layer_backward.default: _rnn_layer_backward,
}
