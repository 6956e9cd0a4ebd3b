"""The called side: requests in, functions run, answers out."""

from __future__ import annotations

import itertools
import struct
import threading
import traceback
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from . import bulks, gpu_streams, holding, permits, profiled, remote_error, serialize
from .bulks import Kept
from .caller import Caller
from .failures import Failures
from .fetches import AWAY, Fetch
from .frames import (
    BULK,
    CONTROL,
    ERROR,
    FLAT,
    HEAD,
    LONE,
    NO_CONTEXT,
    READS,
    REFERENCE,
    REMOTE,
    REQUEST_HEAD,
    RESPONSE,
    RESPONSE_HEAD,
    Frame,
)
from .functions import MAY_DEFER, TOLD_WHO
from .futures import Value, known
from .grad_context import Context, Contexts, current
from .grad_record import unbound
from .handover import Handovers, sole
from .link import MAX_BODY, Link
from .progress import Progress
from .rref_context import RRefContext
from .rref_forks import Fork
from .rref_mail import NotTheirs
from .tensors import (
    NOTHING,
    Landing,
    Memory,
    Outgoing,
    describe,
    describe_all,
    load_places,
    pack,
    pack_handed,
    pack_lone,
    unpack,
    unpack_lone,
)
from .transport import ArenaFull, Device, PeerLost
from .transport.arena import Block
from .worker_info import WorkerInfo

_MAX_FUNCTIONS, _MAX_NAME = 4096, 1024
"""How many functions are remembered by their pickles, and the longest of these."""
_ASYNC_HINT = "Functions decorated with @rpc.async_function must return a torch.futures.Future object,"


