"""The state that a wrapped model keeps beside its modules: the connection to the owners, and the plans of its forward."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..graph.caller.stage import Plan
from ..graph.guards.fast_paths import FastPaths, cut_attention
from ..graph.guards.world import World, Worlds
from ..graph.plan.analyze import TransferGraph, analyze
from ..graph.plan.replicas import replicate, shards_of
from ..graph.show.differences import Differences
from ..graph.trace import values
from ..graph.trace.capture import Capture, Join, TensorSpec
from ..graph.trace.methods import Uncaptured, capture_by, methods_of, symbolic
from ..graph.trace.sites import input_names, name_inputs
from ..graph.trace.sizes import Sizes
from ..graph.trace.watch import structure
from ..parts.parameter import RemoteParameter
from ..parts.remote_part import RemotePart
from ..transport import NotSupported, RdmaError
from .eager import Eager
from .session import Session
from .signature import Miss, Signatures
from .skeleton import flagged, refreshed


def state_of(model: nn.Module) -> State:
    """Of a ``WrappedModel``. It lies in a slot, not among the attributes of a module: parts may have any name."""
    state: State = model._rdmarpc  # type: ignore[assignment]
    return state


def is_wrapped(value: Any) -> bool:
    return isinstance(value, nn.Module) and isinstance(getattr(value, "_rdmarpc", None), State)


Options = tuple[int, float, int, bool]
"""Of ``wrap``: depth, timeout, plans, whether everything is staged."""


class State:
    """``net`` is the original; ``method`` is the ``capture=`` of ``wrap``; ``chunks`` are the micro-batches of
    ``forward_backward``; ``options`` are the session's. ``captured``: see ``WrappedModel.captured``; ``runner`` runs the
    forward where no capture works, ``eager`` says whether it does so for good. What depends on the model's own training flag
    is given it (``training``): its modules' flags are those of ``session.stand_in``."""

    def __init__(self, net: nn.Module, session: Session, method: str, chunks: int, options: Options) -> None:
        self.session, self.method, self.chunks, self.options = session, method, chunks, options
        self.captured = ""
        self.differences = Differences()
        self.runner: Eager | None = None
        self._again = False
        self._turn = threading.RLock()
        self._hooks: list[Any] = []
        """Tables of hooks, for which there is no capture as long as they have entries."""
        self._before: list[Eager] = []
        self._last = 0
        self._methods = methods_of(method)
        self.net, self._top = net, session.stand_in
        self.saved: tuple[dict[str, Any], str] | None = None
        """The state and the folder of the last checkpoint that was saved or loaded."""
        self._signatures = Signatures(session.caller)
        session.here.replica.mixing.tell = self.differences.sums
        session.caller.control.watching = session.goes_backward
        session.caller.control.reordered = self.differences.sums
        session.caller.control.drew = self.differences.draws
        self._worlds = Worlds()
        self._look()

    def _look(self) -> None:
        """Which modules and parameters there are now."""
        self._parameters = list(self._top.parameters())
        # The modules whose forward is part of what is captured.
        whole = self.session.places.whole
        self._cut = [module for name, module in self._top.named_modules() if name and not whole(name)]
        self._attention = cut_attention(self._top, whole)
        self._dropouts = {
            path: m for path, m in self._top.named_modules() if isinstance(m, _DropoutNd) and not isinstance(m, RemotePart)
        }

    def _uncaptured(self, why: str) -> Uncaptured:
        return Uncaptured([f"{method}: {why}" for method in self._methods], NotSupported(why))

    def _away(self, path: str) -> bool:
        return self.session.places.owner(path) != self.session.agent.name

    def _world(self, training: bool) -> World:
        """What captures have read besides tensors and is still so; if there is none that holds, nothing."""
        if label := self.session.globals.other():
            raise self._uncaptured(f"{label} is another one in this process than at the worker of a part that reads it")
        try:
            world = self._worlds.now(training)
        except NotSupported as error:
            raise self._uncaptured(error.message) from error
        if world.number != self._last:
            self._last = world.number
            self._look()
        return world

    def plan(
        self, tensors: Sequence[torch.Tensor], leaves: list[Any], tree: Any, training: bool, recurring: bool = False
    ) -> Plan:
        """The plan for inputs that ``flatten`` gave, ``tensors`` being those among the ``leaves``; captured and set up when
        it is new. ``recurring``: these shapes will come again. Raises ``Uncaptured``."""
        for kind in filter(None, map(values.own_class, tensors)):
            raise self._uncaptured(f"an input is a {kind}, of which a graph would see the plain tensor")
        for kind in filter(None, map(values.sparse, tensors)):
            raise self._uncaptured(f"an input is {kind}, of which a trace would see no values")
        grads = torch.is_grad_enabled()
        world = self._world(training)
        with torch._C.DisableTorchFunctionSubclass():
            shapes = tuple([t.shape for t in tensors])
            family = (
                world.number,
                training,
                self.session.settings.number,
                tuple([module.training for module in self._cut]),
                self._drawing(),
                tuple([(t.dim(), t.dtype, t.requires_grad and grads, None if t.is_cpu else t.device) for t in tensors]),
                tuple([parameter.requires_grad for parameter in self._parameters]),
                values.constants(leaves),
                tree,
            )
        try:
            plan = self._signatures.plan(
                family,
                shapes,
                lambda sizes: self._build(tensors, leaves, tree, training, sizes, world),
                lambda: input_names(self.net, joined(leaves, tree), len(tensors)),
                recurring,
            )
        except TypeError as error:
            if "unhashable" not in str(error):
                raise
            raise NotSupported(f"an input that is no tensor must be hashable: {error}") from error
        if plan.graph.general:
            self.differences.fast_paths(plan.graph.general, grads)
        return plan

    def _draws(self, path: str) -> bool:
        late = self.session.caller.order.late
        return not self._away(path) and any(name == path or name.startswith(f"{path}.") for name in late)

    def _drawing(self) -> frozenset[str]:
        """Modules here that draw random numbers, whatever a capture may see of it."""
        late = self.session.caller.order.late
        late.update(path for path, module in self._dropouts.items() if module.training and 0 < module.p < 1)
        return frozenset(late)

    def only_here(self) -> str:
        """Why a forward that starts now runs in this process, if it does."""
        why = self.session.only_here() or ('capture="here"' if self.method == "here" else "")
        if why and self.session.places.replicas > 1:
            raise NotSupported(f"a forward of parts with replicas cannot run in this process: {why}")
        return why

    def here(self, args: Any, kwargs: Any, training: bool, why: str) -> Any:
        """Run the forward in this process, over fetched parts."""
        self._top.training = training
        self.session.settings.push()
        self.captured = f"here: {why}"
        return self._general_paths(lambda: self.session.here.forward(args, kwargs, "" if self.method == "here" else why))

    def check_falls_back(self, error: NotSupported) -> None:
        """Raise why no method captures the forward, unless it is to run eagerly then."""
        if self.session.places.replicas > 1:
            raise error
        if self.method not in ("auto", "eager"):
            raise getattr(error, "error", None) or error from None

    @property
    def eager(self) -> bool:
        if self._hooks and not any(self._hooks):
            self._hooks, self._again = [], True
        return self.runner is not None and not self._again

    def eagerly(self, args: Any, kwargs: Any, training: bool, refused: Sequence[str] = (), again: bool = False) -> Any:
        """Run the forward in Python. ``refused``: why no capture works; ``again``: the next forward is to try it once more, as
        this one may do for good what a capture cannot have."""
        self._top.training = training
        if self.runner is not None:
            if self._again:
                self._again, self.captured = False, "\n".join(["eager", *refused])
            return self._general_paths(functools.partial(self.runner.forward, args, kwargs))
        # If this fails, it was the input that was wrong: the next one may be captured.
        runner = Eager(self.session, self._top, self.skeleton, self.differences.of)
        try:
            result = self._general_paths(lambda: runner.forward(args, kwargs))
        except NotSupported as error:
            error.args = ("\n".join([*map(str, error.args), *refused]),)
            raise
        self.runner, self.captured, self._again = runner, "\n".join(["eager", *refused]), again
        return result

    def _general_paths(self, forward: Callable[[], Any]) -> Any:
        """Run a forward in Python: those of several threads one after another."""
        with self._turn:
            if not self._attention:
                return forward()
            paths = FastPaths(self._attention)
            try:
                with paths.off():
                    return forward()
            finally:
                self.differences.fast_paths(paths.general, torch.is_grad_enabled())

    def skeleton(self) -> nn.Module:
        """The model without data as it was wrapped, under the present flags."""
        return flagged(self.session.shape, self._top)

    def _build(
        self, tensors: Sequence[torch.Tensor], leaves: list[Any], tree: Any, training: bool, sizes: Sizes, world: World
    ) -> TransferGraph:
        session, join = self.session, joined(leaves, tree)
        self._top.training = training
        taken = session.devices.taken(tensors)
        specs = [TensorSpec(tuple(t.shape), t.dtype, t.requires_grad, device) for t, device in zip(tensors, taken)]
        whole = session.places.whole
        roots, empty = structure(self._top, whole, lambda module: isinstance(module, RemotePart))
        try:
            if any(empty):
                self._hooks = empty
                raise NotSupported("hooks on parts at other workers, or for gradients, are no part of a graph")
            shape = refreshed(self._top, session.shape, session.places, self.net)
        except NotSupported as error:
            raise self._uncaptured(error.message) from error
        names = input_names(shape, join, len(specs))
        graphs: list[TransferGraph] = []

        count = session.places.replicas
        shards = [specs] if count == 1 else shards_of(specs, count)

        def use(found: Capture) -> None:
            if count > 1:
                last = found
                if shards[-1] != shards[0]:
                    last = self._last_shard(shape, shards[-1], join, whole)
                found = replicate([found] * (count - 1) + [last], shape, specs, session.places.replicated)
            session.originals.check(list(found.constants.values()))
            found.draws |= {node for node in found.graph.nodes if node.op == "call_module" and self._draws(str(node.target))}
            found.sites = name_inputs(found.sites, names)
            located = session.located(tensors, taken)
            graph = analyze(found, session.places.owner, session.agent.name, session.places.scope, located)
            graph.general = found.general
            world.add([*roots, *found.roots(self._top)], empty)
            graphs.append(graph)

        if sizes.varying or not sizes.known:
            if count > 1:
                raise NotSupported("replicas have a plan for each batch size")
            if "fx" not in self._methods:
                raise NotSupported(f"capture={self.method!r} knows sizes only as numbers")
            found = symbolic(shape, specs, join, whole, self._away, sizes)
            use(found)
        else:
            found, refused = capture_by(self._methods, shape, shards[0], join, whole, use, self._away)
            self.captured = "\n".join([found.how, *refused])
        if self.runner is not None:
            self._before.append(self.runner)
            self.runner, self._again = None, False
        [graph] = graphs
        session.constants.update(graph.constants)
        self.differences.of(graph)
        graph.constants = {}  # they stay here
        return graph

    def _last_shard(self, shape: nn.Module, specs: list[TensorSpec], join: Join, whole: Callable[[str], bool]) -> Capture:
        """The forward of a smaller one than the others."""
        try:
            return capture_by(self._methods, shape, specs, join, whole, away=self._away)[0]
        except Uncaptured as error:
            said = "; ".join(error.refused)
            raise NotSupported(f"the last shard, of {specs[0].shape[0]} samples: {said}", hint=error.hint) from error

    def parameter_bytes(self) -> dict[str, int]:
        """By worker."""
        found: dict[str, int] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._top.parameters():
                home = parameter.worker if isinstance(parameter, RemoteParameter) else self.session.agent.name
                found[home] = found.get(home, 0) + parameter.numel() * parameter.element_size()
        return found

    def counters(self, everywhere: bool) -> dict[str, int]:
        """See ``WrappedModel.counters``."""
        totals = self.session.counters(everywhere)
        totals["misses"] = self._signatures.misses
        totals["backwards_unsplit"] = sum(n for key, n in totals.items() if key.startswith("backwards_unsplit["))
        totals["forwards_here"], totals["calls_here"] = self.session.here.steps, self.session.here.calls
        totals["steps"] += self.session.here.steps
        seen = [key.partition("[")[2][:-1] for key in totals if key.startswith("draws_elsewhere[")]
        totals |= self.differences.counts(seen)
        for runner in self._runners():
            totals["steps"] += runner.steps - runner.calls
            totals["misses"] += runner.misses.total()
        return totals

    def how(self) -> str:
        """See ``WrappedModel.captured``."""
        reasons = {} if self.runner is None else self.runner.reasons
        return "\n".join([self.captured, *(f"{path!r} here: {why}" for path, why in reasons.items())])

    def _runners(self) -> list[Eager]:
        return self._before if self.runner is None else [*self._before, self.runner]

    def staged(self) -> dict[int, tuple[int, str]]:
        """Bytes that were staged so far, and why, by the number of the edge; after the model's end, or a loss, those of this
        worker."""
        session = self.session
        found = [session.caller.station.staged_by_edge()]
        if not session.closed:
            with contextlib.suppress(RdmaError):
                found += session.ask("copied", dict.fromkeys(session.workers, ())).values()
        totals: dict[int, tuple[int, str]] = {}
        for number, (nbytes, why) in (item for copied in found for item in copied.items()):
            before, reason = totals.get(number, (0, ""))
            totals[number] = before + nbytes, why if reason in ("", why) else f"{reason}; {why}"
        return totals

    def misses(self) -> list[Miss]:
        """See ``WrappedModel.misses``."""
        return self._signatures.missed() + [miss for runner in self._runners() for miss in runner.missed()]


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves among the arguments of a forward, and their tree (``None``: positional tensors only). ``NotSupported`` for an
    argument that cannot be taken apart."""
    if kwargs or not all(type(arg) is torch.Tensor for arg in args):
        return values.flatten((args, kwargs))
    return list(args), None


def joined(leaves: list[Any], tree: Any) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """See ``capture``: what gives the arguments of the forward, with other tensors in the place of those among ``leaves``."""

    def join(*given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = values.filled(leaves, given)
        return (tuple(filled), {}) if tree is None else tree.unflatten(filled)

    return join
