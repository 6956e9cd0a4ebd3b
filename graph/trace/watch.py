"""What a trace reads and changes in Python, while it lasts.

A graph has only what was done with tensors. So a trace is watched: the attributes of modules that the forward reads outside of
whole parts, and the functions that run, become guards (``guards``); what it draws, sets, registers or asks a clock for would
be lost, and is refused. What Python objects were before the trace they are again after it: no fake tensor stays anywhere.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...transport import NotSupported
from ...transport.interrupts import postponed
from ..guards.content import MISSING, Content, foreign, imported_by, package_of
from ..guards.generators import draw_again, drawn_once, drawn_since, generators
from ..guards.instructions import Instructions
from ..guards.questions import asked_of_torch, asks_type, is_traced
from ..guards.roots import (
    ClassTable,
    Root,
    closed_over,
    compares_identity,
    function_of,
    functions_of,
    globals_of,
    named_in,
    needs_search,
)
from ..guards.side_effects import changes_there, draws_there, only_gains
from ..guards.snapshot import Snapshot
from ..opaque.acts import ACT_NAMES, acts, called_to_act, done_once, no_output
from ..opaque.scripts import uncounted

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GRADIENT_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_HINT = "a part that lies at one worker as a whole may do so"
_OWN = ("_tensor_constant", "_flat_weight")
"""Attributes that traces, and torch's own modules, set for themselves."""


