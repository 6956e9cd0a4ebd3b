"""``wrap``: one model, its parts at several workers, trained as if it were here."""

from __future__ import annotations

import copy
import functools
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..calls import agent as _agent
from ..graph.plan.place import Edge
from ..graph.show.describe import Transfers, describe
from ..graph.show.records import Crossing
from ..graph.trace import values
from ..graph.trace.devices import find, named
from ..graph.trace.methods import Uncaptured, methods_of
from ..parts.compiled import is_compiled
from ..parts.placing import check_copied, check_hooked, resolve
from ..parts.remote_part import RemotePart, given
from ..parts.stand_in import Shell
from ..transport import NotSupported, timeouts
from . import batches, replacing
from . import optimizer as remote_optimizer
from .eager import Eager
from .session import Session, close_dropped
from .signature import Miss
from .state import State, flatten, state_of


def wrap(
    net: nn.Module,
    placement: Mapping[str, str | Sequence[str]],
    *,
    depth: int = 2,
    timeout: float = 60.0,
    plans: int = 16,
    staging: str = "traced",
    capture: str = "auto",
    chunks: int = 1,
) -> WrappedModel:
    """Move parts of ``net`` to workers, and return a model that trains as ``net`` would have trained here.

    ``placement`` maps paths of modules, at any depth, to names of workers; ``"layers.0-5"`` stands for ``layers.0`` to
    ``layers.5``. Modules below a path go with it, unless they have an entry of their own. What no entry covers stays here, as
    does what is placed at this worker, but for tied weights: modules without children that share a tensor go where the one
    with an entry goes, and a warning says so. A module that lies at one worker as a whole stays one operation, with its hooks
    and its own control flow. A module that is cut is traced through, and its own parameters belong to the entry above them.
    ``net`` keeps its own copy of the parts that move.

    ``"worker1/cuda:1"`` names a device of that worker (as ``RemoteModule`` does): the part computes there. Without a device a
    part's tensors keep theirs, on the GPU of the same index at its worker. Inputs may lie on any device. Results lie on the
    device of the first tensor input; for a model on several devices, where the model alone would have them. Tensors that
    ``state_dict`` fetches from other workers lie on the CPU.

    A list of workers gives a part *replicas*: ``{"features": ["worker1", "worker2"]}``. All such parts have the same number of
    them, ``k``. Every tensor input is split into ``k`` shards along its first dimension, each replica computes one, and
    tensors in the result are joined along their first dimension. Parameters lie at the first worker of the list that is not
    this one, as without replicas, so there is one ``state_dict`` and one step of the optimizer. The others get them by
    writes in each forward, and their gradients come back in each backward. The bits are those of one process that computes ::

        shards = [shard.clone() for shard in x.chunk(k)]
        copies = [{name: p.view_as(p) for name, p in parameters_of_these_parts.items()} for _ in shards]
        torch.cat([torch.func.functional_call(net, copy, (shard,)) for copy, shard in zip(copies, shards)])

    so gradients are summed, and a loss that is a mean over the result is one over the batch. Norms with running statistics
    normalise each shard by itself and keep the statistics of the first one, as ``nn.DataParallel`` does. Each batch size has a
    plan of its own. Refused by name: batches of too few samples, results that are no batch, parts that draw random numbers, set
    attributes or write other buffers, weights tied across parts, entries inside of such a part, devices, forwards that no
    method captures, and after ``wrap`` attributes, ``apply`` and ``compile`` of such a part, and ``load_state_dict`` where its
    modules take part in it (hooks, methods of their own, extra state).

    * ``depth``: forwards that may wait for their backward.
    * ``timeout``: seconds that a step may wait for a worker.
    * ``plans``: how many captures are kept set up.
    * ``staging``: ``"always"`` copies every tensor into a registered buffer before it is sent, to measure what ``"traced"``
      saves.
    * ``capture``: ``"fx"`` runs the forward once on tensors without data and writes its operations down. ``"export"`` takes the
      operations that ``torch.export`` finds, also inside of parts. ``"eager"`` runs the forward here in every step, so that its
      control flow may depend on values; every remote part that it calls is a set of prepared writes of its own. ``"here"``
      runs all of the forward in this process, over copies of the parts that are fetched when they may have changed: exact
      also with gradients of gradients, ``retain_graph`` and ``autograd.grad`` of parameters, and slow. A forward under
      autocast, or inside of ``torch.utils.checkpoint``, ``torch.func`` or what follows operations, runs so by itself, with a
      warning. ``"auto"`` takes the first of the former three that works, and
      ``model.captured`` says which. Packages may bring other methods, by name
      (``graph/trace/methods``).
    * ``chunks``: micro-batches of ``model.forward_backward``, unless that is given another number.

    At the first call the forward is captured, and the parts run once on tensors without data. Other input shapes are captured
    once more for all of them, or one by one when they come again (``model.misses()``). Random operations of a forward draw
    here, in the order of one process; those in a part at another worker draw from the generator there, which a warning says
    once, and ``counters()["draws_elsewhere"]`` counts them. ``torch.manual_seed`` here seeds the generators of the model's
    workers too, before the next step: so a run repeats bit for bit. Python's and numpy's generators are those of each
    process, and so are globals and attributes of classes. A part runs here, over a fetched copy, if it draws from these
    generators, if it changes globals, or if one that it reads has changed here since ``wrap`` or was another number or text
    at its worker already; a warning says so. If it draws or changes only in a later call, that call raises ``NotSupported``.
    What a part reaches in other ways than by names in its code, and the flags of torch, are not looked at.

    The gradients of a forward that is captured are summed in the order of one process, so they have its bits: also those of
    tied parameters, of tensors that many parts read, and of a part that is called several times. Where no order of the parts
    gives that (a parameter that a part reads as its own and that is read elsewhere by its name), ``placement_table`` names it.
    Where one backward goes through several forwards, or several calls of an eager one, parameters that two of them read have
    sums in another order. So has an input of the model, or of a part that an eager forward calls, where that reads it several
    times and something else reads it later. A warning says so once, in the backward in which it happens, and
    ``counters()["sums_reordered"]`` counts them. Gradients are equal up to rounding there.

    A linear layer on a CPU rounds otherwise for an input that begins off 16 bytes in memory, such as ``x[1:]`` of odd width.
    What crosses to another worker is aligned there, so such a view has the bits of its ``clone()``.

    A part that was compiled (``torch.compile(net.a)``, ``net.a.compile()``) is compiled at its owner in the same way, and has
    the bits of a compiled module. A compilation of the model as a whole, or of a module that is cut, is taken off; what it was
    applied to keeps the names of its parameters. ``torch.compile(model)`` of what ``wrap`` returns leaves its forward as it
    is.

    ``model.close()`` frees what the workers hold. A model that nobody has any more is closed when another one is wrapped.

    Raises ``ValueError`` for an unknown worker or part, or unequal numbers of replicas, and ``NotSupported`` for a part that
    cannot move, both before anything is moved.
    """
    agent = _agent.current()
    if is_compiled(net):
        warnings.warn("wrap() takes torch.compile off the model as a whole; compile its parts instead", stacklevel=2)
    places = resolve(net, placement, agent.name, agent.worker_names(), lambda rank: agent.resolve(rank).name)
    check_copied(net)
    check_hooked(net, places)
    for device in {device for path, device in places.devices.items() if places.homes[path] == agent.name}:
        find(named(device))
    if staging not in ("traced", "always"):
        raise ValueError(f"staging is 'traced' or 'always', got {staging!r}")
    methods_of(capture)
    if places.replicas > 1 and capture in ("eager", "here"):
        raise NotSupported(f"parts with replicas need a forward that is captured, not capture={capture!r}")
    batches.checked(chunks)
    close_dropped(agent)
    remote_optimizer.install()
    options = (depth, timeouts.limit(timeout, "the timeout of wrap"), plans, staging == "always")
    return WrappedModel._made(State(net, Session(net, places, agent, *options), capture, chunks, options))


