"""``model.forward_backward`` and ``model.prepare``: a batch in micro-batches, and what that takes, said before the first
step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..graph.caller.pipeline import Part, check_alike
from ..graph.caller.stage import Plan
from ..graph.plan.place import ACTIVATION, Placement
from ..graph.show.tables import table
from ..graph.trace import values
from ..graph.trace.methods import Uncaptured
from ..graph.wire.header import HEADER_BYTES
from ..transport import NotSupported
from .state import flatten, joined, state_of

MOST = 65535
SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
_ALIGNMENT = 64


def checked(chunks: int) -> int:
    if not 1 <= chunks <= MOST:
        raise ValueError(f"chunks must be from 1 to {MOST}, got {chunks}")
    return chunks


def check_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is one of {', '.join(SCHEDULES)}, got {schedule!r}")


def forward_backward(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    chunks: int | None,
    schedule: str,
) -> torch.Tensor:
    """Forward and backward of one batch in ``chunks`` micro-batches (``None``: as many as ``wrap`` was told), several of them
    under way at once.

    ``schedule="interleaved"`` is for stages that go round the workers (``{"0": "worker1", "1": "worker2", "2": "worker1", "3":
    "worker2"}``) and more micro-batches than workers, a multiple of them at best; then ``wrap(depth=)`` should be twice the
    number of workers, because so many micro-batches lie in the slots of a stage. ``NotSupported`` where stages do not go round.
    Bits are those of ``"1f1b"``.

    ``schedule="zero_bubble"`` runs a backward in two halves (ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism", 2023):
    the gradients of a part's inputs, which the worker before it waits for, then those of its parameters where it would wait.
    It is for parts whose backward takes milliseconds, and holds as many micro-batches at every worker as ``"1f1b"`` holds at
    the first one, each until the second half of its backward; so ``wrap(depth=)`` should be the number of workers. Bits are
    those of ``"1f1b"``. A backward runs in one go where that cannot be shown: with hooks on parameters or set by the forward,
    checkpoints, a parameter that is read twice, recurrent layers, autograd functions without ``generate_vmap_rule``, on
    accelerators. ``model.counters()`` says how many (``backwards_unsplit``), and which and why (``backwards_unsplit[SEGMENT:
    REASON]``).

    Tensors among the inputs whose first dimension is the batch's are split along it, into the sizes of ``torch.chunk`` (so
    there may be fewer than ``chunks``; a smaller last one has a plan of its own); everything else goes to each micro-batch as
    it is. The batch's size is that of ``target``'s first tensor, or else of the first tensor input; all tensors in ``target``
    are split.

    What is computed: ``sum(loss_fn(model(x_i), y_i) * (n_i / n))`` over micro-batches of n_i of the n samples, each a tensor of
    its own (``x.split(...)[i].clone()``: a view may round otherwise, see ``wrap``), and its gradients, added to those that are
    there, in the order of the micro-batches: bit for bit what the model alone gives, one micro-batch after another. Where
    ``target`` is ``None`` it is ``loss_fn(model(x_i))``. With a ``loss_fn`` that is a mean over samples this is the mean over
    the batch; one that sums gives the sum divided by the number of micro-batches (where they are equal). What looks at a whole
    batch (batch norm) sees micro-batches.

    A forward that no method captures runs eagerly, one micro-batch after another (``model.captured`` says why). One after
    another run, too, those of a forward that draws random numbers at several levels of one worker: dropout before and after
    a remote part, for example.

    The bits are those of one process but for what ``wrap`` says of sums of gradients, and ``placement_table`` names.

    Returns the detached loss. ``loss_fn`` runs in this process, by the calling thread, between two tasks of a stage that is
    here. So the caller should have the last stage, whose output the loss is of, or none; if it has the first one, the others
    wait for the loss. Raises what a part or ``loss_fn`` raised: the
    gradients are then unfinished, those at other workers are set to ``None`` before the next backward where this one was to do
    so."""
    state = state_of(model)
    session, chunks = state.session, state.chunks if chunks is None else chunks
    session.in_step = False
    session.state_copies.check()
    session.caller.check_written()
    check_schedule(schedule)
    with torch.enable_grad():
        split = _Split(model, args, kwargs, target, checked(chunks))
        losses: list[torch.Tensor] = []

        def weighted(at: int) -> Callable[[Any], torch.Tensor]:
            def loss_of(output: Any) -> torch.Tensor:
                before = torch.get_rng_state() if ahead else None
                loss = loss_fn(output) if target is None else loss_fn(output, split.target(at))
                if before is not None and not torch.equal(before, torch.get_rng_state()):
                    raise NotSupported(
                        "loss_fn draws random numbers, and so does the forward of the next micro-batch, which may have begun",
                        hint="use chunks=1",
                    )
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    raise ValueError(f"loss_fn must give a tensor of one element, it gave {_describe(loss)}")
                loss = loss if len(split.sizes) == 1 else loss * (split.sizes[at] / split.batch)
                losses.append(loss.detach())
                return loss

            return loss_of

        mode = session.mode()
        plans = None if state.eager or state.only_here() else split.plans_or_none()
        if plans is not None and len(split.sizes) > 1:
            plans = None if any(state.differences.in_turn(plan.graph) for plan in plans) else plans
        ahead = plans is not None and len(split.sizes) > 1 and session.agent.name in plans[0].graph.draws
        if plans is None:
            for at in range(len(split.sizes)):
                given, more = split.arguments(at)
                weighted(at)(model(*given, **more)).backward()
        else:
            inputs = enumerate(zip(plans, split.inputs))
            parts = [Part(plan, tensors, weighted(at), split.whole) for at, (plan, tensors) in inputs]
            session.caller.forward_backward(parts, mode, schedule == "interleaved", schedule == "zero_bubble")
        split.return_writes()
        split.return_gradients()
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


def _aligned(piece: torch.Tensor) -> torch.Tensor:
    """A linear layer rounds otherwise for an input that begins off the alignment of vectors. What crosses never does."""
    if piece.layout != torch.strided or piece.data_ptr() % _ALIGNMENT == 0:
        return piece
    return piece.clone()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Split:
    """The inputs of a batch by micro-batch. ``inputs``: the tensors of each, ``whole`` those of the batch; ``sizes`` their
    samples, ``batch`` of all."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, chunks: int) -> None:
        self._state, self._training = state_of(model), model.training
        self._leaves, self._tree = flatten(args, kwargs)
        self._tensors = values.tensors_of(self._leaves)
        self._target_tree: Any = None
        targets = [target]
        if not isinstance(target, torch.Tensor):
            targets, self._target_tree = values.flatten(target)
        first = [t for t in (*targets, *self._tensors) if isinstance(t, torch.Tensor) and t.dim() > 0]
        if not first or len(first[0]) == 0:
            raise ValueError("there is no batch to split: neither target nor the inputs have a tensor with samples in it")
        self.batch = len(first[0])
        for leaf in targets:
            if isinstance(leaf, torch.Tensor) and leaf.shape[:1] != (self.batch,):
                raise ValueError(f"target has a tensor of shape {tuple(leaf.shape)}, the batch has {self.batch} samples")
        if self._tensors and not any(tensor.shape[:1] == (self.batch,) for tensor in self._tensors):
            raise ValueError(f"target has {self.batch} samples, and none of the inputs has")
        each = -(-self.batch // chunks)
        self.sizes = [each] * (self.batch // each) + ([self.batch % each] if self.batch % each else [])
        # Gradients of inputs are collected in leaves, and go on into the graph that they come from at the end.
        self._versions: dict[int, int] = {}
        self.whole = [self._leaf(t) for t in self._tensors]
        columns = [self._pieces(t, whole) for t, whole in zip(self._tensors, self.whole)]
        self.inputs = [list(row) for row in zip(*columns)] if columns else [[] for _ in self.sizes]
        self._targets = [
            self._pieces(leaf, leaf) if isinstance(leaf, torch.Tensor) else [leaf] * len(self.sizes) for leaf in targets
        ]

    @staticmethod
    def _leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_() if tensor.requires_grad else tensor

    def _pieces(self, tensor: torch.Tensor, whole: torch.Tensor) -> list[torch.Tensor]:
        if tensor.shape[:1] != (self.batch,) or len(self.sizes) == 1:
            return [whole] * len(self.sizes)
        # Each with a version of its own: what the forward writes into one was not saved for the backward of another.
        pieces = [_aligned(piece.data).requires_grad_(tensor.requires_grad) for piece in tensor.split(self.sizes)]
        self._versions.update((id(piece), _version(piece)) for piece in pieces)
        return pieces

    def target(self, at: int) -> Any:
        leaves = [column[at] for column in self._targets]
        return leaves[0] if self._target_tree is None else self._target_tree.unflatten(leaves)

    def plans(self) -> list[Plan]:
        """Of each micro-batch: one, and another for a last one that is smaller."""
        even = self.sizes[-1] == self.sizes[0]
        found = [self._plan(0)]
        if even:
            return found * len(self.sizes)
        self._state.session.caller.plans.check_kept(2)
        found.append(self._plan(len(self.sizes) - 1, recurring=True))
        check_alike(*found)
        return [found[0]] * (len(self.sizes) - 1) + [found[1]]

    def plans_or_none(self) -> list[Plan] | None:
        """As ``plans``; ``None``: no method captures the forward, so it runs eagerly."""
        try:
            return self.plans()
        except Uncaptured as error:
            self._state.check_falls_back(error)
            return None

    def _plan(self, at: int, recurring: bool = False) -> Plan:
        leaves = values.filled(self._leaves, self.inputs[at])
        return self._state.plan(self.inputs[at], leaves, self._tree, self._training, recurring)

    def arguments(self, at: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Of the forward of one micro-batch."""
        return joined(self._leaves, self._tree)(*self.inputs[at])

    def return_writes(self) -> None:
        """What the forward has written into its inputs is in the caller's tensors."""
        with torch.no_grad():
            for at, whole in enumerate(self._tensors):
                pieces = [row[at] for row in self.inputs]
                if all(piece is self.whole[at] for piece in pieces):
                    continue
                for piece, place in zip(pieces, whole.detach().split(self.sizes)):
                    if _version(piece) != self._versions[id(piece)]:
                        place.copy_(piece)  # perhaps onto itself: the version counts

    def return_gradients(self) -> None:
        """All at once: inputs may come from one graph, whose backward runs once."""
        found: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for at, tensor in enumerate(self._tensors):
            pieces = list({id(row[at]): row[at] for row in self.inputs}.values())
            if tensor.requires_grad and any(piece.grad is not None for piece in pieces):
                grads = [torch.zeros_like(piece) if piece.grad is None else piece.grad for piece in pieces]
                found.append(tensor)
                gradients.append(grads[0] if len(grads) == 1 else torch.cat(grads))
        if found:
            torch.autograd.backward(found, gradients)


def _describe(value: Any) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


@dataclass(frozen=True)
class Need:
    """What one worker needs, in bytes. ``send``: slots elsewhere that it writes into; ``receive``: slots of its own;
    ``in_flight``: micro-batches between the forward and the backward of one of its segments at most, and ``activations``
    that wait in its slots then (of static edges)."""

    worker: str
    parameters: int
    send: int
    receive: int
    in_flight: int
    activations: int


@dataclass(frozen=True)
class Prepared:
    """What ``forward_backward`` of such inputs takes; ``str`` of it says everything. ``placements``: one, or two if the last
    micro-batch is smaller. ``sizes``: samples of each micro-batch."""

    placements: list[Placement]
    depth: int
    sizes: list[int]
    levels: int
    memory: list[Need]

    def __str__(self) -> str:
        head = ("worker", "parameters", "slots to send", "slots to receive", "in flight", "activations")
        rows = [
            (m.worker, *(f"{n:,}" for n in (m.parameters, m.send, m.receive, m.in_flight, m.activations))) for m in self.memory
        ]
        sizes = f"{self.sizes[0]} samples" + (f", the last one {self.sizes[-1]}" if self.sizes[-1] != self.sizes[0] else "")
        said = (
            f"depth={self.depth} chunks={len(self.sizes)} ({sizes}), {self.levels} levels; in flight: at most so many "
            "micro-batches are between the forward and the backward of a segment; all else is in bytes"
        )
        return "\n\n".join([*map(str, self.placements), table(head, rows, range(1, len(head))) + "\n" + said])


def prepare(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], chunks: int | None, schedule: str) -> Prepared:
    """See ``WrappedModel.prepare``."""
    check_schedule(schedule)
    state = state_of(model)
    session, chunks = state.session, state.chunks if chunks is None else chunks
    with torch.enable_grad():
        session.mode()
        split = _Split(model, args, kwargs, None, checked(chunks))
        plans = list(dict.fromkeys(split.plans()))
    session.caller.check_schedule(plans[0], schedule == "interleaved")
    owned = state.parameter_bytes()
    placements = [plan.placement for plan in plans]
    memory = [_memory(worker, plans, owned.get(worker, 0), len(split.sizes), schedule) for worker in placements[0].workers]
    return Prepared(placements, session.caller.depth, split.sizes, plans[0].levels, memory)


def _memory(worker: str, plans: list[Plan], parameters: int, chunks: int, schedule: str) -> Need:
    graph = plans[0].graph
    edges = [edge for plan in plans for edge in plan.placement.edges]
    window = plans[0].levels
    # Interleaved, stages are bounded together, and each by what the caller lets begin.
    rounds = plans[0].flow.rounds
    stages = rounds.stages if schedule == "interleaved" and rounds is not None else {}
    held = {
        s.number: min(chunks, window if s.number in stages or schedule == "zero_bubble" else max(1, window - s.level))
        for s in graph.segments
        if s.worker == worker
    }
    waiting = 0
    for edge in plans[0].placement.edges:
        if edge.kind == ACTIVATION and edge.target == worker:
            most = max(held[number] for number in graph.values[edge.value].consumers if number in held)
            waiting += min(edge.depth, most) * edge.nbytes
    return Need(
        worker,
        parameters,
        sum(edge.depth * (edge.nbytes + HEADER_BYTES) for edge in edges if edge.source == worker),
        sum(edge.depth * (edge.nbytes + HEADER_BYTES) for edge in edges if edge.target == worker),
        max(held.values()),
        waiting,
    )
