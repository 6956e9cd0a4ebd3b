"""Operations that write what they make straight into the peer's slot: then the payload is never copied.

After Xue et al., "Fast Distributed Deep Learning over RDMA" (EuroSys'19, section 3.4): the first run of a segment records who
allocates which storage; what turns out to be sent is allocated in its place from the next run on. Python has no hook into
torch's allocator, so the allocating operation runs as its ``out=`` variant, by a dispatch mode below autograd. The mode costs
some microseconds for every operation that it sees, so it is entered for one *window* only: the call of the innermost module
(or the one traced operation) that allocates. What such a window would cost more than the copy is left alone.

Attribution is by storage, so views, reshapes, operations in place and forwarded buffers need no care: whatever happens to the
storage afterwards happens in the slot. A window in which another operation comes than was recorded is a *miss*: the value is
copied as any other, the miss is counted, and the segment is traced again.

Invariants:
1. A slot is written here only between ``Outlet.reserve`` and ``Outlet.send`` or ``Outlet.cancel``, by the station's thread.
2. The tensor may live on after it was sent (autograd keeps it for the backward): the slot is free again when its credit is back
   and that tensor's storage has died (``outlets.target``).
3. Nobody writes into it after it was sent: values that are written after they were made are not produced (``Value.written``),
   the consumer watches (``header.SHARED``), and the model's outputs, which the user may write into, are not produced.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..outlets.outlet import Outlet
from ..plan.program import Machine

MIN_BYTES = 2 << 20
"""Smaller payloads are copied about as fast: a window takes some 20 us, and a slot lies in the cache of another core."""
MAX_OPERATIONS = 16
"""Longest window, in operations seen before the one that allocates."""
_MISSES = 4
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Origin:
    """The operation that allocates a storage: the ``nth`` of the ``call``-th call of ``module`` within one instruction
    (``module`` is ``None``: of the instruction itself). ``output`` is the position among its results, ``results`` their
    (shape, strides, dtype)."""

    instruction: int
    module: nn.Module | None
    call: int
    nth: int
    op: Any
    output: int
    results: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]


class Recorder(TorchDispatchMode):
    """Notes every allocation of a run, by address. An address that is allocated again belongs to the later operation; whatever
    is still alive at the end is therefore attributed rightly."""

    def __init__(self) -> None:
        super().__init__()
        self._origins: dict[int, Origin] = {}
        self._instruction, self._operations = 0, 0
        self._calls: dict[nn.Module | None, tuple[FrameType | None, int, int]] = {}  # its last call, which, operations before

    def origin(self, tensor: torch.Tensor) -> Origin | None:
        """Who allocated its storage; ``None`` if that was before the run."""
        return self._origins.get(tensor.untyped_storage().data_ptr())

    @contextlib.contextmanager
    def around(self, instruction: int) -> Iterator[None]:
        self._instruction, self._operations = instruction, 0
        self._calls = {None: (None, 1, 0)}
        try:
            with self:
                yield
        finally:
            self._calls.clear()

    def _innermost(self) -> nn.Module | None:
        # From the stack: global hooks would be seen by other threads, and some modules take another way when they have hooks.
        found = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not Machine.run.__code__:
            if frame.f_code is nn.Module._call_impl.__code__:
                found.append((frame.f_locals["self"], frame))
            frame = frame.f_back
        for module, call in found:
            known, number, _ = self._calls.get(module, (None, 0, 0))
            if known is not call:
                self._calls[module] = (call, number + 1, self._operations)
        return found[0][0] if found else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        module = self._innermost()
        result = func(*args, **(kwargs or {}))
        self._operations += 1
        results = result if isinstance(result, (tuple, list)) else (result,)
        if all(isinstance(made, torch.Tensor) and made.layout is torch.strided for made in results):
            given = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            _, call, before = self._calls[module]
            described = tuple((tuple(made.shape), made.stride(), made.dtype) for made in results)
            for output, made in enumerate(results):
                address = made.untyped_storage().data_ptr()
                if address not in given:
                    self._origins[address] = Origin(
                        self._instruction, module, call, self._operations - before, func, output, described
                    )
        return result


class Making:
    """One value that its producer writes into the slot. ``outlet`` is the one whose slot it is; other consumers get copies.

    A context around the instruction that makes it. For that long it stands in for the module's ``forward``, to know when that
    runs. No hooks: some modules compute in another way when they, or modules inside them, have hooks.
    """

    def __init__(self, origin: Origin, outlet: Outlet, missed: Callable[[Making], None]) -> None:
        self.origin, self.outlet = origin, outlet
        self._missed = missed
        self._variant = out_variant(origin.op)
        self._window = _Window(self)
        self._armed, self._calls = False, 0
        self._forward: Any = None
        self._before: Any = None

    def __enter__(self) -> None:
        self._armed, self._calls = True, 0
        module = self.origin.module
        if module is None:
            self._enter()
            return
        self._forward, self._before = module.forward, module.__dict__.get("forward")
        module.__dict__["forward"] = self._call

    def __exit__(self, kind: Any, *exc: object) -> None:
        module = self.origin.module
        if module is None:
            self._window.__exit__(None, None, None)
        else:
            del module.__dict__["forward"]
            if self._before is not None:
                module.__dict__["forward"] = self._before
        if self._armed and kind is None:
            self._missed(self)
        self._armed = False

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        if self._calls != self.origin.call:
            return self._forward(*args, **kwargs)
        self._enter()
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._window.__exit__(None, None, None)

    def _enter(self) -> None:
        self._window.left = self.origin.nth
        self._window.__enter__()

    def make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operation that was recorded as the allocating one."""
        origin, variant = self.origin, self._variant
        if func is not origin.op or variant is None:
            return func(*args, **kwargs)
        self._armed = False  # it came: no miss
        place = self.outlet.reserve(*origin.results[origin.output][:2])
        if place is None:
            return func(*args, **kwargs)
        results = [
            place if at == origin.output else torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
            for at, (shape, strides, dtype) in enumerate(origin.results)
        ]
        variant.op(*variant.args(args), **kwargs, **dict(zip(variant.outs, results)))
        return results[0] if len(results) == 1 else tuple(results)


