"""The caller's end of a command stream: what is posted to one device of one worker, in order, and the answers.

Nothing waits but questions, which a lock keeps in the order of the posts. What a question is about has been run when
its answer comes. Names of tensors, geometries and programs are drawn from one count for all streams and are never used
twice. A name is freed by a finaliser, which must not post: it leaves the name in ``dead``, and the next post takes it along.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import sys
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

import torch

from ..base import here
from ..base.here import WorkerInfo
from ..calls import agent as _agent
from ..transport import NotSupported, PeerLost, RdmaError, RemoteRegion, TransferTimeout, fresh
from . import observing, ring, runners
from .flags import flags, flags_of_gpus, precisions
from .geometry import Geometry, at_bytes, bare, dressed, geometry, room
from .operators import Operator
from .ring import INT, dump, encode, load_error, loads
from .worker import ENDED, HEAD_BYTES, REPLY_BYTES, Derived, Landing, raw

_log = logging.getLogger("rdmarpc")
_LINES = 4096
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep
_torchs: set[int] = set()
_frame = sys._getframe
INLINE_BYTES = 512
ANSWERED_BYTES = 32 << 10
_REGION_BYTES = 8 << 20
names = itertools.count(1)
"""Names at workers, shifted by 20 bits: each post takes one and has room for that many results."""
_LOCK_S = 0.2
_FEW, _SMALL = 16, 1 << 14
"""So many dead tensors of so many bytes wait for each other before the worker is told."""
_VIEWS = 16
"""So many views of a storage are kept in mind before it is looked which of them are alive."""
_numbers = itertools.count(1)
"""Of regions, for all streams: a worker knows regions of several others by their numbers."""


def _is_torchs(code: CodeType) -> bool:
    """Whether code is torch's, or ours: not the program's."""
    found = code.co_filename.startswith((_TORCH, _OURS))
    if found:
        _torchs.add(id(code))
    return found


class Meta:
    """A geometry, made once for all tensors that have it: compared by identity. ``name`` is that at workers, freed there when
    the last of these tensors, and of the forms of calls that have it, has died. ``told``: ``dead`` of the streams that know
    it, which it does not keep."""

    __slots__ = ("__weakref__", "dtype", "geometry", "name", "plain", "shape", "strided", "strides", "told")

    def __init__(self, geometry: Geometry) -> None:
        self.geometry, self.name = geometry, next(names) << 20
        self.told: list[weakref.ref[deque[Any]]] = []
        self.shape, self.strides, self.dtype = geometry.shape, geometry.strides, geometry.dtype
        self.strided = geometry.layout is torch.strided
        self.plain = self.strided and not geometry.conj and not geometry.neg

    def __del__(self) -> None:
        for told in self.told:
            if (dead := told()) is not None:
                dead.append(self.name)


_metas: weakref.WeakValueDictionary[Geometry, Meta] = weakref.WeakValueDictionary()


def meta_of(geometry: Geometry) -> Meta:
    found = _metas.get(geometry)
    if found is not None:
        return found
    if torch._C._is_tracing():  # sizes are traced tensors then, which workers would be told
        raise NotSupported("torch.jit.trace cannot follow this operation at a worker", hint="trace a copy that lies here")
    return _metas.setdefault(geometry, Meta(geometry))


class Mirror:
    """Addresses of this process that stand for a storage at a worker, as long as that lives. There is no memory behind them
    but where it was filled, and that is read-only."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, max(nbytes, 1))
        # ctypes needs a writable buffer for the address, so the memory is protected afterwards.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._protect(0)

    def fill(self, start: int, blob: bytes) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        self._memory[start : start + len(blob)] = blob
        self._protect(mmap.PROT_READ)

    def _protect(self, how: int) -> None:
        if _mprotect(self.address, len(self._memory), how):
            raise OSError(ctypes.get_errno(), "mprotect")


