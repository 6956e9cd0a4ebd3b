"""Cut a captured forward at worker boundaries: segments, the values that cross, who needs a gradient back.

Levels: an operation's level is the highest level among its inputs, plus one where an input comes from another worker. All
operations of one worker and one level form a segment. An edge between workers therefore always goes to a higher level: the
segments form no circle, whatever the model looks like.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from ...transport import NotSupported
from ..guards.side_effects import OnlyHere
from ..trace.capture import Capture, TensorSpec
from ..trace.devices import CPU, named
from ..trace.sites import Site, label_of
from ..trace.sizes import Number, plain
from ..trace.values import After, Built, cannot_cross, described, encode, flatten, key, leaves_of, mutable, pick, sparse
from ..trace.writes import check_kept, check_seen, operation_name, scattered
from .draws import Draws
from .graph import TransferGraph, Value
from .located import Located, Pair
from .memory import Memory
from .names import Names
from .order import Order, put_in_order
from .program import Instruction, Ref, Segment, function_path, names_in, plainly, to_number, to_tensor
from .readers import Key, Readers


def analyze(
    capture: Capture,
    owner: Callable[[str], str],
    caller: str,
    scope: Callable[[str], str | None] = lambda path: None,
    located: Located | None = None,
) -> TransferGraph:
    """``owner(path)`` is the worker of a module or attribute, ``scope(path)`` that of the operations in the forward of a cut
    module. What has no place of its own runs where its first tensor input is; the inputs and the output belong to
    ``caller``. ``located`` gives the device of every value; without it all are on the CPU. What is summed in another order than
    in one process is carried (``sums``): the second time."""
    through: set[Key] = set()
    while True:
        found = _Analysis(
            capture, owner, caller, scope, None if located is None else located.fresh(), Readers(capture, through)
        )
        graph = found.result()
        order = Order(graph, found.readers.reads, found.home, found.readers.known, found.readers.names.values())
        more = order.unordered(capture.parameters, through) - through
        if not more:
            return graph
        through |= more


class _Analysis:
    def __init__(
        self,
        capture: Capture,
        owner: Callable[[str], str],
        caller: str,
        scope: Callable[[str], str | None],
        located: Located | None,
        readers: Readers,
    ) -> None:
        self.readers = readers
        self.names = Names(capture)
        self.capture, self.owner, self.caller, self.scope = capture, owner, caller, scope
        self.located = located
        self.expression: dict[fx.Node, Any] = {}
        self.taken: dict[fx.Node, dict[int, Any]] = {}  # what stands for the leaves of a value, by their id
        self.home: dict[str, tuple[str, int]] = {}  # tensor name -> (worker, level) of its maker
        self.specs: dict[str, TensorSpec] = {}
        self.sparse: dict[str, str] = {}  # what is not strided -> what it is called
        self.numbers: dict[str, torch.dtype] = {}  # sizes that are only known in the step -> how they cross
        self.sites: dict[str, Site | None] = {}
        self.slot_of: dict[str, str] = {}
        self.segments: dict[tuple[str, int], Segment] = {}
        self.uses: dict[str, dict[tuple[str, int], None]] = {}
        self.paths: dict[str, str] = {}  # name of an attribute -> where it is in the model
        self.written: set[str] = set()
        self.tensors: dict[str, torch.Tensor] = {}
        self.storages = Memory(capture.graph, capture.values, capture.writes)
        self.calls: list[tuple[fx.Node, Instruction]] = []  # of modules
        self.where: dict[fx.Node, tuple[str, int]] = {}
        self.draws = Draws(caller)
        self.compared: list[tuple[fx.Node, list[str]]] = []  # parts elsewhere that give constants too, and their tensors
        self.writing = {write.node for write in capture.writes}
        self.segment(caller, 0)

    def segment(self, worker: str, level: int) -> Segment:
        if (worker, level) not in self.segments:
            self.segments[worker, level] = Segment(0, worker, level)
        return self.segments[worker, level]

    def result(self) -> TransferGraph:
        inputs, output = [], None
        for at, node in enumerate(self.capture.graph.nodes):
            self.readers.position = at
            if node.op == "placeholder":
                inputs.append(self.names[node])
                self.where[node] = self.caller, 0
                self.define(self.names[node], self.capture.values[node], (self.caller, 0), (node, 0))
                if self.located is not None:
                    self.located.define(
                        self.names[node], self.located.inputs[len(inputs) - 1][0], self.located.inputs[len(inputs) - 1]
                    )
                self.attribute(self.names[node], self.capture.sites.get((node, 0)), (), self.caller)
                self.expression[node] = Ref(self.names[node])
            elif node.op == "output":
                output = self.arguments(node.args[0])
                effects = self.effects()
                given = self.readers.outputs(output)
                # In the last segment of the caller: the loss comes after it. What nothing uses may come later than the result.
                here = [level for worker, level in self.segments if worker == self.caller]
                level = max(self.level((output, effects), self.caller, given), *here, 0)
                self.where[node] = self.caller, level
                self.readers.note(given, (self.caller, level), self.home)
                output = self.localize(output, self.caller, level)
                if self.located is not None:
                    output = self.brought(output, self.caller, level, self.located.caller)
                self.use((output, effects), self.caller, level)
            elif node.op == "get_attr" and id(self.capture.values[node]) in self.readers.known:
                # Tied, or read once more: gradients meet where it lies.
                name = self.readers.known[id(self.capture.values[node])]
                self.where[node], self.expression[node] = self.home[name], Ref(name)
            elif node.op == "get_attr":
                worker = self.owner(str(node.target))
                home = self.where[node] = (worker, 0 if worker == self.caller else 1)
                self.define(self.names[node], self.capture.values[node], home, (node, 0), constant=True)
                if self.located is not None:
                    self.located.attribute(self.names[node], str(node.target), self.capture.values[node].device)
                self.attribute(self.names[node], self.capture.sites.get((node, 0)), (), worker)
                self.paths[self.names[node]] = str(node.target)
                if self.capture.values[node].requires_grad:
                    self.readers.known[id(self.capture.values[node])] = self.names[node]
                self.expression[node] = Ref(self.names[node])
            elif self.located is None and isinstance(self.expression.get(kept := _kept(node, self.capture)), Ref):
                # One name for one tensor: what reads it by either of them is summed together.
                self.where[node], self.expression[node] = self.where[kept], self.expression[kept]
            else:
                self.operation(node)
        for write in self.capture.writes:
            if write.node not in self.where:
                raise NotSupported(f"{operation_name(write.node)} writes into a tensor and gives none", hint=_GIVES_NONE)
        check_seen(self.capture.graph, self.capture.values, self.capture.writes, self.where, self.caller)
        for node, step in self.calls:
            self.storages.tell_apart(node, step, self.tensors, self.readers)
        return self.assemble(inputs, output)

    def effects(self) -> list[Any]:
        """What the caller has to wait for although it does not need it, so that nothing later overtakes it: effects of
        segments that give nothing else away."""
        giving = {self.home[name] for name, uses in self.uses.items() if any(key != self.home[name] for key in uses)}
        found = []
        for effect in self.capture.effects:
            names = [name for name in names_in(self.expression[effect]) if name not in self.numbers]
            if names and self.home[names[0]] not in giving and self.home[names[0]][0] != self.caller:
                giving.add(self.home[names[0]])
                found.append(Ref(names[0]))
        # That constants are what they were must be known before the forward is over.
        for node, names in self.compared:
            if not names:
                raise OnlyHere(f"part {node.target!r} gives no tensor: the forward would not wait for what it gives")
            tensors = [name for name in names if name not in self.numbers]
            if tensors and not any(self.uses[name] for name in tensors) and Ref(tensors[0]) not in found:
                found.append(Ref(tensors[0]))
        return found

    def operation(self, node: fx.Node) -> None:
        value = self.capture.values[node]
        flat, tree = flatten(value)
        leaves = [self.settled(leaf) for leaf in flat]
        args, kwargs = self.arguments(node.args), self.arguments(node.kwargs)
        made = [isinstance(leaf, torch.Tensor) or self.varies(node, leaf, args, kwargs) for leaf in leaves]
        if not any(made) and node.op != "call_module":
            self.express(node, flat, leaves)  # sizes and the like are known now
            return
        if node.target is operator.getitem and not isinstance(args[0], (Ref, Built)):
            self.expression[node] = args[0][args[1]]
            self.where[node] = self.where.get(node.all_input_nodes[0], (self.caller, 0))
            return
        known = self.taken_out(node, flat, made)
        if known is not None:
            self.where[node] = self.where[node.all_input_nodes[0]]
            self.express(node, flat, [known.get(id(leaf), settled) for leaf, settled in zip(flat, leaves)])
            return
        worker = self.place(node, args, kwargs)
        terms = self.readers.terms(node, args, kwargs)
        level = max(self.level((args, kwargs), worker, terms), node.meta.get("level", 0))
        if node in self.capture.draws:
            level = self.draws.level(node, worker, level)
        self.where[node] = worker, level
        self.readers.note(terms, (worker, level), self.home)
        args, kwargs = self.localize((args, kwargs), worker, level)
        kind, target = {"call_module": "module", "call_function": "function", "call_method": "method"}[node.op], node.target
        if self.located is not None:
            result = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), CPU)
            tensors = [name for name in names_in((args, kwargs)) if name not in self.numbers]
            here = self.here(worker)
            scoped = self.scope(node.meta.get("scope", "")) is not None
            pair = self.located.pair(node, tensors, here, result, scoped, worker == self.caller)
            move = functools.partial(self.moved, worker, level)
            target, args, kwargs = self.located.place(node, target, (args, kwargs), pair, here, result, move)
        structured = not isinstance(value, torch.Tensor)
        given = _given(node, self.capture.values, self.expression)
        made = _once(made, flat, given, self.capture.example)
        names = self.names.leaves(node, made) if structured else [self.names[node] if made[0] else None]
        for at, (name, leaf) in enumerate(zip(names, leaves)):
            if isinstance(leaf, torch.Tensor) and name is not None:
                self.define(name, leaf, (worker, level), (node, at))
                if self.located is not None:
                    self.located.define(name, leaf.device, pair)
                self.attribute(name, self.capture.sites.get((node, at)), (args, kwargs), worker)
            elif name is not None:
                self.numbers[name], self.home[name] = _dtype(leaf), (worker, level)
        given |= {id(leaf): Ref(name) for name, leaf in zip(names, flat) if name is not None}
        stands = [Ref(name) if name is not None else given.get(id(leaf), leaf) for name, leaf in zip(names, leaves)]
        self.express(node, flat, stands)
        self.use((args, kwargs), worker, level)
        step = self.instruction(node, kind, target, args, kwargs, names)
        if structured:
            step.tree, step.constants = (
                described(tree),
                tuple([leaf if isinstance(leaf, Ref) else key(leaf) for leaf in stands]),
            )
            if kind == "module" and worker != self.caller and not all(isinstance(leaf, Ref) for leaf in stands):
                self.compared.append((node, [name for name in names if name is not None]))
        self.segment(worker, level).take(step, len(self.where), node in self.capture.draws)

    def instruction(
        self, node: fx.Node, kind: str, target: Any, args: Any, kwargs: Any, names: Sequence[str | None]
    ) -> Instruction:
        path = function_path(target) if callable(target) else str(target)
        # In plain lists and dicts: those of fx are no part of what a worker that restricts its peers lets in.
        args, kwargs = plainly((args, kwargs))
        step = Instruction(
            kind,
            path,
            args,
            kwargs,
            tuple(names),
            not isinstance(self.capture.values[node], torch.Tensor),
            grad=node.meta.get("grad", True),
            numbers=frozenset(name for name in names if name in self.numbers),
            after=bool(node.meta.get("after")),
            label=label_of(node),
            open=kind == "module" and mutable((*args, *kwargs.values())),
        )
        self.calls += [(node, step)] * (kind == "module")
        return step

    def express(self, node: fx.Node, flat: Sequence[Any], leaves: Sequence[Any]) -> None:
        """What stands for the value of a node: the same with these leaves."""
        value, left = self.capture.values[node], iter(leaves)
        self.taken[node] = dict(zip(map(id, flat), leaves))
        if isinstance(value, torch.Size) and node.op != "call_module":
            self.expression[node] = tuple(leaves)  # it may hold what stands for a number
        else:
            self.expression[node] = encode(value, lambda leaf: next(left))

    def taken_out(self, node: fx.Node, flat: Sequence[Any], made: Sequence[bool]) -> dict[int, Any] | None:
        """What stands for the leaves, by ``id``, of an operation that only takes something out of an object; else ``None``."""
        first = node.args[0] if node.args else None
        looks = node.op == "call_method" or node.target in (operator.getitem, getattr, pick)
        if not looks or not isinstance(first, fx.Node) or isinstance(self.capture.values[first], torch.Tensor):
            return None
        known = self.taken.get(first, {})
        same = all(id(leaf) in known and not isinstance(leaf, _VALUES) for leaf, new in zip(flat, made) if new)
        return known if same else None

    def settled(self, leaf: Any) -> Any:
        """Numbers that cannot vary as such."""
        return plain(leaf) if isinstance(leaf, Number) and not self.capture.sizes.varies(leaf) else leaf

    def varies(self, node: fx.Node, leaf: Any, args: Any, kwargs: Any) -> bool:
        """Whether a result that is no tensor has to be computed in every step."""
        if self.capture.example and node.op == "call_module":
            return isinstance(leaf, _VALUES)
        if self.capture.sizes.known:
            return self.capture.sizes.varies(leaf)
        return isinstance(leaf, (int, float)) and bool(names_in((args, kwargs)))

    def define(
        self, name: str, tensor: torch.Tensor, home: tuple[str, int], leaf: tuple[fx.Node, int], constant: bool = False
    ) -> None:
        self.home[name], self.uses[name], self.tensors[name] = home, {}, tensor
        self.readers.define(name, tensor, self.capture.same.get(leaf, leaf))
        if kind := sparse(tensor):
            self.sparse[name] = kind
        if leaf in self.capture.written:
            self.written.add(name)
        shape = tuple(tensor.shape) if constant else self.capture.sizes.shape(tensor)
        self.specs[name] = TensorSpec(shape, tensor.dtype, tensor.requires_grad)

    def localize(self, arguments: Any, worker: str, level: int) -> Any:
        """Have the numbers among the arguments in that segment: from another one they come as tensors."""
        return map_aggregate(
            arguments,
            lambda leaf: self.local(leaf, (worker, level)) if isinstance(leaf, Ref) and leaf.name in self.numbers else leaf,
        )

    def here(self, worker: str) -> Callable[[str], torch.device | None]:
        """See ``Located.pair``."""
        located = self.located
        assert located is not None
        return lambda name: located.at(name, worker, self.home[name][0])

    def brought(self, arguments: Any, worker: str, level: int, pair: Pair) -> Any:
        """The tensors that are its own where this pair has them."""
        located, here = self.located, self.here(worker)
        assert located is not None

        def settle(leaf: Any) -> Any:
            if not isinstance(leaf, Ref) or leaf.name in self.numbers:
                return leaf
            own = located.own[leaf.name]
            return Ref(self.moved(worker, level, leaf.name, pair[1] if own == pair[0] else here(leaf.name) or own))

        return map_aggregate(arguments, settle)

    def moved(self, worker: str, level: int, name: str, device: torch.device) -> str:
        """The name of a value on this device in that segment. What comes from another worker lands where it is first asked for;
        else an operation is added that moves it."""
        located = self.located
        assert located is not None
        found = located.at(name, worker, self.home[name][0])
        if found is None:
            located.landing[name, worker] = device
        if found is None or found == device:
            return name
        self.use(Ref(name), worker, level)
        new, made = located.moved(name, self.segment(worker, level), device)
        if made:
            self.home[new], self.uses[new], self.specs[new] = (worker, level), {}, self.specs[name]
            self.sites[new] = None
        return new

    def local(self, number: Ref, here: tuple[str, int]) -> Ref:
        name, home = number.name, self.home[number.name]
        if home == here:
            return number
        carrier, copy = f"{name} as a tensor", f"{name} at {here[0]}, level {here[1]}"
        if carrier not in self.home:
            self.home[carrier], self.uses[carrier] = home, {}
            self.specs[carrier] = TensorSpec((), self.numbers[name])
            if self.located is not None:
                self.located.define(carrier, CPU, (CPU, CPU))
            self.convert(to_tensor, name, carrier, home)
        if copy not in self.home:
            self.numbers[copy], self.home[copy] = self.numbers[name], here
            self.use(Ref(carrier), *here)
            self.convert(to_number, carrier, copy, here)
        return Ref(copy)

    def convert(self, function: Callable[..., Any], source: str, result: str, where: tuple[str, int]) -> None:
        numbers = frozenset([result]) & self.numbers.keys()
        step = Instruction("function", function_path(function), (Ref(source),), {}, (result,), False, numbers=numbers)
        self.segment(*where).instructions.append(step)

    def attribute(self, name: str, site: Site | None, arguments: Any, worker: str) -> None:
        """Whose memory it is; and if that came with one of the arguments from elsewhere, in which value's slot it lies."""
        self.sites[name] = site
        for other in names_in(arguments):
            if site is not None and self.sites.get(other) == site:
                self.slot_of[name] = other if self.home[other][0] != worker else self.slot_of.get(other, "")
                return

    def arguments(self, arguments: Any) -> Any:
        return map_aggregate(arguments, lambda leaf: self.expression[leaf] if isinstance(leaf, fx.Node) else leaf)

    def place(self, node: fx.Node, args: Any, kwargs: Any) -> str:
        if node.op == "call_module":
            return self.owner(str(node.target))
        names = sorted(names_in((args, kwargs)), key=lambda name: name in self.numbers)  # tensors first
        first = self.home[names[0]][0] if names else self.caller
        if node in self.capture.draws and not (node in self.writing and any(name in self.paths for name in names)):
            first = self.caller
        return self.scope(node.meta.get("scope", "")) or first

    def level(self, arguments: Any, worker: str, terms: Iterable[Key] = ()) -> int:
        names = [name for name in names_in(arguments) if name not in self.paths or self.home[name][0] != worker]
        homes = [self.home[name] for name in names]
        # Only the caller has inputs of its own, so whatever a worker does without inputs comes after the caller's level 0.
        first = 0 if worker == self.caller else 1
        levels = [level if home == worker else level + 1 for home, level in homes]
        return max([first, *levels, *self.readers.levels(terms, worker)])

    def use(self, arguments: Any, worker: str, level: int) -> None:
        self.segment(worker, level)
        for name in names_in(arguments):
            if name in self.numbers:
                continue
            if name not in self.paths:
                self.uses[name][worker, level] = None
            elif self.home[name][0] == worker and (name not in self.readers.carried or self.home[name][1] == level):
                self.read(name, worker, level)
            else:
                self.read(name, *self.home[name])
                self.uses[name][worker, level] = None

    def read(self, name: str, worker: str, level: int) -> None:
        # Every segment of its worker reads an attribute for itself: only to other workers does it cross.
        instructions = self.segment(worker, level).instructions
        if not any(step.results == (name,) for step in instructions):
            instructions.append(Instruction("attribute", self.paths[name], (), {}, (name,), False, label=name))

    def assemble(self, inputs: list[str], output: Any) -> TransferGraph:
        ordered = sorted(self.segments.items(), key=lambda item: (item[0][1], item[0][0] != self.caller))
        number = {key: at for at, (key, _) in enumerate(ordered)}
        segments = [segment for _, segment in ordered]
        for at, segment in enumerate(segments):
            segment.number = at
        values = {}
        returned = set(names_in(output))
        for name, uses in self.uses.items():
            consumers = sorted(number[key] for key in uses if key != self.home[name])
            away = [segments[at] for at in consumers if segments[at].worker != self.home[name][0]]
            if away and name in self.sparse:
                raise cannot_cross(f"{_reader(name, away[0])} {name!r}:", self.sparse[name])
            if consumers:
                producer = number[self.home[name]]
                values[name] = Value(
                    name,
                    self.specs[name],
                    producer,
                    consumers,
                    written=name in self.written,
                    returned=name in returned,
                    site=self.sites.get(name),
                    slot_of=self.slot_of.get(name, ""),
                )
                values[name].carried = name in self.readers.carried
                if self.located is not None:
                    values[name].device = named(self.located.made[name])
                    values[name].landing = {w: named(device) for (n, w), device in self.located.landing.items() if n == name}
                segments[producer].outputs.append(name)
                for consumer in consumers:
                    segments[consumer].inputs.append(name)
        for segment in segments:
            if segment.worker != self.caller and not segment.inputs:
                self.add_trigger(segment, segments[0], values)
            _mark_last_uses(segment, keep={*segment.outputs, *names_in(output)})
        loss = [segment for segment in segments if segment.worker == self.caller][-1]
        for segment in reversed(segments):
            segment.backward = segment is loss or any(
                values[name].spec.requires_grad and any(segments[user].backward for user in values[name].consumers)
                for name in segment.outputs
            )
        graph = TransferGraph(self.caller, segments, values, inputs, plainly(output), self.capture.constants)
        check_kept(self.capture.writes, self.where)
        graph.scattered = scattered(self.capture.graph, self.capture.values, self.capture.writes, self.where)
        graph.drawn, graph.draws = list(self.draws.elsewhere), self.draws.segments()
        put_in_order(graph, self.readers.reads)
        return graph

    def add_trigger(self, segment: Segment, source: Segment, values: dict[str, Value]) -> None:
        name = self.names.new(f"start of {segment.instructions[0]}")
        values[name] = Value(name, TensorSpec((0,), torch.uint8), source.number, [segment.number], trigger=True)
        source.outputs.append(name)
        segment.inputs.append(name)


