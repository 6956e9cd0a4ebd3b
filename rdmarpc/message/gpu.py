"""Tensors on GPUs in messages: they go from GPU to GPU, by streams that wait for each other, or through host memory.

Between processes of one host the receiver copies from the sender's memory, which is mapped there (``transport/gpu/ipc``). All
of it is enqueued, nothing waits: the sender's current stream says when the tensors are there, the receiver's waits for that,
copies, and says when it is done (``transport/gpu/slots``); until then the sender keeps the tensors. Tensors of a message stand
behind its pickle, so each is fetched, and let go, once, whatever becomes of the pickle.

Otherwise (another host, memory that cannot be exported, devices that cannot reach each other) a tensor is copied to host memory
of the arena, travels like any, and is copied to the device: two staging copies, counted, and a reason that is logged once a
peer.

Where a tensor goes is said by the device maps (``device_maps.Targets``).
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..base.streams import Streams
from ..transport import (
    Borrowed,
    Channel,
    Device,
    Exports,
    Guard,
    Imports,
    Lent,
    NotSupported,
    PeerLost,
    RdmaError,
    RemoteRegion,
    imports_of,
)
from ..transport import cuda_driver as driver
from . import layout
from .device_maps import Targets
from .incoming import landed_on_gpu

_GROUP = struct.Struct("<QIIHHH")  # sender, slot, generation, index at the sender, index at the receiver, tensors
_TENSOR = struct.Struct("<QQQ64sI")  # number of the segment, its base, offset, handle, bytes of the description that follows
_NO_SEGMENT = bytes(64)
_PROBE_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S, _POLL_S = 1.0, 0.005
_left: list[object] = []


Find = Callable[[int], Any]
"""The link to a worker, with its ``name`` and ``channel``; connects if need be."""
Call = Callable[[int, Any, tuple[Any, ...], float], Any]


class _Peer:
    """The state of the exchange of GPU tensors with one other worker."""

    def __init__(self) -> None:
        self.asking, self.asked = threading.Lock(), threading.Lock()  # two, because workers may ask each other at once
        self.why_not: str | None = None
        """Why GPU memory goes to that worker through the host; empty: it does not; ``None``: this is not known yet."""
        self.lent: Lent | None = None
        self.channel: Channel | None = None
        self.borrowed: Borrowed | None = None
        self.imports: Imports | None = None
        self.told: set[str] = set()
        """The reasons that were logged."""

    @property
    def over(self) -> bool:
        """Whether, after the connection's end, no stream of ours uses the peer's memory, and none of the peer's uses ours."""
        read = self.lent is None or not self.lent.sweep() or self.channel is None or self.channel.peer_ended()
        return read and (self.borrowed is None or self.borrowed.idle) and (self.imports is None or self.imports.close())


class Parcel:
    """The GPU tensors of a message that is being pickled, in the order of their numbers."""

    def __init__(self, worker: int, reply: bool) -> None:
        self.worker, self.reply = worker, reply
        self.tensors: list[tuple[torch.Tensor, bytes, int, tuple[int, int, bytes]]] = []
        """Flat run, description, index of the target device, where it lies (``Exports.find``)."""