_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Storage:
    """Memory at a worker that tensors here stand for; freed there when the last of them dies. ``copies``: what has been moved
    elsewhere since it was last written, by place, geometry and offset. ``anchor``: whether operations follow it
    (parameters). ``shift``: its address modulo 64."""

    __slots__ = ("__weakref__", "_mirror", "_most", "_views", "anchor", "copies", "name", "nbytes", "place", "shift", "stream")

    def __init__(
        self, stream: Stream, name: int, nbytes: int, place: tuple[Region, int, int] | None = None, shift: int = 0
    ) -> None:
        self.stream, self.name, self.nbytes, self.place, self.shift = stream, name, nbytes, place, shift
        self.copies: dict[Any, Any] | None = None
        self.anchor = False
        self._mirror: Mirror | None = None
        self._views: list[weakref.ref[torch.Tensor]] = []
        self._most = _VIEWS

    def add_view(self, view: torch.Tensor) -> None:
        """It is one of ``views`` as long as it lives."""
        if len(self._views) >= self._most:
            self._views = [weakref.ref(each) for each in self.views()]
            self._most = 2 * len(self._views) + _VIEWS
        self._views.append(weakref.ref(view))

    def views(self) -> list[torch.Tensor]:
        """The views that are alive, of whichever tensor."""
        return [view for each in self._views if (view := each()) is not None]

    @property
    def mirror(self) -> Mirror:
        if self._mirror is None:
            self._mirror = Mirror(self.nbytes)
        return self._mirror

    def __del__(self) -> None:
        stream = self.stream
        if self.place is None:
            stream.dead.append(self.name)
            if self.nbytes <= _SMALL:
                return
        else:
            stream.dead.append((self.name, self.place))
        stream.urgent = True


class Region:
    """Memory of a worker into which one other process writes: the caller gives out its places, and takes one back when the
    worker has run the message that frees what lay there."""

    def __init__(self, number: int, nbytes: int, landing: Landing | None) -> None:
        self.number, self.nbytes, self.landing = number, nbytes, landing
        self._free = [(0, nbytes)]
        self.freed: deque[tuple[int, int, int]] = deque()
        """Places that are not free yet, but will be."""

    def take(self, nbytes: int, done: int) -> int | None:
        """The offset of a free place; ``None``: there is none as long as the worker has run ``done`` words."""
        while self.freed and self.freed[0][0] <= done:
            self._give(*self.freed.popleft()[1:])
        for index, (offset, free) in enumerate(self._free):
            if free >= nbytes:
                if free == nbytes:
                    del self._free[index]
                else:
                    self._free[index] = offset + nbytes, free - nbytes
                return offset
        return None

    def free(self, position: int, offset: int, nbytes: int) -> None:
        """The place is free once the worker has run up to ``position``."""
        self.freed.append((position, offset, nbytes))

    def _give(self, offset: int, nbytes: int) -> None:
        free = self._free
        index = next((i for i, (at, _) in enumerate(free) if at > offset), len(free))
        free.insert(index, (offset, nbytes))
        if index + 1 < len(free) and offset + nbytes == free[index + 1][0]:
            free[index] = offset, nbytes + free.pop(index + 1)[1]
        if index and sum(free[index - 1]) == offset:
            free[index - 1] = free[index - 1][0], free[index - 1][1] + free.pop(index)[1]


def state_words(state: tuple[Any, ...]) -> list[int]:
    """The message that tells a worker the flags."""
    *plain, autocast, dtype = state
    return [ring.STATE, *ring.as_words(dump((*plain, autocast and encode(autocast), encode(dtype))))]


class Known:
    """What an operator gives for operands of one form: its number at the worker, and how each result is made (``tensor.py``).
    ``words``: what those of a post are (``worker.kinds``). ``kind``, and ``result`` of a single one, are for the most frequent
    cases."""

    __slots__ = ("kind", "number", "result", "results", "single", "words")
    results: list[Any]
    result: tuple[Any, ...]
    single: bool

    def __init__(self, number: int, kind: int, words: list[str]) -> None:
        self.number, self.kind, self.words = number, kind, words


