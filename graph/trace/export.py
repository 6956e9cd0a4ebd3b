"""Capture by ``torch.export``: the forward as operations of ATen, for forwards that the other traces cannot follow.

Exported for training, so writes into buffers, dropout and batch norm stay the operations that they are. Parts do not stay
modules: their operations run where the modules are, and their parameters are attributes. Hooks and control flow inside of
parts are what they were when they were exported.
"""

from __future__ import annotations

import contextlib
import functools
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...transport import NotSupported
from ..guards.flags import check_flags, flags, steady_flags
from ..guards.generators import undrawn
from ..opaque.functions import custom_functions
from ..opaque.scripts import no_opaque_calls
from .capture import (
    Capture,
    Join,
    TensorSpec,
    check_inference,
    first_line,
    mode_of,
    propagate,
    quiet,
    sets_attribute,
    unchanged,
)
from .values import check_question, encode
from .watch import compares
from .writes import finish, sets_on_tensor, writes_beyond


def export(model: nn.Module, inputs: list[TensorSpec], join: Join, whole: Callable[[str], bool] = lambda path: True) -> Capture:
    """As ``capture.capture``, for the same skeletons."""
    with torch.inference_mode(False), torch.enable_grad(), undrawn():
        with mode_of(model):
            fakes = [spec.empty() for spec in inputs]
        args, kwargs = join(*fakes)
        program = _exported(model, args, kwargs)
        lowered = _Lowered(program, pytree.tree_leaves((args, kwargs)))
        effects = finish(lowered.graph, model)
        found = propagate(model, lowered.graph, inputs, lowered.constants)
        found.effects, found.how = effects, "export"
        return found


def _exported(model: nn.Module, args: Any, kwargs: Any) -> ExportedProgram:
    # Not strictly: that would read the forward's code instead of running it, and forget hooks and writes that nobody sees.
    try:
        with (
            unchanged(model, lambda path: False),
            custom_functions(_refuse),
            no_opaque_calls(),
            _silent(),
            _assignments(model) as assigned,
            _steady_forward(model),
            _NoForgotten(),
        ):
            program = torch.export.export(model, args, kwargs, strict=False)
    except NotSupported:
        raise
    except Exception as error:  # it raises whatever its parts do
        raise NotSupported(f"torch.export of {type(model).__name__} failed, not strict: {first_line(error)}") from error
    if assigned:
        raise sets_attribute(*assigned[0])
    if (name := compares()) and any("dropout" in str(node.target) for node in program.graph.nodes):
        # One that drops nothing gives back what it is given, but not while it is exported.
        raise NotSupported(f"{name} compares by identity, which an export does otherwise for results of dropout")
    return program


@contextlib.contextmanager
def _steady_forward(model: nn.Module) -> Iterator[None]:
    """Each forward runs under the flags that the program has now: around it ``torch.export`` turns those of backends off."""
    now, attributes = flags(), vars(model)
    forward, before = model.forward, attributes.get("forward")

    @functools.wraps(forward)
    def under_flags(*args: Any, **kwargs: Any) -> Any:
        with steady_flags(now):
            return forward(*args, **kwargs)

    attributes["forward"] = under_flags
    try:
        yield
    finally:
        attributes.pop("forward")
        if before is not None:
            attributes["forward"] = before


