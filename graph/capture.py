"""Which operations, on which tensors, in which order: the model's forward, traced without computing anything.

The model is a skeleton (no weights: see ``skeleton``). Its top-level forward is traced with ``torch.fx``; every module that
it calls stays one operation. Shapes, dtypes and who needs a gradient come from running the trace once on fake tensors.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _pytree as pytree

from ..transport import NotSupported
from .sites import CONSTANT, INPUT, Allocations, Site, place_of
from .sizes import Number, Sizes, depends_on_data

_HINT = "what joins the parts must be the same for all tensors of one shape; decide on values outside of the model"


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before the step; unknown dimensions are ``FREE``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


@dataclass
class Capture:
    """The traced forward. ``values`` has each node's result on fake tensors, ``constants`` the tensors that the forward
    makes without any input. ``sizes`` says which sizes in ``values`` are for good. ``written`` has (node, number of the leaf)
    of every tensor that is written in place after its node made it, ``sites`` who allocated the storage of that leaf."""

    graph: fx.Graph
    values: dict[fx.Node, Any]
    constants: dict[str, torch.Tensor]
    sizes: Sizes
    written: frozenset[tuple[fx.Node, int]] = frozenset()
    sites: dict[tuple[fx.Node, int], Site] = field(default_factory=dict)


def skeleton(model: nn.Module) -> nn.Module:
    """The same modules with the same names, shapes and flags, and no data."""
    with FakeCopyMode(FakeTensorMode(allow_non_fake_inputs=True)):
        return copy.deepcopy(model)


def capture(
    model: nn.Module,
    inputs: list[TensorSpec],
    join: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]],
    sizes: Sizes | None = None,
) -> Capture:
    """Trace the forward of a skeleton. ``join(*tensors)`` gives its (args, kwargs) from the tensor inputs alone.

    Raises ``NotSupported`` with the reason where the forward or a part depends on the values of tensors; errors of the
    model itself (wrong shapes) come as they are. What contributes to no output is not part of the capture.
    """
    mode, sizes = _mode_of(model), sizes or Sizes()
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            graph = _Tracer(len(inputs), join).trace(model)
        except fx.proxy.TraceError as error:
            raise NotSupported(f"{type(model).__name__}.forward cannot be captured: {error}", hint=_HINT) from error
        _refuse_shared_writes(graph)
        graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        constants = {
            str(node.target): getattr(model, str(node.target))
            for node in graph.nodes
            if node.op == "get_attr" and str(node.target).startswith("_tensor_constant")
        }
        with sizes.under(mode), _quiet():
            fakes = sizes.inputs([spec.shape for spec in inputs], [spec.dtype for spec in inputs])
            for fake, spec in zip(fakes, inputs):
                fake.requires_grad_(spec.requires_grad)
            propagator = _Propagator(model, graph)
            values = propagator.propagate(fakes)
    return Capture(graph, values, constants, sizes, propagator.written(), propagator.sites())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # It logs the whole stack of an error that is about to be raised anyway.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def _refuse_shared_writes(graph: fx.Graph) -> None:
    # Once a value is sent, a write into it here would not be seen there; with one user it has no other reader.
    for node in graph.nodes:
        if not _writes(node):
            continue
        target = node.kwargs.get("out", node.args[0] if node.args else None)
        if "out" in node.kwargs or (isinstance(target, fx.Node) and len(target.users) > 1):
            raise NotSupported(
                f"the forward writes into a tensor that is used again: {node.format_node()}",
                hint="use the operation that makes a new tensor (x = x + y, not x += y or x.add_(y))",
            )


def _writes(node: fx.Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        inplace = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        return inplace or bool(node.kwargs.get("inplace")) or "out" in node.kwargs
    return False


def _mode_of(model: nn.Module) -> FakeTensorMode:
    for tensor in (*model.parameters(), *model.buffers()):
        if hasattr(tensor, "fake_mode"):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


class _Tracer(fx.Tracer):
    def __init__(self, count: int, join: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__(param_shapes_constant=True)
        self._count, self._join = count, join

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        proxies = [self.create_proxy("placeholder", f"input{at}", (), {}) for at in range(self._count)]

        def call(root: nn.Module, *tensors: fx.Proxy) -> Any:
            args, kwargs = self._join(*tensors)
            return inspect.unwrap(root_fn)(root, *args, **kwargs)

        return call, [self.root, *proxies]


class _Propagator(fx.Interpreter):
    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False
        self.allocations = Allocations(model)
        self._versions: list[tuple[fx.Node, int, torch.Tensor, int]] = []

    def propagate(self, inputs: list[torch.Tensor]) -> dict[fx.Node, Any]:
        with self.allocations:
            self.run(*inputs)
        return dict(self.env) | self._outputs

    def written(self) -> frozenset[tuple[fx.Node, int]]:
        """See ``Capture``."""
        return frozenset((node, at) for node, at, tensor, version in self._versions if tensor._version != version)

    def sites(self) -> dict[tuple[fx.Node, int], Site]:
        """See ``Capture``."""
        known = {(node, at): self.allocations.of(tensor) for node, at, tensor, _ in self._versions}
        return {where: site for where, site in known.items() if site is not None}

    _outputs: dict[fx.Node, Any]

    def run_node(self, n: fx.Node) -> Any:
        self.allocations.at(n.name, place_of(n))
        try:
            result = super().run_node(n)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            UnsupportedOperatorException,
            depends_on_data(),
        ) as error:
            raise NotSupported(
                f"{n.op} {n.target!r} cannot be captured, its result's shape or control flow depends on data: "
                + str(error).partition("\n")[0],
                hint="what crosses between workers must be known before the step: use torch.where or padding instead of "
                "choosing by value",
            ) from error
        for at, leaf in enumerate(pytree.tree_leaves(result)):
            if not isinstance(leaf, (torch.Tensor, *Number, *_CONSTANTS)) and leaf is not None:
                raise NotSupported(
                    f"{n.op} {n.target!r} gives a {type(leaf).__name__}, which cannot cross between workers",
                    hint="tensors in tuples, lists and dicts can",
                )
            if isinstance(leaf, torch.Tensor):
                self._versions.append((n, at, leaf, leaf._version))
        if n.op in ("placeholder", "get_attr") and isinstance(result, torch.Tensor):
            self.allocations.note(result, Site(INPUT if n.op == "placeholder" else CONSTANT, str(n.target)))
        if n.op == "output":
            self._outputs = {n: result}
        return result


_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, slice)
_IN_PLACE = frozenset(
    [
        "setitem",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "iand",
        "ior",
        "ixor",
        "ilshift",
        "irshift",
        "imatmul",
    ]
)