def _kept(node: fx.Node, capture: Capture) -> fx.Node:
    """What a conversion is called on, if it gives that very tensor, whatever it is like in the step; else the node."""
    first = node.args[0] if node.op == "call_method" and node.target in _CONVERSIONS and node.args else None
    strides = any(isinstance(arg, torch.memory_format) for arg in (*node.args, *node.kwargs.values()))
    if not isinstance(first, fx.Node) or strides or (node, 0) not in capture.same:
        return node
    return first if capture.values[first] is capture.values[node] else node


def _reader(name: str, segment: Segment) -> str:
    """Who uses a value in a segment, for people."""
    reads = [step for step in segment.instructions if name in names_in((step.args, step.kwargs))]
    return f"{'part' if reads[0].kind == 'module' else 'operation'} {reads[0].target!r} is given" if reads else "the result has"


def _once(made: Sequence[bool], flat: Sequence[Any], given: Mapping[int, Any], varies: bool) -> list[bool]:
    """Which leaves get a name: those that are made, but a tensor once only, unless that ``varies``."""
    seen, found = set(given), []
    for new, leaf in zip(made, flat):
        found.append(new and id(leaf) not in seen)
        seen |= {id(leaf)} if isinstance(leaf, torch.Tensor) and not varies else set()
    return found