class _Window(TorchDispatchMode):
    def __init__(self, making: Making) -> None:
        super().__init__()
        self._making, self.left = making, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left:
            return func(*args, **(kwargs or {}))
        return self._making.make(func, args, kwargs or {})


class Production:
    """The outgoing values of one segment under one set of flags. Belongs to the thread of the station.

    ``outlets``: value -> the outlet into whose slots it might be produced. ``notes`` says of each value where it is
    made, or why it is copied.
    """

    def __init__(self, outlets: Mapping[str, Outlet]) -> None:
        self._outlets = outlets
        self._recorder: Recorder | None = Recorder()
        self._makings: dict[int, list[Making]] = {}
        self._names: dict[Making, str] = {}
        self._misses: Counter[str] = Counter()
        self._stale = False
        self.notes: dict[str, str] = {}

    def around(self, instruction: int) -> contextlib.AbstractContextManager[Any] | None:
        """What instruction number ``instruction`` of the segment has to run in, if anything."""
        if self._recorder is not None:
            return self._recorder.around(instruction)
        makings = self._makings.get(instruction)
        if makings is None:
            return None
        if len(makings) == 1:
            return makings[0]
        stack = contextlib.ExitStack()
        for making in makings:
            stack.enter_context(making)
        return stack

    def made(self, name: str, tensor: torch.Tensor) -> None:
        """A value exists, and has not been sent."""
        if self._recorder is None or name not in self._outlets:
            return
        origin = self._recorder.origin(tensor)
        reason = _why_not(origin, tensor)
        if reason is None and self._misses[name] >= _MISSES:
            reason = "what makes it changes from step to step"
        if reason is not None or origin is None:
            self.notes[name] = f"copied: {reason}"
            return
        making = Making(origin, self._outlets[name], self._missed)
        self._names[making] = name
        self._makings.setdefault(origin.instruction, []).append(making)
        where = "" if origin.module is None else f" of {type(origin.module).__name__}"
        self.notes[name] = f"in place, by operation {origin.nth}{where}, {origin.op}"

    def finish(self) -> None:
        """The segment has run, or failed."""
        for outlet in self._outlets.values():
            outlet.cancel()
        if self._stale:
            self._makings.clear()
            self._names.clear()
            self._stale, self._recorder = False, Recorder()
        elif self._recorder is not None and self.notes.keys() >= self._outlets.keys():
            self._recorder = None

    def _missed(self, making: Making) -> None:
        self._misses[self._names[making]] += 1
        self._stale = True
        making.outlet.device.count("production_misses")


def _why_not(origin: Origin | None, tensor: torch.Tensor) -> str | None:
    if origin is None:
        return "its memory was there before (an input, a parameter, a landed tensor)"
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return "it is a part of a larger storage"
    if out_variant(origin.op) is None:
        return f"{origin.op} cannot write into given memory"
    if origin.nth > MAX_OPERATIONS:
        return f"it is made by operation {origin.nth} of its module"
    return None


@dataclass(frozen=True, slots=True)
class Variant:
    """How to run an operation into given memory. ``outs`` names the arguments for its results, in order."""

    op: Any
    outs: tuple[str, ...]
    args: Callable[[Any], Any]


@functools.lru_cache(None)
def out_variant(op: Any) -> Variant | None:
    """The ``out=`` variant of an operation, if the CPU has a kernel for it: the others make the result elsewhere and copy."""
    if op is aten.relu.default:  # torch defines it as this, and so gives it no kernel of its own
        return Variant(aten.clamp_min.out, ("out",), lambda args: (*args, 0))
    plain = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    if op is aten.clone.default:
        return Variant(_clone, ("out",), lambda args: args)
    packet = op.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        arguments = candidate._schema.arguments
        outs = tuple(argument.name for argument in arguments if argument.is_out)
        rest = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        if len(outs) != len(op._schema.returns) or rest != plain:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(candidate.name(), "CPU"):
            return Variant(candidate, outs, lambda args: args)
    return None


def _clone(source: torch.Tensor, *, memory_format: Any = None, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(source)
