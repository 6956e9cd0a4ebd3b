"""The forward run once on fake tensors, every operation written down.

Shapes are known, so ``if x.dim() == 3``, ``len(x)`` and ``for row in x`` are what they are in a step; only values are not.
Modules that are not cut stay one operation, as in a symbolic trace, and the result is the same kind of graph.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...transport import NotSupported
from ..guards.flags import steady_flags
from ..guards.generators import undrawn
from ..guards.side_effects import has_code
from ..guards.snapshot import Snapshot
from ..opaque.again import ActsAgain, runs_again
from ..opaque.functions import custom_functions
from ..opaque.scripts import no_opaque_calls
from .capture import (
    Capture,
    Join,
    Propagator,
    TensorSpec,
    Untraceable,
    annotate,
    changes_input,
    mode_of,
    propagate,
    quiet,
    static,
    unchanged,
)
from .sizes import Sizes
from .values import (
    After,
    Before,
    check_arguments,
    check_question,
    check_result,
    encode,
    leaves_of,
    map_leaves,
    pick,
    tensors_of,
)
from .watch import Unwatched
from .writes import UNSEEN, Registered, calls_itself, finish, mutated, sets_on_tensor, writes_beyond


def record(model: nn.Module, inputs: list[TensorSpec], join: Join, whole: Callable[[str], bool] = lambda path: True) -> Capture:
    """As ``capture``."""
    with torch.inference_mode(False), torch.enable_grad(), undrawn(), steady_flags():
        before = _attributes(*(part for path, part in model.named_modules() if path and whole(path)))
        recorder = _recorded(model, inputs, join, whole)
        if recorder.given_back:
            before.restore()
            _mark_same(recorder, _recorded(model, inputs, join, whole, apart=True))
        if recorder.may_give_back:
            before.restore()
            _mark_own(recorder, lambda: _recorded(model, inputs, join, whole, joined=True))
        before.restore()
        effects = finish(recorder.graph, model)
        found = propagate(model, recorder.graph, inputs, recorder.constants)
        found.effects = effects
        return found


def _attributes(*parts: nn.Module) -> Snapshot:
    """Those of whole parts. Each run of a forward is to find the same there: parts may do otherwise in their second call."""
    before = Snapshot()
    for module in (module for part in parts for module in part.modules()):
        before.keep(vars(module), "")
    return before


def _mark_same(one: _Recorder, other: _Recorder) -> None:
    """Of two records of a forward whose parts give back what they are given, in ``other`` as another tensor. Where the forward
    uses both tensors ``one`` takes the first for the second, and is right as long as these parts give back what they are given:
    they are marked."""
    if _steps(one.graph) != _steps(other.graph):
        for node in one.given_back:
            node.meta["same"] = True


def _mark_own(one: _Recorder, again: Callable[[], _Recorder]) -> None:
    """``again`` records the forward as if its parts gave back what they are given, where that could be. A forward that asks
    which tensor it has (``y is x``) does otherwise then, and is right as long as they do not: they are marked."""
    try:
        other = again()
    except Exception:  # what it does then cannot be captured
        other = None
    if other is None or not other.does_as(one):
        for node in one.may_give_back:
            node.meta["own"] = True


def _steps(graph: fx.Graph, one: Mapping[int, int] = MappingProxyType({})) -> list[Any]:
    """``one``: nodes that stand for a tensor which an earlier one stands for, by their places."""
    number: dict[fx.Node, int] = {}
    first: list[int] = []
    for at, node in enumerate(graph.nodes):
        first.append(first[one[at]] if at in one else at)
        number[node] = first[at]
    found = []
    for node in graph.nodes:
        constant = node.op == "get_attr" and str(node.target).startswith("_tensor_constant_")
        given = fx.map_arg((node.args, node.kwargs), number.__getitem__)
        found.append((node.op, "" if constant else str(node.target), repr(given)))
    return found


def _recorded(
    model: nn.Module,
    inputs: list[TensorSpec],
    join: Join,
    whole: Callable[[str], bool],
    *,
    apart: bool = False,
    joined: bool = False,
) -> _Recorder:
    """``apart``: a tensor that a part gives back is another one; ``joined``: what a part gives is what it is given, where that
    could be."""
    recorder = _Recorder(model, whole, apart, joined)
    with Sizes().under(mode_of(model)), quiet(), unchanged(model, whole):
        fakes = [spec.empty() for spec in inputs]
        for at, fake in enumerate(fakes):
            recorder.define(recorder.graph.placeholder(f"input{at}"), fake)
        args, kwargs = join(*fakes)
        before = Before(args, kwargs)
        with (
            static(f"{type(model).__name__}.forward"),
            recorder.calls(),
            custom_functions(recorder.apply),
            no_opaque_calls(lambda: recorder.in_part),
            _NoRealWrites(),
            Unwatched(),
            recorder,
        ):
            result = model.forward(*args, **kwargs)
        check_result(f"{type(model).__name__}.forward", result)
        if before.changed():
            raise changes_input(before.names(model.forward))
        recorder.graph.output(recorder.arguments(result))
    return recorder


class _NoRealWrites(TorchDispatchMode):
    """Refuses writes into tensors that have data, before they happen: they come from outside of the model, and a capture leaves
    them as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in mutated(func, args, kwargs or {}):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor):
                raise writes_beyond()
        return func(*args, **kwargs or {})


