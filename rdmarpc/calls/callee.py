"""The called side: requests in, functions run, answers out."""

from __future__ import annotations

import struct
import sys
import traceback
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from ..base import here
from ..base import streams as gpu_streams
from ..base.futures import Value, known
from ..base.here import WorkerInfo
from ..functions import MAY_DEFER, NO_FUTURE, TOLD_WHO
from ..gradients.context import Context, Contexts, current, plainly
from ..gradients.graph import unbound
from ..gradients.waves import deliver
from ..links import frames, messages
from ..links.frames import Body, Frame, NotTheirs, created, request_body, response_head
from ..links.grants import Promises
from ..links.messages import AWAY, Fetch, Kept, Post
from ..links.polling.pool import Pool
from ..links.ring import MAX_BODY, Distrust, Link
from ..message import errors, permits, serialize
from ..message.layout import as_it_lies, travels
from ..message.tensors import INLINE_BYTES, NOTHING, Outgoing, pack, pack_handed, string_at, unpack, unpack_lone
from ..references.context import RRefContext
from ..references.forks import Fork
from ..transport import Device, Guard, PeerLost, RemoteRegion
from . import profiled
from .memory import Handovers

_MAX_FUNCTIONS, _MAX_NAME = 4096, 1024
"""How many functions are remembered by their pickles, and the length in bytes of the longest such pickle."""
_SCRIPT_HINT = "Async functions must return an IValue of Future type,"


class Answering:
    """A request, from the arrival of its frame until it is answered. One thread at a time writes it."""

    # Class attributes are the defaults: an instance only carries what differs, and is quickly made.
    request: Fetch | None = None
    """The READs of a request that was held, or that did not come with its frame alone; else ``None``."""
    references: list[Fork] | None = None
    """The references that came with its arguments, if there are any."""
    body: Body | None = None
    """The parsed body, from the look for references until its arguments are decoded."""
    rref: int | None = None
    """The reference whose value it creates."""
    context: Context | None = None
    """The autograd context that it carries."""
    sizes: tuple[int, ...] = ()
    """The bytes of each argument that needs a landing place."""
    places: list[RemoteRegion] | None = None
    """The caller's landing places for the result."""
    function: Any = None
    """The unpickled function, and (``args``) its arguments, while it runs."""
    args: tuple[Any, ...] = ()

    def __init__(self, link: Link, frame: Frame) -> None:
        self.link, self.frame, self.call = link, frame, frame.call