class Stream:
    """One device of one worker, as a place of tensors. Any thread posts; a thread that asks keeps others from posting here."""

    def __init__(self, agent: _agent.Agent, worker: WorkerInfo, device: torch.device) -> None:
        self.agent, self.info, self.worker, self.device = agent, worker, worker.name, device
        self.timeout = agent.rpc_timeout
        self.key = uuid.uuid4().hex
        self.lock = threading.RLock()
        self.dead: deque[int | list[int] | tuple[int, tuple[Region, int, int]]] = deque()
        """Names that have died, of tensors with their places; messages that are owed (``owe``)."""
        self.known: dict[tuple[Any, ...], Known] = {}
        """By the forms of calls."""
        self.numbers = itertools.count(1)
        self.urgent = False
        """Whether the next post takes ``dead`` along however few they are."""
        self.closed: BaseException | None = None
        self.operations = 0
        self._counts = {"questions": 0, "bytes_in": 0, "bytes_out": 0, "moves": 0, "home": 0}
        self._questions = 0
        self._waits = False
        self._regions: dict[Stream | None, list[Region]] = {}
        self.flags = flags if device.type == "cpu" else flags_of_gpus
        self.state: tuple[Any, ...] = ()
        """The flags under which the worker runs operations."""
        self.forgotten = 0
        """How often the forms of calls, and so their numbers, were forgotten."""
        self._lines: deque[tuple[int, str, CodeType, int]] = deque(maxlen=_LINES)
        self.link = agent.connections.to(worker.number, time.monotonic() + self.timeout if self.timeout else None)
        channel = self.channel = self.link.channel
        self._reply_memory = channel.empty(REPLY_BYTES, dtype=torch.uint8)
        self._done_memory = channel.empty(64, dtype=torch.uint8).zero_()
        mirror = channel.empty(ring.RING_WORDS * ring.WORD, dtype=torch.uint8)
        self._reply = memoryview(self._reply_memory.numpy()).cast("B")
        notify = channel.take_numbers(2)
        self._answers = channel.expect(notify)
        export = channel.device.export
        mine = (export(self._reply_memory), export(self._done_memory), notify)
        remote, number = self._manage(runners.open_stream, agent.name, str(device), *mine)
        self._ring = ring.RingWriter(channel, remote, number, mirror, self._done_memory.data_ptr(), self.timeout)

    def __repr__(self) -> str:
        return self.worker if self.device.type == "cpu" else f"{self.worker}/{self.device}"

    @property
    def counts(self) -> dict[str, int]:
        """Operations posted, questions waited for, bytes copied in from this process and out to it, tensors sent to other
        workers (``moves``) and brought home."""
        return {"operations": self.operations, **self._counts}

    def count_move(self) -> None:
        self._counts["moves"] += 1

    def _manage(self, function: Any, *args: Any) -> Any:
        self._check()
        return self.agent.call(self.info, function, (self.key, *args), {}, self.timeout, control=True)

    def explain(self) -> str:
        """What is under way, for people."""
        left = self._ring.written - self._ring.done
        asked = f", a thread waits for answer {self._questions}" if self._waits else ""
        counts = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        return f"stream to {self}: {counts}; {left} words not known to be run{asked}"

    # -- posting

    def post(self, words: list[int]) -> None:
        """Post one message, whose first word is its kind."""
        with self.lock:
            self.put(words)

    def put(self, words: list[int]) -> None:
        """As ``post``, with the lock held."""
        words[0] |= len(words) << 8
        if self.closed is not None:  # quicker than the call
            self._check()
        try:
            if self.urgent or len(self.dead) >= _FEW:
                self._take_dead(words)
            else:
                self._ring.write(words)
        except PeerLost as error:
            raise fresh(self.link.why(error)) from None

    def owe(self, words: list[int], places: Iterable[tuple[Region, int, int]] = ()) -> None:
        """Have a message posted before anything else, by whoever has the lock next, and free these places after it. Such as
        one whose own post has failed: workers count copies by it and by what another stream was given."""
        words[0] |= len(words) << 8  # as ``put`` may have done
        self.dead.extend([words, *[(0, place) for place in places]])
        self.urgent = True

    def replay(self, program: int, base: int, given: list[int], freed: list[tuple[Region, int, int]], operations: int) -> None:
        """Have a program run once more (``graphed.py``). ``freed``: places of what it frees."""
        with self.lock:
            self.operations += operations
            self.note("a graphed step")
            self.put([ring.REPLAY, program, base, *given])
            for region, offset, nbytes in freed:
                region.free(self._ring.written, offset, nbytes)

    def _check(self) -> None:
        """Raise if it is closed."""
        error = self.closed
        if error is None:
            return
        raise fresh(error) if isinstance(error, RdmaError) else type(error)(*error.args)

    def _take_dead(self, words: list[int]) -> None:
        """Post what is owed, the message, and the names that have died. Where that cannot be, they stay to be posted."""
        self.urgent = False
        owed: list[int] = []
        names, places, taken = [ring.FREE], [], []
        try:
            while self.dead:  # only who has the lock takes from it
                dead = self.dead.popleft()
                taken.append(dead)
                if isinstance(dead, tuple):
                    names.append(dead[0])
                    places.append(dead[1])
                elif isinstance(dead, list):
                    owed += dead
                else:
                    names.append(dead)
            names[0] |= len(names) << 8
            self._ring.write([*owed, *words, *names] if len(names) > 1 else [*owed, *words])
        except BaseException:
            self.dead.extendleft(reversed(taken))
            self.urgent = True
            raise
        position = self._ring.written
        for region, offset, nbytes in places:
            region.free(position, offset, nbytes)

    def note(self, name: str) -> None:
        """Note the line of the program, some frames up, that is about to post operator ``name``."""
        if self.closed is not None:
            self._check()
        frame: FrameType = _frame(3)
        code, torchs = frame.f_code, _torchs
        while (id(code) in torchs or _is_torchs(code)) and (above := frame.f_back) is not None:
            frame, code = above, above.f_code
        self._lines.append((self._ring.written, name, code, frame.f_lasti))

    def _line(self, position: int) -> str:
        """Who posted what failed at this position."""
        for written, name, code, at in reversed(self._lines):
            if written <= position:
                number = next((line for start, end, line in code.co_lines() if start <= at < end), None)
                return f'{name}, posted by File "{code.co_filename}", line {number}, in {code.co_name}'
        return "an operation that was posted long ago"

    def tell_state(self, state: tuple[Any, ...]) -> None:
        self.post(state_words(state))
        self.state = state

    def tell_meta(self, meta: Meta) -> int:
        if not any(told() is self.dead for told in meta.told):
            self.post([ring.META, meta.name, *ring.as_words(dump(meta.geometry.plain()))])
            meta.told = [*(told for told in meta.told if told() is not None), weakref.ref(self.dead)]
        return meta.name

    def forget_forms(self) -> None:
        """Forget the forms of calls, here and at the worker."""
        self.forgotten += 1
        self.post([ring.FORGET])
        self.known.clear()

    def tell_signature(self, op: Operator, takes: list[Any], keywords: Iterable[str], one: bool) -> int:
        """``keywords``: the names of the last of ``takes``; ``one``: whether operands are one object."""
        number = next(self.numbers)
        told = op.name, takes, list(keywords), torch.is_grad_enabled(), one, precisions() if op.precise else None
        self.post([ring.SIGNATURE, number, *ring.as_words(dump(told))])
        return number

    def question(self, words: list[int], at: int) -> Any:
        """Post a message that is answered, with the question's number at ``words[at]``, and wait for the answer."""
        kind, value = self._asked(words, at)
        if kind == "ok":
            return value
        # No variable has the error, so that what its frames hold is free with it.
        raise self._reset_all(*load_error(value)) if kind == "late" else load_error(value)[0]

    def _asked(self, words: list[int], at: int) -> tuple[str, Any]:
        with self.lock:
            if self._waits:  # an exception has interrupted the wait: its answer would be overwritten while it is read
                self._answer(self._questions)
            self._questions += 1
            self._counts["questions"] += 1
            words[at] = number = self._questions
            self.post(words)
            self._waits = True
            return self._answer(number)

    def _answer(self, number: int) -> tuple[str, Any]:
        begin = time.monotonic_ns() if observing.line is not None else 0
        while True:
            self._await_answer()
            answered = INT.unpack_from(self._reply, 0)[0]
            if answered == ENDED:
                error, _ = load_error(self._replied()[1])
                self.closed = self.link.why(error) if isinstance(error, PeerLost) else error
                self._check()
            if answered == number:
                break
        self._waits = False
        if observing.line is not None and begin:
            about = {"question": number}
            observing.line.span(observing.line.track(), f"wait for {self}", "model", begin, time.monotonic_ns(), about)
        kind, value = self._replied()
        return (kind, value) if kind != "large" else loads(self._manage(runners.take_large, number))

    def _replied(self) -> tuple[str, Any]:
        """What the worker has written last."""
        return loads(bytes(self._reply[16 : 16 + INT.unpack_from(self._reply, 8)[0]]))

    def _await_answer(self) -> None:
        seen, since = self._ring.done, time.monotonic()
        while True:
            try:
                self._answers.wait(1.0)
                return
            except PeerLost as error:
                raise fresh(self.link.why(error)) from None
            except TransferTimeout:
                now = self._ring.done
                if now != seen:
                    seen, since = now, time.monotonic()
                elif self.timeout and time.monotonic() - since > self.timeout:
                    raise ring.stuck(self.channel, self.timeout) from None

    def _reset_all(self, error: BaseException, position: int) -> BaseException:
        """An error came late: find the first one of all streams, after which all go on."""
        found = [(self, error, position)]
        # A thread that holds another stream's lock may be here, too, and want ours.
        others = [each for each in streams() if each is not self and each.lock.acquire(timeout=_LOCK_S)]
        try:
            for stream in others:
                with contextlib.suppress(RdmaError):
                    kind, value = stream._asked([ring.CHECK, 0], 1)
                    if kind == "late":
                        found.append((stream, *load_error(value)))
            for stream in streams():
                with contextlib.suppress(RdmaError):
                    (stream.post if stream is self or stream in others else stream.owe)([ring.RESET, stream._ring.written + 1])
        finally:
            for stream in others:
                stream.lock.release()
        where, error, position = next((each for each in found if not isinstance(each[1], Derived)), found[0])
        error.add_note(f"at worker {where}, in {where._line(position)}; what was posted since was not run")
        return error

    def synchronize(self) -> None:
        """Return when all that was posted has been run. Raises what went wrong meanwhile."""
        self.question([ring.CHECK, 0], 1)

    # -- tensors that come and go

    def bring(self, tensor: torch.Tensor) -> tuple[Storage, Meta]:
        """Copy a strided plain tensor here to the worker, where all of the storage is it."""
        self._check()
        shape, given = geometry(tensor), tensor
        tensor = bare(tensor)
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        meta = meta_of(shape)
        nbytes, shift = room(shape, tensor.data_ptr())
        used = shape.span * shape.dtype.itemsize
        self._counts["bytes_in"] += used
        with self.lock:
            number, name = self.tell_meta(meta), next(names) << 20
            if used <= INLINE_BYTES:
                self.post([ring.INLINE, name, number, shift, *ring.as_words(raw(tensor))])
                made = Storage(self, name, used, None, shift)
            else:
                region, offset = self.place(None, nbytes)
                assert region.landing is not None
                region.landing.put(offset, shift, tensor)
                self.post([ring.LAND, name, number, region.number, offset, shift])
                made = Storage(self, name, used, (region, offset, nbytes), shift)
        for each in observing.observers:
            each.brought(self, given, made)
        return made, meta

    def place(self, source: Stream | None, nbytes: int) -> tuple[Region, int]:
        """A free place of memory here that ``source`` may write (``None``: this process). Call it with the lock held."""
        regions = self._regions.setdefault(source, [])
        while True:
            done = self._ring.done
            for region in regions:
                offset = region.take(nbytes, done)
                if offset is not None:
                    return region, offset
            large = sum(region.nbytes for region in regions) >= 4 * _REGION_BYTES
            # What has died may have places: it is not looked through, for finalisers add to it meanwhile.
            if self.urgent or (large and any(region.freed for region in regions)):
                self.synchronize()
            else:
                regions.append(self._new_region(source, max(nbytes, _REGION_BYTES, *(2 * r.nbytes for r in regions), 0)))

    def _new_region(self, source: Stream | None, nbytes: int) -> Region:
        number = next(_numbers)
        descriptor, notify = self._manage(runners.new_region, number, source.worker if source else "", nbytes)
        if source is None:
            return Region(number, nbytes, Landing(self.link, RemoteRegion.load(descriptor), None))
        source._manage(runners.reach_region, number, self.worker, descriptor, notify)
        return Region(number, nbytes, None)

    def fetch(self, name: int, at: int, meta: Meta, address: int) -> torch.Tensor:
        """A copy of a tensor's bytes, here: with its strides, and with ``address`` modulo 64."""
        self._check()
        shape = meta.geometry
        used = shape.span * shape.dtype.itemsize
        self._counts["bytes_out"] += used
        self._counts["home"] += 1
        number = self.tell_meta(meta)
        nbytes, shift = room(shape, address)
        if used <= ANSWERED_BYTES:
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            memoryview(memory.numpy())[shift : shift + used] = self.question([ring.FETCH, name, at, number, 0, 0, 0], 4)
        else:
            memory = self.channel.empty(nbytes, dtype=torch.uint8)
            self.question([ring.FETCH, name, at, number, 0, shift, *ring.as_words(self.channel.device.export(memory))], 4)
        found = at_bytes(memory.untyped_storage(), int(memory.storage_offset()) + shift, shape)
        for each in observing.observers:
            each.fetched(self, name, at, meta, found)
        return dressed(found, shape)

    def close(self) -> None:
        """The stream ends when all that was posted has been run. Tensors that are kept, also by the rest of a backward that
        failed, keep nothing by which the worker was reached."""
        with self.lock:
            if self.closed is None:
                with contextlib.suppress(RdmaError):
                    self.post([ring.LAST])
            for region in [each for regions in self._regions.values() for each in regions]:
                region.landing = None
            self._regions.clear()
            del self._ring, self._answers, self._reply, self._reply_memory, self._done_memory
            del self.agent, self.channel, self.link
            gone = f"RPC was shut down: what lay at worker {self.worker} is gone (bring tensors home with .cpu() before)"
            self.closed = self.closed or RuntimeError(gone)