class _Forward:
    """The forward of a wrapped model, with the signature that the original's has. Another function may be set in its place:
    that runs here, and may call this one."""

    def __init__(self, kind: type[nn.Module]) -> None:
        @functools.wraps(kind.forward)
        def forward(model: WrappedModel, *args: Any, **kwargs: Any) -> Any:
            # Importing torch.compile takes seconds: only where the program has done so.
            run = _uncompiled if "torch._dynamo" in sys.modules else WrappedModel.forward
            return run(model, *args, **kwargs)

        self._function = forward

    def __get__(self, model: WrappedModel | None, kind: type | None = None) -> Any:
        if model is None:
            return self._function
        return model._replaced or types.MethodType(self._function, model)

    def __set__(self, model: WrappedModel, function: Any) -> None:
        model._replaced = function

    def __delete__(self, model: WrappedModel) -> None:
        model._replaced = None


@torch._disable_dynamo
def _uncompiled(model: WrappedModel, *args: Any, **kwargs: Any) -> Any:
    """The forward, which ``torch.compile`` leaves as it is."""
    return WrappedModel.forward(model, *args, **kwargs)


def _class_of(kind: type[nn.Module]) -> type[WrappedModel]:
    """The class of wrapped models whose original is a ``kind``: an instance of both. Called, it makes a ``kind``."""
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__slots__": ("_rdmarpc", "_replaced"),
        "__new__": lambda cls, *args, **kwargs: kind(*args, **kwargs),
        "forward": _Forward(kind),
    }
    try:
        return type(kind.__name__, (WrappedModel, kind), names)
    except TypeError:  # of a class that cannot have such children
        return type(kind.__name__, (WrappedModel,), names)


