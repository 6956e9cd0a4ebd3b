"""What a call is, as the two words in front of every piece of it: so that ranks can tell whether they call the same."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ..transport import RdmaError


class Mismatch(RdmaError):
    """Two ranks call different things."""


OPERATIONS = (
    *("barrier", "all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all"),
    *("monitored_barrier", "send"),
)
SUMS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
_USUAL = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
TYPES = (*_USUAL, *sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)} - set(_USUAL), key=str))
_NUMBERS = {kind: number for number, kind in enumerate(TYPES)}
_NONE = 255


class Signature(NamedTuple):
    """``root``: a rank, or -1. ``elements``: their number, where all ranks have to agree on them, else 0."""

    operation: str
    dtype: torch.dtype | None = None
    elements: int = 0
    sum: str = ""
    root: int = -1

    @staticmethod
    def of(code: int, count: int) -> Signature:
        """That of which ``code_of`` made this code."""
        kind = code >> 16 & 0xFF
        operation, total = code & 0xFF, code >> 8 & 0xFF
        if operation >= len(OPERATIONS) or total >= len(SUMS):
            return Signature(f"operation {code:x}", None, count)
        dtype = TYPES[kind] if kind < len(TYPES) else None
        return Signature(OPERATIONS[operation], dtype, count, SUMS[total], (code >> 24) - 1)

    def __str__(self) -> str:
        parts = [f"{self.elements} elements"] if self.elements else []
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        if self.sum:
            parts.append(self.sum)
        if self.root >= 0:
            parts.append(f"root {self.root}")
        return f"{self.operation}({', '.join(parts)})"


@lru_cache(1024)
def code_of(signature: Signature) -> int:
    """The first of the two words."""
    kind = _NONE if signature.dtype is None else _NUMBERS[signature.dtype]
    operation, total = OPERATIONS.index(signature.operation), SUMS.index(signature.sum)
    return operation | total << 8 | kind << 16 | (signature.root + 1) << 24