def check_operations(model: nn.Module, inputs: list[TensorSpec], one: Capture, other: Capture) -> None:
    """Raise ``Untraceable`` unless two captures of a forward do the same operations, in the same order, on the same tensors."""
    first, second = (_operations(model, inputs, found) for found in (one, other))
    for mine, theirs in itertools.zip_longest(first, second):
        if mine != theirs:
            name = (theirs or mine or ("",))[0]
            raise Untraceable(f"the forward asks what a tensor is, and does otherwise without one: from {name} on")


def _operations(model: nn.Module, inputs: list[TensorSpec], found: Capture) -> list[tuple[str, str]]:
    seen = _Operations()
    with torch.inference_mode(False), torch.enable_grad(), Sizes().under(mode_of(model)), quiet(), seen:
        Propagator(model, found.graph, found.constants).propagate([spec.empty() for spec in inputs])
    return seen.seen


class _Operations(TorchDispatchMode):
    """``seen``: every operation and its arguments, where a tensor is the number of its first use."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []
        self._kept: dict[int, tuple[int, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told = pytree.tree_map_only(torch.Tensor, self._number, (args, kwargs))
        self.seen.append((str(func), repr(told)))
        return func(*args, **kwargs or {})

    def _number(self, tensor: torch.Tensor) -> str:
        number, _ = self._kept.setdefault(id(tensor), (len(self._kept), tensor))
        return f"tensor {number}"


_constants = itertools.count()  # names are unique in a process: models keep the constants of all their captures


def set_item(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """``tensor[index] = value`` as an operation with a result."""
    tensor[index] = value
    return tensor


_POWERS = (torch.Tensor.__pow__, torch.Tensor.__ipow__)
"""``x ** y`` calls wrappers of the methods ``pow`` and ``pow_`` that no name leads to."""
_PLACES = frozenset(["data_ptr", "storage", "untyped_storage", "_typed_storage"])


class _Recorder(TorchFunctionMode):
    """``constants`` as in ``Capture``. A tensor is known by its identity: ``_kept`` keeps them all alive. ``given_back``: calls
    of parts that give a tensor which they are given; ``apart``: it is another one for the forward. ``may_give_back``: calls of
    parts with code of the user's that give a tensor like one which they are given; ``joined``: it is that one for the forward,
    and ``one`` has pairs of nodes that stand for it, the later one first."""

    def __init__(self, model: nn.Module, whole: Callable[[str], bool], apart: bool = False, joined: bool = False) -> None:
        super().__init__()
        self.given_back: list[fx.Node] = []
        self.may_give_back: list[fx.Node] = []
        self.one: list[tuple[fx.Node, fx.Node]] = []
        self._apart, self._joined = apart, joined
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self._whole = whole
        self._paths = {module: name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self._attributes: dict[int, str] = {}
        for name, module in model.named_modules():
            own = {**module._parameters, **module._buffers, **vars(module)}
            for key, tensor in own.items():
                if isinstance(tensor, torch.Tensor):
                    self._attributes.setdefault(id(tensor), f"{name}.{key}" if name else key)
        self._nodes: dict[int, fx.Node] = {}
        self._lengths: dict[str, tuple[torch.Tensor, int]] = {}
        self._kept: list[Any] = []
        self._given: Set[int] = frozenset()
        """Tensors that a call was given and gives back: they stay what they are."""
        self._scope = [""]
        self._inside = False

    def does_as(self, other: _Recorder) -> bool:
        """Whether both have recorded the same steps, if what is ``one`` here is one tensor there too."""
        number = {node: at for at, node in enumerate(self.graph.nodes)}
        one = {number[later]: number[earlier] for later, earlier in self.one}
        return _steps(self.graph, one) == _steps(other.graph, one)

    @property
    def in_part(self) -> bool:
        """Whether something runs that is one operation."""
        return self._inside

    def define(self, node: fx.Node, value: Any) -> None:
        """What this node gives, and all tensors in it."""
        annotate(node, self._scope[-1])
        self._kept.append(value)
        self._define_leaves(node, value)

    def _define_leaves(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._given:
                self._nodes[id(value)] = node
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    self._lengths.setdefault(str(size), (value, dim))
        elif type(value) not in (tuple, list, dict):
            for at, leaf in enumerate(leaves_of(value)):
                if isinstance(leaf, torch.Tensor):
                    picked = self.graph.call_function(pick, (node, at))
                    annotate(picked, self._scope[-1])
                    self._define_leaves(picked, leaf)
        else:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                if any(isinstance(leaf, torch.Tensor) for leaf in leaves_of(item)):
                    picked = self.graph.call_function(operator.getitem, (node, key))
                    annotate(picked, self._scope[-1])
                    self._define_leaves(picked, item)

    def arguments(self, arguments: Any) -> Any:
        return encode(arguments, self._argument)

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.SymInt):
            return self._size(leaf)
        return self._node_of(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _size(self, size: torch.SymInt) -> fx.Node:
        """A size that depends on data: of which tensor it is."""
        if str(size) not in self._lengths:
            raise NotSupported("the forward computes with a size that depends on data")
        tensor, dim = self._lengths[str(size)]
        node = self.graph.call_method("size", (self._node_of(tensor), dim))
        annotate(node, self._scope[-1])
        return node

    def _node_of(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) not in self._nodes:
            path = self._attributes.get(id(tensor))
            if path is None:
                if isinstance(tensor, FakeTensor):
                    raise NotSupported("the forward uses a tensor that comes from no operation that was seen")
                path = f"_tensor_constant_{next(_constants)}"
                self.constants[path] = tensor
            node = self.graph.get_attr(path)
            self._kept.append(tensor)
            self._nodes[id(tensor)] = node
        return self._nodes[id(tensor)]

    # -- what is called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _PLACES:
            raise NotSupported(f"the forward asks a tensor for its {name}, which another tensor has in every step")
        check_question(name, args)
        if name in UNSEEN or name == "__set__":
            raise sets_on_tensor(f"an assignment of {func.__self__.__name__!r}" if name == "__set__" else name)
        if name == "__setitem__":
            target, func = "call_function", set_item
        elif name == "__get__":
            # A property; those that are no tensors are known now.
            target, name = "call_function", func.__self__.__name__
            func, args = getattr, (args[0], name)
        elif func in _POWERS or (hasattr(torch.Tensor, name) and getattr(torch.Tensor, name) is func):
            target = "call_method"
        else:
            target = "call_function"
        given = [(leaf, leaf._version) for leaf in leaves_of((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        result = func(*args, **kwargs)
        acts = any(leaf._version != version for leaf, version in given)
        if acts or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            known = self.arguments((args, kwargs))
            node = self.graph.create_node(target, name if target == "call_method" else func, *known)
            node.meta["acts"] = acts
            self.define(node, result)
        return result

    def apply(self, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function with a backward of its own."""
        if self._inside:
            return apply(*args, **kwargs)
        return self._one(lambda known: self.graph.call_function(apply, *known), apply, args, kwargs)

    def _one(
        self,
        make: Callable[[Any], fx.Node],
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        part: nn.Module | None = None,
    ) -> Any:
        known = self.arguments((args, kwargs))
        before = Before(args, kwargs)
        self._inside = True
        try:
            result = call(*args, **kwargs)
            back = {id(leaf): leaf for leaf in tensors_of(leaves_of((args, kwargs)))}
            back = {id(leaf): leaf for leaf in leaves_of(result) if id(leaf) in back}
            if back and self._apart:
                others = {number: leaf.view_as(leaf) for number, leaf in back.items()}
                result = map_leaves(lambda leaf: others.get(id(leaf), leaf), result)
        finally:
            self._inside = False
        like = {} if back or part is None or not has_code(part) else _alike((args, kwargs), result)
        earlier = [(given, self._node_of(given)) for given in (*like.values(), *back.values())] if self._joined else []
        if self._joined:
            result = map_leaves(lambda leaf: like.get(id(leaf), leaf), result)
        node = make(known)
        if like:
            self.may_give_back.append(node)
        if back and node.op == "call_module":
            self.given_back.append(node)
        check_result(f"{node.op} {node.name}", result)
        # The forward may have used them where no operation tells.
        node.meta["compared"] = any(leaf is not None and not isinstance(leaf, torch.Tensor) for leaf in leaves_of(result))
        if before.changed():
            if node.op != "call_module":
                raise NotSupported(f"{node.name} puts something into its arguments, which a trace would do once")
            # What was put there comes with the result: here it is there already, and the forward may use it.
            node.meta["after"] = True
            self._given = self._nodes.keys() - {id(leaf) for leaf in leaves_of(result)}
            self.define(node, After(result, args, kwargs))
            self._given = frozenset()
        else:
            self.define(node, result)
        self.one += [(self._nodes[id(given)], node) for given, node in earlier]
        return result

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """While this lasts, calls of modules in this thread are seen."""
        thread, original = threading.get_ident(), nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(module)
            if threading.get_ident() != thread or self._inside or path is None:
                return original(module, *args, **kwargs)
            self._scope.append(path)
            try:
                if not self._whole(path):
                    return original(module, *args, **kwargs)
                if calls_itself(module):
                    raise NotSupported(f"{path!r} has a __call__ of its own")
                make = lambda known: self.graph.call_module(path, *known)  # noqa: E731
                with static(f"call_module {path!r}"):
                    check_arguments(f"part {path!r}", module.forward, args, kwargs)
                    registered = Registered(module)
                    before = _attributes(module)
                    result = self._one(make, lambda *a, **k: original(module, *a, **k), args, kwargs, module)
                    registered.check(f"part {path!r}")
                    if runs_again() and before.changed():
                        raise ActsAgain(f"part {path!r}")
                    return result
            finally:
                self._scope.pop()

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]


def _alike(given: Any, result: Any) -> dict[int, torch.Tensor]:
    """By the ``id`` of each tensor in a result: the first tensor that was given and could be it."""

    def kind(tensor: torch.Tensor) -> Any:
        # Sizes that depend on data cannot be compared, their names can.
        return str(tensor.shape), tensor.dtype, tensor.device, tensor.layout

    tensors, found = tensors_of(leaves_of(given)), {}
    for leaf in tensors_of(leaves_of(result)):
        like = next((tensor for tensor in tensors if kind(tensor) == kind(leaf)), None)
        if like is not None:
            found[id(leaf)] = like
    return found
