"""Micro-batches: a batch in pieces, several of them under way at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..transport import RdmaError
from . import ring
from .stream import Stream, streams

MOST = 1 << 16
Loss = Callable[..., torch.Tensor]
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")


def checked(chunks: int) -> int:
    if not 1 <= chunks <= MOST:
        raise ValueError(f"chunks must be from 1 to {MOST}, got {chunks}")
    return chunks


def forward_backward(
    model: nn.Module, loss_fn: Loss, args: Any, kwargs: dict[str, Any], target: Any, chunks: int, schedule: str, stages: int
) -> torch.Tensor:
    """Forward and backward of one batch in ``chunks`` micro-batches.

    Tensors among the inputs whose first dimension is the batch's are split along it, into the sizes of ``torch.chunk`` (so
    there may be fewer than ``chunks``); everything else goes to each micro-batch as it is. The batch's size is that of
    ``target``'s first tensor, or else of the first tensor input; all tensors in ``target`` are split.

    What is computed: ``sum(loss_fn(model(x_i), y_i) * (n_i / n))`` over micro-batches of n_i of the n samples, and its
    gradients, added to those that are there, in the order of the micro-batches. Where ``target`` is ``None`` it is
    ``loss_fn(model(x_i))``. With a ``loss_fn`` that is a mean over samples this is the mean over the batch. What looks at a
    whole batch (batch norm) sees micro-batches.

    Operations are posted in this order: ``"gpipe"`` all forwards, then all backwards, and each worker holds what all
    micro-batches need for their backward; ``"1f1b"`` a backward as soon as one micro-batch more than the model has ``stages``
    (places) is under way, so what workers keep for it does not grow with ``chunks``; inputs and what crosses have their places
    from when they are posted. Workers run them in that order; with ``"1f1b"`` one that would wait for a copy goes on with the
    next micro-batch, as far as the next backward. ``"zero_bubble"`` posts as ``"gpipe"``, and workers run first what another
    one waits for; while they would idle, gradients of weights, and, where the parts of a model go round the workers, another
    micro-batch (``scoreboard.py``). Bits are those of the other schedules.

    Nothing is waited for, so the workers of a model whose parts lie at several compute at once. Returns the detached loss,
    where it was computed. Raises what the model or ``loss_fn`` raised; gradients are then unfinished.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is one of {', '.join(SCHEDULES)}, got {schedule!r}")
    with torch.enable_grad():
        pieces = _Pieces(args, kwargs, target, checked(chunks))
        count = len(pieces.sizes)
        losses: list[torch.Tensor] = []
        with nullcontext() if schedule == "gpipe" else looking_ahead() as turn:
            for forward, at in actions(count, min(count, stages + 1) if schedule == "1f1b" else count):
                if forward:
                    losses.append(pieces.loss(model, loss_fn, at))
                else:
                    if turn is not None and schedule == "1f1b":
                        turn()
                    losses[at].backward()
                    losses[at] = losses[at].detach()  # what its graph holds is free
        pieces.return_gradients()
    return sum(losses[1:], losses[0])


@contextmanager
def looking_ahead() -> Iterator[Callable[[], None]]:
    """Have workers run what is posted meanwhile as soon as what it needs is there. Once what this gives was called, they keep
    the order of posts where nothing waits, and run all that was posted before one call of it before what comes behind the
    next."""
    told: list[Stream] = []

    def turn() -> None:
        for stream in told:
            stream.owe([ring.TURN])

    try:
        for stream in streams():
            with suppress(RdmaError):  # a lost worker is named where it is asked for something, if it is
                stream.post([ring.AHEAD, 1])
                told.append(stream)
        yield turn
    finally:
        for stream in told:
            stream.owe([ring.AHEAD, -1], [])  # which cannot fail, and comes before all that is posted next


def actions(count: int, ahead: int) -> list[tuple[bool, int]]:
    """The order in which ``count`` micro-batches are posted, at most ``ahead`` of them between forward and backward:
    (whether it is a forward, which micro-batch)."""
    found = [(True, at) for at in range(ahead)]
    for at in range(count):
        found.append((False, at))
        if at + ahead < count:
            found.append((True, at + ahead))
    return found


class _Pieces:
    """The inputs of a batch by micro-batch: ``sizes`` are their samples, ``batch`` those of all."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, chunks: int) -> None:
        leaves, self._tree = tree_flatten((args, kwargs))
        targets, self._target_tree = tree_flatten(target)
        first = [t for t in (*targets, *leaves) if isinstance(t, torch.Tensor) and t.dim() > 0]
        if not first or len(first[0]) == 0:
            raise ValueError("there is no batch to split: neither target nor the inputs have a tensor with samples in it")
        self.batch = len(first[0])
        for leaf in targets:
            if isinstance(leaf, torch.Tensor) and leaf.shape[:1] != (self.batch,):
                raise ValueError(f"target has a tensor of shape {tuple(leaf.shape)}, the batch has {self.batch} samples")
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if tensors and not any(tensor.shape[:1] == (self.batch,) for tensor in tensors):
            raise ValueError(f"target has {self.batch} samples, and none of the inputs has")
        each = -(-self.batch // chunks)
        self.sizes = [each] * (self.batch // each) + ([self.batch % each] if self.batch % each else [])
        # Gradients of inputs are collected in leaves, and go on into the graph that they come from at the end.
        self._inputs = {id(t): (t, t.detach().requires_grad_()) for t in tensors if t.requires_grad}
        given = [self._inputs[id(leaf)][1] if id(leaf) in self._inputs else leaf for leaf in leaves]
        self._columns = [self._split(leaf) for leaf in given]
        self._targets = [self._split(leaf) for leaf in targets]
        self._has_target = target is not None

    def _split(self, leaf: Any) -> list[Any]:
        if len(self.sizes) == 1 or not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != (self.batch,):
            return [leaf] * len(self.sizes)
        if leaf.requires_grad:
            return list(leaf.split(self.sizes))
        # Each with a version of its own: what the forward writes into one was not saved for the backward of another.
        return [piece.data for piece in leaf.split(self.sizes)]

    def loss(self, model: nn.Module, loss_fn: Loss, at: int) -> torch.Tensor:
        """The weighted loss of a micro-batch."""
        args, kwargs = tree_unflatten([column[at] for column in self._columns], self._tree)
        target = [tree_unflatten([column[at] for column in self._targets], self._target_tree)] if self._has_target else []
        loss = loss_fn(model(*args, **kwargs), *target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"one of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"loss_fn must give a tensor of one element, it gave {found}")
        return loss if len(self.sizes) == 1 else loss * (self.sizes[at] / self.batch)

    def return_gradients(self) -> None:
        """All at once: inputs may come from one graph, whose backward runs once."""
        found = [(tensor, leaf.grad) for tensor, leaf in self._inputs.values() if leaf.grad is not None]
        if found:
            torch.autograd.backward([tensor for tensor, _ in found], [grad for _, grad in found])
