"""The model's forward, traced without computing anything: operations, their tensors, their order.

The model is a skeleton (no weights: see ``skeleton``). Its forward is traced with ``torch.fx``; every module that it calls
stays one operation, unless it is cut: then it is traced through. Shapes, dtypes and who needs a gradient come from running
the trace once on fake tensors.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import operator
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

from ...transport import NotSupported
from ..guards.content import Content, foreign
from ..guards.flags import check_flags, steady_flags
from ..guards.generators import undrawn
from ..guards.roots import Root
from ..opaque.again import ActsAgain, runs_again
from ..opaque.functions import custom_functions
from .devices import CPU
from .sites import CONSTANT, INPUT, Allocations, Site, place_of
from .sizes import Sizes, depends_on_data
from .terms import TermCount, Terms
from .values import (
    After,
    Before,
    ChangesArgument,
    apart,
    changes_argument,
    check_arguments,
    check_result,
    decode,
    encode,
    leaves_of,
)
from .watch import HOOKS, Changes, Unwatched, alone, check_tensors, untouched
from .writes import (
    UNSEEN,
    Augmented,
    NoAssignments,
    NoWrites,
    Registered,
    Write,
    aliases,
    calls_itself,
    check_writes,
    finish,
    sets_on_tensor,
    with_modules,
    writes_of,
)

_HINT = "what joins the parts must be the same for all tensors of one shape; decide on values outside of the model"


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before the step; unknown dimensions are ``FREE``. ``device``: where the capture takes it to be
    (``devices``)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    device: torch.device = CPU

    def empty(self) -> torch.Tensor:
        """Such a tensor: without data under the mode of a skeleton."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device).requires_grad_(self.requires_grad)


@dataclass
class Capture:
    """The traced forward. ``values`` has each node's result on fake tensors (of a call of a module that is marked ``after``:
    ``After``), ``constants`` the tensors that the forward makes without any input. ``sizes`` says which sizes in ``values`` are
    for good. ``written`` has (node, number of the leaf) of every tensor that is written in place after its node made it,
    ``sites`` who allocated the storage of that leaf. ``effects``: nodes that nothing uses, kept for what they do to buffers or
    generators. ``draws``: nodes that take numbers from a generator. ``how``: what made it. ``roots``: what the forward of a
    model like the skeleton read besides tensors (``guards``)."""

    graph: fx.Graph
    values: dict[fx.Node, Any]
    constants: dict[str, torch.Tensor]
    sizes: Sizes
    written: frozenset[tuple[fx.Node, int]] = frozenset()
    sites: dict[tuple[fx.Node, int], Site] = field(default_factory=dict)
    effects: list[fx.Node] = field(default_factory=list)
    draws: frozenset[fx.Node] = frozenset()
    writes: list[Write] = field(default_factory=list)
    how: str = "fx"
    example: bool = False
    """Whether modules ran on real tensors: the numbers that they gave are those of one step."""
    roots: Callable[[nn.Module], list[Root]] = lambda model: []
    terms: Terms = field(default_factory=dict)
    """See ``TermCount``. An operation that is not in it adds any number of terms."""
    parameters: dict[int, str] = field(default_factory=dict)
    same: dict[tuple[fx.Node, int], tuple[fx.Node, int]] = field(default_factory=dict)
    """Of each leaf that is the very tensor which another node has given before, unchanged since: where that was."""
    aliases: list[tuple[int, int, bool]] = field(default_factory=list)
    """Of one call: see ``writes.aliases``."""
    general: dict[str, bool] = field(default_factory=dict)
    """See ``FastPaths``."""


def skeleton(model: nn.Module) -> nn.Module:
    """The same modules with the same names, shapes and flags, and no data."""
    memo: dict[int, Any] = {}
    with FakeCopyMode(FakeTensorMode(allow_non_fake_inputs=True)):
        for module in reversed(list(model.modules())):  # the innermost first
            copy_attributes(module, memo)
        return copy.deepcopy(model, memo)


def copy_attributes(module: nn.Module, memo: dict[int, Any]) -> None:
    """Have copies of them in ``memo``; what cannot be copied is shared."""
    for value in vars(module).values():
        try:
            copy.deepcopy(value, memo)
        except Exception:
            memo[id(value)] = value


Join = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]