def _crossing(edge: Edge) -> Crossing:
    shape, dtype = tuple(max(n, 0) for n in edge.shape), str(edge.dtype).removeprefix("torch.")
    return Crossing(edge.number, edge.value, edge.kind, edge.source, edge.target, shape, dtype, edge.nbytes, edge.static)


class WrappedModel(nn.Module):
    """A model with parts at several workers, as ``wrap`` returns it.

    It is an instance of the original's class, with its methods and attributes, and has the modules of the original under their
    names: those that stayed, and stand-ins for those that moved. So ``named_parameters`` and ``state_dict`` have the same keys.
    Methods run here: what they call of the model goes to the parts, one round trip a part. ``copy.deepcopy(model)``, and a
    pickle of it, is a model of the original's class that is all here, with the values of the moment.
    """

    _rdmarpc: State
    _replaced: Callable[..., Any] | None

    @staticmethod
    def _made(state: State) -> WrappedModel:
        model: WrappedModel = object.__new__(_class_of(type(state.session.stand_in)))
        model._replaced = None
        model._stand_over(state)
        return model

    def _stand_over(self, state: State) -> None:
        """Be the model of this state: it and the stand-in of the original have attributes, tables and hooks in common."""
        session = state.session
        object.__setattr__(self, "__dict__", vars(session.stand_in))
        self._rdmarpc = state
        session.always_here = state.method == "here"
        outside = (
            session.here if session.always_here else Eager(session, session.stand_in, state.skeleton, state.differences.of)
        )
        session.runs_outside(outside)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if nn.modules.module._has_any_global_hook():
            raise NotSupported(
                "hooks for all modules (register_module_forward_hook and the like) do not run at other workers",
                hint="register hooks on single parts",
            )
        state = state_of(self)
        session = state.session
        session.in_step = False
        session.state_copies.check()
        session.caller.check_written()
        if why := state.only_here():
            return state.here(args, kwargs, self.training, why)
        if state.eager:
            return state.eagerly(args, kwargs, self.training)
        try:
            leaves, tree = flatten(args, kwargs)
        except values.Unknown as error:
            state.check_falls_back(error)
            return state.eagerly(args, kwargs, self.training, [error.message])
        tensors = values.tensors_of(leaves)
        mode = session.mode()
        try:
            plan = state.plan(tensors, leaves, tree, self.training)
        except Uncaptured as error:
            state.check_falls_back(error)
            refused, again = error.refused, error.again
        else:
            return session.caller.forward(plan, tensors, mode)
        return state.eagerly(args, kwargs, self.training, refused, again)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_rdmarpc", "_replaced", "forward"):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name) if name == "forward" else super().__delattr__(name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for module in state_of(self).session.stand_in.modules():
            if isinstance(module, (RemotePart, Shell)):
                module._apply(fn, False)  # refuse before anything is changed
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(state_of(self).session.stand_in, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return given, (copy.deepcopy(self),)

    def __copy__(self) -> Any:
        raise NotSupported("a wrapped model cannot be copied with its parts left where they are", hint="copy.deepcopy")

    def forward_backward(
        self,
        loss_fn: Callable[..., torch.Tensor],
        *args: Any,
        target: Any = None,
        chunks: int | None = None,
        schedule: str = "1f1b",
        **kwargs: Any,
    ) -> torch.Tensor:
        """See ``batches.forward_backward``."""
        return batches.forward_backward(self, loss_fn, args, kwargs, target, chunks, schedule)

    def prepare(self, *args: Any, chunks: int | None = None, schedule: str = "1f1b", **kwargs: Any) -> batches.Prepared:
        """Capture the model for these inputs and set everything up, without a step. ``chunks``, ``schedule``: of
        ``forward_backward``. Print the result to see what crosses and the memory that every worker needs."""
        return batches.prepare(self, args, kwargs, chunks, schedule)

    @property
    def captured(self) -> str:
        """The capture method that was used for the latest new inputs, then the reason why each method before it failed, then
        the parts that an eager forward has run here, with the reason, a line each. Empty before the first step."""
        return state_of(self).how()

    def placement_table(self) -> str:
        """A table of the tensors that cross, for each plan that is set up. Empty before the first step."""
        return "\n\n".join(plan.table() for plan in self.transfers())

    def transfers(self) -> list[Transfers]:
        """The tensors that cross, as data: one entry for each plan that is set up, the last used one last. Entries have
        ``save`` and ``draw``, and print as tables."""
        state = state_of(self)
        kept, plans = state.parameter_bytes(), state.session.caller.plans.placements()
        return [describe(plan.caller, [_crossing(edge) for edge in plan.edges], kept) for plan in plans]

    def counters(self, everywhere: bool = True) -> dict[str, int]:
        """This process's counters (see ``Device.counters``); with ``everywhere`` those of the model's other workers are added.
        Also ``rpc_messages`` that this process has sent (without those of ``counters`` itself), ``steps`` (forwards),
        ``plans``, ``misses`` (see there), ``dynamic_reads``, ``sums_reordered`` (tensors and parameters whose gradients are not
        summed in the order of one process, those that ``placement_table`` names), ``draws_elsewhere`` (parts and operations
        that draw random numbers at other workers), ``fast_paths_left`` (modules of attention that take their general path where
        one process would not), ``forwards_here`` and ``calls_here`` (forwards, and calls of single parts,
        that ran in this process over fetched parameters) and, for each value that was copied besides its transfer,
        ``bytes_staged[NAME]``."""
        return state_of(self).counters(everywhere)

    def misses(self) -> list[Miss]:
        """Forwards whose input shapes had no plan of their own and therefore ran over dynamic edges: grouped by what changed,
        the most frequent first. In a model that runs eagerly, the calls of parts that were new after the first forward."""
        return state_of(self).misses()

    def production(self) -> dict[str, str]:
        """For each large tensor that is made at one worker and sent to another: the operation that writes it directly into its
        slot at the receiver, or the reason why it is copied. Filled by the first step of each kind."""
        session = state_of(self).session
        answers = session.ask("notes", dict.fromkeys(session.workers, ()))
        return {name: note for notes in (session.caller.plans.notes(), *answers.values()) for name, note in notes.items()}

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the remote halves of an optimizer now instead of at its first step."""
        for halves in remote_optimizer.attach(optimizer):
            halves.ensure()

    def replace(self, old: str, new: str) -> dict[str, Any]:
        """See ``replacing.replace``."""
        return replacing.replace(self, old, new)

    def close(self) -> None:
        """Free the parts and slots at every worker. Idempotent."""
        state_of(self).session.close()
