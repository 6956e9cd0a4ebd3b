"""The description of a plan (``describe``) as records of plain data: what crosses, and what each worker holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """One operation of one segment that reads a tensor (or gives it out: ``output``)."""

    segment: int
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} (segment {self.segment})"


@dataclass(frozen=True, slots=True)
class Crossing:
    """One tensor on its way to one worker: one write in a step.

    ``shape`` has ``None`` where a dimension is free, and then ``nbytes`` (of the payload) is ``None``. ``depth`` counts the
    slots, which take ``slot_bytes`` at the target; ``device`` is where it wants the tensor (empty: the CPU). ``producer`` is
    the operation whose result it is, and ``allocator`` says whose memory is sent. ``first`` and ``last`` use it at the target.
    ``needs_gradient``: a gradient comes back. ``trigger``: carries nothing, only starts a segment. ``staged``: bytes that were copied besides the transfer so far, and ``why``. A
    tensor with several targets is several crossings of one ``name``.
    """

    number: int
    name: str
    kind: str
    source: str
    target: str
    shape: tuple[int | None, ...]
    dtype: str
    nbytes: int | None
    depth: int
    slot_bytes: int
    static: bool
    needs_gradient: bool = False
    trigger: bool = False
    producer: str = ""
    allocator: str = ""
    first: Use | None = None
    last: Use | None = None
    device: str = ""
    staged: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """The operations that one worker runs in one go, in order."""

    number: int
    worker: str
    level: int
    operations: tuple[str, ...]
    backward: bool


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """Bytes that land at and leave a worker in a training step, of its slots, and of the model's parameters that live there
    (0 where nobody said). ``parts`` are the modules that it runs."""

    name: str
    parameter_bytes: int
    bytes_in: int
    bytes_out: int
    slot_bytes: int
    parts: tuple[str, ...]
