"""The worker's end of a command stream: a thread that runs a caller's operations in order, on tensors that lie here.

A message is ``[kind, words...]`` (``ring.py``); ``docs/formats.md`` says what each kind has and does. ``name`` is the number of
a tensor, never used twice; ``at`` is -1 for the tensor as it was made, else the offset of a view in elements.

Errors: one that happens in ASK is the answer, and nothing is changed but what the operator has changed. One in OPERATION is
kept: nothing more is run, everything named from then on is *void*, and so is what is sent to other workers, whose streams
then do the same. The next answer is the error; RESET, which the caller posts to all its streams, ends that state. What is
void stays so.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..calls.agent import Agent
from ..links.ring import Link
from ..transport import Channel, Device, NotSupported, PeerLost, RdmaError, RemoteRegion, fresh, kernels
from . import observing, ring
from .flags import at_default, at_precisions, set_flags
from .geometry import Geometry, bare, dressed, geometry, lies_anywhere, over, room, view
from .operators import RESIZED, at_device, operator
from .programs import Program
from .ring import FLOAT, INT, decode, dump_error, encode, loads
from .scoreboard import Entry, Scoreboard

REPLY_BYTES = 1 << 16
HEAD_BYTES = 64
_FINE, _VOID = 0, 1
_END_S = 5.0
_GLANCE_NS = 100_000
"""So long a worker that looks ahead waits for one copy before it looks for others."""
_SHOWN = {
    ring.OPERATION: "an operation",
    ring.ASK: "an operation",
    ring.LAND: "a tensor that came",
    ring.SEND: "a copy",
    ring.FETCH: "a copy to the caller",
}
"""Messages that a timeline has, and what they are in words."""


_NEW = (ring.INLINE, ring.META, ring.TURN)
"""Messages about names that no earlier one knows, or about none."""
ENDED = -1
"""In the place of a question's number: the stream has ended, and nothing will be answered any more."""


class Void(NamedTuple):
    """In the place of a tensor that was not computed."""

    error: bytes
    position: int


class Signature:
    """An operator with the geometry of its operands, ready to run. ``takes`` says of each argument what its words are, of
    the last ones also their ``keywords``; ``names``: which words are names.
    ``expected``: of each result (geometry, offset, whether it has a name of its own), as it came out the first time; ``None``
    for no tensor, and for an operator that was not asked yet. ``grad``: the caller's grad mode, which some kernels ask for.
    ``writes``: whether it writes an operand. ``identity``: whether operands are one object, for an operator that asks.
    ``in_arena``: whether its result is made where an adapter can send it from."""

    __slots__ = ("expected", "func", "grad", "identity", "in_arena", "keywords", "name", "names", "takes", "writes")

    def __init__(self, told: tuple[Any, ...], device: torch.device, default: torch.dtype) -> None:
        self.name, takes, self.keywords, self.grad, self.identity, precisions = told
        overload = _overload(self.name)
        rules = operator(overload)
        self.func, self.writes = at_device(overload, device), bool(rules.written)
        if precisions is not None:
            self.func = at_precisions(self.func, precisions)
        func, self.func = self.func, at_default(self.func, default)
        self.takes = [_taken(each, device) for each in takes]
        self.names, words = [], 0
        for kind in kinds(self.takes):
            if kind == "w":
                self.names.append(words)
            words += 2 if kind == "w" else 1
        self.expected: list[tuple[Geometry, int, bool] | None] | None = None
        self.in_arena = self.func is not func  # as if it were: a form with ``out=`` would run under another default dtype

    def make_in(self, device: Device) -> None:
        """From now on, make the result in the device's arena: an adapter then sends it without a copy. The operator's form with
        ``out=`` is the same kernel; one that has none makes its results as before."""
        if self.in_arena:
            return
        self.in_arena = True
        found, expected = form_with_out(_overload(self.name)), self.expected or []
        if found is None or len(expected) != 1 or expected[0] is None:
            return
        (shape, _, named), (filled, out), func = expected[0], found, self.func
        if not named or shape != Geometry(shape.shape, shape.strides, shape.dtype) or 0 in shape.strides:
            return

        def into_arena(*args: Any, **keywords: Any) -> torch.Tensor:
            if torch.is_autocast_enabled("cpu"):  # it does not know forms with ``out=``
                return func(*args, **keywords)
            try:
                memory = device.empty(shape.span, dtype=shape.dtype)
            except RdmaError:  # no more memory can be registered
                return func(*args, **keywords)
            return filled(*args, **keywords, **{out: memory.as_strided(shape.shape, shape.strides)})

        self.func = into_arena


