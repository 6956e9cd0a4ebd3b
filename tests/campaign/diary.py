"""What a worker writes down: every operation that failed, was slow, or gave a wrong result. Lines of JSON in a file, so that
what was written before a SIGKILL is there."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .board import Board

KINDS = (
    "init",
    "shutdown",
    "call",
    "tensor",
    "nested",
    "raises",
    "exits",
    "flood",
    "large",
    "reference",
    "fork",
    "backward",
    "wrap",
    "train",
    "serve",
    "join",
    "leave",
    "connect",
    "write",
    "read",
    "notify",
    "callbacks",
    "end",
    "liar",
    "program",
    "statement",
    "again",
)
SLOW_S = 0.5
_RANK = re.compile(r"\b(?:worker|rank )(\d+)")


def ranks_in(text: str) -> list[int]:
    """The workers that a text names."""
    return sorted({int(found) for found in _RANK.findall(text)})


class Wrong(Exception):
    """A result is not the one of the local computation."""


def same(found: Any, expected: Any, what: str) -> None:
    """Bit for bit, or ``Wrong``."""
    if isinstance(expected, torch.Tensor):
        equal = isinstance(found, torch.Tensor) and found.dtype is expected.dtype and torch.equal(found.cpu(), expected)
    else:
        equal = type(found) is type(expected) and found == expected
    if not equal:
        raise Wrong(f"{what}: {str(found)[:100]} instead of {str(expected)[:100]}")


class Diary:
    """Any thread."""

    def __init__(self, path: Path, board: Board, rank: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.board, self.rank = board, rank
        self.lost: set[int] = set()
        """Ranks that this worker has been told are lost."""
        self._lock = threading.Lock()

    def close(self) -> None:
        os.close(self._file)

    def write(self, event: str, **what: Any) -> None:
        line = json.dumps({"event": event, "at": time.monotonic_ns(), "rank": self.rank, **what})
        with self._lock:
            os.write(self._file, (line + "\n").encode())

    @contextmanager
    def doing(self, kind: str, *touched: int) -> Iterator[None]:
        """One operation that depends on the workers ``touched``. Errors are written down, and end here."""
        bits = sum(1 << rank for rank in set(touched))
        began = time.monotonic_ns()
        self.board.begin(self.rank, bits, KINDS.index(kind))
        try:
            yield
        except Exception as error:
            self._failed(kind, touched, began, error)
        finally:
            self.board.end(self.rank)
            took = (time.monotonic_ns() - began) / 1e9
            if took > SLOW_S:
                self.write("slow", kind=kind, touched=sorted(set(touched)), began=began, took=took)

    def _failed(self, kind: str, touched: tuple[int, ...], began: int, error: Exception) -> None:
        import rdmarpc as rpc

        text = str(error)
        named = ranks_in(getattr(error, "peer", "")) or ranks_in(text.split("Traceback")[0])
        if isinstance(error, rpc.PeerLost):
            self.lost.update(rank for rank in named if rank != self.rank)
        where = "".join(traceback.format_tb(error.__traceback__)[-3:])
        self.write(
            "wrong" if isinstance(error, Wrong) else "error",
            kind=kind,
            touched=sorted(set(touched)),
            began=began,
            type=type(error).__name__,
            tree=[base.__name__ for base in type(error).__mro__],
            text=text[:1500],
            named=named,
            status=getattr(error, "status", ""),
            trace=where,
        )
