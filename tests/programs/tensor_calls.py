"""What programs over tensors at workers (``tensor_programs``) call beside torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import mixed_calls
import torch
from torch.autograd.function import once_differentiable


def at(x: torch.Tensor, place: str) -> torch.Tensor:
    """A copy there, or here."""
    x = x.clone()  # a copy there has the strides of what has gaps, as a copy here has not
    return mixed_calls.at(x, place) if place else x.cpu()


def attempts(keep: Callable[[str, Any], None]) -> Callable[[int], Any]:
    """An error that comes late is that of its own statement."""
    attempt = mixed_calls.attempts(keep)

    @contextlib.contextmanager
    def waited(number: int) -> Iterator[None]:
        with attempt(number):
            yield
            for place in ("worker1", "worker2"):
                at(torch.zeros(()), place).item()

    return waited


def device(place: str) -> Any:
    return torch.device("cpu") if isinstance(mixed_calls.rpc, mixed_calls.Alone) else mixed_calls.rpc.device(place)


def look(*values: Any) -> list[Any]:
    """Values and all that autograd, views and copies depend on. Which node made a view is torch's affair."""
    return [_looked(value) if isinstance(value, torch.Tensor) else value for value in values]


def _looked(value: torch.Tensor) -> Any:
    plain = value.detach()
    if plain.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        plain = plain.float()
    if value.layout != torch.strided:
        return plain
    return (
        plain,
        [value.requires_grad, value.is_inference(), value.is_neg()],
        value.grad.detach() if value.is_leaf and value.grad is not None else None,
    )


class Scaled(torch.autograd.Function):
    """Keeps an operand, a result and a number; its second result has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, by: float) -> Any:
        out, sign = x * w * by, x.sign()
        ctx.save_for_backward(x, w, out)
        ctx.by = by
        ctx.mark_non_differentiable(sign)
        return out, sign

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> Any:
        x, w, out = ctx.saved_tensors
        return g * w * ctx.by, (g * x * ctx.by + out * 0) if ctx.needs_input_grad[1] else None, None


class Halved(torch.autograd.Function):
    """Writes its operand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 0.5


class Viewed(torch.autograd.Function):
    """Its result is a view of its operand; gradients that nobody has are none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x.view_as(x), x[:1] * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor | None, h: torch.Tensor | None) -> Any:
        return g if h is None else None if g is None else g + h.sum()


class Mapped(torch.autograd.Function):
    """As torch.func takes it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * (x.cos() * x + x.sin())

    @staticmethod
    def jvp(ctx: Any, t: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return t * (x.cos() * x + x.sin())
