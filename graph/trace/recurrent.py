"""Recurrent layers on fake tensors of symbolic sizes: the shapes of their results, computed without their kernels.

Those kernels loop over the sequence, so a trace through them would make its length a constant. A packed sequence has as many
rows as its lengths add up to, which depends on data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

_LAYERS = frozenset([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu])


class RecurrentShapes(TorchFunctionMode):
    """Active while a forward is traced; for this thread only."""

    def __init__(self, sizes: ShapeEnv) -> None:
        super().__init__()
        self._sizes = sizes
        self._packed: list[tuple[torch.Tensor, int]] = []  # sizes of the batch at each position; the first of them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs:
            if func in _LAYERS and any(isinstance(size, torch.SymInt) for size in args[0].shape):
                return _layer(func, *args)
            if func is torch._pack_padded_sequence:
                return self._pack(*args)
            if func is torch._pad_packed_sequence and (batch := self._batch(args[1])) is not None:
                return self._pad(batch, *args)
            if (
                func is torch.Tensor.__getitem__
                and type(args[1]) is int
                and args[1] == 0
                and (batch := self._batch(args[0])) is not None
            ):
                return batch
        return func(*args, **(kwargs or {}))

    def _pack(self, padded: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
        rows: Any = self._sizes.create_unbacked_symint()
        steps: Any = self._sizes.create_unbacked_symint()
        torch._check(rows >= 0)
        torch._check(steps >= 0)
        batches = torch.empty(steps, dtype=torch.int64)
        self._packed.append((batches, padded.size(0 if batch_first else 1)))
        return _like((rows, *padded.shape[2:]), [padded]), batches

    def _pad(
        self, batch: int, data: torch.Tensor, batches: torch.Tensor, batch_first: bool, value: float, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (batch, total) if batch_first else (total, batch)
        return _like((*shape, *data.shape[1:]), [data]), torch.empty(batch, dtype=torch.int64)

    def _batch(self, batches: Any) -> int | None:
        return next((batch for known, batch in self._packed if known is batches), None)


def _layer(func: Any, data: torch.Tensor, second: Any, third: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    # (input, hx, weights, bias, ...) or, of a packed sequence, (data, batch_sizes, hx, weights, bias, ...)
    packed = not isinstance(rest[0], bool)
    hidden, weights, options = (third, rest[0], rest[1:]) if packed else (second, third, rest)
    states = tuple(hidden) if func is torch.lstm else (hidden,)
    used = (data, *states, *weights)
    bidirectional = options[4]
    width = states[0].size(2) * (2 if bidirectional else 1)
    return (_like((*data.shape[:-1], width), used), *(_like(state.shape, used) for state in states))


def _like(shape: Sequence[int], sources: Sequence[torch.Tensor]) -> torch.Tensor:
    made = torch.empty(shape, dtype=sources[0].dtype, device=sources[0].device)
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sources)):
        return made
    return made.requires_grad_().clone()  # no leaf: it may be written in place