def capture(
    model: nn.Module,
    inputs: list[TensorSpec],
    join: Join,
    sizes: Sizes | None = None,
    whole: Callable[[str], bool] = lambda path: True,
) -> Capture:
    """Trace the forward of a skeleton. ``join(*tensors)`` gives its (args, kwargs) from the tensor inputs alone,
    ``whole(path)`` says whether a module is one operation.

    Raises ``Untraceable`` where the forward needs more than the names of its tensors, ``NotSupported`` with the reason
    where a part depends on the values of tensors, or the forward writes in place what others use; errors of the model
    itself (wrong shapes) come as they are. What contributes to no output and changes nothing is not part of the capture.
    """
    with torch.inference_mode(False), torch.enable_grad(), undrawn(), steady_flags():
        return _symbolic(model, inputs, join, sizes, whole)


def capture_call(model: nn.Module, path: str, inputs: list[TensorSpec], join: Join) -> Capture:
    """One call of a module of a skeleton, whose inputs somebody else may read afterwards; it gives ``After`` where it puts
    something into them. Raises as ``capture``."""
    graph = fx.Graph()
    call = call_of(graph, model, path, inputs, join)
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            found = _propagate_call(model, path, graph, inputs)
        except ChangesArgument:
            call.meta["after"] = True
            found = _propagate_call(model, path, graph, inputs)
    if any(node.op == "placeholder" for node, _ in found.written):
        raise writes_input(path)
    return found


def _propagate_call(model: nn.Module, path: str, graph: fx.Graph, inputs: list[TensorSpec]) -> Capture:
    part = model.get_submodule(path)
    with untouched(part):
        found = propagate(model, graph, inputs, made=True)
        [result] = [found.values[node] for node in graph.nodes if node.op == "call_module"]
        if not isinstance(result, After):
            given = [found.values[node] for node in graph.nodes if node.op == "placeholder"]
            found.aliases = aliases(given, leaves_of(result), part)
    return found


def call_of(graph: fx.Graph, model: nn.Module, path: str, inputs: list[TensorSpec], join: Join) -> fx.Node:
    """Fill an empty graph with one call of a module of a skeleton."""
    with mode_of(model):  # some objects look at the tensors that they are made of
        fakes = [spec.empty() for spec in inputs]
    nodes = {id(fake): graph.placeholder(f"input{at}") for at, fake in enumerate(fakes)}
    args, kwargs = encode(join(*fakes), lambda leaf: nodes.get(id(leaf), leaf))
    call = graph.call_module(path, args, kwargs)
    graph.output(call)
    return call


def writes_input(path: str) -> NotSupported:
    return NotSupported(
        f"part {path!r} writes into its input, which the forward may use again",
        hint="use the operation that makes a new tensor there, for example ReLU(inplace=False)",
    )


def changes_input(names: str) -> NotSupported:
    return NotSupported(f"the forward puts something into its input {names}, which a trace would do once")