class Gpus:
    """The GPU side of an agent. Thread-safe. ``find(worker)``: that worker, connected to if need be;
    ``call(worker, function, args, timeout)``: call a function of ours there."""

    def __init__(self, me: int, device: Device, targets: Targets, find: Find, call: Call) -> None:
        self._me, self._device, self.targets, self._find, self._call = me, device, targets, find, call
        self.streams = Streams()
        self._exports = Exports()
        self._peers: dict[int, _Peer] = {}
        self._graves: list[_Peer] = []
        self._digging = False
        self._burying = threading.Lock()

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether we see to this tensor."""
        return (
            tensor.device.type == self.streams.kind
            and tensor.layout is torch.strided
            and not tensor.is_quantized
            and not tensor.is_nested
            and layout.is_memory(tensor)
        )

    # -- out

    def reduce(self, tensor: torch.Tensor, parcel: Parcel) -> Any:
        """See ``pickle``: ``__reduce__``. Adds to ``parcel`` what goes directly. Raises ``RuntimeError`` where the maps do not
        let it go."""
        _not_captured()
        tensor = tensor.clone() if tensor._is_zerotensor() else tensor  # which has no memory
        layout.check_held(tensor, layout.span(tensor.shape, tensor.stride()) * tensor.itemsize)
        target = self.targets.find(parcel.worker, tensor.device, parcel.reply)
        self.streams.use(tensor.device.index)
        if target.type != "cpu":
            place = self._place(tensor, parcel.worker, target)
            if place is not None:
                return self._directly(tensor, target.index, place, parcel)
        return _from_host, (self._to_host(tensor), target, tensor.requires_grad)

    def _place(self, tensor: torch.Tensor, worker: int, target: torch.device) -> tuple[int, int, bytes] | None:
        """The tensor's memory as the peer names it (base, number, IPC handle); ``None`` if it goes through the host."""
        peer = self._peer(worker)
        if peer.why_not:
            return None
        if tensor.numel() == 0:
            return None if peer.why_not is None else (0, 0, _NO_SEGMENT)
        try:
            place = self._where(tensor)
            if peer.why_not is None:
                self._probe(worker, peer, place, tensor.device.index, target.index)
        except NotSupported as error:
            # This holds for this memory only: other tensors may lie in memory that can be exported.
            self._log(worker, error.message)
            return None
        return None if peer.why_not else place

    def _where(self, tensor: torch.Tensor) -> tuple[int, int, bytes]:
        with driver.driver().on(tensor.device.index):  # this thread may have called no GPU so far
            return self._exports.find(tensor.data_ptr())

    def _peer(self, worker: int) -> _Peer:
        found = self._peers.get(worker)
        return found if found is not None else self._peers.setdefault(worker, _Peer())

    def _probe(self, worker: int, peer: _Peer, place: tuple[int, int, bytes], source: int, target: int) -> None:
        """Find out once whether the peer can reach our GPU memory."""
        link = self._find(worker)
        with peer.asking:
            if peer.why_not is not None:
                return
            if not link.channel.can_adopt:
                peer.why_not = "no memory is shared with that worker"
                logging.getLogger("rdmarpc").info("GPU tensors go to %s through host memory: %s", link.name, peer.why_not)
                return
            why = ""
            peer.channel = link.channel
            try:
                lent = peer.lent = peer.lent or Lent(self._find(worker).channel, source)
            except RdmaError as error:
                why = error.message
            else:
                _, number, handle = place
                args = (self._me, lent.remote.dump(), number, handle, target)
                why = self._call(worker, probe, args, _PROBE_TIMEOUT_S)
            if why:
                self._log(worker, why)
            peer.why_not = why

    def _log(self, worker: int, why: str) -> None:
        peer = self._peer(worker)
        if why in peer.told:
            return
        peer.told.add(why)
        name = self._find(worker).name
        logging.getLogger("rdmarpc").warning("GPU tensors go to %s through host memory: %s", name, why)

    def _directly(self, tensor: torch.Tensor, target: int, place: tuple[int, int, bytes], parcel: Parcel) -> Any:
        value, text, nbytes = layout.flattened(tensor)
        if not value.is_contiguous():
            value = value.contiguous()
            self._device.count_staged(nbytes)
            place = self._where(value)
        what = layout.decode(text)._replace(requires_grad=False)
        parcel.tensors.append((value, layout.encode(what), target, place))
        return landed_on_gpu, (len(parcel.tensors) - 1, tensor.requires_grad)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the arena. Waits for the current stream."""
        value = tensor.detach().resolve_conj().resolve_neg()
        flat = self._device.empty(value.numel(), dtype=value.dtype)
        dense = layout.span(value.shape, value.stride()) == value.numel() > 0
        staged = flat.as_strided(value.shape, value.stride()) if dense else flat.view(value.shape)
        with driver.driver().relaxed():
            staged.copy_(value)
        self._device.count_staged(value.nbytes)
        return staged

    def pack(self, parcel: Parcel) -> bytes:
        """The bytes behind the pickle that describe the parcel. From now on the tensors are kept until the receiver has them,
        or until ``undo``."""
        by_source: dict[tuple[int, int], list[tuple[torch.Tensor, bytes, tuple[int, int, bytes]]]] = {}
        for run, text, target, place in parcel.tensors:
            by_source.setdefault((run.device.index, target), []).append((run, text, place))
        lent = self._peer(parcel.worker).lent
        assert lent is not None
        parts = []
        for (source, target), runs in by_source.items():
            slot, generation = lent.lend([run for run, _, _ in runs], source)
            parts.append(_GROUP.pack(self._me, slot, generation, source, target, len(runs)))
            for run, text, (base, number, handle) in runs:
                offset = run.data_ptr() - base if base else 0
                parts.append(_TENSOR.pack(number, base, offset, handle, len(text)) + text)
        # Those of several sources do not arrive in the order of their numbers.
        order = {id(run): at for at, (run, _, _) in enumerate(each for runs in by_source.values() for each in runs)}
        numbers = [order[id(run)] for run, _, _, _ in parcel.tensors]
        return b"".join(parts) + struct.pack(f"<{len(numbers)}I", *numbers) + struct.pack("<II", len(by_source), len(numbers))

    def undo(self, worker: int, blob: bytes) -> None:
        """The message that ``blob`` belongs to was not sent."""
        lent = self._peer(worker).lent
        if lent is None:
            return
        for _, slot, generation, _, _ in _groups(blob)[0]:
            lent.take_back(slot, generation)

    # -- in

    def unpack(self, blob: bytes) -> list[torch.Tensor]:
        """The tensors, on the current streams. What made them, and the copies, may still be under way there."""
        groups, numbers = _groups(blob)
        runs: list[torch.Tensor] = []
        failed: Exception | None = None
        for group in groups:
            try:
                runs += self._fetch(*group)
            except Exception as error:  # also for want of memory: the other slots have to be answered all the same
                failed = failed or error
        if failed is not None:
            raise failed
        return [runs[number] for number in numbers]

    def _fetch(self, sender: int, slot: int, generation: int, target: int, entries: list[Any]) -> list[torch.Tensor]:
        peer = self._peer(sender)
        borrowed = peer.borrowed
        if borrowed is None:
            raise PeerLost("GPU memory came from a worker that is lost, or had not asked whether it can be reached")
        cuda, found = driver.driver(), []
        over = partial(borrowed.is_done, slot, generation)
        try:
            _not_captured()
            self.streams.use(target)
            with cuda.on(target):
                borrowed.wait(slot, generation, target)
        except BaseException:
            borrowed.decline(slot, generation)
            raise
        with cuda.on(target):
            try:
                for number, base, offset, handle, what in entries:
                    run = torch.empty(what.nbytes // what.dtype.itemsize, dtype=what.dtype, device=self.streams.devices[target])
                    if what.nbytes:
                        if sender != self._me:
                            assert peer.imports is not None
                            base = peer.imports.base(number, handle, target, over)
                        stream = driver.current_stream(target)
                        cuda.call("cuMemcpyAsync", run.data_ptr(), base + offset, what.nbytes, stream)
                    found.append(layout.rebuilt(run, what))
            finally:
                try:
                    borrowed.done(slot, generation, target)
                except RdmaError:  # our GPU has failed
                    borrowed.decline(slot, generation)
                    raise
        self._device.count("gpu_bytes_direct", sum(entry[4].nbytes for entry in entries))
        return found

    def admit(self, sender: int, table: bytes, number: int, handle: bytes, target: int) -> str:
        """A worker asks whether we can reach its GPU memory for copies to device ``target``; empty, or why not."""
        peer = self._peer(sender)
        try:
            with peer.asked:
                if peer.borrowed is None:
                    remote = RemoteRegion.load(table)
                    peer.imports = imports_of(remote.owner)
                    peer.borrowed = Borrowed(self._find(sender).channel, remote, target)
            if sender != self._me:
                assert peer.imports is not None
                peer.imports.base(number, handle, target, lambda: True)
        except RdmaError as error:
            return f"{error.message} ({error.status})" if error.status and error.status not in error.message else error.message
        return ""

    # -- the ends

    def let_go(self, worker: int) -> None:
        """Release all streams of ours that wait for a lost worker. This happens at once, as all our threads may be waiting for
        such streams."""
        peer = self._peers.get(worker)
        count = peer.borrowed.release() if peer is not None and peer.borrowed is not None else 0
        if count:
            self._device.count("gpu_messages_lost", count)
            logging.getLogger("rdmarpc").error(
                "worker %d has ended before its GPU had made what it sent: tensors of %d messages from it are garbage",
                worker,
                count,
            )

    def lost(self, worker: int) -> None:
        """See ``let_go``. What that worker may still read is kept until its process has ended."""
        self.let_go(worker)
        peer = self._peers.pop(worker, None)
        if peer is None or (peer.lent is None and peer.borrowed is None):
            return
        with self._burying:
            self._graves.append(peer)
            if not self._digging:
                with contextlib.suppress(RuntimeError):  # no more threads: the process ends
                    threading.Thread(target=self._bury, name="rdmarpc-gpu-ends", daemon=True).start()
                    self._digging = True

    def _bury(self) -> None:
        # On a thread of its own: to unmap memory may wait for whatever a GPU does.
        guard = Guard("rdmarpc-gpu-ends")
        while True:
            for peer in list(self._graves):
                try:
                    over = peer.over
                except BaseException as error:  # what it has is kept until our process ends
                    guard.note(error, "letting go of what a peer has lent")
                    _left.append(peer)
                    over = True
                if over:
                    self._graves.remove(peer)
            with self._burying:
                if not self._graves:
                    self._digging = False
                    return
            time.sleep(_POLL_S)

    def sweep(self) -> None:
        """Let go of what is done."""
        for peer in list(self._peers.values()):
            if peer.lent is not None:
                peer.lent.sweep()
        self.streams.sweep()

    @property
    def settled(self) -> bool:
        """Whether no peer has still to read our GPU memory."""
        return not any(peer.lent is not None and peer.lent.sweep() for peer in list(self._peers.values()))

    def close(self) -> None:
        """The end of all peers. What is then still in use, of a peer that stopped, is kept until our process ends."""
        for worker in list(self._peers):
            self.lost(worker)
        limit = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._graves and time.monotonic() < limit:
            time.sleep(_POLL_S)
        _left.extend(self._graves)


def _groups(blob: bytes) -> tuple[list[tuple[int, int, int, int, list[Any]]], tuple[int, ...]]:
    """What ``Gpus.pack`` made: of each group the sender, its slot and generation, the index of our device, and for each tensor
    where it lies and what it is; and which of all these each tensor of the message is."""
    count, tensors = struct.unpack_from("<II", blob, len(blob) - 8)
    found, at = [], 0
    for _ in range(count):
        sender, slot, generation, _, target, size = _GROUP.unpack_from(blob, at)
        at += _GROUP.size
        entries = []
        for _ in range(size):
            *place, length = _TENSOR.unpack_from(blob, at)
            at += _TENSOR.size + length
            entries.append((*place, layout.decode(blob[at - length : at])))
        found.append((sender, slot, generation, target, entries))
    return found, struct.unpack_from(f"<{tensors}I", blob, len(blob) - 8 - 4 * tensors)


def _not_captured() -> None:
    if driver.capturing():
        raise NotSupported(
            "this thread captures a CUDA graph: no tensor on a GPU can be sent or received meanwhile",
            device="cuda",
            hint="capture what is between two calls",
        )


current: Gpus | None = None
"""This process's; ``None`` without a GPU."""


def present() -> Gpus:
    """``current``. ``RuntimeError`` without a GPU."""
    if current is None:
        raise RuntimeError("this worker has no GPU")
    return current


def probe(sender: int, table: bytes, number: int, handle: bytes, target: int) -> str:
    """Called at a peer: see ``Gpus.admit``."""
    return "that worker has no GPU" if current is None else current.admit(sender, table, number, handle, target)


def _from_host(staged: torch.Tensor, target: torch.device, requires_grad: bool) -> torch.Tensor:
    if target.type != "cpu":
        gpus = present()
        gpus.streams.use(target.index)
        gpus._device.count_staged(staged.nbytes)
        with driver.driver().relaxed():
            staged = staged.to(target)
    return staged.requires_grad_() if requires_grad else staged
