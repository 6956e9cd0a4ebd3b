"""Settings that the forwards of ``test_wrap_guards`` read."""

from __future__ import annotations

import dataclasses
from typing import Any

OFFSET = 1.0
TABLE = {"factor": 1}


class Knobs:
    turn = 1


@dataclasses.dataclass
class Settings:
    beta: float = 0.5
    more: Any = None


class Slotted:
    __slots__ = ("alpha",)

    def __init__(self) -> None:
        self.alpha = 1.0
