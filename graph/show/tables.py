"""Plain text: tables, sizes in words, histograms of sizes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

_CELL = 44
_BAR = 40


@dataclass(frozen=True, slots=True)
class Bucket:
    """How many sizes of ``low <= size < high``, in bytes, and their sum."""

    low: int
    high: int
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Sizes in bytes of the tensors of one kind. The buckets are powers of two (``[0, 1)`` for empty tensors), from the
    smallest to the largest without a gap."""

    kind: str
    buckets: tuple[Bucket, ...]

    @property
    def count(self) -> int:
        return sum(bucket.count for bucket in self.buckets)

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def average(self) -> float:
        """Bytes a tensor; 0 where there are none."""
        return self.nbytes / self.count if self.buckets else 0.0

    def __str__(self) -> str:
        most = max((bucket.count for bucket in self.buckets), default=1)
        lines = [f"{self.kind}: {self.count} tensors, {self.nbytes:,} bytes, {self.average:,.1f} bytes on average"]
        for bucket in self.buckets:
            bar = "#" * -(-bucket.count * _BAR // most)
            lines.append(f"  {size(bucket.low):>8} to {size(bucket.high):>8}  {bucket.count:>6}  {bar}".rstrip())
        return "\n".join(lines)


def histogram(kind: str, sizes: Collection[int]) -> Histogram:
    """``sizes`` in bytes, none negative."""
    ranks = [size.bit_length() for size in sizes]
    buckets = []
    for rank in range(min(ranks, default=0), max(ranks, default=-1) + 1):
        inside = [size for size in sizes if size.bit_length() == rank]
        buckets.append(Bucket(1 << rank >> 1, 1 << rank, len(inside), sum(inside)))
    return Histogram(kind, tuple(buckets))


def size(count: int) -> str:
    """``1.5 MiB``"""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f} {unit}".replace(".0 ", " ")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Columns of equal width, those of ``right`` flush right. The middle of long cells is left out; it is in the JSON."""
    cells = [[shortened(cell, _CELL) for cell in row[:-1]] + [row[-1]] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells)]
    lines = [
        "  ".join(cell.rjust(w) if at in right else cell.ljust(w) for at, (cell, w) in enumerate(zip(row, widths)))
        for row in (head, ["-" * width for width in widths], *cells)
    ]
    return "\n".join(line.rstrip() for line in lines)


def shortened(text: str, width: int) -> str:
    """``encoder.la…norm2``"""
    if len(text) <= width:
        return text
    front = (width - 1) // 2
    return text[:front] + "…" + text[len(text) - (width - 1 - front) :]