def cross(source: Stream, target: Stream, storage: Storage, at: int, meta: Meta, address: int) -> Storage:
    """Copy a tensor from one worker to another: one WRITE there, into a place that is chosen here."""
    shape = meta.geometry
    nbytes, shift = room(shape, address)
    nbytes += HEAD_BYTES
    with crossing:
        with target.lock:
            number, name = target.tell_meta(meta), next(names) << 20
            region, offset = target.place(source, nbytes)
        source.post([ring.SEND, storage.name, at, source.tell_meta(meta), region.number, offset, shift])
        land = [ring.LAND, name, number, region.number, offset, shift]
        try:
            target.post(land)
        except BaseException:
            target.owe(land, [(region, offset, nbytes)])
            target.dead.append(name)
            raise
    source.count_move()
    made = Storage(target, name, shape.span * shape.dtype.itemsize, (region, offset, nbytes), shift)
    for each in observing.observers:
        each.crossed(storage, at, meta, shift, made)
    return made


crossing = threading.Lock()
"""Held while a copy is posted to both its ends: they count copies, so both have to see them in one order."""


# -- the streams of this process

_streams: dict[tuple[int, str], Stream] = {}
"""By the worker's number, which one that comes back under its name does not have, and the device."""
ran: dict[int, Stream | None] = {}
"""Where forward operations ran, by the sequence number of the node that autograd made for them, and its thread
(``tensor.py``)."""
_lock = threading.Lock()


