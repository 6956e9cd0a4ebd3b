"""How tensors are added up: in the order of the ranks, pair by pair from the left, so with the same bits at every rank.

Types that kernels know (``words/atomics.FOLD_TYPES``) are summed by them, without the GIL; bfloat16 and float16 through
float32, rounded after each pair. Minima and maxima keep what is no number, as torch's do. Complex products and all other types
are summed by torch. Bools: a sum is an or, a product an and. An average of integers is rounded towards zero, as NCCL's. What is
multiplied before it is summed (``PREMUL_SUM``) is rounded to its type in between, as NCCL's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..transport import NotSupported, exchange
from .signature import SUMS

_NAMES = {getattr(dist.ReduceOp, name.upper()): name for name in SUMS if name}
_OF_BOOLS = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}
_BY_TORCH: dict[str, Callable[..., torch.Tensor]]
_BY_TORCH = {"sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}


class Sum:
    """An operation on tensors of one type. Raises ``ValueError`` or ``NotSupported`` for one that there is not."""

    __slots__ = ("average", "code", "dtype", "factor", "function", "name")

    def __init__(self, name: str, dtype: torch.dtype, factor: float | None = None) -> None:
        """``factor``: what each rank multiplies its part by before; ``None``: nothing."""
        self.name, self.dtype, self.factor = name, dtype, factor
        self.average = name == "avg"
        bits = name in ("band", "bor", "bxor")
        if bits and (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"{name} is for integers and bools, got {dtype}")
        if self.average and dtype is torch.bool:
            raise ValueError("an average of bools is not defined")
        if dtype.is_complex and name in ("min", "max"):
            raise ValueError(f"{name} of complex numbers is not defined")
        if factor is not None and not dtype.is_floating_point:
            raise ValueError(f"a premultiplied sum is for floating-point numbers, got {dtype}")
        plain = "sum" if self.average or factor is not None else name
        self.function = _BY_TORCH.get(plain)
        if dtype is torch.bool:
            dtype, plain = torch.uint8, _OF_BOOLS.get(plain, plain)
        elif dtype.is_complex and plain == "sum":
            dtype = dtype.to_real()
        self.code = exchange.fold_code(str(dtype).removeprefix("torch."), plain)
        if self.code < 0 and not self._has_torch():
            raise NotSupported(f"{name} of {self.dtype}")

    def _has_torch(self) -> bool:
        """Whether torch has the operation for this type. Before the call begins: one that fails ends its group."""
        one = torch.zeros(1, dtype=self.dtype, device="cpu")
        try:
            return self.function is not None and self.function(one, one).dtype == self.dtype
        except (NotImplementedError, RuntimeError):
            return False

    def part(self, values: torch.Tensor) -> torch.Tensor:
        """What a rank with these values adds to the sum."""
        return values if self.factor is None else values * self.factor

    def finish(self, result: torch.Tensor, size: int) -> None:
        """What comes after the sum."""
        if self.average:
            rounded = not (self.dtype.is_floating_point or self.dtype.is_complex)
            result.div_(size, rounding_mode="trunc" if rounded else None)


_known: dict[tuple[Any, torch.dtype], Sum] = {}


def sum_of(operation: dist.ReduceOp, dtype: torch.dtype) -> Sum:
    """As ``Sum``, by torch's name of the operation."""
    kind: Any = getattr(operation, "op", operation)  # ReduceOp has it, and is it, in turn
    found = _known.get((kind, dtype))
    if found is None:
        name = _NAMES.get(kind)
        if name is None:
            raise NotSupported(f"the reduction {operation}", hint="scale before, and sum")
        if name == "premul_sum":
            return Sum(name, dtype, _factor(operation))
        found = _known[kind, dtype] = Sum(name, dtype)
    return found


def _factor(operation: Any) -> float:
    """That of a ``PREMUL_SUM``: a number, or a tensor of one element."""
    if not hasattr(operation, "__getstate__") or not isinstance(state := operation.__getstate__(), tuple) or state[1] is None:
        raise ValueError("PREMUL_SUM needs a factor: ReduceOp.PREMUL_SUM(factor)")
    return float(state[1])
