"""The called side: requests in, functions run, answers out."""

from __future__ import annotations

import itertools
import pickle
import struct
import sys
import threading
import traceback
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

from . import profiling, serialize
from .caller import FLAT, HEAD, LONE, READS, REFERENCE, REMOTE, REQUEST_HEAD, RESPONSE_HEAD, Caller, fetch_bulk
from .link import CONTROL, ERROR, RESPONSE, Frame, Link
from .options import WorkerInfo
from .rref_store import RRefStore
from .tensors import NOTHING, Landing, Outgoing, describe_all, load_places, pack, pack_lone, unpack, unpack_lone
from .transport import ArenaFull, Device, PeerLost

_PICKLER_HINT = (
    "Default RPC pickler does not serialize function code. Ensure that UDFs are defined on both caller and callee modules."
)
_ASYNC_HINT = "Functions decorated with @rpc.async_function must return a torch.futures.Future object,"


class Callee:
    """Thread-safe. Grants at most a quarter of the arena's limit ahead of calls."""

    def __init__(self, device: Device, caller: Caller, me: WorkerInfo, rrefs: RRefStore) -> None:
        self.device, self.caller, self.me, self.rrefs = device, caller, me, rrefs
        self._functions: dict[bytes, Any] = {}
        self._landings: dict[tuple[int, int], Landing] = {}
        self._granted = 0
        self._grants = itertools.count(1)
        self._sources: dict[tuple[int, int], Any] = {}
        self._lock = threading.Lock()

    # -- frames

    def accept(self, link: Link, frame: Frame) -> None:
        """A request arrived (called by the holder of the polling role): leave it to the pool."""
        self.caller.progress.jobs.append(partial(self._serve, link, frame))

    def release(self, link: Link, call: int) -> None:
        """The peer has read what a response left in our memory."""
        self._sources.pop((link.rank, call), None)

    def forgo(self, link: Link, frame: Frame) -> None:
        """The peer gives back landing places it will not use."""
        for (grant,) in struct.iter_unpack("<Q", frame.body):
            self._take_landing(link, grant)

    def lost(self, link: Link) -> None:
        """Forget what we kept for a peer that is gone. Its landing places go too: nothing of it can be under way."""
        for rank, call in list(self._sources):
            if rank == link.rank:
                self.release(link, call)
        for rank, grant in list(self._landings):
            if rank == link.rank:
                self._take_landing(link, grant)

    def granted(self, link: Link) -> int:
        """How many landing places this peer holds of us."""
        return sum(rank == link.rank for rank, _ in list(self._landings))

    # -- running a request

    def _serve(self, link: Link, frame: Frame) -> None:
        call, control = frame.call, frame.flags & CONTROL
        rref: int | None = None
        try:
            frame = fetch_bulk(frame, self.device, link)
            if frame.flags & REMOTE:
                _, rref, fork, _ = REQUEST_HEAD.unpack_from(frame.body, frame.function)
                self.rrefs.add(rref, fork)
            function, args, kwargs, sizes, places = self._decode(link, frame)
            inner = getattr(function, "_wrapped_async_rpc_function", None)
            if torch_profiler._is_profiler_enabled and not control:
                function = profiling.serving(function, link.name, self.me.name)
            if inner is None:
                answer = [function(*args, **kwargs)]
            else:
                future = function(*args, **kwargs)
                if not isinstance(future, torch._C.Future):
                    raise RuntimeError(f"{_ASYNC_HINT} but got {type(future)}")
                future.add_done_callback(partial(self._reply_later, link, call, control, sizes, places, rref))
                return
            del args, kwargs
        except BaseException as error:
            self._fail(link, call, control, error, rref)
            return
        self._reply(link, call, control, answer, sizes, places, rref)

    def _decode(
        self, link: Link, frame: Frame
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any], tuple[int, ...], list[Any] | None]:
        body, start = frame.body, frame.function
        grant = places_bytes = 0
        at = start
        if frame.flags & HEAD:
            grant, _, _, places_bytes = REQUEST_HEAD.unpack_from(body, start)
            at += REQUEST_HEAD.size
        places = load_places(body[at : at + places_bytes], link.places) if places_bytes else None
        table_at = start + frame.payload
        data_at = table_at + frame.table
        payload = body[at + places_bytes : table_at]
        sizes: tuple[int, ...] = ()
        tensors: list[torch.Tensor] = []
        if frame.tensors and not frame.flags & LONE:
            landing = self._take_landing(link, grant) if grant else None
            tensors, sizes, _ = unpack(
                body[table_at:data_at], body[data_at:], frame.tensors, self.device, link.channel, landing
            )
        try:
            if frame.flags & LONE:
                return self._function(body[:start]), (unpack_lone(body[table_at:data_at], body[data_at:]),), {}, (), places
            if frame.flags & FLAT:
                args, kwargs = serialize.load_flat(payload, tensors), {}
                function = self._function(body[:start])
            elif frame.flags & REFERENCE:
                args, kwargs = serialize.loads(payload, tensors)
                function = self._function(body[:start])
            else:
                function, args, kwargs = serialize.loads(payload, tensors)
        except (AttributeError, ModuleNotFoundError) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}. RPC pickler does not serialize it: {_PICKLER_HINT}") from None
        return function, args, kwargs, sizes, places

    def _function(self, name: bytes) -> Any:
        found = self._functions.get(name)
        if found is None:
            found = self._functions[name] = pickle.loads(name)
        return found

    # -- answering

    def _reply_later(
        self, link: Link, call: int, control: int, sizes: Any, places: Any, rref: int | None, future: torch.futures.Future[Any]
    ) -> None:
        try:
            answer = [future.value()]
        except BaseException as error:
            self._fail(link, call, control, error, rref)
            return
        self._reply(link, call, control, answer, sizes, places, rref)

    def _reply(
        self, link: Link, call: int, control: int, answer: list[Any], sizes: tuple[int, ...], places: Any, rref: int | None
    ) -> None:
        """``answer`` holds the result, and nothing else here does: once it is packed it dies, and what the arguments lay in is
        what ``_grant`` promises next. Memory that one writes again and again is many times faster than memory that goes round.
        """
        result = answer.pop()
        if rref is not None:
            self.rrefs.fulfil(rref, result)
            result = None
        flags = control
        try:
            tensors: list[torch.Tensor] | None = None
            out = NOTHING
            if type(result) is torch.Tensor and (lone := pack_lone(result)):
                flags |= LONE | FLAT
                payload, out = b"", Outgoing(lone[0], lone[1], 1, [])
            elif (tensors := serialize.flat((result,))) is not None:
                flags |= FLAT
                payload = serialize.dump_flat_one(result)
            else:
                payload, tensors = serialize.dumps(result)
            if tensors:
                out = pack(describe_all(tensors, self.device), self.device, link.channel, places)
            flags |= READS if out.lent else 0
            del result, tensors
            grant, blob = self._grant(link, sizes)
            if grant:
                flags |= HEAD
                payload = RESPONSE_HEAD.pack(grant, len(blob)) + blob + payload
            if out.lent:
                self._sources[link.rank, call] = out.lent
            bulk = self.caller.send(link, RESPONSE, call, flags, out, b"", payload, None)
            if bulk is not None:
                self._sources[link.rank, call] = (out.lent, bulk)
        except PeerLost:
            pass
        except BaseException as error:
            self._fail(link, call, control, error, None)

    def _fail(self, link: Link, call: int, control: int, error: BaseException, rref: int | None) -> None:
        if rref is not None:
            # The creator learns that the reference exists; the error waits for whoever fetches the value.
            self.rrefs.fail(rref, error)
            self._reply(link, call, control, [None], (), None, None)
            return
        kind = type(error) if isinstance(error, Exception) else RuntimeError
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        text = f"On {self.me}:\n{error!r}\n{trace}" if isinstance(error, Exception) else f"{type(error).__name__}: {error}"
        print(text, file=sys.stderr)
        try:
            payload = pickle.dumps((kind, kind.__name__, text), 5)
        except Exception:
            payload = pickle.dumps((None, kind.__name__, text), 5)
        try:
            self.caller.send(link, ERROR, call, control, NOTHING, b"", payload, None)
        except PeerLost:
            pass

    # -- landing places

    def _grant(self, link: Link, sizes: tuple[int, ...]) -> tuple[int, bytes]:
        """Promise fresh memory for the next call of this signature; (0, b"") when enough has been promised."""
        total = sum(sizes)
        if not total or self._granted + total > self.device.arena.limit // 4:
            return 0, b""
        try:
            landing = Landing.allocate(self.device, sizes)
        except ArenaFull:
            return 0, b""
        number = next(self._grants)
        with self._lock:
            self._landings[link.rank, number] = landing
            self._granted += total
        return number, landing.places

    def _take_landing(self, link: Link, number: int) -> Landing | None:
        with self._lock:
            landing = self._landings.pop((link.rank, number), None)
            if landing is not None:
                self._granted -= sum(landing.sizes)
        return landing
