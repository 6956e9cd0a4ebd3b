"""The state that a wrapped model keeps beside its modules: the connection to the owners, and the plans of its forward."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..graph.caller.stage import Plan
from ..graph.guards.world import World, Worlds
from ..graph.plan.analyze import TransferGraph, analyze
from ..graph.trace import values
from ..graph.trace.capture import Capture, TensorSpec
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

_log = logging.getLogger("rdmarpc")


class State:
    """``net`` is the original; ``method`` is the ``capture=`` of ``wrap``; ``chunks`` are the micro-batches of
    ``forward_backward``; ``options`` are the session's. ``captured``: see ``WrappedModel.captured``; ``runner`` runs the
    forward where no capture works. What depends on the model's own training flag is given it (``training``): its modules'
    flags are those of ``session.stand_in``."""

    def __init__(self, net: nn.Module, session: Session, method: str, chunks: int, options: Options) -> None:
        self.session, self.method, self.chunks, self.options = session, method, chunks, options
        self.captured = ""
        self._reordered: dict[str, None] = {}
        self.runner: Eager | None = None
        self._last = 0
        self._methods = methods_of(method)
        self.net, self._top = net, session.stand_in
        self.saved: tuple[dict[str, Any], str] | None = None
        """The state and the folder of the last checkpoint that was saved or loaded."""
        self._signatures = Signatures(session.caller)
        self._worlds, self.elsewhere = Worlds(), World(0)
        self._look()

    def _look(self) -> None:
        """Which modules and parameters there are now."""
        self._parameters = list(self._top.parameters())
        # The modules whose forward is part of what is captured.
        whole = self.session.places.whole
        self._cut = [module for name, module in self._top.named_modules() if name and not whole(name)]

    def _uncaptured(self, why: str) -> Uncaptured:
        return Uncaptured([f"{method}: {why}" for method in self._methods], NotSupported(why))

    def _away(self, path: str) -> bool:
        return self.session.places.owner(path) != self.session.agent.name

    def check_elsewhere(self) -> None:
        """Raise ``NotSupported`` where a setting has changed here that parts read at other workers."""
        if not self.elsewhere.holds():
            raise NotSupported(
                f"{self.elsewhere.changed()} has changed in this process; a part at another worker reads its own",
                hint="make it an attribute or an argument of the part",
            )

    def _world(self, training: bool) -> World:
        """What captures have read besides tensors and is still so; if there is none that holds, nothing."""
        self.check_elsewhere()
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
        grads = torch.is_grad_enabled()
        world = self._world(training)
        with torch._C.DisableTorchFunctionSubclass():
            shapes = tuple([t.shape for t in tensors])
            family = (
                world.number,
                training,
                self.session.settings.number,
                tuple([module.training for module in self._cut]),
                tuple([(t.dim(), t.dtype, t.requires_grad and grads, None if t.is_cpu else t.device) for t in tensors]),
                tuple([parameter.requires_grad for parameter in self._parameters]),
                values.constants(leaves),
                tree,
            )
        try:
            return self._signatures.plan(
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

    def eagerly(self, args: Any, kwargs: Any, training: bool, refused: Sequence[str] = ()) -> Any:
        """Run the forward in Python. ``refused``: why no capture works."""
        self._top.training = training
        if self.runner is not None:
            return self.runner.forward(args, kwargs)
        # If this fails, it was the input that was wrong: the next one may be captured.
        runner = Eager(self.session, self._top, self.skeleton)
        try:
            result = runner.forward(args, kwargs)
        except NotSupported as error:
            error.args = ("\n".join([*map(str, error.args), *refused]),)
            raise
        self.runner, self.captured = runner, "\n".join(["eager", *refused])
        return result

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
                raise NotSupported("hooks on parts at other workers, or for gradients, are no part of a graph")
            shape = refreshed(self._top, session.shape, session.places)
        except NotSupported as error:
            raise self._uncaptured(error.message) from error
        names = input_names(shape, join, len(specs))
        graphs: list[TransferGraph] = []

        def use(found: Capture) -> None:
            found.sites = name_inputs(found.sites, names)
            located = session.located(tensors, taken)
            graph = analyze(found, session.places.owner, session.agent.name, session.places.scope, located)
            world.add([*roots, *found.roots(self._top)], empty)
            self.elsewhere.add(found.elsewhere)
            graphs.append(graph)

        if sizes.varying or not sizes.known:
            if "fx" not in self._methods:
                raise NotSupported(f"capture={self.method!r} knows sizes only as numbers")
            found = symbolic(shape, specs, join, whole, self._away, sizes)
            use(found)
        else:
            found, refused = capture_by(self._methods, shape, specs, join, whole, use, self._away)
            self.captured = "\n".join([found.how, *refused])
        session.constants.update(found.constants)
        [graph] = graphs
        self._tell(graph.reordered)
        graph.constants = {}  # they stay here
        return graph

    def _tell(self, reordered: Sequence[str]) -> None:
        """Sums of gradients that are not those of one process are named, once each."""
        new = [name for name in dict.fromkeys(reordered) if name not in self._reordered]
        if new:
            self._reordered.update(dict.fromkeys(new))
            _log.warning("gradients of %s are not summed in the order of one process: equal up to rounding", ", ".join(new))

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
        totals["sums_reordered"] = len(self._reordered)
        if self.runner is not None:
            totals["steps"] += self.runner.steps - self.runner.calls
            totals["misses"] += self.runner.misses.total()
        return totals

    def staged(self) -> dict[int, int]:
        """Bytes that were staged so far, by the number of the edge; after the model's end, or a loss, those of this worker."""
        session = self.session
        totals = Counter(session.caller.station.copied)
        if not session.closed:
            with contextlib.suppress(RdmaError):
                for copied in session.ask("copied", dict.fromkeys(session.workers, ())).values():
                    totals.update(copied)
        return totals

    def misses(self) -> list[Miss]:
        """See ``WrappedModel.misses``."""
        return self._signatures.missed() + (self.runner.missed() if self.runner is not None else [])


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves among the arguments of a forward, and their tree (``None``: positional tensors only). ``NotSupported`` for an
    argument that cannot be taken apart."""
    if torch._C._is_any_autocast_enabled():
        raise NotSupported("autocast does not reach other workers", hint="convert the parts' dtype before wrap()")
    if kwargs or not all(type(arg) is torch.Tensor for arg in args):
        return values.flatten((args, kwargs))
    return list(args), None


def joined(leaves: list[Any], tree: Any) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """See ``capture``: what gives the arguments of the forward, with other tensors in the place of those among ``leaves``."""

    def join(*given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = values.filled(leaves, given)
        return (tuple(filled), {}) if tree is None else tree.unflatten(filled)

    return join
