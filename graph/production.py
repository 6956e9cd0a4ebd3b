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
   and that tensor's storage has died (``outlet.Target``).
3. Nobody writes into it after it was sent: values that are written after they were made are not produced (``Value.written``),
   the consumer watches (``header.SHARED``), and the model's outputs, which the user may write into, are not produced.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .outlet import Outlet

MIN_BYTES = 2 << 20
"""Smaller payloads are copied about as fast: a window takes some 20 us, and a slot lies in the cache of another core."""
MAX_OPERATIONS = 16
"""Longest window, in operations seen before the one that allocates."""
_MISSES = 4
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Site:
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

    def __init__(self, modules: bool) -> None:
        super().__init__()
        self._modules, self._thread = modules, threading.get_ident()
        self._sites: dict[int, Site] = {}
        self._instruction, self._operations = 0, 0
        self._calls: Counter[int] = Counter()
        self._frames: list[tuple[nn.Module | None, int, int]] = []  # module, number of its call, operations before it

    def site(self, tensor: torch.Tensor) -> Site | None:
        """Who allocated its storage; ``None`` if that was before the run."""
        return self._sites.get(tensor.untyped_storage().data_ptr())

    @contextlib.contextmanager
    def around(self, instruction: int) -> Iterator[None]:
        self._instruction, self._operations = instruction, 0
        self._calls.clear()
        self._frames = [(None, 1, 0)]
        hooks = []
        if self._modules:
            hooks.append(register_module_forward_pre_hook(self._enter_module))
            hooks.append(register_module_forward_hook(self._leave_module, always_call=True))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:  # the hooks are everybody's
            self._calls[id(module)] += 1
            self._frames.append((module, self._calls[id(module)], self._operations))

    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        if threading.get_ident() == self._thread:
            self._frames.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operations += 1
        results = result if isinstance(result, (tuple, list)) else (result,)
        if all(isinstance(made, torch.Tensor) and made.layout is torch.strided for made in results):
            given = {t.untyped_storage().data_ptr() for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            module, call, before = self._frames[-1]
            described = tuple((tuple(made.shape), made.stride(), made.dtype) for made in results)
            for output, made in enumerate(results):
                address = made.untyped_storage().data_ptr()
                if address not in given:
                    self._sites[address] = Site(
                        self._instruction, module, call, self._operations - before, func, output, described
                    )
        return result


class Making:
    """One value that its producer writes into the slot. ``outlet`` is the one whose slot it is; other consumers get copies."""

    def __init__(self, site: Site, outlet: Outlet, missed: Callable[[Making], None]) -> None:
        self.site, self.outlet = site, outlet
        self._missed = missed
        self._variant = out_variant(site.op)
        self._window = _Window(self)
        self._hooks: list[Any] = []
        self._armed, self._calls, self._open = False, 0, False
        if site.module is not None:
            # Plain functions: a copy of the module must not copy us.
            self._hooks.append(site.module.register_forward_pre_hook(lambda module, args: self._enter_module()))
            self._hooks.append(site.module.register_forward_hook(lambda module, args, out: self._leave(), always_call=True))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> None:
        self._armed, self._calls = True, 0
        if not self._hooks:
            self._enter()

    def __exit__(self, kind: Any, *exc: object) -> None:
        self._leave()
        if self._armed and kind is None:
            self._missed(self)
        self._armed = False

    def _enter_module(self) -> None:
        if self._armed:
            self._calls += 1
            if self._calls == self.site.call:
                self._enter()

    def _enter(self) -> None:
        self._window.left = self.site.nth
        self._window.__enter__()
        self._open = True

    def _leave(self) -> None:
        if self._open:
            self._open = False
            self._window.__exit__(None, None, None)

    def make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operation that was recorded as the allocating one."""
        site, variant = self.site, self._variant
        if func is not site.op or variant is None:
            return func(*args, **kwargs)
        self._armed = False  # it came: no miss
        place = self.outlet.reserve(*site.results[site.output][:2])
        if place is None:
            return func(*args, **kwargs)
        results = [
            place if at == site.output else torch.empty_strided(shape, strides, dtype=dtype)
            for at, (shape, strides, dtype) in enumerate(site.results)
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

    ``outlets``: value -> the outlet into whose slots it might be produced. ``hooks``: whether the modules are ours to put hooks
    on, so that windows are narrow. ``notes`` says of each value where it is made, or why it is copied.
    """

    def __init__(self, outlets: Mapping[str, Outlet], hooks: bool) -> None:
        self._outlets, self._hooks = outlets, hooks
        self._recorder: Recorder | None = Recorder(hooks)
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
        """A value of ``outlets`` exists."""
        if self._recorder is None:
            return
        site = self._recorder.site(tensor)
        reason = _why_not(site, tensor)
        if reason is None and self._misses[name] >= _MISSES:
            reason = "what makes it changes from step to step"
        if reason is not None or site is None:
            self.notes[name] = f"copied: {reason}"
            return
        making = Making(site, self._outlets[name], self._missed)
        self._names[making] = name
        self._makings.setdefault(site.instruction, []).append(making)
        where = "" if site.module is None else f" of {type(site.module).__name__}"
        self.notes[name] = f"in place, by operation {site.nth}{where}, {site.op}"

    def finish(self) -> None:
        """The segment has run, or failed."""
        for outlet in self._outlets.values():
            outlet.cancel()
        if self._stale:
            self.close()
            self._stale, self._recorder = False, Recorder(self._hooks)
        elif self._recorder is not None and self.notes.keys() >= self._outlets.keys():
            self._recorder = None

    def _missed(self, making: Making) -> None:
        self._misses[self._names[making]] += 1
        self._stale = True
        making.outlet.device.count("production_misses")

    def close(self) -> None:
        """Take the hooks off again."""
        for making in self._names:
            making.close()
        self._makings.clear()
        self._names.clear()
        self.notes.clear()


def _why_not(site: Site | None, tensor: torch.Tensor) -> str | None:
    if site is None:
        return "its memory was there before (an input, a parameter, a landed tensor)"
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        return "it is a part of a larger storage"
    if out_variant(site.op) is None:
        return f"{site.op} cannot write into given memory"
    if site.nth > MAX_OPERATIONS:
        return f"it is made by operation {site.nth} of its module"
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
