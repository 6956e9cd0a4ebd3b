"""``WorkerInfo``: the name and the id of a worker."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_MAX_ID = 2**15 - 1
_NAME = re.compile(r"[A-Za-z0-9_:-]+")


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's name and id (its rank). Immutable, hashable, picklable."""

    name: str
    id: int
    number: int = field(default=-1, compare=False, repr=False)
    """The worker's number (``members.Record``), which torch's class does not have."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) >= 128:
            raise RuntimeError(
                "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than 128 chars, "
                f"but got {self.name}"
            )
        if not -_MAX_ID - 1 <= self.id <= _MAX_ID:
            raise TypeError(f"a worker's id is a number of 16 bits, got {self.id}")

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"
