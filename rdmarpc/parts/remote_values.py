"""What the caller does with parameters and gradients of other workers: writes that wait for the next message, reads that
remember each other.

Invariants:
1. An owner does what it is asked for in the order in which it was asked here, between the forwards, backwards and commands that
   came before and after (``Order``).
2. What was read is known until something may have changed it: another forward, backward or command (the *epoch* ends), or a
   write to that tensor.
3. A read that is not known brings along what was read after it in the last epoch where it was asked for. So a loop over all
   parameters costs one message to each worker, from its second time on.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..graph.work.remote_values import GRAD, VALUE, WHOLE, Operation, Place
from ..transport import NotSupported

Target = tuple[str, int, bool]
"""Worker, position of a parameter, whether it is the gradient."""
Request = tuple[str, Operation, tuple[int, ...]]
"""Worker, what is read there, and how often each of its tensors was written before in the same epoch."""

_EPOCHS = 8
_QUEUED_BYTES = 64 << 20
_OWN_NAMES, _OWN_STORAGES = 3, 2
"""References to a tensor, and to its storage, in ``_seen_elsewhere`` where nobody else has any."""


class Order(Protocol):
    """The place of these messages among all others of the model (``control.Control``)."""

    deferred: Callable[[], None] | None
    """Called before anything else is sent."""

    def epoch(self) -> Any:
        """Equal as long as nothing was sent."""

    def settle(self) -> None:
        """Zeroing that was asked for before goes out now."""


class RemoteValues:
    """``order`` gives the ``Order``; ``ask`` has these operations carried out at each worker, after everything that was sent,
    and gives their results."""

    def __init__(
        self, order: Callable[[], Order], ask: Callable[[Mapping[str, Sequence[Operation]]], Mapping[str, list[Any]]]
    ) -> None:
        self.messages = 0
        """How many were sent."""
        self._order, self._ask = order, ask
        self._queue: dict[str, list[Operation]] = {}
        self._queued_bytes = 0
        self._epoch: Any = None
        self._writes: dict[Target, int] = {}
        self._known: dict[Request, Any] = {}
        self._read: dict[Request, None] = {}
        self._past: deque[dict[Request, None]] = deque(maxlen=_EPOCHS)
        self._lent: dict[Target, tuple[torch.Tensor, int]] = {}

    def write(self, worker: str, operation: Operation, targets: Sequence[Target], nbytes: int = 0) -> None:
        """Have ``targets`` of a worker changed, before anything else happens there. ``nbytes``: of the tensors that travel."""
        order = self._order()
        order.settle()
        self._take_over()
        self._begin(order)
        self._put_off(order, worker, operation, targets)
        self._queued_bytes += nbytes
        if self._queued_bytes > _QUEUED_BYTES:
            self.flush()
        if self._lent:
            self.bring_back(targets)

    def _put_off(self, order: Order, worker: str, operation: Operation, targets: Sequence[Target]) -> None:
        self._queue.setdefault(worker, []).append(operation)
        order.deferred = self.flush
        for target in targets:
            self.changed(target)

    # -- ordinary tensors that were assigned: they and what stands at the owner are one tensor, as long as anybody sees it

    def lend(self, target: Target, tensor: torch.Tensor) -> None:
        """This tensor was assigned as a gradient or value."""
        self._lent[target] = tensor, tensor._version
        self._order().deferred = self.flush

    def take_back(self, target: Target) -> None:
        """It is something else now."""
        self._lent.pop(target, None)

    def bring_back(self, targets: Sequence[Target] | None = None) -> None:
        """Let the tensors that were assigned to these, or to any, have what stands there now."""
        for target in tuple(self._lent) if targets is None else targets:
            if target not in self._lent:
                continue
            tensor, _ = self._lent.pop(target)
            if _seen_elsewhere(tensor):
                with torch.no_grad():
                    tensor.detach().copy_(self.whole(*target))
                self._lent[target] = tensor, tensor._version

    def _take_over(self) -> None:
        """What was written here into tensors that were assigned."""
        for target, (tensor, version) in tuple(self._lent.items()):
            if tensor._version != version:
                worker, position, grad = target
                self._lent[target] = tensor, tensor._version
                place = Place(position, GRAD if grad else VALUE)
                operation = Operation("copy_.default", (place, tensor.detach().clone()))
                self._put_off(self._order(), worker, operation, [target])

    def changed(self, target: Target) -> None:
        """It is not what was read."""
        self._writes[target] = self._writes.get(target, 0) + 1

    def whole(self, worker: str, position: int, grad: bool) -> torch.Tensor:
        """The value of a parameter or gradient, in host memory. Not to be written."""
        return self.read(worker, Operation(WHOLE, (Place(position, GRAD if grad else VALUE),), wanted=True))

    def read(self, worker: str, operation: Operation) -> Any:
        """The result of an operation on tensors of that worker alone. Not to be written."""
        order = self._order()
        order.settle()
        self._take_over()
        self._begin(order)
        request = worker, operation, self._version(worker, operation)
        self._read[request] = None
        if request not in self._known:
            self._fetch(request)
        return self._known[request]

    def flush(self) -> None:
        """Send what was written."""
        if self._lent:
            self._take_over()
        if self._queue:
            self._send({})
        if self._lent:
            self._order().deferred = self.flush

    def _begin(self, order: Order) -> None:
        epoch = order.epoch()
        if epoch == self._epoch:
            return
        if self._read:
            self._past.append(self._read)
        self._epoch, self._read = epoch, {}
        self._known.clear()
        self._writes.clear()

    def _version(self, worker: str, operation: Operation) -> tuple[int, ...]:
        return tuple([self._writes.get((worker, p.position, p.kind == GRAD), 0) for p in _places(operation.args)])

    def _fetch(self, request: Request) -> None:
        nothing: dict[Request, None] = {}
        past = next((epoch for epoch in reversed(self._past) if request in epoch), nothing)
        wanted: dict[str, list[Request]] = {request[0]: [request]}
        for other in past:
            worker, operation, version = other
            if other != request and other not in self._known and self._version(worker, operation) == version:
                wanted.setdefault(worker, []).append(other)
        self._send(wanted, request)

    def _send(self, wanted: Mapping[str, list[Request]], asked: Request | None = None) -> None:
        """``asked``: the one that must not fail; the others are only brought along."""
        order = self._order()
        queue, self._queue, self._queued_bytes = self._queue, {}, 0
        order.deferred = self.flush if self._lent else None
        messages = {}
        for worker in {**queue, **wanted}:
            reads = [request[1]._replace(maybe=request != asked) for request in wanted.get(worker, ())]
            messages[worker] = [*queue.get(worker, ()), *reads]
        self.messages += len(messages)
        found = self._ask(messages)
        self._epoch = order.epoch()
        for worker, requests in wanted.items():
            self._known.update((request, value) for request, value in zip(requests, found[worker]) if value is not None)


class StateCopies:
    """The copies of tensors of owners that ``state_dict`` has given out. In one process these are the model's own tensors: what
    is written into one of them changes the model. Here it would be lost, so it is an error of the next forward."""

    def __init__(self) -> None:
        self._given: list[tuple[weakref.ref[torch.Tensor], int, str, str]] = []

    def add(self, worker: str, entries: Mapping[str, Any]) -> None:
        """These were fetched from a worker, by their names in the model."""
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and not value.is_inference():
                self._given.append((weakref.ref(value), value._version, worker, name))

    def check(self) -> None:
        """Raise ``NotSupported`` if one of them was written."""
        alive = []
        for each in self._given:
            reference, version, worker, name = each
            if (copy := reference()) is None:
                continue
            if copy._version != version:
                raise NotSupported(
                    f"what state_dict() gave for {name!r} was written, but is a copy: the tensor itself is on {worker!r}",
                    hint="load_state_dict() takes it there; state_dict(keep_vars=True) has parameters that can be written",
                )
            alive.append(each)
        self._given = alive

    def settle(self, names: Collection[str]) -> None:
        """These were loaded: what had been written into their copies before does not matter any more."""
        settled = [(given, given[0]()) for given in self._given]
        self._given = [
            (given[0], copy._version if given[3] in names else given[1], *given[2:])
            for given, copy in settled
            if copy is not None
        ]


def _seen_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether anybody has it, or another tensor over its memory, besides the caller's own table."""
    storage = tensor.untyped_storage()
    return sys.getrefcount(tensor) > _OWN_NAMES or torch._C._storage_Use_Count(storage._cdata) > _OWN_STORAGES


def _places(value: Any) -> Iterator[Place]:
    if isinstance(value, Place):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _places(item)