class Callee:
    """Thread-safe. Grants at most a quarter of the arena's limit ahead of calls."""

    def __init__(
        self,
        device: Device,
        progress: Progress,
        memory: Memory,
        caller: Caller,
        me: WorkerInfo,
        rrefs: RRefContext,
        contexts: Contexts,
    ) -> None:
        self.progress, self.memory = progress, memory
        self.device, self.caller, self.me, self.rrefs, self.contexts = device, caller, me, rrefs, contexts
        self._functions: dict[bytes, Any] = {}
        self._landings: dict[tuple[Link, int], Landing] = {}
        self._granted = 0
        self._grants = itertools.count(1)
        self._sources: dict[tuple[Link, int], Kept] = {}
        self._lock = threading.Lock()
        self.dropped = 0
        """Answers that came too late for a peer that was lost."""
        self.handovers = Handovers(device)
        self.failures = Failures()
        self.refused_grants = 0
        """Landing places given back by a worker that does not hold them."""

    # -- frames

    def accept(self, link: Link, frame: Frame) -> None:
        """A request arrived (called by the holder of the polling role): leave it to the pool. ``NotTheirs`` if it creates a
        value under another worker's number."""
        if frame.flags & REMOTE and not frame.flags & BULK:
            self._introduce(link, frame)
        self.progress.jobs.append(partial(self._serve, link, frame))

    def release(self, link: Link, call: int) -> None:
        """The peer has read what a response left in our memory."""
        kept = self._sources.pop((link, call), None)
        if kept is not None:
            link.lend(-kept.nbytes)
            holding.resume(self, link)

    def _lend(self, link: Link, call: int, runs: list[torch.Tensor]) -> Kept:
        """Keep what the peer will READ of an answer. Before that is sent: ``release`` may come before we are back."""
        kept = Kept(runs)
        self._sources[link, call] = kept
        link.lend(kept.nbytes)
        return kept

    def forgo(self, link: Link, frame: Frame) -> None:
        """The peer gives back landing places it will not use."""
        for (grant,) in struct.iter_unpack("<Q", frame.body):
            if self._take_landing(link, grant) is None:
                self.refused_grants += 1

    def lost(self, link: Link) -> list[Any]:
        """Forget what we kept for a peer that is gone; returned is what it may still touch if it stopped in a copy."""
        found: list[Any] = [self._sources.pop(key, None) for key in list(self._sources) if key[0] is link]
        found += [self._take_landing(link, grant) for owner, grant in list(self._landings) if owner is link]
        self.handovers.sweep()
        return found

    @property
    def settled(self) -> bool:
        """Whether no peer has still to fetch a result from our memory."""
        return not self._sources

    def granted_bytes(self) -> dict[Link, int]:
        """What the landing places take that peers hold of us."""
        found: dict[Link, int] = {}
        for (owner, _), landing in list(self._landings.items()):
            found[owner] = found.get(owner, 0) + sum(landing.sizes)
        return found

    def granted(self, link: Link) -> int:
        """How many landing places this peer holds of us."""
        return sum(owner is link for owner, _ in list(self._landings))

    # -- running a request

    def begin(self, link: Link, request: Fetch) -> None:
        """What was held may begin."""
        self._serve(link, request.frame, None, request)

    def _serve(self, link: Link, frame: Frame, references: list[Fork] | None = None, request: Fetch | None = None) -> None:
        """Without ``references`` for the first time; with them when those among the arguments are confirmed. ``request``: where
        it was held before."""
        first = references is None and request is None
        if first and (link.crowded or link.held.any or (frame.flags & AWAY and link.channel.reads_take_peer)):
            holding.hold(self, link, frame)
            return
        call, flags = frame.call, frame.flags
        control = flags & CONTROL
        rref: int | None = None
        streams = gpu_streams.current
        try:
            if flags & BULK:
                frame = bulks.fetch(frame, self.memory, link) if request is None else request.whole(self.memory)
            if flags & REMOTE:
                rref = REQUEST_HEAD.unpack_from(frame.body, frame.function)[1]
                if flags & BULK:
                    self._introduce(link, frame)
                    frame = frame._replace(flags=flags & ~BULK)
            if request is not None:
                request.check()
            if not flags & FLAT and references is None:
                at = _payload_at(frame)
                if frame.body[at] == serialize.MARK:
                    references = self.rrefs.adopt(link.worker, frame.body[at : frame.function + frame.payload])
                    held = frame._replace(flags=frame.flags & ~BULK)
                    if self.rrefs.hold(references, partial(self._resume, link, held, rref, references, request)):
                        return
            if streams is not None:
                streams.begin()
            try:
                function, args, kwargs, sizes, places, context = self._decode(link, frame, references, request)
            finally:
                if streams is not None:
                    streams.begun()
            if references:
                references.clear()  # the arguments hold them now
            inner = getattr(function, "_wrapped_async_rpc_function", None)
            if inner is TOLD_WHO:
                args = (link.worker, *args)
            if torch_profiler._is_profiler_enabled and not control:
                function = profiled.serving(function, args, link.name, self.me.name)
            if context is None:
                answer = [function(*args, **kwargs)]
            else:
                answer = [_within(context, function, args, kwargs)]
            if streams is not None:
                streams.ended()
            if inner is not None:
                if isinstance(answer[0], torch._C.Future):
                    later = partial(self._reply_later, link, call, control, sizes, places, rref, context, known(answer[0]))
                    answer.pop().add_done_callback(later)
                    return
                if inner is not MAY_DEFER and inner is not TOLD_WHO:
                    raise RuntimeError(f"{_ASYNC_HINT} but got {type(answer[0])}")
            del args, kwargs
        except BaseException as error:
            args, kwargs = (), {}  # noqa: F841 -- the error holds this frame
            if references:
                references.clear()
            if streams is not None:
                streams.ended()
            if isinstance(error, NotTheirs):
                self.caller.distrust(link, error)
            self._fail(link, call, control, error, rref)
            return
        self._reply(link, call, control, answer, sizes, places, rref, context)

    def _resume(
        self,
        link: Link,
        frame: Frame,
        rref: int | None,
        references: list[Fork],
        request: Fetch | None,
        error: Exception | None = None,
    ) -> None:
        """The references among the arguments are confirmed by their owners, or (``error``) one of them never will be."""
        if self.rrefs.closed:
            return  # nobody hears of it
        if error is None:
            self._serve(link, frame, references, request)
        else:
            self._fail(link, frame.call, frame.flags & CONTROL, error, rref)

    def _introduce(self, link: Link, frame: Frame) -> None:
        """A call that creates a value arrived: from now on its creator's reference is known."""
        _, rref, fork, *_ = REQUEST_HEAD.unpack_from(frame.body, frame.function)
        self.rrefs.introduce(rref, fork, link.worker)

    def _decode(
        self, link: Link, frame: Frame, references: list[Fork] | None, request: Fetch | None
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any], tuple[int, ...], list[Any] | None, Context | None]:
        body, start = frame.body, frame.function
        if frame.flags & (LONE | HEAD) == LONE:
            table_at = start + frame.payload
            data_at = table_at + frame.table
            return self._function(body[:start]), (unpack_lone(body[table_at:data_at], body[data_at:]),), {}, (), None, None
        grant = places_bytes = message = 0
        context = None
        at = start
        if frame.flags & HEAD:
            grant, _, _, places_bytes, number, message = REQUEST_HEAD.unpack_from(body, start)
            if number != NO_CONTEXT:
                context = self.contexts.join(number, link.worker)
            at += REQUEST_HEAD.size
        places = load_places(body[at : at + places_bytes], link.places) if places_bytes else None
        table_at = start + frame.payload
        data_at = table_at + frame.table
        payload = body[at + places_bytes : table_at]
        sizes: tuple[int, ...] = ()
        tensors: list[torch.Tensor] = []
        parts: list[torch.Tensor] = []
        kwargs: dict[str, Any] = {}
        if frame.tensors and not frame.flags & LONE:
            landing = self._take_landing(link, grant) if grant else None
            ahead: list[torch.Tensor] | None = [] if link.channel.reads_take_peer else None  # nothing is READ here then
            if request is not None and request.runs is not None:
                ahead = request.take()
            tensors, sizes, was_read = unpack(
                body[table_at:data_at],
                body[data_at:],
                frame.tensors,
                self.memory,
                link.channel,
                landing,
                link.places,
                ahead=ahead,
            )
            if was_read:
                link.count_read()
        try:
            if frame.flags & LONE:
                tensors = [unpack_lone(body[table_at:data_at], body[data_at:])]
                function, args = self._function(body[:start]), tuple(tensors)
            elif frame.flags & FLAT:
                args = serialize.load_flat(payload, tensors)
                function = self._function(body[:start])
            elif frame.flags & REFERENCE:
                args, kwargs = serialize.loads(payload, tensors, references, parts)
                function = self._function(body[:start])
            else:
                function, args, kwargs = serialize.loads(payload, tensors, references, parts)
        except (AttributeError, ImportError) as error:
            raise remote_error.unknown_name(error) from error
        if message and context is not None:
            context.attach(link.worker, message, [*tensors, *parts])
        return function, args, kwargs, sizes, places, context

    def _function(self, name: bytes) -> Any:
        found = self._functions.get(name)
        if found is None:
            found = permits.load_called(name)
            if len(name) <= _MAX_NAME:
                if len(self._functions) >= _MAX_FUNCTIONS:
                    self._functions.clear()
                self._functions[name] = found
        return found

    # -- answering

    def _reply_later(
        self,
        link: Link,
        call: int,
        control: int,
        sizes: Any,
        places: Any,
        rref: int | None,
        context: Context | None,
        source: Value | None,
        future: torch.futures.Future[Any],
    ) -> None:
        try:
            answer = [(source or future).value()]
        except BaseException as error:
            self._fail(link, call, control, error, rref)
            # The future holds the error, the error this frame, and this frame the future: no collector sees that circle, as the
            # future is C++, and all of this worker would live in it.
            error.__traceback__ = None
            return
        self._reply(link, call, control, answer, sizes, places, rref, context)

    def _reply(
        self,
        link: Link,
        call: int,
        control: int,
        answer: list[Any],
        sizes: tuple[int, ...],
        places: Any,
        rref: int | None,
        context: Context | None,
    ) -> None:
        """``answer`` holds the result, and nothing else here does: once it is packed it dies, and what the arguments lay in is
        what ``_grant`` promises next. Memory that one writes again and again is many times faster than memory that goes round.
        """
        result = answer.pop()
        if rref is not None:
            self.rrefs.store.fulfil(rref, result)
            result = None
        flags = control
        payload = blob = b""
        message = 0
        parts: list[torch.Tensor] = []
        try:
            if context is not None:
                result = unbound(result, {})
            tensors: list[torch.Tensor] | None = None
            out = NOTHING
            if type(result) is torch.Tensor and (lone := pack_lone(result)):
                flags |= LONE | FLAT
                if context is not None:
                    message = context.send(link.worker, (result,))
                if not sizes and not message and link.try_send(RESPONSE, call, flags, 1, b"", b"", lone[0], lone[1]):
                    return
                payload, out = b"", Outgoing(lone[0], lone[1], 1, [])
            elif type(result) is torch.Tensor and link.channel.can_adopt and (block := sole(result, self.device.arena)):
                flags |= FLAT
                payload, out = serialize.ONE_TENSOR, self._hand_over(link, result, block)
                tensors = None if out.tensors else [result]
            elif (tensors := serialize.flat(result if type(result) is tuple else (result,))) is not None:
                flags |= FLAT
                payload = serialize.dump_flat_one(result)
            else:
                payload, tensors = serialize.dumps(result, link.worker, parts=parts, reply=True)
            if tensors:
                described = describe_all(tensors, self.device)
                out = pack(described, self.device, link.channel, places, self.memory)
                del described
            flags |= READS if out.lent else 0
            if context is not None and not flags & LONE:
                message = context.send(link.worker, [*(tensors or ()), *parts])
            del result, tensors
            parts.clear()
            grant, blob = self._grant(link, sizes) if sizes else (0, b"")
            if grant or message:
                flags |= HEAD
                payload = RESPONSE_HEAD.pack(grant, len(blob), message) + blob + payload
            kept = None
            if out.lent or len(payload) + len(out.table) + len(out.data) > MAX_BODY:
                kept = self._lend(link, call, out.lent)
            taken_back = None
            if not flags & FLAT and payload:
                taken_back = partial(self._take_back, link, flags, payload, RESPONSE_HEAD.size + len(blob))
            self.caller.send(link, RESPONSE, call, flags, out, b"", payload, kept, taken_back)
        except PeerLost:
            self.dropped += 1
            self.release(link, call)
            self._take_back(link, flags, payload, RESPONSE_HEAD.size + len(blob))
        except BaseException as error:
            self.release(link, call)
            self._take_back(link, flags, payload, RESPONSE_HEAD.size + len(blob))
            self._fail(link, call, control, remote_error.unsendable(error), None)

    def _take_back(self, link: Link, flags: int, payload: bytes, head: int) -> None:
        """The references in an answer that was not sent, and the GPU memory that it lends."""
        if not flags & FLAT and payload:
            payload = payload[head:] if flags & HEAD else payload
            self.rrefs.undo(link.worker, payload)
            serialize.undo(link.worker, payload)

    def _hand_over(self, link: Link, result: torch.Tensor, block: Block) -> Outgoing:
        """A result that is ours alone, where it lies; nothing if it has to be copied after all."""
        if result.is_conj() or result.is_neg() or not result.is_contiguous():
            return NOTHING
        if block.segment.pool is not link.pool:  # whoever owns it may write it, which this peer cannot there
            return NOTHING
        run, text = describe(result)
        place = self.handovers.give(link.channel, run, block)
        return NOTHING if place is None else pack_handed(text, place)

    def _fail(self, link: Link, call: int, control: int, error: BaseException, rref: int | None) -> None:
        self.release(link, call)  # of an answer that could not be sent
        if self.rrefs.closed:
            return  # it may have failed because we leave: the end of the link says so
        payload = remote_error.dump(error, self.me)
        if not control:
            self.failures.tell(error, remote_error.text_of(payload))
        if rref is not None:
            # The creator learns that the reference exists; the error waits for whoever fetches the value.
            error = remote_error.ordinary(error)
            traceback.clear_frames(error.__traceback__)  # the references among their variables would live as long as the error
            self.rrefs.store.fail(rref, error)
            self._reply(link, call, control, [None], (), None, None, None)
            return
        try:
            kept = None
            if len(payload) > MAX_BODY:
                kept = self._lend(link, call, [])
            self.caller.send(link, ERROR, call, control, NOTHING, b"", payload, kept)
        except PeerLost:
            self.dropped += 1
            self.release(link, call)

    # -- landing places

    def _grant(self, link: Link, sizes: tuple[int, ...]) -> tuple[int, bytes]:
        """Promise fresh memory for the next call of this signature; (0, b"") when enough has been promised."""
        total = sum(sizes)
        if not total or self._granted + total > self.device.arena.limit // 4:
            return 0, b""
        try:
            landing = Landing(link.channel, sizes)
        except ArenaFull:
            return 0, b""
        number = next(self._grants)
        with self._lock:
            self._landings[link, number] = landing
            self._granted += total
        return number, landing.places

    def _take_landing(self, link: Link, number: int) -> Landing | None:
        with self._lock:
            landing = self._landings.pop((link, number), None)
            if landing is not None:
                self._granted -= sum(landing.sizes)
        return landing


def _payload_at(frame: Frame) -> int:
    """Where in a request's body the pickle begins, with the references in front of it."""
    if not frame.flags & HEAD:
        return frame.function
    return frame.function + REQUEST_HEAD.size + REQUEST_HEAD.unpack_from(frame.body, frame.function)[3]


def _within(context: Context, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``function`` in the caller's autograd context."""
    current.context = context
    try:
        return function(*args, **kwargs)
    finally:
        current.context = None