def module_calls(model: nn.Module, whole: Callable[[str], bool]) -> list[str]:
    """The whole modules that the forward of a skeleton calls, in order, from a symbolic trace that needs no inputs: every
    parameter without a default is one tensor. Raises ``Untraceable``."""
    known = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in known):
        raise Untraceable("the forward takes any number of inputs")
    plain = [p for p in known if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    names = [parameter.name for parameter in plain]
    graph = _trace(model, len(plain), lambda *tensors: ((), dict(zip(names, tensors))), whole)
    return [str(node.target) for node in graph.nodes if node.op == "call_module"]


def first_line(error: BaseException) -> str:
    message = getattr(error, "message", None) or str(error) or type(error).__name__
    return message.strip().splitlines()[0]


class Untraceable(NotSupported):
    """Python needs to know more of a tensor than that it is one."""


def _trace(model: nn.Module, inputs: int, join: Join, whole: Callable[[str], bool]) -> fx.Graph:
    with alone(), unchanged(model, whole):
        try:
            with custom_functions(_proxy_of), NoWrites(model), NoAssignments():
                return _Tracer(inputs, join, whole).trace(model)
        except NotSupported:
            raise
        except Exception as error:
            raise Untraceable(f"{type(model).__name__}.forward cannot be traced: {first_line(error)}", hint=_HINT) from error


def _symbolic(
    model: nn.Module, inputs: list[TensorSpec], join: Join, sizes: Sizes | None, whole: Callable[[str], bool]
) -> Capture:
    _check_hooks(model, whole)
    graph = _trace(model, len(inputs), join, whole)
    constants = {
        str(node.target): getattr(model, str(node.target))
        for node in graph.nodes
        if node.op == "get_attr" and str(node.target).startswith("_tensor_constant")
    }
    if any(isinstance(tensor, FakeTensor) for tensor in constants.values()):
        raise Untraceable("the forward computes with tensors of its modules before any input", hint=_HINT)
    effects = finish(graph, model)
    found = propagate(model, graph, inputs, constants, sizes, strict=True)
    found.effects = effects
    return found


def _check_hooks(model: nn.Module, whole: Callable[[str], bool]) -> None:
    """A symbolic trace runs no part, so what hooks of parts leave for the forward would not be there."""
    for path, module in model.named_modules():
        for hook in (hook for name in HOOKS for hook in vars(module)[name].values()):
            if path and whole(path) and not foreign(getattr(hook, "__module__", type(hook).__module__)):
                raise Untraceable(f"{path!r} has hooks")


def propagate(
    model: nn.Module,
    graph: fx.Graph,
    inputs: list[TensorSpec],
    constants: dict[str, torch.Tensor] | None = None,
    sizes: Sizes | None = None,
    made: bool = False,
    strict: bool = False,
) -> Capture:
    """Run a graph on fake tensors. ``made``: its inputs are no leaves; ``strict``: what is written in place is read by nobody
    else."""
    sizes = sizes or Sizes()
    with sizes.under(mode_of(model)), quiet():
        fakes = sizes.inputs(*([getattr(spec, what) for spec in inputs] for what in ("shape", "dtype", "device")))
        for fake, spec in zip(fakes, inputs):
            fake.requires_grad_(spec.requires_grad)
        fakes = [fake.clone() for fake in fakes] if made else fakes
        propagator = Propagator(model, graph, constants)
        values = propagator.propagate(fakes)
    if strict:
        check_writes(graph, values, {write.node for write in propagator.writes})
    for write in propagator.writes:
        if write.node.meta.get("again"):
            raise ActsAgain(f"what the forward does by {write.node.name!r}")
    written, sites, counted = propagator.written(), propagator.sites(), propagator.counted
    return Capture(
        graph,
        values,
        constants or {},
        sizes,
        written,
        sites,
        writes=with_modules(propagator.writes, graph, model),
        draws=propagator.draws(),
        terms=counted.terms,
        parameters=counted.parameters,
        same=propagator.same(),
    )


@contextlib.contextmanager
def unchanged(model: nn.Module, whole: Callable[[str], bool]) -> Iterator[None]:
    """Refuse a forward that sets attributes of the modules that are traced through: a trace sets them once, and to nothing.
    They get what they had back."""
    cut = [(name, module) for name, module in model.named_modules() if not name or not whole(name)]
    before = [(dict(vars(m)), dict(m._buffers), dict(m._parameters), dict(m._modules)) for _, m in cut]
    changed = None
    try:
        yield
    finally:
        for (name, module), (attributes, *tables) in zip(cut, before):
            now, then = dict(vars(module)), dict(attributes)
            for table, old in zip((module._buffers, module._parameters, module._modules), tables):
                now.update(table)
                then.update(old)
                table.clear()
                table.update(old)
            for key, value in now.items():
                own = key.startswith("_tensor_constant") or (key.startswith("_flat_weight") and isinstance(module, nn.RNNBase))
                if then.get(key, module) is not value and not own and not _alike(then.get(key, module), value):
                    changed = changed or (name, key)
            vars(module).clear()
            vars(module).update(attributes | {key: now[key] for key in now if key.startswith("_tensor_constant")})
    if changed:
        raise sets_attribute(changed[0] or type(model).__name__, changed[1])


def _alike(one: Any, other: Any) -> bool:
    """Whether these are containers of the same: an export makes them anew."""
    if type(one) is not type(other) or not isinstance(one, (tuple, list, dict)):
        return False
    try:
        return bool(Content().of(one, "") == Content().of(other, ""))
    except NotSupported:
        return False


def sets_attribute(where: str, name: str) -> Changes:
    return Changes(
        f"the forward of {where} sets its attribute {name!r}, which a trace would do once and for all",
        hint="keep what changes inside of a part that lies at one worker",
    )


def _proxy_of(apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    proxy = next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, fx.Proxy)), None)
    if proxy is None:
        return apply(*args, **kwargs)
    return proxy.tracer.create_proxy("call_function", apply, args, kwargs)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the log of fake tensors."""
    # It logs the whole stack of an error that is about to be raised anyway.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def mode_of(model: nn.Module) -> FakeTensorMode:
    """The mode of a skeleton's tensors."""
    for tensor in (*model.parameters(), *model.buffers()):
        if hasattr(tensor, "fake_mode"):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def annotate(node: fx.Node, scope: str) -> None:
    """What an operation must know of where the forward ran it: in which module, and whether autograd looked on."""
    if torch._C._is_any_autocast_enabled():
        raise NotSupported("the forward uses autocast, which does not reach other workers", hint="use it inside of a part")
    check_flags()
    check_inference()
    node.meta["scope"], node.meta["grad"] = scope, torch.is_grad_enabled()
    node.meta["again"] = runs_again()


