"""Reading answers, at the worker that made the call: the tensors, the value, and the landing places for later calls."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch

from ..links import reads
from ..links.frames import (
    BULK,
    ERROR,
    FLAT,
    FORGO,
    HEAD,
    LONE,
    READS,
    RELEASE,
    Frame,
    Head,
    NotTheirs,
    error_of,
    lone,
    response_body,
)
from ..links.polling.modes import intercepted, unseen
from ..links.post import tell
from ..links.reads import Fetch
from ..links.ring import Link
from ..message import serialize
from ..message.tensors import HANDED, Memory, load_places, size_classes, unpack, unpack_lone
from ..references.context import RRefContext
from ..transport import ArenaFull, RdmaError, RemoteRegion, TransferTimeout, fresh
from ..transport.peers.ended import nobody
from . import errors
from .pending import Answer, Pending


class Answers:
    """Decodes the answers to one worker's calls. Thread-safe. ``late(call, fetch)`` is told of an answer of which a part is
    missing at its call's deadline. ``distrust`` ends the link of a peer that sent something that it had no right to."""

    def __init__(
        self,
        memory: Memory,
        rrefs: RRefContext,
        late: Callable[[Pending, Fetch], None],
        distrust: Callable[[Link, RdmaError], None],
    ) -> None:
        self._memory, self._rrefs, self._late, self._distrust = memory, rrefs, late, distrust
        self.refused_grants = 0
        """The number of grants with landing places that fit no call of ours."""

    def stop(self) -> None:
        """Call ``late`` and ``distrust`` no more."""
        self._late = self._distrust = nobody

    def decode(self, pending: Pending, answer: Answer) -> Any:
        """The result, or raise the exception. Runs user code (unpickling)."""
        if not (torch.is_inference_mode_enabled() or intercepted()):
            return self._decode(pending, answer)
        with torch.inference_mode(False), unseen():  # as elsewhere: who waits in that mode may train with what came later
            return self._decode(pending, answer)

    def _decode(self, pending: Pending, answer: Answer) -> Any:
        fetch = None
        if not isinstance(answer, Frame):
            if isinstance(answer, Exception):
                raise fresh(answer)
            if isinstance(answer.error, ArenaFull):
                self._read_rest(pending, answer)
            fetch, answer = answer, answer.frame
        flags = answer.flags
        if flags & (LONE | HEAD | BULK) == LONE and not pending.key[1]:
            _, table, data = lone(answer)
            return unpack_lone(table, data)
        frame = self._whole(pending, answer, fetch) if flags & BULK else answer
        if frame.kind == ERROR:
            if flags & (READS | BULK):
                tell(pending.link, RELEASE, pending.call)
            raise errors.rebuild(error_of(frame))
        head, payload, table, data = response_body(frame)
        references = None
        if not flags & FLAT and payload[0] == serialize.MARK:
            try:
                references = self._rrefs.adopt(pending.link.worker, payload)
            except NotTheirs as error:
                self._distrust(pending.link, error)
                raise
        if head.grant or pending.key[1]:
            self._keep_places(pending, head)
        if flags & LONE:
            value = unpack_lone(table, data)
            if head.message:
                _attach(pending, head.message, [value])
            return value
        tensors = self._tensors(pending, frame, table, data, fetch) if frame.tensors or flags & (READS | BULK) else []
        if not frame.tensors:
            pending.link.grants.expect_result(pending.key, ())
        if head.message:
            _attach(pending, head.message, tensors)  # before it is unpickled, which may compute with them
        parts: list[torch.Tensor] = []
        if flags & FLAT:
            value = serialize.load_flat_one(payload, tensors)
        else:
            try:
                value = serialize.loads(payload, tensors, references, parts)
            except (AttributeError, ImportError) as error:
                raise errors.unknown_name(error) from error
        if head.message:
            _attach(pending, head.message + 1, parts)
        return value

    def _read_rest(self, pending: Pending, fetch: Fetch) -> None:
        """There was no memory for an answer when it came. Wait for that, and for the data, until the call's deadline (of an
        answer that nobody wants any more for memory only): then it is taken when it is here."""
        try:
            fetch.finish(self._memory, _deadline(pending), patient=not pending.expired)
        except TransferTimeout:
            self._late(pending, fetch)
            raise pending.timed_out() from None

    def _whole(self, pending: Pending, frame: Frame, fetch: Fetch | None) -> Frame:
        """The frame with its whole body, which had to be READ because it did not fit the frame."""
        try:
            if fetch is None:
                return reads.fetch(frame, self._memory, pending.link, _deadline(pending))
            return fetch.whole(self._memory)
        except BaseException:
            tell(pending.link, RELEASE, pending.call)
            raise

    def _keep_places(self, pending: Pending, head: Head) -> None:
        """Keep the landing places that an answer grants for later calls."""
        link, sizes, grant = pending.link, pending.key[1], head.grant
        if grant and not 0 < len(head.places) == RemoteRegion.WIRE_SIZE * len(sizes):
            self.refused_grants += 1
            grant = 0
        if grant:
            forgone = link.grants.put(size_classes(sizes), grant, load_places(head.places, link.places))
        else:
            # Large arguments, and no place for those of the next call: the callee has promised as much as it may.
            forgone = link.grants.make_room(size_classes(sizes)) if sizes else []
        if forgone:
            tell(link, FORGO, 0, struct.pack(f"<{len(forgone)}Q", *forgone))

    def _tensors(
        self, pending: Pending, frame: Frame, table: bytes, data: bytearray, fetch: Fetch | None
    ) -> list[torch.Tensor]:
        """The tensors of an answer. The callee is told when all that it left for us in its memory has been READ, or will not
        be."""
        link, was_read = pending.link, False
        tensors: list[torch.Tensor] = []
        sizes: tuple[int, ...] = ()
        try:
            if frame.tensors:
                ahead: list[torch.Tensor] | None = [] if link.channel.reads_take_peer else None  # nothing is READ here then
                if fetch is not None:
                    ahead = fetch.take()
                tensors, sizes, was_read = unpack(
                    table,
                    data,
                    frame.tensors,
                    self._memory,
                    link.channel,
                    pending.landing,
                    link.places,
                    _deadline(pending),
                    ahead,
                )
        finally:
            if frame.flags & (READS | BULK):
                tell(link, RELEASE, pending.call)
        if was_read:
            link.count_read()
        if frame.tensors and table[0] != HANDED:  # that says nothing of calls to come
            link.grants.expect_result(pending.key, sizes)
        return tensors


def _deadline(pending: Pending) -> float | None:
    """The time until which memory for an answer may be waited for. ``None``, without limit, if the call was given up."""
    return None if pending.expired else pending.deadline


def _attach(pending: Pending, message: int, tensors: list[torch.Tensor]) -> None:
    """Connect what an answer brought to the local graph."""
    context = pending.context
    if context is not None and pending.recorded and not context.ended:
        context.attach(pending.link.worker, message, tensors)
