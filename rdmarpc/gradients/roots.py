"""The arguments of a backward pass, checked: the roots that users name, and the context."""

from __future__ import annotations

from typing import Any

import torch


def check_types(context_id: Any, roots: Any) -> None:
    """Raise ``TypeError``, with torch's text, if these are not a context's id and a list of roots."""
    if not isinstance(context_id, int) or isinstance(context_id, bool) or not isinstance(roots, list | tuple):
        raise TypeError(
            "backward(): incompatible function arguments. Expected: (context_id: int, roots: list[torch.Tensor], "
            f"retain_graph: bool = False), got ({type(context_id).__name__}, {type(roots).__name__})"
        )


def scalars(roots: Any) -> list[torch.Tensor]:
    """The roots. Raises what torch raises for those that are no scalars with a graph."""
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not isinstance(root, torch.Tensor):
            raise TypeError(f"backward(): incompatible function arguments: a root is a tensor, got {type(root).__name__}")
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(f"Tensor of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError("root does not have a valid gradient function.")
    return list(roots)


def referenced_scalar(value: Any) -> torch.Tensor:
    """The value of a reference as a root. Raises what torch raises for those that are none."""
    if not isinstance(value, torch.Tensor):
        raise RuntimeError("RRef should contain a tensor for .backward()")
    if not value.requires_grad:
        raise RuntimeError("tensors does not require grad and does not have a grad_fn")
    if value.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    return value