def _given(node: fx.Node, values: Mapping[fx.Node, Any], expression: Mapping[fx.Node, Any]) -> dict[int, Ref]:
    """Tensors that a call gives back as what became of its arguments, by ``id``: they are what they were."""
    value = values[node]
    if not isinstance(value, After):
        return {}
    own = {id(leaf) for leaf in leaves_of(value.result)}
    found = {id(values[other]): expression[other] for other in node.all_input_nodes}
    return {number: ref for number, ref in found.items() if isinstance(ref, Ref) and number not in own}


_CONVERSIONS = frozenset(["to", "float", "double", "half", "bfloat16", "int", "long", "bool", "type_as"])
_VALUES = (bool, int, float)
"""Of Python: unlike tensors and symbols, not known by their identity."""
_GIVES_NONE = "have it return what it has written, or have a part do it that lies at one worker"


def _dtype(number: Any) -> torch.dtype:
    if isinstance(number, (bool, torch.SymBool)):
        return torch.bool
    return torch.int64 if isinstance(number, (int, torch.SymInt)) else torch.float64


def _mark_last_uses(segment: Segment, keep: set[str]) -> None:
    # Outputs stay: they are sent, and they are the roots of the backward.
    left = Counter(name for step in segment.instructions for name in set(names_in((step.args, step.kwargs))))
    for step in segment.instructions:
        used = set(names_in((step.args, step.kwargs)))
        left.subtract(used)
        unused = {name for name in step.results if name is not None and left[name] == 0}
        finished = {name for name in used if left[name] == 0} | unused
        step.last = tuple(sorted(finished - keep))
