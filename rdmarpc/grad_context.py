"""Contexts of distributed autograd: what a worker knows of one forward and backward computation that spans workers.

A context is made by whoever enters it, and on every other worker by the first call that carries its number. It holds the
gradient edges of the tensors that left (``Sent``) and the gradients of leaves; tensors themselves are held by nobody but their
users. It ends where it was entered; its end is passed on to every worker that heard of it from here, once, without waiting.

Its end may overtake calls that carry it, if these wait for a thread: numbers that ended are remembered, and who comes late
finds no context. Numbers are never used twice.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from .grad_record import Sent, sent

if TYPE_CHECKING:
    from .grad_pass import Pass

WORKER_SHIFT = 48
_REMEMBERED = 4096
# References to a gradient while a prehook has it: of the engine's buffer and of the Python object.
_UNSHARED = 2
# References to a gradient that is only kept here: the table's, a variable's, and getrefcount's own.
_OURS = 3


class Context:
    """Thread-safe."""

    def __init__(self, number: int, messages: itertools.count[int]) -> None:
        self.number = number
        self.sent: dict[int, Sent] = {}
        """By the number of the message."""
        self.received: dict[tuple[int, int], Any] = {}
        """Nodes of the local graph, by the worker and the number of the message that brought their tensors. To be looked at."""
        self.workers: set[int] = set()
        """Numbers of the workers that were told of it by us."""
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.passes: dict[tuple[int, int], Pass] = {}
        """Backward passes here, by the number of the worker that began it and its count."""
        self.oldest: dict[int, int] = {}
        """By worker: of the passes that it began, those counted less are over."""
        self.ended = False
        self.lock = threading.Lock()
        self._messages = messages

    def send(self, to: int, tensors: Iterable[torch.Tensor]) -> int:
        """Note the tensors of a message to worker number ``to``; its number, 0 if none of them needs a gradient."""
        self.workers.add(to)
        left = sent(to, tensors)
        if left is None:
            return 0
        message = next(self._messages)
        self.sent[message] = left
        return message

    def accumulate(self, leaf: torch.Tensor, gradient: torch.Tensor, ours: bool = False) -> None:
        """Add to the gradient of a leaf. ``gradient`` is taken over if it is ``ours``, or, from a prehook of the leaf's
        accumulator, if nothing else refers to it; it is copied otherwise."""
        with self.lock:
            before = self.gradients.get(leaf)
            if before is None:
                self.gradients[leaf] = gradient if ours or _unshared(gradient) else _copy(gradient)
            elif before.is_sparse and not gradient.is_sparse:
                self.gradients[leaf] = gradient + before
            elif not gradient.is_sparse and sys.getrefcount(before) <= _OURS:
                before.add_(gradient)
            else:
                self.gradients[leaf] = before + gradient

    def __repr__(self) -> str:
        return f"Context({self.number})"


def _unshared(gradient: torch.Tensor) -> bool:
    if gradient._use_count() > _UNSHARED:  # type: ignore[attr-defined]
        return False
    if gradient.layout is torch.sparse_coo:
        return gradient._indices().is_contiguous() and gradient._values().is_contiguous()
    return gradient.layout is torch.strided and gradient.is_contiguous()


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is torch.strided:
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient.clone()


class _Current(threading.local):
    context: Context | None = None


current = _Current()
"""The context that this thread is in."""


class Contexts:
    """Those that this worker knows. Thread-safe. ``tell(worker, number)`` passes the end of one on; it must not raise."""

    def __init__(self, me: int, tell: Callable[[int, int], None]) -> None:
        self._me, self._tell = me, tell
        self.live: dict[int, Context] = {}
        self._count = itertools.count(me << WORKER_SHIFT)
        self._messages = itertools.count(1)
        self._past: set[int] = set()
        self._past_order: deque[int] = deque()
        self._lock = threading.Lock()
        self.surveys = 0
        """Backward passes that had to ask which calls take part (``grad_flow``)."""

    def new(self) -> Context:
        return self._enter(next(self._count))

    def _enter(self, number: int) -> Context:
        made = Context(number, self._messages)
        self.live[number] = made
        return made

    def join(self, number: int) -> Context | None:
        """The context that a call carries, made if need be; ``None`` if it has ended."""
        found = self.live.get(number)
        if found is not None:
            return found
        with self._lock:
            if number in self._past:
                return None
            return self.live.get(number) or self._enter(number)

    def find(self, number: int) -> Context:
        """``RuntimeError`` if there is none of that number."""
        found = self.live.get(number)
        if found is None:
            raise RuntimeError(f"Could not find autograd context with id: {number}")
        return found

    def end(self, number: int, heard_from: int | None = None) -> None:
        """It ends here, and everywhere that we brought it to."""
        with self._lock:
            if number in self._past:
                return
            self._past.add(number)
            self._past_order.append(number)
            if len(self._past_order) > _REMEMBERED:
                self._past.discard(self._past_order.popleft())
            context = self.live.pop(number, None)
        if context is None:
            return
        context.ended = True
        for worker in list(context.workers):
            if worker != heard_from:
                self._tell(worker, number)
        context.sent.clear()
        context.received.clear()
        context.passes.clear()

    def lost(self, worker: int) -> None:
        """The contexts that a worker of this id had entered end with it."""
        for number in list(self.live):
            if number >> WORKER_SHIFT == worker:
                self.end(number)

    def clear(self) -> None:
        for context in list(self.live.values()):
            context.ended = True
        self.live.clear()

    @property
    def largest(self) -> int:
        """The largest number that we may draw."""
        return (self._me << WORKER_SHIFT) + (1 << WORKER_SHIFT) - 1
