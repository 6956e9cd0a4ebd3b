"""What crosses between workers in a step (``describe``) as records of plain data: tensors, and what each worker holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Crossing:
    """One tensor on its way to one worker: one write in a step, or ``times`` ones of different tensors of one name (of as many
    micro-batches). ``again`` of them take over what was copied there already.

    ``kind``: activation, gradient, parameter, input, update (made in an optimizer's step), weight (sent by a parameter server).
    ``nbytes``: payload of one write. ``static``: every step that was seen has it in this shape. ``allocator``: the operation in
    whose memory the tensor lies, with the module in which that ran, where both are known. ``first`` and ``last``: operations
    that read it at the target.
    """

    number: int
    name: str
    kind: str
    source: str
    target: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    static: bool
    times: int = 1
    again: int = 0
    allocator: str = ""
    first: str = ""
    last: str = ""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """Bytes that land at and leave a worker in a step, of what the step makes there and lives at once (``peak_bytes``), and of
    the model's parameters that lie there (0 where nobody said). ``parts`` are the modules that run there."""

    name: str
    parameter_bytes: int
    bytes_in: int
    bytes_out: int
    peak_bytes: int
    parts: tuple[str, ...]