class Callee:
    """The called side of one worker. Thread-safe."""

    def __init__(
        self, device: Device, pool: Pool, post: Post, me: WorkerInfo, rrefs: RRefContext, contexts: Contexts, distrust: Distrust
    ) -> None:
        """``distrust``: see ``Caller``."""
        self.device, self.pool, self.post, self.memory = device, pool, post, post.memory
        self.me, self.rrefs, self.contexts, self._distrust = me, rrefs, contexts, distrust
        self.running: dict[int, Answering] = {}
        """The requests that are being served, by the thread that serves each."""
        self._functions: dict[bytes, Any] = {}
        self.promises = Promises(device.arena)
        self._sources: dict[tuple[Link, int], Kept] = {}
        self.dropped = 0
        """Answers that came too late for a peer that was lost."""
        self.handovers = Handovers(device)
        self.failures = Guard("rdmarpc")
        """Logs the requests that fail."""
        self.refused_grants = 0
        """Landing places given back by a worker that does not hold them."""
        self.forked = False
        """Whether this is a forked child of the worker's process."""
        self.leaving = False
        """Whether others are told that this worker is gone: it begins nothing for those that are not told yet, either."""

    # -- frames

    def accept(self, link: Link, frame: Frame) -> None:
        """A request arrived (called by the holder of the polling role): leave it to the pool. ``NotTheirs`` if it creates a
        value under another worker's number."""
        if frame.flags & frames.REMOTE and not frame.flags & frames.BULK:
            self._introduce(link, frame)
        if self.post.observer is not None:
            self.post.observer.came(link, frame)
        if self.leaving:  # the end of the connection ends the call
            return
        self.pool.jobs.append(partial(self._serve, Answering(link, frame)))

    def release(self, link: Link, call: int) -> None:
        """The peer has read what a response left in our memory."""
        kept = self._sources.pop((link, call), None)
        if kept is not None:
            kept.end()
            messages.resume(self, link)

    def _lend(self, link: Link, call: int, runs: list[torch.Tensor]) -> Kept:
        """Keep what the peer will READ of an answer. Before that is sent: ``release`` may come before we are back."""
        kept = self._sources[link, call] = Kept(runs, link.lend)
        return kept

    def forgo(self, link: Link, frame: Frame) -> None:
        """The peer gives back landing places it will not use."""
        for (grant,) in struct.iter_unpack("<Q", frame.body):
            if self.promises.take(link, grant) is None:
                self.refused_grants += 1

    def lost(self, link: Link) -> list[Any]:
        """Forget what we kept for a peer that is gone; returned is what it may still touch if it stopped in a copy."""
        found: list[Any] = [self._sources.pop(key, None) for key in list(self._sources) if key[0] is link]
        found += self.promises.forget(link)
        self.handovers.sweep()
        return found

    @property
    def settled(self) -> bool:
        """Whether no peer has still to fetch a result from our memory."""
        return not self._sources

    # -- running a request

    def begin(self, link: Link, request: Fetch) -> None:
        """Begin a request that was held."""
        answering = Answering(link, request.frame)
        answering.request = request
        self._serve(answering)

    def _serve(self, answering: Answering) -> None:
        """Serve a request: when it comes, when it is held no longer, or when the references among its arguments are
        confirmed."""
        link, flags = answering.link, answering.frame.flags
        first = answering.request is None and answering.references is None
        if first and (link.crowded or link.held.any or (flags & AWAY and link.channel.reads_take_peer)):
            messages.hold(self, link, answering.frame)
            return
        thread, observer, streams = get_ident(), self.post.observer, gpu_streams.current
        self.running[thread] = answering
        if observer is not None:
            observer.serving(answering)
        try:
            try:
                plain = first and flags & frames.FLAT and not flags & (AWAY | frames.REMOTE)
                if not (plain or self._prepare(answering)):
                    return
                answer = self._run(answering, streams)
                if answer is None:
                    return
            except BaseException as error:
                answering.args = ()  # the error holds this frame
                if answering.references:
                    answering.references.clear()
                if streams is not None:
                    streams.ended()
                if isinstance(error, NotTheirs):
                    self._distrust(link, error)
                self._reply(answering, error)
                return
            (self._answer if observer is None else self._reply)(answering, answer)
        finally:
            self.running.pop(thread, None)
            if current.context is not None:  # entered by the function, and never left
                current.context = None
            if observer is not None:
                observer.served(answering)

    def _prepare(self, answering: Answering) -> bool:
        """Have all of a request here, its body and what its references refer to. ``False``: it goes on when these are
        confirmed."""
        link, frame, request = answering.link, answering.frame, answering.request
        introduced = not frame.flags & frames.BULK  # when it came
        if frame.flags & AWAY:
            request = answering.request = request or Fetch(link, frame)
            request.read(self.memory, None)
            frame = answering.frame = request.whole()
        if frame.flags & frames.REMOTE:
            answering.rref = created(frame)[0]
            if not introduced:
                self._introduce(link, frame)
        if not frame.flags & frames.FLAT and answering.references is None:
            answering.body = request_body(frame)
            payload = answering.body[1]
            if payload[0] == serialize.MARK:
                answering.references = self.rrefs.adopt(link.worker, payload)
                if self.rrefs.hold(answering.references, partial(self._resume, answering)):
                    return False
        if request is not None:  # its references were taken, whatever became of the rest
            request.check()
        return True

    def _resume(self, answering: Answering, error: Exception | None = None) -> None:
        """The references among the arguments are confirmed by their owners, or (``error``) one of them never will be."""
        if self.rrefs.closed:
            return  # nobody hears of it
        if error is None:
            self._serve(answering)
        else:
            self._reply(answering, error)

    def _run(self, answering: Answering, streams: gpu_streams.Streams | None) -> list[Any] | None:
        """The result of the function; ``None`` if it comes later."""
        if streams is not None:
            streams.begin()
        frame = answering.frame
        args: tuple[Any, ...]
        kwargs: dict[str, Any]
        try:
            if frame.kind == frames.REQUEST and frame.flags & (frames.LONE | frames.HEAD) == frames.LONE:
                at = frame.function
                function, args, kwargs = self._function(frame.body[:at]), (unpack_lone(frame.body[at:], frame.data),), {}
            else:
                function, args, kwargs = self._decode(answering)
        finally:
            if streams is not None:
                streams.begun()
        answering.function, answering.args = function, args
        if self.post.observer is not None:
            self.post.observer.unpickled(answering, function, args)
        if answering.references:
            answering.references.clear()  # the arguments hold them now
        link, context = answering.link, answering.context
        inner = getattr(function, "_wrapped_async_rpc_function", None)
        if inner is TOLD_WHO:
            args = (link.worker, *args)
        if torch_profiler._is_profiler_enabled and not frame.flags & frames.CONTROL:
            function = profiled.serving(function, args, link.name, self.me.name)
        if context is not None:
            current.context = context
        try:
            answer = [function(*args, **kwargs)]
        finally:
            if context is not None:
                current.context = None
            del args, kwargs  # an error holds this frame
            answering.args = ()
            if self.forked and self.pool.slot:
                here.leave(sys.exc_info()[1])
        if streams is not None:
            streams.ended()
        if inner is not None:
            if isinstance(answer[0], torch._C.Future):
                # Nobody needs these meanwhile.
                answering.function = answering.request = None
                answering.frame = frame._replace(body=b"", data=bytearray())
                del frame
                future = answer.pop()
                later = partial(self._reply_later, answering, known(future))
                if future.done():  # a callback would run at once, too, on this thread
                    later(future)
                else:
                    future.add_done_callback(later)
                return None
            if inner is not MAY_DEFER and inner is not TOLD_WHO:
                kind = type(answer[0])
                if isinstance(inner, torch.jit.ScriptFunction):
                    raise RuntimeError(f"{_SCRIPT_HINT} but got {kind.__name__}")
                raise RuntimeError(f"{NO_FUTURE} but got {kind}")
        return answer

    def _introduce(self, link: Link, frame: Frame) -> None:
        """A call that creates a value arrived: from now on its creator's reference is known."""
        self.rrefs.introduce(*created(frame), link.worker)

    def _decode(self, answering: Answering) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Function and arguments. Runs user code (unpickling)."""
        link, frame = answering.link, answering.frame
        head, payload, table, data = answering.body or request_body(frame)
        answering.body = None
        if head.context != frames.NO_CONTEXT:
            answering.context = self.contexts.join(head.context, link.worker)
        if head.places:
            answering.places = link.places[head.places]
        tensors: list[torch.Tensor] = []
        if frame.flags & frames.LONE:
            tensors = [unpack_lone(table, data)]
        elif frame.tensors:
            landing = self.promises.take(link, head.grant) if head.grant else None
            runs = [] if answering.request is None else answering.request.take()
            tensors, answering.sizes = unpack(table, data, frame.tensors, link.channel, landing, link.places, runs)
        parts: list[torch.Tensor] = []
        args: tuple[Any, ...]
        kwargs: dict[str, Any] = {}
        references, context = answering.references, answering.context if head.message else None
        if context is not None:
            context.attach(link.worker, head.message, tensors)  # before it is unpickled, which may compute with them
        try:
            name = frame.body[: frame.function]
            if frame.kind == frames.GRADIENTS:
                gradients = tensors if frame.flags & frames.FLAT else serialize.loads(payload, tensors, references, parts)
                function, args = deliver, (name, gradients)
            elif frame.flags & frames.FLAT:
                one = bool(tensors) and (frame.flags & frames.LONE or payload == serialize.ONE_TENSOR)
                function, args = self._function(name), (tensors[0],) if one else serialize.load_flat(payload, tensors)
            elif frame.flags & frames.REFERENCE:
                args, kwargs = serialize.loads(payload, tensors, references, parts)
                function = self._function(name)
            else:
                function, args, kwargs = serialize.loads(payload, tensors, references, parts)
        except (AttributeError, ImportError) as error:
            raise errors.unknown_name(error) from error
        if context is not None and parts:
            context.attach(link.worker, head.message + 1, parts)
        return function, args, kwargs

    def _function(self, name: bytes) -> Any:
        found = self._functions.get(name)
        if found is None or not (
            getattr(sys.modules.get(found.__module__), found.__qualname__, None) is found or serialize.current(found)
        ):
            try:
                found = permits.load_called(name)
            except (AttributeError, ImportError) as error:
                raise errors.unknown_name(error) from error
            if len(name) <= _MAX_NAME and serialize.refers(name, found):
                if len(self._functions) >= _MAX_FUNCTIONS:
                    self._functions.clear()
                self._functions[name] = found
        return found

    # -- answering

    def _reply_later(self, answering: Answering, source: Value | None, future: torch.futures.Future[Any]) -> None:
        try:
            answer = [(source or future).value()]
        except BaseException as error:
            self._reply(answering, error)
            # The future holds the error, the error this frame, and this frame the future: no collector sees that circle, as the
            # future is C++, and all of this worker would live in it.
            error.with_traceback(None)
            return
        plainly(partial(self._reply, answering, answer))

    def _reply(self, answering: Answering, answer: list[Any] | BaseException) -> None:
        """Send the answer, or an error. Only ``answer`` holds the result, so the result dies once it is packed, and the memory
        of the arguments is free for the next promise. Writing the same memory again is many times faster than writing other
        memory."""
        send: Any = self._answer_error if isinstance(answer, BaseException) else self._answer
        observer = self.post.observer
        if observer is None:
            send(answering, answer)
        else:
            observer.replying(send, answering, answer)

    def _answer(self, answering: Answering, answer: list[Any]) -> None:
        link, call, sizes, context = answering.link, answering.call, answering.sizes, answering.context
        result = answer.pop()
        if answering.rref is not None:
            self.rrefs.store.fulfil(answering.rref, result)
            result = None
        flags, name, payload, message = answering.frame.flags & frames.CONTROL, b"", b"", 0
        try:
            if context is not None and type(result) is not torch.Tensor:
                result = unbound(result)
            if answering.frame.kind == frames.GRADIENTS:
                name, result = result
                result = (result[0] if len(result) == 1 else tuple(result)) if result else None
            whole = type(result) is torch.Tensor and travels(result)
            lone = as_it_lies(result) if whole and result.nbytes <= INLINE_BYTES else None
            if lone is not None and lone.nbytes <= INLINE_BYTES:
                flags |= frames.LONE | frames.FLAT
                data = string_at(result.data_ptr(), lone.nbytes)
                if context is not None:
                    message = context.send(link.worker, (result,))
                if not sizes and not message and link.try_send(frames.RESPONSE, call, flags, 1, (name, b"", lone.text, data)):
                    return
                out = Outgoing(lone.text, data, 1, [])
            elif result is None and context is None:
                flags, payload, out = flags | frames.FLAT, serialize.NONE, NOTHING
            else:
                answer.append(result)
                result = None
                payload, out, carried, flat = self._pack(answering, answer, whole)
                flags |= flat | (frames.READS if out.lent else 0)
                if context is not None:
                    message = context.send(link.worker, *carried)
                del carried
            result = None
            grant, places = self.promises.give(link, sizes) if sizes else (0, b"")
            if grant or message:
                flags |= frames.HEAD
                payload = response_head(grant, len(places), message) + places + payload
            kept = None
            if out.lent or len(name) + len(payload) + len(out.table) + len(out.data) > MAX_BODY:
                kept = self._lend(link, call, out.lent)
            refers = payload and not flags & frames.FLAT
            dropped = partial(self.rrefs.take_back, link.worker, frames.RESPONSE, flags, payload) if refers else None
            self.post.send(link, frames.RESPONSE, call, flags, out, name, payload, kept, dropped)
        except BaseException as error:
            self.release(link, call)
            self.rrefs.take_back(link.worker, frames.RESPONSE, flags, payload)
            if isinstance(error, PeerLost) and link.channel.error is not None:  # else it is where a tensor of the result lies
                self.dropped += 1
                return
            answering.rref = None
            self._reply(answering, errors.unsendable(error))

    def _pack(
        self, answering: Answering, answer: list[Any], whole: bool
    ) -> tuple[bytes, Outgoing, tuple[list[torch.Tensor], list[torch.Tensor]], int]:
        """The result in ``answer``, which alone holds it, as it is sent: payload, tensors, those that may require grad (the
        dense ones, and those that travel in parts), and ``FLAT`` or 0. ``whole``: it is a tensor that ``travels``."""
        link, result, flags = answering.link, answer.pop(), 0
        tensors: list[torch.Tensor] | None
        parts: list[torch.Tensor] = []
        out = NOTHING
        if whole:
            flags, payload = frames.FLAT, serialize.ONE_TENSOR
            if link.channel.can_adopt and (block := self.device.arena.sole_block(result)):
                place = self.handovers.give(link.channel, link.pool, result, block)
                out = NOTHING if place is None else pack_handed(result, place)
            tensors = [] if out.tensors else [result]
        elif (tensors := serialize.flat(result if type(result) is tuple else (result,))) is not None:
            flags = frames.FLAT
            payload = b"" if answering.frame.kind == frames.GRADIENTS else serialize.dump_flat_one(result)
        else:
            payload, tensors = serialize.dumps(result, link.worker, parts=parts, reply=True)
        if tensors:
            places = answering.places or []
            out = pack(tensors, self.device, link.channel, lambda classes: (0, places), self.memory)
        return payload, out, (tensors or [], parts), flags

    def _answer_error(self, answering: Answering, error: BaseException) -> None:
        link, call, rref = answering.link, answering.call, answering.rref
        self.release(link, call)  # of an answer that could not be sent
        if self.rrefs.closed:
            return  # it may have failed because we leave: the end of the link says so
        error = errors.readable(error)
        payload = errors.dump(error, self.me)
        control = answering.frame.flags & frames.CONTROL
        if not control and not (answering.function is None and isinstance(error, PeerLost)):  # it never began
            errors.tell(self.failures, error, answering.function)
        if rref is not None:
            # The creator learns that the reference exists; a fetch of the value raises the error.
            error = errors.ordinary(error)
            traceback.clear_frames(error.__traceback__)  # the references among their variables would live as long as the error
            self.rrefs.store.fail(rref, error)
            done = Answering(link, answering.frame)
            self._reply(done, [None])
            return
        try:
            kept = self._lend(link, call, []) if len(payload) > MAX_BODY else None
            self.post.send(link, frames.ERROR, call, control, NOTHING, b"", payload, kept)
        except PeerLost:
            self.dropped += 1
            self.release(link, call)


SERVE = Callee._serve.__code__
"""The code object that lies below the user's function on the stack of a thread that serves a request."""
