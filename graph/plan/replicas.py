"""Replicas: the captured forward of one shard of a batch, made the graph of all shards, each with its own replica of the parts.

Where parts of ``net`` have replicas, the graph computes what one process computes by ::

    shards = [shard.clone() for shard in x.chunk(count)]
    copies = [{name: p.view_as(p) for name, p in net.named_parameters() if it is one of these parts} for _ in shards]
    torch.cat([functional_call(net, copy, shard) for copy, shard in zip(copies, shards)])

but for buffers that layers write in training: what the first shard leaves there stays. A parameter lies at the worker of the
first replica, as if there were no other. The others get it in each forward, as any tensor that crosses. Its gradient is the sum
of one term a shard, added as autograd adds them: the last shard's first. Bits are those of that process.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from ...transport import NotSupported
from ..trace.capture import Capture, TensorSpec, propagate, unchanged
from ..trace.sites import INSIDE, OF_INPUT, SHARD
from ..trace.values import constants, described, encode, flatten, leaves_of, pick

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_JOIN = "@"
"""The scope of what splits and joins: nobody's but the caller's."""


class Replica(nn.Module):
    """A part as one of its replicas calls it: with tensors in the place of those that it has under these names."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self._modules[INSIDE] = part

    @property
    def part(self) -> nn.Module:
        return self.get_submodule(INSIDE)

    def forward(self, names: tuple[str, ...], tensors: tuple[torch.Tensor, ...], /, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.part, dict(zip(names, tensors)), args, kwargs)


def replica_path(at: int, path: str) -> str:
    """Where the ``Replica`` number ``at`` of the part at ``path`` stands: no module of a model has such a name."""
    return f"@{at}.{path}"


def shards_of(inputs: Sequence[TensorSpec], count: int) -> list[list[TensorSpec]]:
    """The inputs of each shard, of the sizes of ``torch.chunk``: the last may be smaller. ``NotSupported`` for inputs that are
    no batch, or too few."""
    sizes = sorted({spec.shape[0] for spec in inputs if spec.shape})
    if len(sizes) != 1:
        raise NotSupported(
            f"replicas split every tensor input along its first dimension, and these have {sizes or 'none'} there",
            hint="give what is no batch to the model as a buffer, or a number",
        )
    parts = torch.empty(sizes[0]).chunk(count)
    if len(parts) < count or not sizes[0]:
        raise NotSupported(
            f"torch.chunk splits a batch of {sizes[0]} samples into {len(parts)} shards, and there are {count} replicas",
            hint="DataLoader(drop_last=True), or a larger batch",
        )
    return [[replace(spec, shape=(len(part), *spec.shape[1:])) if spec.shape else spec for spec in inputs] for part in parts]


def replicate(shards: Sequence[Capture], model: nn.Module, inputs: list[TensorSpec], parts: Sequence[str]) -> Capture:
    """The forward of a whole batch, of those of its shards (``shards_of`` the ``inputs``): each has its replicas of the
    ``parts``. ``model`` is the skeleton that was captured. ``NotSupported``, with the reason, where the result is not proven to
    be that of one process."""
    for path in parts:
        if any(table for m in model.get_submodule(path).modules() for name, table in vars(m).items() if name.endswith(_HOOKS)):
            raise NotSupported(f"part {path!r} has replicas, and hooks: each replica would have its own")
    made = _Replicated(shards, model, parts)
    made.fill(inputs)
    kept = {name: tensor for shard in shards for name, tensor in shard.constants.items()}
    with _standing(model, parts, len(shards)), unchanged(model, lambda path: made.part_of(path) is None):
        found = propagate(model, made.graph, inputs, kept)
    made.check(found)
    found.effects = [copy[effect] for shard, copy in zip(shards, made.copies) for effect in shard.effects]
    found.how = shards[0].how
    different = list({id(shard): shard for shard in shards}.values())
    found.roots = lambda live: [root for shard in different for root in shard.roots(live)]
    return found


