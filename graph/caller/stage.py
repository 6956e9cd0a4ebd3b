"""The caller's view of one forward: its own segments run inline in its autograd graph, and between them *stages*: send what
the workers need next, receive what the caller needs next.

Each stage is one autograd function. A token runs through the stages, so that autograd meets them in reverse order, all of
them, the first stage last, whichever of their outputs the loss depends on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from ...transport import NotSupported
from ...transport.gpu.driver import on_streams
from ..edges.slot import Inlet
from ..edges.station import Fittings
from ..outlets.outlet import Outlet
from ..plan.analyze import TransferGraph
from ..plan.place import ACTIVATION, GRADIENT
from ..plan.program import Segment
from ..work.flow import Flow, levels, sinks
from .blocks import Edge


class Exchange(Protocol):
    """Whoever sends and receives for the stages: ``exchange.Exchanges``."""

    def exchange(self, run: Forward, stage: Stage, tensors: Sequence[torch.Tensor], /) -> list[torch.Tensor]: ...
    def exchange_gradients(
        self, run: Forward, stage: Stage, grads: Sequence[torch.Tensor | None], /
    ) -> list[torch.Tensor | None]: ...
    def follow(self, run: Forward, edge: Edge, block: torch.Tensor, reader: torch.Tensor | None, name: str, /) -> None: ...


@dataclass(slots=True)
class Stage:
    """``sends``: name and outlets of each value that leaves; ``receives``: name and inlet of each that comes. ``returns``: the
    gradient inlets of each sent value, in the order of summation. ``backs``: the gradient outlet of each received one.
    ``apart``: something lands on an accelerator (``Land``).

    ``blocks``: what of this is an input of the forward, to whose gradient workers give a sum of several terms: its place among
    ``sends`` without triggers, and behind them ``joins``, and its name.

    ``joins``, ``splits``: values that are carried (``plan/sums``), and that the caller had before or has later: with the inlet
    of the sum that segments of others give, and with the outlet to them. What comes after this stage reads the tensors that
    come out of it, so autograd gives their gradient to it. Behind the others in ``returns``, and in ``backs``."""

    number: int
    sends: list[tuple[str, Sequence[Outlet]]]
    receives: list[tuple[str, Inlet]]
    returns: list[list[Inlet]]
    backs: list[Outlet | None]
    differentiable: list[bool]
    apart: bool
    joins: list[str]
    splits: list[str]
    blocks: list[tuple[int, str]]


class Plan:
    """One placement at the caller. ``schedule`` alternates between the caller's segments and stages. ``pending`` holds the
    forwards whose backward has not come yet; ``participants`` the workers that take part in a backward; ``landing`` the inlets
    of activations by value; ``flow`` is for micro-batches."""

    def __init__(self, fittings: Fittings, caller: str) -> None:
        self.fittings = fittings
        self.placement = fittings.placement
        graph = fittings.placement.graph
        assert graph is not None
        self.graph = graph
        self.pending: set[int] = set()
        self.given_back: dict[str, tuple[int, bool]] = {}
        """What the part that is called gave in the last forward that has the memory of a tensor which it was given: number of
        that among ``graph.inputs``, and whether they are one object."""
        self.participants = sorted({s.worker for s in graph.segments if s.backward and s.worker != caller})
        self.schedule: list[Segment | Stage] = []
        self.stages: list[Stage] = []
        self.flow = Flow(fittings, caller)
        self.levels, self.sinks = levels(graph), sinks(graph)
        self.landing = {i.edge.value: i for i in fittings.inlets.values() if i.edge.kind == ACTIVATION}
        self._arrange(graph, caller)

    def _arrange(self, graph: TransferGraph, caller: str) -> None:
        mine = [segment for segment in graph.segments if segment.worker == caller]
        carried = Carried(graph, mine, self.fittings)
        received: set[str] = set()
        for at, segment in enumerate(mine):
            self.schedule.append(segment)
            if at + 1 == len(mine):
                break
            sends = [name for name in segment.outputs if self.fittings.outlets_of(ACTIVATION, name)]
            wanted = [name for name in mine[at + 1].inputs if self._inlet(ACTIVATION, name) and name not in received]
            received.update(wanted)
            if sends or wanted or carried.joins[at] or carried.splits[at]:
                stage = self._stage(graph, sends, wanted, carried, at)
                self.stages.append(stage)
                self.schedule.append(stage)

    def _stage(self, graph: TransferGraph, sends: list[str], wanted: list[str], carried: Carried, at: int) -> Stage:
        backs = [carried.first_back(name) for name in wanted]
        inlets = [(name, self._inlet(ACTIVATION, name)) for name in wanted]
        joins, splits = carried.joins[at], carried.splits[at]
        return Stage(
            number=len(self.stages),
            sends=[(name, self.fittings.outlets_of(ACTIVATION, name)) for name in sends],
            receives=[(name, inlet) for name, inlet in inlets if inlet is not None],
            returns=[*(self._returns(graph, name) for name in sends), *([inlet] for inlet in joins.values())],
            backs=[*backs, *splits.values()],
            differentiable=[*(graph.values[name].spec.requires_grad for name in wanted), *(True for _ in splits)],
            apart=any(inlet is not None and inlet.edge.device for _, inlet in inlets),
            joins=list(joins),
            splits=list(splits),
            blocks=self._blocks(graph, [*(name for name in sends if not graph.values[name].trigger), *joins]),
        )

    @staticmethod
    def _blocks(graph: TransferGraph, given: Sequence[str]) -> list[tuple[int, str]]:
        of = f" of {graph.part!r}" if graph.part else ""
        return [(at, name + of) for at, name in enumerate(given) if name in graph.inputs and graph.values[name].several]

    def _returns(self, graph: TransferGraph, name: str) -> list[Inlet]:
        value = graph.values[name]
        found = self.fittings.inlets_of(GRADIENT, name)
        if value.carried:
            return [inlet for inlet in found if inlet.edge.segment == value.producer]
        first = {graph.segments[number].worker: at for at, number in reversed([*enumerate(value.order)])}
        return sorted(found, key=lambda inlet: first[inlet.edge.source])

    def _inlet(self, kind: str, name: str) -> Inlet | None:
        return next(iter(self.fittings.inlets_of(kind, name)), None)


class Carried:
    """Where gradients of values that are carried leave the caller and come back, by stage: between its segments ``at`` and
    ``at + 1``."""

    def __init__(self, graph: TransferGraph, mine: Sequence[Segment], fittings: Fittings) -> None:
        self.joins: list[dict[str, Inlet]] = [{} for _ in mine]
        self.splits: list[dict[str, Outlet]] = [{} for _ in mine]
        self._graph, self._fittings = graph, fittings
        place = {segment.number: at for at, segment in enumerate(mine)}
        for value in graph.values.values():
            if not value.carried:
                continue
            outlets = {outlet.edge.segment: outlet for outlet in fittings.outlets_of(GRADIENT, value.name)}
            readers = [number for number in reversed(value.order) if number in place]
            for start, end in graph.hops(value):
                if start in place and end not in place and (start != readers[0] or value.producer in place):
                    self.splits[place[start] - 1][value.name] = outlets[end]
                if end in place and start not in place and end != value.producer:
                    level = graph.segments[start].level
                    at = next(at for at, segment in enumerate(mine) if segment.level > level)
                    self.joins[at - 1][value.name] = self._inlet(value.name, end)

    def first_back(self, name: str) -> Outlet | None:
        """Where the gradient of a value goes that others make: from the first segment of the caller that reads it."""
        found = self._fittings.outlets_of(GRADIENT, name)
        value = self._graph.values[name]
        if value.carried:
            mine = self._graph.caller
            hops = [end for start, end in self._graph.hops(value) if self._graph.segments[start].worker == mine]
            found = [outlet for outlet in found if hops and outlet.edge.segment == hops[-1]]
        return found[0] if found else None

    def _inlet(self, name: str, segment: int) -> Inlet:
        [found] = [inlet for inlet in self._fittings.inlets_of(GRADIENT, name) if inlet.edge.segment == segment]
        return found


class Forward:
    """One forward. The autograd graph keeps it alive; if it dies before its backward, ``abandoned`` learns of it. ``zeroed``:
    marks of the parameters whose gradients its backward sets to ``None`` (``Control.begin_backward``)."""

    def __init__(
        self, plan: Plan, sequence: int, grad: bool, mode: int, abandoned: Callable[[Plan, int, Mapping[str, bytes]], None]
    ) -> None:
        self.plan, self.sequence, self.grad, self.mode = plan, sequence, grad, mode
        self.records = torch.is_grad_enabled()
        self.landed: dict[int, torch.Tensor | None] = {}
        self.shared: list[tuple[str, torch.Tensor, int]] = []
        """What its maker still reads where it landed: name, tensor, version (see ``header.SHARED``)."""
        self.streams = [torch.accelerator.current_stream(torch.device(gpu)) for gpu in plan.flow.gpus]
        """Of the accelerators where tensors of the caller lie: its backward uses them, as the engine does."""
        self.finished = False
        self.zeroed: Mapping[str, bytes] = {}
        self.backward_started = False
        self.leave = False
        """Whether its backward leaves parameters' gradients as they are (``header.LEAVE``)."""
        self.stages_left = set(range(len(plan.stages)))
        self._abandoned = abandoned

    def __del__(self) -> None:
        if not self.finished:
            self._abandoned(self.plan, self.sequence, self.zeroed)