def form_with_out(overload: Any) -> tuple[Any, str] | None:
    """The overload that writes the single result of ``overload`` into memory that is given, and the argument's name. ``None``
    where torch has none with a kernel of its own: those that it generates copy."""
    takes, packet = [(a.name, str(a.type)) for a in overload._schema.arguments], overload._overloadpacket
    for each in (getattr(packet, name) for name in packet.overloads()):
        arguments = each._schema.arguments
        out, rest = [a.name for a in arguments if a.is_out], [(a.name, str(a.type)) for a in arguments if not a.is_out]
        if len(out) == 1 and rest == takes and torch.Tag.generated not in each.tags:
            return each, out[0]
    return None


def _overload(name: str) -> Any:
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
    except AttributeError:
        hint = "import what registers it in the worker's program"
        raise NotSupported(f"this worker has no operator {name}", hint=hint) from None


def _taken(told: Any, device: torch.device) -> tuple[str, Any]:
    kind, value = told
    if kind == "c":
        found = decode(value)
        return kind, device if isinstance(found, torch.device) else found
    return (kind, [_taken(each, device) for each in value]) if kind == "l" else (kind, value)


class Runner:
    """One stream. ``open`` begins its thread; ``stop`` may be called by any thread."""

    def __init__(self, agent: Agent, caller: str, device: torch.device) -> None:
        self.channel, self.device, self._me = agent.serving(caller).channel, device, agent.name
        self._serving, self._reaching = agent.serving, agent.link
        self.values: dict[int, Any] = {}
        self.metas: dict[int, Geometry] = {}
        self.signatures: dict[int, Signature] = {}
        self.default = torch.get_default_dtype()
        self.regions: dict[int, memoryview] = {}
        """Memory of ours, by number, into which the caller or another worker writes."""
        self.remote: dict[int, Landing] = {}
        """Memory of other workers, by number, into which we write."""
        self.sources: dict[int, tuple[Link, int]] = {}
        """By region: the link to the other worker that writes into it, and the record that counts its copies."""
        self.arrived: dict[int, int] = {}
        self.void: Void | None = None
        self.stopped = False
        self.large: dict[int, bytes] = {}
        self.operations = 0
        self._told = 0
        self._told_at = 0.0
        self._batch: list[int] = []
        self._start = self._at = 0
        """The batch that is run, the position of its first word in the ring, and of the message in it."""
        self._line: tuple[Any, int] | None = None
        """The timeline that is recorded, and this stream's track in it."""
        self._makes_in_arena = self.channel.registered_only
        """Whether what is sent from here has to lie in the arena, or is staged there."""
        self._looks = 0
        self._turn_at: int | None = None
        """The position of the last TURN, while it looks ahead."""
        self._board = Scoreboard(self._arrived)
        """Messages that may run in another order, while it ``_looks`` ahead."""

    def open(self, reply: bytes, done: bytes, notify: int) -> tuple[bytes, int]:
        """Take the caller's memory for answers and progress; returns the ring's descriptor and its notification number."""
        channel, device = self.channel, self.channel.device
        self._ring_memory = channel.empty(ring.RING_WORDS * ring.WORD, dtype=torch.uint8)
        self._reply_memory = channel.empty(REPLY_BYTES, dtype=torch.uint8)
        self._done_memory = channel.empty(64, dtype=torch.uint8)
        self._reply, self._done = (memoryview(t.numpy()).cast("B") for t in (self._reply_memory, self._done_memory))
        self._reply_window = channel.window(RemoteRegion.load(reply), self._reply_memory, notify=notify)
        self._done_window = channel.window(RemoteRegion.load(done), self._done_memory, notify=notify + 1)
        number = channel.take_numbers(1)
        self.ring = ring.RingReader(channel, self._ring_memory, number)
        self._run: list[Callable[[list[int], int], None]] = [getattr(self, f"_{kind}") for kind in ring.KINDS.split()]
        self.thread = threading.Thread(target=self._serve, name=f"rdmarpc-stream-{channel.peer}", daemon=True)
        self.thread.start()
        return device.export(self._ring_memory), number

    def region(self, number: int, source: str, nbytes: int) -> tuple[bytes, int]:
        """Memory for what ``source`` sends ("" is the caller): its descriptor, and the notification that announces it."""
        link = self._serving(source) if source else None
        channel = link.channel if link else self.channel
        memory = channel.device.arena.note(channel.empty(nbytes, dtype=torch.uint8), "what streams send")
        notify = channel.take_numbers(1) if source else 0
        self.regions[number] = memoryview(memory.numpy()).cast("B")
        if link:
            self.sources[number] = link, channel.count(notify).record
            self.arrived[number] = kernels.load(self.sources[number][1])
        return channel.device.export(memory), notify

    def reach(self, number: int, target: str, descriptor: bytes, notify: int) -> None:
        """Memory of another worker's."""
        link = self._reaching(target)
        self.remote[number] = Landing(link, RemoteRegion.load(descriptor), notify)
        self._makes_in_arena |= link.channel.registered_only

    def stop(self) -> None:
        """End the stream. Returns when nothing of it runs any more, or after some seconds."""
        self.stopped = True
        if threading.current_thread() is not self.thread:
            self.thread.join(_END_S)

    # -- the thread

    def _serve(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(True):
                self._loop()
        except RdmaError as error:  # the caller has gone, or we leave, or nothing more can be read
            with contextlib.suppress(RdmaError):
                self._answer(ENDED, ("error", dump_error(error, self._position)))
        finally:
            # What is left refers to nothing: the memory is given back without Python's collector.
            self.stopped = True
            for table in (self.values, self.signatures, self.regions, self.remote, self.sources, self._run):
                table.clear()
            del self._serving, self._reaching, self.ring, self._ring_memory, self._reply_window, self._done_window

    def _loop(self) -> None:
        reader, board = self.ring, self._board
        while not self.stopped:
            if not reader.look():
                if board:
                    self._run_next()
                    continue
                self._batch = []
                self._tell()
                if not reader.wait():
                    self.channel.check()
                    continue
            self._take_batch()
            if reader.read - self._told > ring.RING_WORDS // 8 or time.monotonic() - self._told_at > ring.TOLD_S:
                self._tell()

    def _take_batch(self) -> None:
        start, words = self.ring.read, self.ring.take()
        self._start, self._at, self._batch = start, 0, words
        if observing.line is not (self._line and self._line[0]):
            line = observing.line
            self._line = line and (line, line.new_track(f"stream of {self.channel.peer}, {self.device}"))
        at, end = 0, len(words)
        while at < end:
            if self._looks:
                if self._put_off(words, at, start):
                    at += words[at] >> 8
                    continue
                while self._board and words[at] & 255 not in _NEW:  # it sees all that was posted before
                    self._run_next()
                self._start, self._batch = start, words
            self._at = at
            self._message(words, at)
            if self._looks and self.void is not None:
                self._run_in_order()
            at += words[at] >> 8

    def _message(self, words: list[int], at: int) -> None:
        try:
            if self._line is None:
                self._run[words[at] & 255](words, at + 1)
            else:
                self._run_noted(*self._line, words, at)
        except RdmaError:
            raise
        except BaseException as error:  # no memory for what has come, say: what it was to be is void
            self._fail(error)

    @property
    def _position(self) -> int:
        return self._start + self._at

    # -- looking ahead

    def _ahead(self, words: list[int], at: int) -> None:
        self._looks += words[at]
        self._turn_at = None

    def _turn(self, words: list[int], at: int) -> None:
        position, before = self._position, self._turn_at or 0
        while self._board and self._board.oldest.position < before:
            self._run_next()
        self._turn_at = position

    def _put_off(self, words: list[int], at: int, start: int) -> bool:
        """Whether a message may be run later; it will be. Names whose numbers differ in the last 20 bits are of one post."""
        kind, region = words[at] & 255, None
        reads: list[int] = []
        if kind == ring.OPERATION:
            found = self.signatures.get(words[at + 1])
            if found is None:
                return False
            reads, writes = [words[at + 3 + name] >> 20 for name in found.names], [words[at + 2] >> 20]
            if found.writes:
                reads, writes = [], writes + reads
        elif kind == ring.SEND:
            reads, writes = [words[at + 1] >> 20, words[at + 3] >> 20], [-words[at + 4]]
        elif kind == ring.LAND:
            reads, writes = [words[at + 2] >> 20], [words[at + 1] >> 20, -words[at + 3]]
            region = words[at + 3] if words[at + 3] in self.sources else None
        elif kind == ring.FREE:
            writes = [name >> 20 for name in words[at + 1 : at + (words[at] >> 8)]]
        else:
            return False
        urgent = kind == ring.SEND and self._turn_at is None
        self._board.add(Entry(words, at, start, region), reads, writes, urgent)
        return True

    def _run_next(self) -> None:
        """Run one of the messages that were put off. Waits, for a short time, if all of them wait for copies."""
        entry = self._board.next()
        if entry is None:
            region, entry = next(iter(self._board.landings.items()))
            self._start, self._at, self._batch = entry.start, entry.at, entry.words
            link, record = self.sources[region]
            kernels.wait_count(record, self.arrived[region] + 1, kernels.SPIN, _GLANCE_NS, link.channel.port)
            self._tell()
            if self.stopped:
                raise PeerLost(f"worker {self._me} leaves", peer=self._me)
            self.channel.check()
            return
        self._run_entry(entry)
        self._board.ran(entry)
        if self.void is not None:
            self._run_in_order()
        if self._board and time.monotonic() - self._told_at > ring.TOLD_S:  # without any, a batch may be half run
            self._tell()

    def _run_entry(self, entry: Entry) -> None:
        self._start, self._at, self._batch = entry.start, entry.at, entry.words
        self._message(entry.words, entry.at)

    def _run_in_order(self) -> None:
        """An operation has failed. What was posted before it is run, and may turn out to have failed first."""
        first = self.void
        for entry in self._board.in_order():
            self.void = None if first is not None and entry.position < first.position else first
            self._run_entry(entry)
            first = self.void or first
        self.void = first

    # -- seeing it

    def _run_noted(self, line: Any, track: int, words: list[int], at: int) -> None:
        head, begin = words[at], time.monotonic_ns()
        self._run[head & 255](words, at + 1)
        if head & 255 in _SHOWN:
            line.span(track, self._told_as(words, at), "stream", begin, time.monotonic_ns(), {"position": self._position})

    def _told_as(self, words: list[int], at: int) -> str:
        """A message in words."""
        kind = words[at] & 255
        if kind in (ring.OPERATION, ring.ASK):
            found = self.signatures.get(words[at + (1 if kind == ring.OPERATION else 2)])
            return "an operation" if found is None else found.name.removeprefix("aten::")
        if kind == ring.LAND and words[at + 3] in self.sources:
            return f"a copy from {self.sources[words[at + 3]][0].name}"
        if kind == ring.SEND:
            return f"a copy to {self.remote[words[at + 4]].link.name}"
        if kind == ring.REPLAY:
            return "a graphed step"
        return _SHOWN.get(kind, "names and tables")

    def explain(self) -> str:
        """What the stream does at this moment. Any thread may ask; it is not kept from going on."""
        words, at = self._batch, self._at
        now = f"waits for {self.channel.peer} to post"
        try:
            if words:
                now = f"{'waits for' if words[at] & 255 == ring.LAND else 'at'} {self._told_as(words, at)}"
        except (IndexError, KeyError):
            now = "between two operations"
        state = "has ended" if self.stopped else now if self.void is None else "stands still until its error is asked for"
        return (
            f"stream of {self.channel.peer} at {self.device}: {state}; {self.operations} operations, {len(self.values)} tensors"
        )

    def _tell(self) -> None:
        run = self._board.oldest.start if self._board else self.ring.read
        if self._told != run:
            self._told, self._told_at = run, time.monotonic()
            INT.pack_into(self._done, 0, self._told)
            self._done_window.put(0, 8)

    def _answer(self, question: int, value: Any) -> None:
        blob = pickle.dumps(value, 5)
        if len(blob) > REPLY_BYTES - 16:
            self.large[question] = blob
            blob = pickle.dumps(("large", None), 5)
        INT.pack_into(self._reply, 0, question)
        INT.pack_into(self._reply, 8, len(blob))
        self._reply[16 : 16 + len(blob)] = blob
        self._tell()
        self._reply_window.put(0, 16 + len(blob))

    # -- operations

    def _operation(self, words: list[int], at: int) -> None:
        if self.void is not None:
            return
        try:
            found = self.signatures[words[at]]
            self._name(found, words[at + 1], self._call(found, words, at + 2))
        except _Voided as error:
            self.void = Void(error.void.error, self._position)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.void = self._void(error)

    def _void(self, error: BaseException) -> Void:
        return Void(dump_error(error, self._position), self._position)

    def _call(self, signature: Signature, words: list[int], at: int) -> Any:
        self.operations += 1
        if signature.grad is not torch.is_grad_enabled():
            torch._C._set_grad_enabled(signature.grad)
        arguments: list[Any] = []
        for kind, value in signature.takes:
            if kind == "w":
                arguments.append(self._tensor(words[at], words[at + 1], value))
                at += 2
            elif kind == "c":
                arguments.append(value)
            else:
                found, at = self._argument(kind, value, words, at)
                arguments.append(found)
        if signature.identity:
            arguments = _once(arguments, [])
        if signature.keywords:
            positional = len(arguments) - len(signature.keywords)
            return signature.func(*arguments[:positional], **dict(zip(signature.keywords, arguments[positional:])))
        return signature.func(*arguments)

    def _argument(self, kind: str, value: Any, words: list[int], at: int) -> tuple[Any, int]:
        if kind == "c":
            return value, at
        if kind == "w":
            return self._tensor(words[at], words[at + 1], value), at + 2
        if kind == "f":
            return FLOAT.unpack(INT.pack(words[at]))[0], at + 1
        if kind == "i":
            return words[at], at + 1
        found = []
        for inner, each in value:
            one, at = self._argument(inner, each, words, at)
            found.append(one)
        return found, at

    def _tensor(self, name: int, at: int, meta: int) -> torch.Tensor:
        found = self.values.get(name)
        if type(found) is Void or found is None:
            error = RdmaError("this tensor was not computed: an error came before", peer=self._me, hint="compute it again")
            raise _Voided(found or self.void or self._void(error))
        return found if at == -1 else view(found, self.metas[meta], at)

    def _name(self, signature: Signature, name: int, result: Any) -> None:
        """Name what came out, if it is what the caller takes it for."""
        results = result if type(result) in (list, tuple) else (result,)
        expected = signature.expected
        if expected is None or len(results) != len(expected):
            raise RuntimeError(f"{signature.name} gave {len(results)} results, and another number before")
        for each, told in zip(results, expected):
            if told is not None:
                wanted, offset, named = told
                if each.shape != wanted.shape or each.dtype is not wanted.dtype or each.layout is not wanted.layout:
                    raise _changed(signature, each, wanted)
                if wanted.layout is torch.strided and (
                    each.stride() != wanted.strides or (named and each.storage_offset() != offset)
                ):
                    raise _changed(signature, each, wanted)
                if named:
                    self.values[name] = each
                    if self._makes_in_arena:
                        each.made_by = signature
            elif isinstance(each, torch.Tensor):
                raise _changed(signature, each, None)
            name += 1

    def _answer_with(self, question: int, find: Callable[[], Any]) -> None:
        """Answer a question with what ``find`` gives, or with the error."""
        if self.void is not None:
            self._answer(question, ("late", self.void.error))
            return
        try:
            self._answer(question, ("ok", find()))
        except _Voided as error:
            self._answer(question, ("late", error.void.error))
        except BaseException as error:
            self._answer(question, ("error", dump_error(error, self._position)))

    def _ask(self, words: list[int], at: int) -> None:
        """Words: question, then as OPERATION."""
        self._answer_with(words[at], lambda: self._asked(self.signatures[words[at + 1]], words, at + 2))

    def _asked(self, found: Signature, words: list[int], at: int) -> list[Any]:
        operands = self._operands(found, words, at + 1)
        before = [geometry(tensor) for _, tensor in operands]
        # Kernels of sparse tensors change their parts in place, as nobody may who looks for views and versions.
        strided = all(tensor.layout is torch.strided for _, tensor in operands)
        try:
            with contextlib.nullcontext() if strided else torch._C._AutoDispatchBelowADInplaceOrView():
                result = self._call(found, words, at + 1)
        except RuntimeError as error:
            if "resize storage" in str(error):
                raise NotSupported(RESIZED) from None
            raise
        finally:
            if _resized_back(operands, before):
                raise NotSupported(RESIZED)
        return self._describe(found, words[at], result, operands)

    def _operands(self, signature: Signature, words: list[int], at: int) -> list[tuple[int, torch.Tensor]]:
        """(name, tensor as it was made) of all operands that are not void."""
        found = [(words[at + name], self.values.get(words[at + name])) for name in signature.names]
        return [(name, tensor) for name, tensor in found if isinstance(tensor, torch.Tensor)]

    def _describe(self, signature: Signature, name: int, result: Any, operands: list[tuple[int, torch.Tensor]]) -> list[Any]:
        """Name what came out of an ASK and say what it is: whether it is one result and not a sequence, then for each result
        ("t", geometry, offset, name, storage's bytes), ("n",) for no tensor, ("v", value), or ("s",) for a tensor that cannot
        stay. A tensor over an operand's storage, or an earlier result's, has that one's name."""
        single = type(result) not in (list, tuple)
        known: dict[int, int] = {}
        for key, tensor in operands:
            if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
                known.setdefault(tensor.untyped_storage()._cdata, key)
        found: list[Any] = []
        signature.expected = []
        for each in (result,) if single else result:
            if not isinstance(each, torch.Tensor) or not lies_anywhere(each):
                found.append(("n",) if each is None else ("s",) if isinstance(each, torch.Tensor) else ("v", encode(each)))
                signature.expected.append(None)
                name += 1
                continue
            own, offset, nbytes = name, 0, 0
            if each.layout is torch.strided:
                storage = each.untyped_storage()
                own = known.setdefault(storage._cdata, name)
                offset, nbytes = int(each.storage_offset()), storage.nbytes()
            else:
                each = _apart(each)
            if own == name:
                self.values[name] = each
            found.append(("t", geometry(each).plain(), offset, own, nbytes))
            signature.expected.append((geometry(each), offset, own == name))
            name += 1
        return [single, found]

    # -- tables, frees

    def _free(self, words: list[int], at: int) -> None:
        for name in words[at : at + (words[at - 1] >> 8) - 1]:
            if self.values.pop(name, None) is None:
                self.metas.pop(name, None)

    def _meta(self, words: list[int], at: int) -> None:
        self.metas[words[at]] = Geometry.of_plain(loads(ring.as_bytes(words, at + 1)))

    def _signature(self, words: list[int], at: int) -> None:
        try:
            self.signatures[words[at]] = Signature(loads(ring.as_bytes(words, at + 1)), self.device, self.default)
        except BaseException as error:
            self._fail(error)

    def _check(self, words: list[int], at: int) -> None:
        self._answer_with(words[at], lambda: None)

    def _reset(self, words: list[int], at: int) -> None:
        if self.void is not None and self.void.position < words[at]:
            self.void = None

    def _forget(self, words: list[int], at: int) -> None:
        for number in words[at : at - 1 + (words[at - 1] >> 8)] or list(self.signatures):
            self.signatures.pop(number, None)

    def _last(self, words: list[int], at: int) -> None:
        self.stopped = True

    def _state(self, words: list[int], at: int) -> None:
        self.default = set_flags(loads(ring.as_bytes(words, at)), self.device.type)

    # -- programs

    def _program(self, words: list[int], at: int) -> None:
        self.values[words[at]] = Program(words[at + 1 : at - 1 + (words[at - 1] >> 8)], self.signatures, self.metas)

    def _replay(self, words: list[int], at: int) -> None:
        program, base, given = self.values[words[at]], words[at + 1], words[at + 2 : at - 1 + (words[at - 1] >> 8)]
        reached = 0
        if self._line is None and self.void is None:
            reached = program.run(self.values, base, given, self._run, self)
            if reached < 0:
                self.operations += program.operations
                return
        messages = program.messages(base, given)
        while reached < len(messages):
            self._message(messages, reached)
            reached += messages[reached] >> 8

    def _rename(self, words: list[int], at: int) -> None:
        for old, new in zip(*[iter(words[at : at - 1 + (words[at - 1] >> 8)])] * 2):
            self.values.pop(new, None)  # also where the other was not computed
            if old in self.values:
                self.values[new] = self.values.pop(old)

    # -- tensors that come and go

    def _inline(self, words: list[int], at: int) -> None:
        name, meta, shift, nbytes = words[at : at + 4]
        geometry = self.metas[meta]
        flat = torch.empty(room(geometry, shift)[0] + 64, dtype=torch.uint8, device="cpu")
        buffer, start = memoryview(flat.numpy()), (shift - flat.data_ptr()) % 64
        buffer[start : start + nbytes] = ring.as_bytes(words, at + 3)
        tensor = over(buffer, start, geometry)  # its storage begins there: views count from it
        self.values[name] = self._placed(dressed(tensor, geometry))

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def _land(self, words: list[int], at: int) -> None:
        name, meta, region, offset, shift = words[at : at + 5]
        buffer = self.regions[region]
        if region in self.sources:
            self._await(region)
            if int.from_bytes(buffer[offset : offset + 8], "little") == _VOID:
                source = self.sources[region][0].name
                self.void = self.void or self._void(Derived(f"worker {source} has not computed it"))
            offset += HEAD_BYTES
        if self.void is not None:
            self.values[name] = self.void
            return
        geometry = self.metas[meta]
        self.values[name] = self._placed(dressed(over(buffer, offset + shift, geometry), geometry))

    def _arrived(self, region: int) -> bool:
        """Whether the next copy into a region is here, or will never be."""
        link, record = self.sources[region]
        return link.channel.error is not None or kernels.load(record) > self.arrived[region]

    def _await(self, region: int) -> None:
        """Wait until the next thing has come from the worker that writes into this region."""
        (link, record), target = self.sources[region], self.arrived[region] + 1
        channel = link.channel
        while kernels.load(record) < target:
            if kernels.wait_count(record, target, kernels.SPIN, kernels.SLICE_NS, channel.port) != kernels.OK:
                if self.stopped:
                    raise PeerLost(f"worker {self._me} leaves", peer=self._me)
                self.channel.check()
                if channel.error is not None:
                    self._fail(link.why(channel.error))
                    return
        self.arrived[region] = target

    def _send(self, words: list[int], at: int) -> None:
        name, view_at, meta, target, offset, shift = words[at : at + 6]
        landing, tensor = self.remote[target], None
        if self.void is None:
            try:
                tensor = self._tensor(name, view_at, meta)
                self._make_the_next_in_arena(name)
            except BaseException as error:
                self._fail(error)
        try:
            landing.write(offset, shift, tensor)
        except RdmaError as error:
            if self.void is None:
                self._fail(error)
        except BaseException as error:
            self._fail(error)
            landing.write(offset, shift, None)

    def _make_the_next_in_arena(self, name: int) -> None:
        """The next result of what has made this tensor, which is sent."""
        signature = getattr(self.values[name], "made_by", None)
        if signature is not None and self.device.type == "cpu":
            signature.make_in(self.channel.device)

    def _fetch(self, words: list[int], at: int) -> None:
        name, view_at, meta, question, shift, length = words[at : at + 6]

        def fetched() -> bytes | None:
            tensor = bare(self._tensor(name, view_at, meta).cpu())
            if length == 0:
                return raw(tensor)
            self._make_the_next_in_arena(name)
            write_strided(self.channel, RemoteRegion.load(ring.as_bytes(words, at + 5)), shift, tensor, None)
            return None

        self._answer_with(question, fetched)


def kinds(arguments: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Of arguments that have words: "w" for a name and an offset, "f" and "i" for a number."""
    for kind, value in arguments:
        if kind == "l":
            yield from kinds(value)
        elif kind != "c":
            yield kind


def _resized_back(operands: list[tuple[int, torch.Tensor]], shapes: list[Geometry]) -> bool:
    """Whether one was resized (``out=``, also before it is an error). The caller's tensors would not see it."""
    found = [(each, shape) for (_, each), shape in zip(operands, shapes) if each.layout is torch.strided]
    found = [(each, shape) for each, shape in found if geometry(each) != shape]
    for each, shape in found:
        each.as_strided_(shape.shape, shape.strides)
    return bool(found)


def _once(value: Any, seen: list[torch.Tensor]) -> Any:
    """An argument, or a list of them, with the first tensor that was ``seen`` in place of each that is the same."""
    if type(value) is list:
        return [_once(each, seen) for each in value]
    if type(value) is not torch.Tensor or value.layout is not torch.strided or not value.data_ptr():
        return value
    for each in seen:
        if each.data_ptr() == value.data_ptr() and geometry(each) == geometry(value):
            return each
    seen.append(value)
    return value


class Derived(RdmaError):
    """What was to come from another worker has not been computed there: that worker's error is the reason."""


class _Voided(Exception):
    """An operand was not computed."""

    def __init__(self, void: Void) -> None:
        self.void = void
        super().__init__("an operand was not computed")


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is not strided, without the operands' memory that it may hold on to: the caller would give it to others.
    A sparse one's parts keep their strides, by which sums are chosen."""
    if tensor.layout is not torch.sparse_coo:
        return tensor.clone()
    parts = []
    for part in (tensor._indices(), tensor._values()):
        shape = geometry(part)
        parts.append(part.as_strided((shape.span,), (1,)).clone().as_strided(shape.shape, shape.strides))
    return torch.ops.aten._sparse_coo_tensor_unsafe(*parts, tensor.shape, is_coalesced=tensor.is_coalesced())


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes from the first to the last element of a bare tensor. After ``numpy()`` torch would not resize it any more."""
    return ctypes.string_at(tensor.data_ptr(), geometry(tensor).span * tensor.dtype.itemsize)


def _changed(signature: Signature, found: torch.Tensor, wanted: Geometry | None) -> RuntimeError:
    return RuntimeError(
        f"{signature.name} gave {geometry(found)}, and {wanted} before, for operands of the same shapes: sizes of its results "
        "depend on values"
    )


class Landing:
    """Memory of another process into which tensors are written. One thread."""

    def __init__(self, link: Link, remote: RemoteRegion, notify: int | None) -> None:
        self.link, self.remote, self.notify = link, remote, notify
        self.channel = channel = link.channel
        self.mapped = channel.map(remote)
        if self.mapped is None and notify is not None:
            self._heads = channel.empty(2 * HEAD_BYTES, dtype=torch.uint8).zero_().split(HEAD_BYTES)
            self._heads[_VOID][0] = _VOID

    def write(self, offset: int, shift: int, tensor: torch.Tensor | None) -> None:
        """Write a tensor (``None``: it is void) behind a header, and announce it."""
        head, mapped = _VOID if tensor is None else _FINE, self.mapped
        assert self.notify is not None
        if tensor is not None:
            self.put(offset + HEAD_BYTES, shift, bare(tensor.cpu()))
        if mapped is None:
            self.channel.memcpy(self.remote[offset : offset + HEAD_BYTES], self._heads[head], notify=self.notify).wait()
            return
        mapped.begin()
        mapped.memory[offset : offset + HEAD_BYTES] = head.to_bytes(HEAD_BYTES, "little")
        mapped.end(HEAD_BYTES)
        self.channel.notify(self.notify)

    def put(self, offset: int, shift: int, tensor: torch.Tensor) -> None:
        """Write the numbers of a bare tensor, with its strides. They are there when anything that this thread sends later
        is. A worker that is lost is named with its reason."""
        nbytes = room(geometry(tensor), shift)[0]
        try:
            write_strided(self.channel, self.remote[offset : offset + nbytes], shift, tensor, self.mapped, offset)
        except PeerLost as error:
            raise fresh(self.link.why(error)) from None


def write_strided(
    channel: Channel, remote: RemoteRegion, shift: int, tensor: torch.Tensor, mapped: Any, offset: int = 0
) -> None:
    """Write a bare tensor to ``shift`` bytes behind the start of ``remote``, with its strides. ``mapped``: memory of the
    peer in which ``remote`` begins at ``offset``, if it is mapped already."""
    if not tensor.numel():
        return
    if 0 in tensor.stride():  # elements that are one are written once
        tensor = tensor.as_strided(
            [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride())], tensor.stride()
        )
    if mapped is None:
        mapped, offset = channel.map(remote), 0
    if mapped is not None:
        mapped.begin()
        try:
            over(mapped.memory, offset + shift, geometry(tensor)).copy_(tensor)
        finally:
            mapped.end(tensor.nbytes)
        return
    shape = geometry(tensor)
    flat = tensor.as_strided((shape.span,), (1,))
    if shape.span != shape.numel:  # the gaps belong to others: what they hold must not leave this process
        flat = torch.zeros(shape.span, dtype=shape.dtype, device="cpu")
        flat.as_strided(shape.shape, shape.strides).copy_(tensor)
    flat = flat.view(torch.uint8) if flat.dtype is not torch.uint8 else flat
    channel.memcpy(remote[shift : shift + flat.numel()], flat).wait()