class Watch:
    """One trace of a skeleton in this thread. ``whole(path)``: see ``capture``; ``away(path)``: whether that is at another
    worker. What is seen is kept apart by where it happens: outside of whole parts, inside, inside of those that are away."""

    def __init__(
        self, model: nn.Module, whole: Callable[[str], bool], away: Callable[[str], bool] = lambda path: False
    ) -> None:
        modules = list(model.named_modules(remove_duplicate=False))
        self._model, self._name = model, type(model).__name__
        self._modules = {id(module): (path, module) for path, module in reversed(modules)}
        self._whole = {id(module): 2 if away(path) else 1 for path, module in modules if path and whole(path)}
        self._at = 0
        self._inside: set[int] = set()
        self._tensors = {id(module): _own(module) for _, module in modules}
        self._inlined = False
        self._drawn_there: list[NotSupported] = []
        self._refused: list[NotSupported] = []
        self._beyond: list[str] = []
        self._outside: list[NotSupported] = []
        """Of whole parts. Calls of an export are not seen as such: there the parts themselves may have done it."""
        self._reads: tuple[set[tuple[int, str]], ...] = set(), set(), set()
        self._codes: tuple[dict[Any, Any], ...] = {}, {}, {}
        self._roots: tuple[dict[tuple[int, str], tuple[Root, Any]], ...] = {}, {}, {}
        self._asked_types: tuple[list[str], ...] = [], [], []
        """Functions that have asked for the class of something that is of another one in a trace."""
        self._instructions = Instructions(self._looks)
        self._before = Snapshot()
        for path, module in self._modules.values():
            self._before.keep(vars(module), "")
            for name, value in vars(module).items():
                self._before.add(value, _label(name, path or self._name))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While this lasts, what happens in this thread is seen; afterwards all is as it was."""
        drawn, collects = generators(), gc.isenabled()
        gc.disable()  # it runs what is none of the forward's
        try:
            with self._patched():
                yield
        finally:
            if collects:
                gc.enable()
            try:
                self._look(drawn)
            finally:
                self._put_back(drawn)

    def _put_back(self, drawn: dict[str, Any]) -> None:
        self._before.restore()
        for root, value in (item for roots in self._roots for item in roots.values()):
            if root.value() is not value:
                _rebind(root, value)
        draw_again(drawn)

    def _look(self, drawn: dict[str, Any]) -> None:
        """What is different now."""
        self._drawn = drawn_since(drawn)
        reach, away = Snapshot(), Snapshot()
        for root, value in self._roots[2].values():
            away.add([value, root.value()], "")
        for key, name in self._reads[0]:
            path, module = self._modules[key]
            reach.add(vars(module).get(name), "")
        for root, value in self._roots[0].values():
            reach.add([value, root.value()], "")
        modules = {id(vars(module)): (path, module) for path, module in self._modules.values()}
        modules |= {id(module._buffers): (path, module) for path, module in self._modules.values()}
        self._set: list[tuple[str, str, bool]] = []
        named = self._roots[2] | self._roots[0]
        rebound = {key: root.label for key, (root, value) in named.items() if root.value() is not value}
        self._changed = [(label, key in self._roots[0], key in self._roots[2]) for key, label in rebound.items()]
        tables = {id(value): root for roots in self._roots for root, value in roots.values()}
        for key, (value, before, label) in self._before.changed().items():
            if key in tables and type(value) is dict and only_gains(tables[key], dict(before)):
                continue
            if key not in modules:
                self._changed.append((label, reach.met(key), away.met(key)))
                continue
            path, module = modules[key]
            old = dict(before)
            for name in old.keys() | value.keys():
                if old.get(name, MISSING) is not value.get(name, MISSING) and not name.startswith(_OWN):
                    read = not self._reads[0].isdisjoint({(id(module), name), (id(module), "__dict__")})
                    self._set.append((path or self._name, name, read))

    # -- the verdict

    def check(self, graph: fx.Graph, exported: bool) -> None:
        """Raise ``NotSupported`` for what the graph does not have."""
        self._inlined = not any(node.op == "call_module" for node in graph.nodes)
        if self._beyond:
            raise Beyond(self._beyond[0], hint="pass what it needs as an argument")
        for error in (*self._refused, *(() if exported else self._outside)):
            raise error
        for name in self._drawn:
            raise drawn_once(name)
        if self._drawn_there:
            raise self._drawn_there[0]
        if not self._inlined and (label := self.changed_there()):
            raise changes_there("a part at another worker", label)
        for where, name, read in self._set:
            if read:
                raise NotSupported(
                    f"the forward reads attribute {name!r} of {where!r}, which a part sets while the forward runs",
                    hint="return the value from the part's forward",
                )
        for label, read, _ in self._changed:
            if read or self._inlined:
                raise _changes(label)
        _check_leaves(graph)
        both = (0, 1, 2) if self._inlined else (0,)
        for name in (name for at in both for name in self._asked_types[at]):
            raise NotSupported(f"{name} asks for the class of an object, which a trace has others for", hint="use isinstance")
        for code in self._ran(*both):
            for asked in named_in(code, self._codes[0].get(code) or {}):
                if name := asked_of_torch(asked, exported):
                    raise NotSupported(f"{code.co_name} asks torch for {name}(), which has another answer in a trace")
        content = Content()
        for root in self.roots(self._model):
            content.of(root.value(), root.label, root.by_path)

    def roots(self, live: nn.Module) -> list[Root]:
        """What was read, of a model with the same modules as the skeleton."""
        modules = dict(live.named_modules(remove_duplicate=False))
        both = (0, 1, 2) if self._inlined else (0,)
        found: list[Root] = []
        reads = {read for at in both for read in self._reads[at]}
        for key, name in reads:
            path, _ = self._modules[key]
            if path in modules and name not in _TABLES:
                found += _attribute_roots(modules[path], path or self._name, name)
        codes = {code: table for at in both for code, table in self._codes[at].items() if table is not None}
        for code, table in codes.items():
            found += globals_of(code, table)
        return found + [root for at in both for root, _ in self._roots[at].values() if not isinstance(root.table, dict)]

    def changed_there(self) -> str:
        """Something changed that parts at other workers name, if anything."""
        return next((label for label, _, away in self._changed if away), "")

    def compares(self) -> str:
        """A function of the forward, or of a part, that may compare tensors by identity, if there is one."""
        codes = filter(compares_identity, self._ran(0, 1, 2))
        return next((f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})" for code in codes), "")

    def _ran(self, *where: int) -> list[types.CodeType]:
        """The user's functions that have run."""
        return [code for at in where for code, table in list(self._codes[at].items()) if table is not None]

    def drawn(self) -> str:
        """A generator that somebody has drawn from, if anybody has."""
        return next(iter(self._drawn), "")

    # -- what is seen

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        # No hook or protocol tells of reads, and types must stay what they are: a forward may look at them.
        thread, call, assign = threading.get_ident(), nn.Module.__call__, nn.Module.__setattr__
        trace = sys.gettrace()

        def read(module: nn.Module, name: str) -> Any:
            seen = threading.get_ident() == thread and (name[:2] != "__" or name == "__dict__")
            if seen and _reads(sys._getframe(1)) and id(module) in self._modules:
                self._reads[self._at].add((id(module), name))
            return object.__getattribute__(module, name)

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or id(module) not in self._modules:
                return call(module, *args, **kwargs)
            before, inside = self._at, self._inside
            if before:
                self._check_beyond(module)
            if before or id(module) not in self._whole:
                return call(module, *args, **kwargs)
            self.check_tensors(module)
            self._at, self._inside, drawn = self._whole[id(module)], {id(m) for m in module.modules()}, generators()
            try:
                return call(module, *args, **kwargs)
            finally:
                self._at, self._inside = before, inside
                self._tensors |= {id(m): _own(m) for m in module.modules()}
                if self._whole[id(module)] == 2:
                    self._drawn_there += there(drawn, f"part {self._modules[id(module)][0]!r}")
                draw_again(drawn)

        def assigned(module: nn.Module, name: str, value: Any) -> None:
            seen = threading.get_ident() == thread and not self._at and id(module) in self._whole
            if seen and vars(module).get(name, MISSING) is not value and not name.startswith(_OWN):
                what = f"the forward sets attribute {name!r} of {self._modules[id(module)][0]!r} from outside"
                self._outside.append(Changes(what, hint=_HINT))
            assign(module, name, value)

        nn.Module.__call__, nn.Module.__setattr__ = called, assigned  # type: ignore[method-assign, assignment]
        nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
        _current.watch = self
        sys.settrace(self._called)
        try:
            with no_output(lambda: not self._at, self._refuse), self._instructions.running():
                yield
        finally:
            sys.settrace(trace)
            if sys.getprofile() == self._asked:
                sys.setprofile(None)
            _current.watch = None
            with contextlib.suppress(AttributeError):
                del nn.Module.__getattribute__
            nn.Module.__call__, nn.Module.__setattr__ = call, assign  # type: ignore[method-assign]

    def check_tensors(self, part: nn.Module) -> None:
        """Raise ``NotSupported`` for a whole part that is called while it has other tensors than its own, or while parametrized
        ones are computed once for several calls."""
        if parametrize._cache_enabled and any(parametrize.is_parametrized(module) for module in part.modules()):
            raise NotSupported("the forward calls a parametrized part within torch.nn.utils.parametrize.cached()", hint=_HINT)
        for path, module in part.named_modules():
            known = self._tensors.get(id(module), {})
            for name, tensor in _own(module).items():
                if known.get(name) is not tensor:
                    where = ".".join(filter(None, (self._modules[id(part)][0], path, name)))
                    raise NotSupported(f"the forward calls a part with another tensor for {where!r}", hint=_HINT)

    def _check_beyond(self, module: nn.Module) -> None:
        """Whether a whole part calls a module that is not in it."""
        if id(module) not in self._inside and not self._at == self._whole.get(id(module)) == 1:
            path = self._modules[id(module)][0] or self._name
            self._beyond.append(f"a part, or a hook of it, calls {path!r}, which is not in that part and not as a whole here")

    def _called(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        codes = self._codes[self._at]
        if event != "call":
            return None
        if frame.f_code not in codes:
            self._first(frame, frame.f_code, codes)
        if codes[frame.f_code] is None or not asks_type(frame.f_code):
            return None
        return self._instructions.follow(frame)

    def _looks(self, frame: types.FrameType, offset: int) -> None:
        """An instruction of a function that asks for the class of something is next."""
        names = asks_type(frame.f_code).get(offset)
        if names is not None and (not names or is_traced(frame, names)):
            self._asked_types[self._at].append(frame.f_code.co_name)

    def _asked(self, frame: types.FrameType, event: str, arg: Any) -> None:
        """A function of C is called; watched from where a function has the name of a clock, or of what acts, on."""
        if event != "c_call" or self._at:
            return
        name = getattr(arg, "__name__", "")
        if name in ACT_NAMES and acts(arg) and not foreign(frame.f_globals.get("__name__")):
            raise self._refuse(done_once(f"calls {name}()", frame))  # so it is not called
        if name in _CLOCK_NAMES and arg in _CLOCKS and not _collects(frame) and package_of(frame) not in _EXCUSED:
            self._refuse(f"calls {arg.__name__}(), which gives another value every time")

    def _refuse(self, what: str, kind: type[NotSupported] = NotSupported) -> NotSupported:
        """The error is kept, as the forward may catch one that is raised."""
        self._refused.append(kind(f"the forward {what}", hint=_HINT))
        return self._refused[-1]

    def _first(self, frame: types.FrameType, code: types.CodeType, codes: dict[Any, Any]) -> None:
        """A function runs for the first time."""
        codes[code] = None
        if code in _REGISTER and not self._at and not self._internal(frame.f_back):
            self._refuse(f"registers hooks ({code.co_name})", Changes)
        if not self._at and (caller := called_to_act(frame)) is not None:
            raise self._refuse(done_once(f"calls {code.co_name}()", caller))
        importing = getattr(frame.f_globals.get("__spec__"), "_initializing", False)
        if importing or foreign(frame.f_globals.get("__name__")) or _collects(frame) or imported_by(frame.f_back):
            return
        clocks = (type(value) is _BUILTIN and value in _CLOCKS for value in named_in(code, frame.f_globals))
        if not self._at and (not ACT_NAMES.isdisjoint(code.co_names) or any(clocks)):
            sys.setprofile(self._asked)  # one that somebody else has set is gone then
        made = [other for other, table in codes.items() if table is not None]
        codes[code] = frame.f_globals
        roots = list(globals_of(code, frame.f_globals))
        free = [name for name in code.co_freevars if name != "__class__"]
        function = function_of(code, frame.f_globals) or _method_of(frame)
        if function is not None:
            roots += closed_over(function)
        elif free and needs_search(code, made):
            roots += [root for found in functions_of([code]) for root in closed_over(found)]
        kept = self._roots[self._at]
        for root in roots:
            value = root.value()
            kept.setdefault((id(root.table), root.name), (root, value))
            self._before.add(value, root.label)

    @staticmethod
    def _internal(frame: types.FrameType | None) -> bool:
        return frame is not None and frame.f_globals.get("__name__", "").startswith(
            ("torch.export", "torch._dynamo", "torch.fx")
        )


class _Current(threading.local):
    watch: Watch | None = None


_current = _Current()


def check_tensors(part: nn.Module) -> None:
    """For a trace that does not run parts: see ``Watch.check_tensors``, of the watch of this thread, if there is one."""
    if _current.watch is not None:
        _current.watch.check_tensors(part)


def compares() -> str:
    """See ``Watch.compares``, of the watch of this thread, if there is one."""
    return _current.watch.compares() if _current.watch is not None else ""


class Unwatched(TorchDispatchMode):
    """To be entered after a fake mode and modes of ours. What these run for an operation of ATen is torch's and our Python
    alone, and of all that a capture runs the most: while that is watched, the interpreter is several times slower."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        trace = sys.gettrace()
        if _current.watch is None or trace != _current.watch._called or func.namespace != "aten" or _SETTING_IS_SLOW:
            return func(*args, **kwargs or {})
        sys.settrace(None)
        try:
            return func(*args, **kwargs or {})
        finally:
            sys.settrace(trace)


_SETTING_IS_SLOW = sys.version_info >= (3, 12)
"""A change of the trace function there changes the instructions of all functions that run afterwards."""


class Beyond(NotSupported):
    """What a part calls outside of itself; no method can have it."""


class Busy(NotSupported):
    """Another thread of this process traces."""


PATIENCE_S = 60.0
_tracing = threading.RLock()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One trace at a time in a process: a trace exchanges methods of ``nn.Module`` and puts globals back, and two that overlap
    would leave each other's. Raises ``Busy`` after ``PATIENCE_S``."""
    if not _tracing.acquire(timeout=PATIENCE_S):
        what = f"another thread of this process has been capturing a forward for {PATIENCE_S:g} s"
        raise Busy(what, hint="call the models one after another once; forwards that are captured need not wait")
    try:
        with postponed(PATIENCE_S):  # a signal handler is none of the forward's, and what it saves is to be real tensors
            yield
    finally:
        _tracing.release()


def watched(
    make: Callable[[], Any], model: nn.Module, whole: Callable[[str], bool], away: Callable[[str], bool] = lambda path: False
) -> Any:
    """The capture that ``make()`` gives, with what it read. Raises ``NotSupported`` if it would not hold."""
    with alone():
        watch = Watch(model, whole, away)
        with watch.running():
            found = make()
    watch.check(found.graph, found.how == "export")
    found.roots = watch.roots
    return found


@contextlib.contextmanager
def untouched(part: nn.Module) -> Iterator[None]:
    """While this lasts, one whole part runs; afterwards it, and what it reached, is as it was. Raises ``OnlyHere`` if it has
    changed globals, or drawn from generators of Python's or numpy's."""
    with alone():
        watch = Watch(part, lambda path: True, lambda path: True)
        watch._at = 2
        with watch.running(), uncounted():
            yield
    if drawn := watch.drawn():
        raise draws_there("the part", drawn)
    if label := watch.changed_there():
        raise changes_there("the part", label)


def structure(live: nn.Module, whole: Callable[[str], bool], away: Callable[[nn.Module], bool]) -> tuple[list[Root], list[Any]]:
    """What every capture depends on: which modules and tensors a model has, and the hooks of those that are traced through.
    Then the tables of hooks that no graph would run. ``away``: whether a module only stands for one elsewhere."""
    roots: list[Root] = []
    empty: list[Any] = [getattr(nn.modules.module, name) for name in _GLOBAL_HOOKS]
    left = [("", live)]
    seen: set[int] = set()
    while left:
        path, module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if away(module):
            empty += [vars(inner)[name] for inner in module.modules() for name in (*HOOKS, *GRADIENT_HOOKS)]
            continue
        own, cut = vars(module), not path or not whole(path)
        where = path or type(live).__name__
        tables = [name for name in ("_modules", "_parameters", "_buffers") if cut or (own[name] and name != "_buffers")]
        roots += [Root(f"{name[1:]} of {where}", own, name, True) for name in tables]
        if cut:
            empty += [own[name] for name in GRADIENT_HOOKS if path]
            roots += [Root(f"hooks of {where}", own, name) for name in HOOKS if path]
            roots.append(Root(_label("forward", where), own, "forward"))
        left += [(f"{path}.{name}" if path else name, child) for name, child in module._modules.items() if child is not None]
    return roots, empty


def _attribute_roots(module: nn.Module, where: str, name: str) -> Iterator[Root]:
    own = vars(module)
    if name == "__dict__":
        yield from (Root(_label(key, where), own, key, True) for key in own if key not in _TABLES and key != "training")
    elif name != "training" and not any(name in own[table] for table in ("_parameters", "_buffers", "_modules")):
        kind = next((kind for kind in type(module).__mro__ if name in vars(kind)), None)
        value = vars(kind)[name] if kind is not None else MISSING
        if (
            isinstance(value, (types.FunctionType, property, classmethod, staticmethod))
            and name not in own
            and (foreign(kind.__module__) or not isinstance(value, types.FunctionType))
        ):
            return
        yield Root(_label(name, where), own, name, True)
        if kind is not None and name not in own and not foreign(kind.__module__):
            yield Root(_label(name, kind.__qualname__), vars(kind), name)


def _own(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {**module._parameters, **module._buffers}


def _label(name: str, where: str) -> str:
    return f"attribute {name!r} of {where}"


def there(drawn: dict[str, Any], what: str) -> list[NotSupported]:
    """That it has drawn from generators that were in this state before."""
    return [draws_there(what, name) for name in drawn_since(drawn)]


class Changes(NotSupported):
    """What a forward does to Python objects. If it does so only the first time, a later forward can be captured."""


def _changes(label: str) -> Changes:
    return Changes(f"the forward changes {label}, which a trace would do once and for all", hint=_HINT)


def _check_leaves(graph: fx.Graph) -> None:
    for node in graph.nodes:
        for leaf in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, torch.Generator):
                raise drawn_once("a generator of its own")
            if isinstance(leaf, torch.Tensor):
                raise NotSupported(f"{node.name} has a tensor that comes from no operation that was seen")


def _reads(frame: types.FrameType) -> bool:
    """Whether this code is part of a forward: the user's, or that of a module of torch's."""
    name = frame.f_globals.get("__name__", "")
    return not foreign(name) or (name.startswith("torch.nn.") and name != "torch.nn.modules.module")


def _collects(frame: types.FrameType) -> bool:
    """Whether the garbage collector has called this, not the forward."""
    return any(getattr(callback, "__code__", None) is frame.f_code for callback in gc.callbacks)


def _method_of(frame: types.FrameType) -> types.FunctionType | None:
    code = frame.f_code
    if not code.co_argcount:
        return None
    kind = type(frame.f_locals.get(code.co_varnames[0]))
    for base in kind.__mro__:
        found = vars(base).get(code.co_name)
        found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
        if isinstance(found, types.FunctionType) and found.__code__ is code:
            return found
    return None


def _rebind(root: Root, value: Any) -> None:
    if isinstance(root.table, ClassTable):
        root.table.put(root.name, value)
    elif isinstance(root.table, types.CellType):
        if value is MISSING:
            del root.table.cell_contents
        else:
            root.table.cell_contents = value
    elif isinstance(root.table, dict):
        if value is MISSING:
            root.table.pop(root.name, None)
        else:
            root.table[root.name] = value


_TABLES = ("_modules", "_parameters", "_buffers", *HOOKS, *GRADIENT_HOOKS)
_TIMES = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "process_time_ns")
_DATES = (datetime.datetime.now, datetime.datetime.utcnow, datetime.datetime.today, datetime.date.today)
_CLOCKS = frozenset([*(getattr(time, name) for name in _TIMES), os.urandom, os.times, *_DATES])
_BUILTIN = types.BuiltinFunctionType
_CLOCK_NAMES = frozenset(clock.__name__ for clock in _CLOCKS)
_EXCUSED = frozenset(["torch", "logging", "warnings", "threading", "rdmarpc"])
"""They ask a clock for themselves."""
_REGISTER = frozenset(
    getattr(kind, name).__code__
    for kind in (nn.Module, torch.Tensor)
    for name in vars(kind)
    if name.startswith("register_") and name.endswith("hook") and hasattr(getattr(kind, name), "__code__")
)
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
