"""Distributed autograd, with the names of ``torch.distributed.autograd``.

Inside ``with context() as context_id:`` calls by RPC and fetches of references carry the context, and tensors that require grad
are connected across workers. ``backward(context_id, [loss])`` computes the gradients of the leaves on all of them. Gradients
are added to the context, never to ``.grad``. ``get_gradients(context_id)`` returns them, on each worker, until the block is
left.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from .calls import agent as _agent
from .gradients import waves
from .gradients.context import Context, current
from .gradients.graph import edge
from .gradients.waves import check_types, scalars
from .message.errors import BackwardError as BackwardError

_NOT_INITIALIZED = "Need to initialize distributed autograd using torch.distributed.autograd.init()"


def is_available() -> bool:
    return True


class context:
    """``with context() as context_id:`` surrounds a forward and backward pass over several workers. A thread has at most one
    context at a time, and each thread has its own. Leaving the block drops the context's gradients and graph here, and on
    every worker that the context reached, without waiting for those."""

    def __enter__(self) -> int:
        self._contexts = _agent.current(_NOT_INITIALIZED).contexts  # of this agent: those of the next one are not concerned
        if current.context is not None and not current.context.ended:
            raise RuntimeError("Already have an autograd context id for this thread.")
        made = current.context = self._contexts.new()
        self._context_id = made.number
        return made.number

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        current.context = None
        self._contexts.end(self._context_id)


def backward(context_id: int, roots: list[torch.Tensor] | tuple[torch.Tensor, ...], retain_graph: bool = False) -> None:
    """Run the backward pass of ``roots`` (scalars with a graph). Returns when all gradients, on all workers, are in the
    context. From any thread. A call whose result does not contribute to ``roots`` is not waited for.

    Raises ``RuntimeError`` for invalid roots and contexts, and ``BackwardError`` for a failure on the way; that error is also
    of the original type (``PeerLost``, ...). With ``retain_graph`` the context can be used again after a failure, but the parts
    that ran have added their gradients: begin anew with a new context.
    """
    check_types(context_id, roots)
    agent = _agent.current(_NOT_INITIALIZED)
    waves.backward(agent, agent.contexts.find(context_id), scalars(roots), retain_graph)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The leaves on this worker that have a gradient in the context, and those gradients (not copies), in a new dict."""
    found = _find(context_id)
    with found.joint:
        return dict(found.gradients)


def _find(context_id: int) -> Context:
    return _agent.current(_NOT_INITIALIZED).contexts.find(context_id)


class _Send(NamedTuple):
    """The tensors of a sent message, seen as a node of the autograd graph."""

    next_functions: tuple[tuple[Any, int], ...]


def _next(target: torch.Tensor | GradientEdge) -> tuple[Any, int]:
    found = edge(target) if isinstance(target, torch.Tensor) else target
    return found.node, found.output_nr


class DistAutogradContext:
    """The state of a context at this worker, for inspection. Methods have the private names of torch's class."""

    def __init__(self, found: Context) -> None:
        self._found = found

    def _context_id(self) -> int:
        return self._found.number

    def _send_functions(self) -> dict[int, _Send]:
        """For each message from here with tensors that require grad, the nodes into which their gradients flow."""
        sent = list(self._found.sent.items())
        return {message: _Send(tuple([_next(target) for target in left.targets])) for message, left in sent}

    def _recv_functions(self) -> dict[tuple[int, int], Any]:
        """For each message to here with such tensors, by (number of the worker, number of the message), their node."""
        return dict(self._found.received)

    def _known_worker_ids(self) -> set[int]:
        """The ids of the other workers to which this one brought the context."""
        agent = _agent.current()
        return {agent.group.worker(number).id for number in self._found.workers} - {agent.me.id}


def _new_context() -> DistAutogradContext:
    return _retrieve_context(context().__enter__())


def _current_context() -> DistAutogradContext:
    if current.context is None:
        why = "Current thread doesn't have a valid autograd context. Please wrap your code using: `with context()`"
        raise RuntimeError(why)
    return DistAutogradContext(current.context)


def _is_valid_context(context_id: int) -> bool:
    return (agent := _agent.found()) is not None and context_id in agent.contexts.live


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return DistAutogradContext(_find(context_id))


def _release_context(context_id: int) -> None:
    _agent.current().contexts.end(_find(context_id).number)


def _init(worker_id: int) -> None:
    """Nothing: ``init_rpc`` has done it."""


def _get_max_id() -> int:
    return _agent.current(_NOT_INITIALIZED).contexts.largest


def _get_debug_info() -> dict[str, int]:
    """``num_autograd_contexts`` here, and ``num_current_backward_passes`` that this worker began or takes part in."""
    agent = _agent.found()
    live = list(agent.contexts.live.values()) if agent is not None else []
    return {"num_current_backward_passes": sum(len(each.passes) for each in live), "num_autograd_contexts": len(live)}
