"""Models whose forward nobody can trace: it runs here, in Python, and every remote part that it calls is a small plan.

A call is known by its part, how often that part was called before in this forward, and the shapes and flags of its inputs.
When it is new it is captured (on fake tensors; where the part itself looks at values, on the real ones: a *probe*) and set
up; from then on it is prepared writes, as in a captured model. So every turn of a loop has slots of its own, and the turns
that a forward does not take cost nothing.

What a part gives comes on the device of its first tensor input, a fetched parameter on that of the forward's; everything else
that the forward computes with has to be where torch asks for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..graph.caller.stage import Plan
from ..graph.guards.side_effects import OnlyHere
from ..graph.plan.analyze import TransferGraph, analyze
from ..graph.trace import values
from ..graph.trace.capture import Capture, TensorSpec, call_of, capture_call, mode_of
from ..graph.trace.devices import CPU, named
from ..graph.trace.sites import INPUT, Site, input_names, name_inputs
from ..graph.trace.sizes import Sizes
from ..graph.trace.watch import Busy
from ..graph.trace.writes import OWN
from ..graph.work.command import WorkerError
from ..ground.advice import warn
from ..parts.parameter import RemoteParameter
from ..parts.remote_part import has_hooks, hooks_around, tables_inside
from ..transport import NotSupported
from .session import Session
from .signature import Miss

_GIVES_VIEW = "gives a view of what it is given, and the forward writes into one of them"
_KEEPS = "keeps what it gives, and the forward writes into that: it would keep it as it was"
PLANS = 128
"""How many calls are kept set up, at least."""


class Eager:
    """The forward of one model. ``shape()`` gives its skeleton, with the present flags; ``tell`` is given the graph of each
    call that is new. One thread at a time."""

    def __init__(
        self, session: Session, top: nn.Module, shape: Callable[[], nn.Module], tell: Callable[[TransferGraph], object]
    ) -> None:
        self.steps = 0
        self.calls = 0
        self.misses: Counter[str] = Counter()
        self._session, self._top, self._shape, self._tell = session, top, shape, tell
        self._seen: Counter[str] = Counter()
        self._fetched: dict[str, tuple[torch.Tensor, int]] = {}
        self._views: list[tuple[str, torch.Tensor, int]] = []
        """Tensors, and their versions, that the forward must not write into, and why."""
        self._mode = 0
        self._alone = False
        self.reasons: dict[str, str] = {}
        """Why a part runs in this process, by its path."""
        self._alone_here: set[str] = set()
        self._tables: dict[str, list[Any]] = {}
        self._device: torch.device | None = None

    def forward(self, args: Any, kwargs: Any) -> Any:
        session = self._session
        self._mode = session.mode()
        self._device = _device_of(args, kwargs)
        session.eager, before = self, session.caller.ledger.sequence
        try:
            result = self._top.forward(*args, **kwargs)
            self._check_fetched()
            session.originals.check_graph(result, (args, kwargs))
            self.steps += 1
            return result
        except BaseException:
            session.caller.forget_written(before)
            raise
        finally:
            session.eager = None
            self._seen.clear()
            self._fetched.clear()
            self._views.clear()

    def missed(self) -> list[Miss]:
        return [Miss(*item) for item in self.misses.most_common()]

    def call(self, path: str, args: Any, kwargs: Any) -> Any:
        """A remote part is called: by the forward that runs, or outside of any."""
        if why := self._session.only_here():
            self._say(path, why)
            return self._session.here.call(path, args, kwargs)
        if self._hooked(path):
            return self._session.here.call(path, args, kwargs)
        if self._session.eager is not None:
            return self._call(path, args, kwargs)
        session = self._session
        session.in_step = False
        session.caller.check_written()
        self._mode, self._alone = session.mode(), True
        self._device = _device_of(args, kwargs)
        session.eager = self
        try:
            return self._call(path, args, kwargs)
        finally:
            session.eager, self._alone = None, False
            self._seen.clear()
            self._fetched.clear()
            self._views.clear()

    def _hooked(self, path: str) -> bool:
        """Whether a part has hooks that its owner cannot call."""
        part: Any = self._top.get_submodule(path)
        if path not in self._tables:
            self._tables[path] = tables_inside(part)
        if any(self._tables[path]):
            self._say(path, "there are hooks on modules inside of it")
            return True
        if has_hooks(part) and not hooks_around(part):
            self._say(path, "hooks on it are to run among those that it came with, or at an operation of its own")
            return True
        return False

    def _say(self, path: str, why: str) -> None:
        if self.reasons.get(path) != why:
            self.reasons[path] = why
            warn(f"part {path!r} of a wrapped model runs in this process, over fetched parameters: {why}")

    def _call(self, path: str, args: Any, kwargs: Any) -> Any:
        self._mode = self._session.mode()  # the forward may have switched to eval()
        what, forward = f"part {path!r}", self._session.shape.get_submodule(path).forward
        values.check_arguments(what, forward, args, kwargs)
        values.check_dense(what, forward, args, kwargs)
        leaves, tree = values.flatten((args, kwargs))
        leaves = [self.fetch(leaf.path) if isinstance(leaf, RemoteParameter) else leaf for leaf in leaves]
        tensors = values.tensors_of(leaves)

        def join(*given: Any) -> Any:
            return tree.unflatten(values.filled(leaves, given))

        def build() -> Capture:
            found = captured()
            names = input_names(self._session.shape.get_submodule(path), join, len(tensors))
            found.sites = name_inputs(found.sites, names)
            return found

        def captured() -> Capture:
            try:
                found = capture_call(self._shape(), path, self._specs(path, tensors), join)
            except (OnlyHere, Busy):
                raise
            except Exception:  # of the part, or of what fake tensors can do: the probe will tell
                return self._probe(path, tensors, join)
            [result] = [found.values[node] for node in found.graph.nodes if node.op == "call_module"]
            numbers = any(isinstance(leaf, (bool, int, float)) for leaf in values.flatten(result)[0])
            if numbers and not isinstance(result, values.After):
                return self._probe(path, tensors, join)  # they may vary
            return found

        if path not in self._alone_here and (label := self._session.globals.other(path)):
            self._stay(path, f"{label} is another one here than at its worker")
        if path in self._alone_here:
            return self._session.here.call(path, args, kwargs)
        try:
            result = self._run(path, tensors, (values.constants(leaves), tree), build)
        except OnlyHere as error:
            self._stay(path, error.message)
            return self._session.here.call(path, args, kwargs)
        if isinstance(result, values.After):
            self._bring_back(path, (args, kwargs), (result.args, result.kwargs))
            return result.result
        return result

    def _stay(self, path: str, why: str) -> None:
        """From now on a part runs in this process."""
        self._alone_here.add(path)
        self._say(path, why)

    def _bring_back(self, path: str, given: tuple[Any, Any], after: tuple[Any, Any]) -> None:
        """Put into the arguments of a call what the part put into its copies."""
        forward = self._session.shape.get_submodule(path).forward
        now = values.named(forward, *after)
        for name, value in values.named(forward, *given).items():
            try:
                values.restore(value, now[name])
            except NotSupported as error:
                raise values.changes_argument(path, repr(name)) from error

    def fetch(self, path: str) -> torch.Tensor:
        """A parameter or buffer that lies elsewhere, as this forward computes with it: its gradient goes back."""
        if path not in self._fetched:
            tensor = self._run(path, [], (), lambda: _attribute(self._shape(), path))
            self._fetched[path] = (tensor, tensor._version)
        return self._fetched[path][0]

    def _check_fetched(self) -> None:
        for path, (tensor, version) in self._fetched.items():
            if tensor._version != version:
                worker = self._session.places.owner(path)
                raise NotSupported(
                    f"the forward writes into {path!r}, which lives on worker {worker!r}; here it has a copy",
                    peer=worker,
                    hint="place the module whose forward writes as a whole",
                )
        for what, tensor, version in self._views:
            if tensor._version != version:
                raise NotSupported(
                    what,
                    hint="use the operation that makes a new tensor (x = x + y, not x += y or x.add_(y))",
                )

    def _run(self, path: str, tensors: Sequence[torch.Tensor], rest: Any, build: Callable[[], Capture]) -> Any:
        caller = self._session.caller
        caller.plans.keep(PLANS)
        grads = torch.is_grad_enabled()
        # Without a backward a call is over when it returns, and the next one may use its slots.
        nth = self._seen[path] if grads else 0
        self._seen[path] += 1
        settings = self._session.settings.number
        given = tuple([(t.shape, t.dtype, t.requires_grad and grads, None if t.is_cpu else t.device) for t in tensors])

        def new() -> TransferGraph:
            if self.steps:
                shapes = ", ".join(f"{'x'.join(map(str, t.shape)) or 'scalar'} {str(t.dtype)[6:]}" for t in tensors)
                self.misses[f"{path}, call {nth + 1}: {shapes or 'no tensors'}"] += 1
            session, places = self._session, self._session.places
            located = session.located(tensors, session.devices.taken(tensors, path), path, self._device)
            found = build()
            graph = analyze(found, places.owner, session.agent.name, places.scope, located)
            graph.constants, graph.aliases, graph.part = {}, found.aliases, path
            self._tell(graph)
            return graph

        try:
            plan = caller.plan(("eager", path, nth, self._mode, settings, given, rest), new)
            while self._alone and len(plan.pending) >= caller.depth and nth < PLANS // 2:
                nth += 1  # outside of a forward nobody counts the calls whose backward is to come
                plan = caller.plan(("eager", path, nth, self._mode, settings, given, rest), new)
        except TypeError as error:
            if "unhashable" not in str(error):
                raise
            raise NotSupported(f"an input of {path!r} that is no tensor must be hashable: {error}") from error
        self.calls += 1
        result = caller.forward(plan, tensors, self._mode)
        return self._aliased(path, tensors, result, plan) if plan.graph.aliases or plan.given_back else result

    def _aliased(self, path: str, given: Sequence[torch.Tensor], result: Any, plan: Plan) -> Any:
        """Put the arguments themselves where a part gives them back; views of them are copies here, which nobody may write
        into. A part may give back its argument in one call, and something else in another."""
        leaves = values.leaves_of(result)
        names = plan.flow.names
        now = [(at, *plan.given_back[name]) for at, name in enumerate(names) if name in plan.given_back]
        same = {at: given[number] for at, number, same in now if same}
        # What a worker gives says so itself, what several replicas give does not.
        then = [item for item in plan.graph.aliases if item[1] == OWN or names[item[0]] not in plan.graph.values]
        for at, number, _ in {*then, *now}:
            what = _KEEPS if number == OWN else _GIVES_VIEW
            tensors = [leaves[at]] if number == OWN else [given[number], leaves[at]]
            if at not in same and not any(tensor.is_inference() for tensor in tensors):
                self._views += [(f"part {path!r} {what}", tensor, tensor._version) for tensor in tensors]
        order = iter(range(len(leaves)))
        return values.map_leaves(lambda leaf: same.get(next(order), leaf), result)

    def _specs(self, path: str, tensors: Sequence[torch.Tensor]) -> list[TensorSpec]:
        taken = self._session.devices.taken(tensors, path)
        return [TensorSpec(tuple(t.shape), t.dtype, t.requires_grad, device) for t, device in zip(tensors, taken)]

    def _probe(self, path: str, tensors: Sequence[torch.Tensor], join: Callable[..., Any]) -> Capture:
        args, kwargs = join(*(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors))
        worker = self._session.places.owner(path)
        taken = self._session.devices.taken(tensors, path)
        given = self._session.devices.given(path)
        own = self._session.devices.own(path)
        there = [named(given if given is not None and own in (None, device) else device) for device in taken]
        args, kwargs = values.map_tensors(torch.Tensor.cpu, (args, kwargs))
        answer = self._session.ask_owner(worker, "probe", path, self._mode, there, args, kwargs)
        if isinstance(answer, bytes):
            raise WorkerError.load(answer).raised(worker)
        found, drew, aliases = answer
        graph = fx.Graph()
        call = call_of(graph, self._shape(), path, self._specs(path, tensors), join)
        *nodes, _, output = graph.nodes
        with mode_of(self._shape()):
            fakes = [spec.empty() for spec in self._specs(path, tensors)]
            at = own or next(iter(taken), CPU)
            fake = lambda leaf: replace(leaf, device=at).empty() if isinstance(leaf, TensorSpec) else leaf  # noqa: E731
            result = values.decode(found, fake)
        made = {**dict(zip(nodes, fakes)), call: result, output: result}
        draws = frozenset([call] if drew else [])
        sites = {(node, 0): Site(INPUT, node.name) for node in nodes}
        return Capture(
            graph, made, {}, Sizes(known=False), sites=sites, draws=draws, how="probe", example=True, aliases=aliases
        )


def _device_of(args: Any, kwargs: Any) -> torch.device | None:
    """That of the first tensor among the arguments."""
    given = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in given), None)


def _attribute(model: nn.Module, path: str) -> Capture:
    graph = fx.Graph()
    node = graph.get_attr(path)
    output = graph.output(node)
    value: Any = model
    for name in path.split("."):
        value = getattr(value, name)
    return Capture(graph, {node: value, output: value}, {}, Sizes())