def check_inference() -> None:
    """Raise ``NotSupported`` where a forward has turned inference mode on: its operations would be differentiated."""
    if torch.is_inference_mode_enabled():
        raise NotSupported("the forward uses inference_mode, which a graph does not have", hint="torch.no_grad()")


class _Attribute(Augmented, fx.proxy.Attribute):
    """A property of a tensor, such as ``x.T``."""


class _Proxy(Augmented, fx.Proxy):
    def __getattr__(self, name: str) -> fx.proxy.Attribute:
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "node" in self.__dict__ and name not in self.__dict__:
            raise sets_on_tensor(f"an assignment of {name!r}")
        super().__setattr__(name, value)


class _ParameterProxy(Augmented, fx.proxy.ParameterProxy):
    def __setattr__(self, name: str, value: Any) -> None:
        if "name" in self.__dict__:  # the last one that it sets itself
            raise sets_on_tensor(f"an assignment of {name!r}")
        super().__setattr__(name, value)


class _Tracer(fx.Tracer):
    def __init__(self, count: int, join: Join, whole: Callable[[str], bool]) -> None:
        super().__init__(param_shapes_constant=True)
        self._count, self._join, self._whole = count, join, whole
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:  # torch.fx sees calls of all threads
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = self._whole(module_qualified_name)
        if whole:
            if calls_itself(m):
                raise Untraceable(f"{module_qualified_name!r} has a __call__ of its own")
            check_tensors(m)
        return whole

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if not isinstance(attr_val, torch.Tensor) or isinstance(attr_val, nn.Parameter):
            found = super().getattr(attr, attr_val, parameter_proxy_cache)
            if type(found) is fx.proxy.ParameterProxy:
                made = _ParameterProxy(self, found.node, found.name, found.param)
                found = parameter_proxy_cache[found.name] = made
            return found
        # Left alone, what a forward computes from buffers would be computed now, once, from no data.
        for name, buffer in self.root.named_buffers():
            if buffer is attr_val:
                if name not in parameter_proxy_cache:
                    parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
                return parameter_proxy_cache[name]
        return attr_val

    def create_arg(self, a: Any) -> Any:
        opened = isinstance(a, (tuple, list, dict, slice)) or apart(a) is not None
        return encode(a, self.create_arg) if opened else super().create_arg(a)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        annotate(node, next(reversed(self.module_stack.values()))[0] if self.module_stack else "")
        if node.op == "call_method" and str(node.target) in UNSEEN:
            raise sets_on_tensor(str(node.target))
        return node

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        proxies = [self.create_proxy("placeholder", f"input{at}", (), {}) for at in range(self._count)]

        def call(root: nn.Module, *tensors: fx.Proxy) -> Any:
            args, kwargs = self._join(*tensors)
            before = Before(args, kwargs)
            result = inspect.unwrap(root_fn)(root, *args, **kwargs)
            if before.changed():
                raise changes_input(before.names(root.forward))
            return result

        return call, [self.root, *proxies]