@contextlib.contextmanager
def _standing(model: nn.Module, parts: Sequence[str], count: int) -> Iterator[None]:
    """While this lasts, the replicas stand in the model."""
    for at, path in itertools.product(range(count), parts):
        *above, name = replica_path(at, path).split(".")
        place = model
        for step in above:
            place = place._modules.setdefault(step, nn.Module())  # type: ignore[assignment]
        place._modules[name] = Replica(model.get_submodule(path))
    try:
        yield
    finally:
        for at in range(count):
            del model._modules[f"@{at}"]


class _Replicated:
    """``graph`` is filled; ``copies`` has, by shard, what became of each node of the shard's graph."""

    def __init__(self, shards: Sequence[Capture], model: nn.Module, parts: Sequence[str]) -> None:
        self.graph = fx.Graph()
        self.copies: list[dict[fx.Node, fx.Node]] = []
        self._shards, self._model, self._parts = shards, model, parts
        self._attributes: dict[str, fx.Node] = {}
        self._aliases: dict[tuple[int, str], fx.Node] = {}

    def fill(self, inputs: list[TensorSpec]) -> None:
        graph, count = self.graph, len(self._shards)
        whole = [graph.placeholder(f"input{at}") for at in range(len(inputs))]
        pieces: list[list[fx.Node]] = [[] for _ in range(count)]
        for node, spec in zip(whole, inputs):
            split = self._joint(graph.call_method("chunk", (node, count))) if spec.shape else None
            for at, row in enumerate(pieces):
                piece = None if split is None else self._joint(graph.call_function(pick, (split, at)))
                # Kernels give other bits where memory is not aligned, as it is in slots, and in copies.
                row.append(node if piece is None else self._joint(graph.call_method("clone", (piece,))))
                row[-1].meta |= {} if piece is None else {SHARD: at, OF_INPUT: node}
        outputs = [self._copy(at, row) for at, row in enumerate(pieces)]
        # What is no tensor must be the same in all shards.
        given = [flatten(shard.values[output]) for shard, output in zip(self._shards, outputs)]
        if len({(described(tree), constants(leaves)) for leaves, tree in given}) > 1:
            raise NotSupported("the forward gives other objects for the last shard, which is smaller")
        tensors = zip(*(self._tensors(at, output) for at, output in enumerate(outputs)))
        graph.output(fx.map_arg(outputs[0].args[0], lambda node: self._joined(node, tensors)))

    def part_of(self, path: str) -> str | None:
        """The replicated part that this path belongs to."""
        return next((part for part in self._parts if path == part or path.startswith(part + ".")), None)

    def check(self, found: Capture) -> None:
        """Refuse what replicas would do otherwise than one process."""
        for node in found.draws:
            if self._is_replica(node):
                raise NotSupported(
                    f"{node.target} draws random numbers, and has replicas: each would draw its own",
                    hint="place what draws (dropout) without replicas, or call eval() on it",
                )
        kept = {
            buffer.untyped_storage()._cdata: f"{path}.{name}"
            for path, module in self._model.named_modules()
            if self.part_of(path) and not isinstance(module, _NormBase)  # has those of the first shard
            for name, buffer in module.named_buffers(recurse=False)
        }
        for write in found.writes:
            if write.storage in kept:
                raise NotSupported(f"the forward writes buffer {kept[write.storage]!r} of a part that has replicas")

    @staticmethod
    def _is_replica(node: fx.Node) -> bool:
        place = str(node.target) if node.op == "call_module" else node.meta.get("scope", "")
        return place.startswith("@") and place != _JOIN

    def _copy(self, at: int, pieces: list[fx.Node]) -> fx.Node:
        """The node of the shard's output."""
        nodes: dict[fx.Node, fx.Node] = {}
        self.copies.append(nodes)
        left = iter(pieces)
        for node in self._shards[at].graph.nodes:
            if node.op == "placeholder":
                nodes[node] = next(left)
            elif node.op == "get_attr":
                nodes[node] = self._tensor(at, str(node.target))
            elif node.op == "call_module" and self.part_of(str(node.target)) is not None:
                nodes[node] = self._call(at, node)
            elif node.op != "output":
                made = nodes[node] = self.graph.node_copy(node, nodes.__getitem__)
                made.meta[SHARD] = at
                scope = made.meta.get("scope", "")
                if self.part_of(scope) is not None:
                    self._place(made, at, scope)
        return node

    def _place(self, node: fx.Node, at: int, path: str) -> None:
        """At the worker of this replica. The first one starts above the level of the parameters, which lie there too: so
        its backward need not wait for their gradients from the others."""
        node.meta["scope"] = replica_path(at, path)
        node.meta["level"] = 2

    def _call(self, at: int, node: fx.Node) -> fx.Node:
        path = str(node.target)
        if path not in self._parts:
            raise NotSupported(
                f"the forward calls {path!r}, which is inside of a part that has replicas", hint="place it by itself"
            )
        if node.meta.get("after"):
            raise NotSupported(f"part {path!r} has replicas, and puts something into its arguments")
        part = self._model.get_submodule(path)
        names = [name for name, _ in part.named_parameters()]
        if at > 0:
            # In training these layers compute without the buffers that they write: each replica writes its own.
            own = {id(b) for m in part.modules() if isinstance(m, _NormBase) and m.training for b in m.buffers(recurse=False)}
            names += [name for name, buffer in part.named_buffers() if id(buffer) not in own]
        tensors = tuple(self._tensor(at, f"{path}.{name}") for name in names)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.copies[at].__getitem__)
        made = self.graph.call_module(replica_path(at, path), (tuple(names), tensors, *args), kwargs)
        made.meta = dict(node.meta) | {"level": 2}
        return made

    def _tensor(self, at: int, path: str) -> fx.Node:
        """What a replica has as this parameter, buffer or constant."""
        if path not in self._attributes:
            self._attributes[path] = self.graph.get_attr(path)
        node, part = self._attributes[path], self.part_of(path)
        if part is None or not isinstance(_attribute(self._model, path), nn.Parameter):
            return node
        if (at, path) not in self._aliases:
            alias = self._aliases[at, path] = self.graph.call_function(torch.ops.aten.alias.default, (node,))
            alias.meta["scope"], alias.meta["grad"] = replica_path(at, part), True
            alias.meta["label"], alias.meta[SHARD] = path, at
        return self._aliases[at, path]

    def _joint(self, node: fx.Node) -> fx.Node:
        node.meta["scope"], node.meta["grad"] = _JOIN, True
        return node

    def _tensors(self, at: int, output: fx.Node) -> list[fx.Node]:
        """Those in the result of a shard, in order. ``NotSupported`` for one that is no batch."""
        shard, found = self._shards[at], list[fx.Node]()
        given = [shard.values[node] for node in shard.graph.nodes if node.op == "placeholder"]
        size = next(len(tensor) for tensor in given if tensor.dim())
        results: list[fx.Node] = []
        fx.map_arg(output.args[0], results.append)
        for node in results:
            value, made = shard.values[node], self.copies[at][node]
            for number, leaf in enumerate(leaves_of(value)):
                if not isinstance(leaf, torch.Tensor):
                    continue
                if tuple(leaf.shape[:1]) != (size,):
                    raise NotSupported(
                        "results of replicas are joined along their first dimension, the batch's, and "
                        f"{node.name} has the shape {tuple(leaf.shape)} for {size} samples",
                        hint="compute the loss outside of the model",
                    )
                found.append(made if leaf is value else self._joint(self.graph.call_function(pick, (made, number))))
        return found

    def _joined(self, node: fx.Node, tensors: Iterator[tuple[fx.Node, ...]]) -> Any:
        """A result of the first shard with those of all, one behind the other, in the place of its tensors."""

        def put(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return self._joint(self.graph.call_function(torch.cat, (list(next(tensors)),)))

        return encode(self._shards[0].values[node], put)


def _attribute(model: nn.Module, path: str) -> Any:
    above, _, name = path.rpartition(".")
    return getattr(model.get_submodule(above), name, None)