class _NoForgotten(TorchFunctionMode):
    """Refuses what an export forgets: assignments such as ``buffer.data = ...``, parameters that are frozen, and writes into
    tensors from outside of the model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        check_flags()
        check_inference()
        first = args[0] if args else None
        what = func.__self__.__name__ if name == "__set__" else ""
        check_question(name, args)
        # An export itself sets flags of tensors that are no parameters.
        if what and (what != "requires_grad" or isinstance(first, nn.Parameter)):
            raise sets_on_tensor(f"an assignment of {what!r}")
        if name == "requires_grad_" and isinstance(first, nn.Parameter):
            raise sets_on_tensor(name)
        writes = name == "__setitem__" or name in _AUGMENTED or (name.endswith("_") and not name.endswith("__"))
        if writes and isinstance(first, torch.Tensor) and not isinstance(first, FakeTensor):
            raise writes_beyond()
        return func(*args, **kwargs or {})


_AUGMENTED = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


@contextlib.contextmanager
def _assignments(model: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """Attributes (module, name) that the forward sets to anything but tensors, and buffers or tensors that had a value before;
    an export puts back what they were."""
    thread, original = threading.get_ident(), nn.Module.__setattr__
    paths = {module: name or type(model).__name__ for name, module in model.named_modules()}
    found: list[tuple[str, str]] = []
    written: set[tuple[nn.Module, str]] = set()

    def assign(module: nn.Module, name: str, value: Any) -> None:
        if threading.get_ident() != thread:
            original(module, name, value)
            return
        plain = not isinstance(value, (torch.Tensor, nn.Module)) and not name.startswith("_flat_weight")
        before = next((table[name] for table in (vars(module), module._buffers, module._parameters) if name in table), None)
        if isinstance(value, torch.Tensor):
            plain = before is not None and (module, name) not in written
            written.add((module, name))
        if plain and module in paths and vars(module).get(name, module) is not value:
            found.append((paths[module], name))
        original(module, name, value)

    nn.Module.__setattr__ = assign  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    import torch._dynamo.config  # takes long

    # An export that fails prints its graph so far, to the standard streams. What it makes of numpy has other bits.
    with (
        torch._dynamo.config.patch(trace_numpy=False),
        quiet(),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def _refuse(apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    raise NotSupported(f"{apply.__self__.__name__} has a backward of its own, which an export forgets")  # type: ignore[attr-defined]


class _Lowered:
    """The exported graph with inputs as placeholders, everything else that it reads as attributes, and nothing nested."""

    def __init__(self, program: ExportedProgram, leaves: list[Any]) -> None:
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        nodes: dict[fx.Node, Any] = {}
        given = iter(leaves)
        inputs: dict[int, fx.Node] = {}
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        # Placeholders come first in a graph that is captured.
        for node, spec in zip(placeholders, program.graph_signature.input_specs):
            if spec.kind is InputKind.USER_INPUT:
                leaf = next(given)
                if not isinstance(leaf, torch.Tensor):
                    nodes[node] = leaf
                    continue
                if id(leaf) not in inputs:
                    inputs[id(leaf)] = self.graph.placeholder(f"input{len(inputs)}")
                nodes[node] = inputs[id(leaf)]
        for node, spec in zip(placeholders, program.graph_signature.input_specs):
            if spec.kind is InputKind.USER_INPUT:
                continue
            path = str(spec.target)
            if spec.kind is InputKind.CONSTANT_TENSOR:
                path = self._constant(node.name, program.constants[path])
            elif spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
                raise NotSupported(f"torch.export made {spec.kind.name} of {path!r}")
            if node.users:
                nodes[node] = self.graph.get_attr(path)
        result = self._copy(program.graph_module, program.graph, nodes, True)
        self.graph.output(encode(pytree.tree_unflatten(list(result), program.call_spec.out_spec), lambda leaf: leaf))

    def _constant(self, name: str, value: Any) -> str:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            raise NotSupported(f"torch.export lost the values of the constant {name!r}")
        path = f"_tensor_constant_{id(value):x}_{name}"
        self.constants[path] = value
        return path

    def _copy(self, module: fx.GraphModule, graph: fx.Graph, nodes: dict[fx.Node, Any], grad: bool) -> Any:
        """The operations of a graph; its output, in nodes of ours."""
        ours: Callable[[Any], Any] = lambda leaf: nodes[leaf]  # noqa: E731
        for node in graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], ours)
            if node.op in ("placeholder", "get_attr"):
                continue
            if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
                enabled, inner, *args = node.args
                body = getattr(module, str(inner.target))
                inputs = [other for other in body.graph.nodes if other.op == "placeholder"]
                nodes[node] = self._copy(body, body.graph, dict(zip(inputs, fx.map_arg(args, ours))), bool(enabled))
                continue
            if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
                raise NotSupported(f"torch.export made {node.format_node()}, which cannot be cut")
            args, kwargs = fx.map_arg(node.args, ours), fx.map_arg(node.kwargs, ours)
            if getattr(node.target, "__name__", "") == "getitem" and not isinstance(args[0], fx.Node):
                nodes[node] = args[0][args[1]]
                continue
            made = nodes[node] = self.graph.call_function(node.target, args, kwargs)
            made.meta["scope"], made.meta["grad"] = _scope(node), grad
        raise AssertionError("a graph without an output")


def _scope(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    return next(reversed(stack.values()))[0].removeprefix("L['self']").lstrip(".") if stack else ""