@contextmanager
def as_in_forward(run: Forward) -> Iterator[None]:
    """On the streams of its forward, as the engine runs what it has of it. The engine takes what comes of a stage, which it
    knows on the CPU only, to be made by the current streams of this thread: so these wait."""
    with on_streams(run.streams):
        yield
    for stream in run.streams:
        now = torch.accelerator.current_stream(stream.device)
        if now != stream:
            now.wait_stream(stream)


def check_once() -> None:
    """In a backward, before what is differentiated once only."""
    if torch.is_grad_enabled():
        raise NotSupported(
            "create_graph=True: gradients of remote parts have no graph of their own",
            hint='wrap(..., capture="here") runs the model in this process, over fetched parts',
        )


def check_plain() -> None:
    """In a backward, before its first gradient goes out: nothing here changes what operations do."""
    if torch._C._is_any_autocast_enabled() or torch._C._len_torch_dispatch_stack():
        raise NotSupported(
            "a backward under autocast, or a mode that follows operations: these reach no other worker",
            hint='call backward() outside of them; wrap(..., capture="here") runs the model in this process',
        )


def engine_runs(node: Any) -> bool:
    """In a backward: whether it is to reach this node."""
    return bool(torch._C._will_engine_execute_node(node))


def accumulator(leaf: torch.Tensor) -> Any:
    """The node that adds to a leaf's gradient."""
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def backward_of(ctx: Any, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The backward of the stage of an autograd function: gradients of what it sent."""
    check_once()
    with as_in_forward(ctx.run) if ctx.run.streams else nullcontext():
        found = ctx.exchanges.exchange_gradients(ctx.run, ctx.stage, grads)
    for at, name in ctx.stage.blocks:
        block, edge = found[at], ctx.next_functions[1 + at]  # the first one is the token's
        if block is not None and edge[0] is not None:
            ctx.exchanges.follow(ctx.run, edge, block, ctx.readers[at](), name)
    return found


def note_readers(ctx: Any, stage: Stage, tensors: Sequence[torch.Tensor]) -> None:
    """For ``backward_of``: the tensors of its blocks, which it does not keep alive."""
    ctx.readers = {at: weakref.ref(tensors[at]) for at, _ in stage.blocks}


class Cross(torch.autograd.Function):
    """One stage, as autograd sees it. The token's gradient is ``None``: it is there for the order alone, and the engine runs a
    node whatever the gradients are."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, exchanges: Exchange, run: Forward, stage: Stage, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.exchanges, ctx.run, ctx.stage = exchanges, run, stage
        note_readers(ctx, stage, tensors)
        outputs = exchanges.exchange(run, stage, tensors)
        ctx.mark_non_differentiable(*(out for out, grad in zip(outputs, stage.differentiable) if not grad))
        return (torch.empty(()), *outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (None, None, None, None, *backward_of(ctx, grads[1:]))  # the first one is the token's


class Land(torch.autograd.Function):
    """Makes what came on an accelerator part of the graph, behind a CPU scalar of its stage, and puts its gradient into a list.

    The engine has one thread for all backwards on an accelerator of this process, of all models. A stage waits for its workers,
    which may themselves need that thread, for a part of a model of theirs: so it must not wait there, and has nothing on the
    accelerator that the engine could see. It runs on the thread that called ``backward``."""

    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, tensor: list[torch.Tensor], grads: list[Any], at: int) -> torch.Tensor:
        ctx.grads, ctx.at = grads, at
        return tensor[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        ctx.grads[ctx.at] = grads[0]
        return None, None, None, None


class CrossApart(torch.autograd.Function):
    """``Cross``, with a scalar for every output: the outputs themselves come in ``made``, their gradients in ``back``."""

    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        exchanges: Exchange,
        run: Forward,
        stage: Stage,
        made: list[torch.Tensor],
        back: list[Any],
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.exchanges, ctx.run, ctx.stage, ctx.back = exchanges, run, stage, back
        note_readers(ctx, stage, tensors)
        made += exchanges.exchange(run, stage, tensors)
        return tuple(torch.empty(()) for _ in range(1 + len(made)))

    @staticmethod
    def backward(ctx: Any, *handles: None) -> Any:
        grads, ctx.back[:] = list(ctx.back), [None] * len(ctx.back)
        return (None, None, None, None, None, None, *backward_of(ctx, grads))


def cross_apart(
    token: torch.Tensor, exchanges: Exchange, run: Forward, stage: Stage, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """As ``Cross.apply``, where some output is on an accelerator."""
    made: list[torch.Tensor] = []
    back: list[Any] = [None] * len(stage.differentiable)
    token, *handles = CrossApart.apply(token, exchanges, run, stage, made, back, *tensors)
    outputs = [
        Land.apply(handle, [tensor], back, at) if grad else tensor
        for at, (handle, tensor, grad) in enumerate(zip(handles, made, stage.differentiable))
    ]
    return token, *outputs