class Propagator(fx.Interpreter):
    """Runs a graph on fake tensors."""

    def __init__(self, model: nn.Module, graph: fx.Graph, constants: dict[str, torch.Tensor] | None = None) -> None:
        super().__init__(model, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False
        self._constants = constants or {}
        self.allocations = Allocations(model)
        self.writes: list[Write] = []
        self.counted = TermCount(model)
        self._versions: list[tuple[fx.Node, int, torch.Tensor, int]] = []

    def fetch_attr(self, target: str) -> Any:
        return self._constants[target] if target in self._constants else super().fetch_attr(target)

    def propagate(self, inputs: list[torch.Tensor]) -> dict[fx.Node, Any]:
        with self.allocations, Unwatched():
            self.run(*inputs)
        return dict(self.env) | self._outputs

    def written(self) -> frozenset[tuple[fx.Node, int]]:
        """See ``Capture``."""
        return frozenset((node, at) for node, at, tensor, version in self._versions if tensor._version != version)

    def sites(self) -> dict[tuple[fx.Node, int], Site]:
        """See ``Capture``."""
        known = {(node, at): self.allocations.of(tensor) for node, at, tensor, _ in self._versions}
        return {where: site for where, site in known.items() if site is not None}

    def same(self) -> dict[tuple[fx.Node, int], tuple[fx.Node, int]]:
        """See ``Capture``."""
        first: dict[tuple[int, int], tuple[fx.Node, int]] = {}
        found = {(n, at): first.setdefault((id(tensor), version), (n, at)) for n, at, tensor, version in self._versions}
        return {where: before for where, before in found.items() if where != before}

    def draws(self) -> frozenset[fx.Node]:
        """See ``Capture``."""
        return frozenset(node for node in self.env if node.name in self.allocations.drawing or self._drops(node))

    def _drops(self, node: fx.Node) -> bool:
        """Recurrent layers need not run for their shapes (``recurrent``)."""
        parts = self.fetch_attr(str(node.target)).modules() if node.op == "call_module" else ()
        return any(isinstance(part, nn.RNNBase) and part.training and part.dropout and part.num_layers > 1 for part in parts)

    def _part(self, node: fx.Node) -> nn.Module | None:
        return self.fetch_attr(str(node.target)) if node.op == "call_module" else None

    _outputs: dict[fx.Node, Any]
    _after: bool

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        return decode(super().fetch_args_kwargs_from_env(n))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        what, module = f"part {target!r}", self.fetch_attr(str(target))
        check_arguments(what, module.forward, args, kwargs)
        before, registered = Before(args, kwargs, self._after), Registered(module)
        result = super().call_module(target, args, kwargs)
        registered.check(what)
        if self._after:
            if before.moved():
                raise changes_argument(str(target), before.names(module.forward))
            return After(result, args, kwargs)
        if before.changed():
            raise changes_argument(str(target), before.names(module.forward))
        return result

    def _item(self, node: fx.Node) -> torch.Tensor | None:
        """The tensor that an operation takes out of many, if it does no more than that: it then runs nothing, reads one, and
        must not look at all of them."""
        if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node) or type(node.args[1]) is not int:
            return None
        value = self.env[node.args[0]]
        if type(value) not in (tuple, list) or not -len(value) <= node.args[1] < len(value):
            return None
        item = value[node.args[1]]
        return item if isinstance(item, torch.Tensor) else None

    def run_node(self, n: fx.Node) -> Any:
        self._after = bool(n.meta.get("after"))
        self.allocations.at(n.name, place_of(n))
        item = self._item(n)
        if item is not None:
            self.counted.after(n, {}, None)
            self._versions.append((n, 0, item, item._version))
            return item
        grad, writes = torch.set_grad_enabled(n.meta.get("grad", True)), writes_of(n, self.env, self.writes, self._part(n))
        read = self.counted.before(self.env[node] for node in n.all_input_nodes)
        with static(f"{n.op} {n.target!r}"), grad, writes:
            result = super().run_node(n)
        if n.op in ("call_module", "call_function", "call_method"):
            self.counted.after(n, read, result)
        check_result(f"{n.op} {n.target!r}", result.result if isinstance(result, After) else result)
        for at, leaf in enumerate(leaves_of(result)):
            if isinstance(leaf, torch.Tensor):
                self._versions.append((n, at, leaf, leaf._version))
        if n.op in ("placeholder", "get_attr") and isinstance(result, torch.Tensor):
            self.allocations.note(result, Site(INPUT if n.op == "placeholder" else CONSTANT, str(n.target)))
        if n.op == "output":
            self._outputs = {n: result}
        return result


@contextlib.contextmanager
def static(what: str) -> Iterator[None]:
    """``NotSupported`` instead of what fake tensors say when they are asked for their values."""
    try:
        yield
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
        depends_on_data(),
    ) as error:
        raise NotSupported(
            f"{what} cannot be captured, its result's shape or control flow depends on data: {first_line(error)}",
            hint="what crosses between workers must be known before the step: use torch.where or padding instead of "
            "choosing by value",
        ) from error