def streams() -> list[Stream]:
    """Those that are open."""
    return [stream for stream in list(_streams.values()) if stream.closed is None]


def stream_to(worker: str, device: str | torch.device = "cpu") -> Stream | None:
    """The stream to a device of a worker, opened at first use; ``None`` for the CPU of this process."""
    agent = _agent.current()
    info = agent.resolve(worker)
    where = torch.device(device)
    if info.name == agent.name and where.type == "cpu":
        return None
    key = info.number, str(where)
    with _lock:
        found = _streams.get(key)
        if found is None or found.closed is not None or found.agent is not agent:
            if not any(stream.agent is agent for stream in _streams.values()):
                agent.before_leaving.append(close_streams)
                agent.at_close.append(close_streams)  # functions that still run then may have opened others
            found = _streams[key] = Stream(agent, info, where)
        return found


def close_streams() -> None:
    """This worker leaves its group: return when all that was posted has been run, or cannot be any more."""
    for stream in list(_streams.values()):
        try:
            stream.synchronize()
        except RdmaError:
            pass
        except Exception as error:
            _log.warning("an operation at worker %s failed, and nothing asked for its result: %s", stream.worker, error)
        stream.close()
    _streams.clear()
    ran.clear()


here.explained.append(lambda: [stream.explain() for stream in streams()])


def _forget() -> None:
    """In a forked child: the streams are the parent's."""
    error = RuntimeError(here.FORKED)
    for stream in _streams.values():
        stream.lock = threading.RLock()
        stream.closed = error
    _streams.clear()


os.register_at_fork(after_in_child=_forget)
