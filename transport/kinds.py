"""``open_device``, the kinds of devices that it knows, and the kinds that other packages bring by an entry point.

The ``auto`` device reaches each peer by the fastest device that can. That is ``shm`` for processes of this host (``cuda``,
which extends ``shm`` by GPU memory, where torch has a GPU), ``verbs`` where both ends have a usable port, and ``tcp``
otherwise. These devices stand on one memory: every CPU tensor of the arena, every region and every poller serves all of them.
GPU memory that is made or registered here is for peers of this host. The address of an ``auto`` device is the list of its
devices' addresses, separated by commas. A host whose RDMA hardware cannot be used adds ``no-verbs:REASON`` (percent-encoded).

A *fallback* is a connection over tcp although at least one end has RDMA hardware. It is counted (``fallbacks``) and, once for
every peer, logged as a warning with the reason (logger ``rdmarpc``): at the end that connects, and at the other end if that has
such hardware. Connections over shm, and connections over tcp where neither end has RDMA hardware, are no fallbacks.

``require="rdma"``: no peer is reached over tcp, which is not even opened. Within a host shm is allowed: it is one-sided as RDMA
is (the peer's processor takes no part in a copy), and faster.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import torch

from .channel import Channel
from .device import Device, DeviceOptions, host_id
from .errors import NotSupported, RdmaError
from .gpu import driver
from .memory.arena import Pool
from .nic import sysfs
from .notify import Poller
from .peers.guard import have_standard_streams, hint_for
from .region import Array, Region, RemoteRegion, as_tensor
from .shm.device import ShmDevice
from .tcp.device import TcpDevice
from .timeouts import of_socket

GROUP = "rdmarpc.devices"
"""The entry points by which packages bring devices."""
Factory = Callable[..., Device]
"""Called with what stands behind ``KIND://`` (empty: nothing), the ``DeviceOptions``, and options of that kind by name."""
_OPTIONS = {field.name for field in fields(DeviceOptions)}


def open_device(name: str = "shm", **options: Any) -> Device:
    """Open a device: a way to reach the memory of other processes.

    ``name`` is one of

    * ``"shm"``: processes of this host;
    * ``"cuda"``: as ``shm``, and GPU memory besides;
    * ``"tcp"``, ``"tcp://ADDRESS"``: any host; the device listens on that local address;
    * ``"verbs"``, ``"verbs://mlx5_0:1"``: RDMA by that port;
    * ``"auto"``, ``"auto://ADDRESS"``: all of them on one arena, each peer by the fastest one that reaches it. ``ADDRESS`` is
      where its ``tcp`` listens.

    ``ADDRESS`` may be an interface name and may end in ``:PORT``. Without an address ``tcp`` listens on the address of the
    default route, or on loopback if there is no secret.

    ``options``: those of ``DeviceOptions``, and those of the kind alone. ``require="rdma"``: a peer that could only be reached
    over ``tcp`` is ``NotSupported``; the text says what to put right. ``tls``, ``True`` or ``TlsOptions``: ``tcp`` and the
    control stream of ``verbs`` are encrypted. RDMA itself is not encrypted, so ``verbs`` is refused unless
    ``TlsOptions.rdma_in_clear``. ``shm`` and ``cuda`` send nothing over a network.

    Raises ``NotSupported``, with the reason, for an unknown kind and for one that this host cannot offer.

    Two processes, of which one writes into the other's memory::

        device = open_device("shm", secret=secret)  # worker b
        landing = device.empty((1024,), dtype=torch.float32, writable=True)
        send_to_a(device.address, device.export(landing))  # by any way you like: bytes, no code
        channel = device.accept(timeout=5.0)
        channel.expect(20).wait(timeout=5.0)  # now the data is in ``landing``

        device = open_device("shm", secret=secret)  # worker a
        address, descriptor = receive_from_b()
        channel = device.connect(address, timeout=5.0)
        source = device.empty((1024,), dtype=torch.float32).fill_(1.0)
        transfer = channel.prepare([(RemoteRegion.load(descriptor), source)], notify=20)  # everything is checked here
        transfer.post().wait(timeout=5.0)  # and may be posted again and again

    **A device of your own.** A package brings one by an entry point of the group ``rdmarpc.devices``, here in its
    ``pyproject.toml``::

        [project.entry-points."rdmarpc.devices"]
        myfabric = "mypackage.devices:open_myfabric"

    The name is the kind: ``open_device("myfabric://PLACE")`` imports ``mypackage.devices`` and calls
    ``open_myfabric("PLACE", options)`` with the ``DeviceOptions``, and by name with each option that is not among them. It
    returns a ``Device``::

        class MyDevice(Device):
            def __init__(self, place: str, options: DeviceOptions) -> None:
                super().__init__("myfabric", options)  # ``self.memory``: the arena, and the table of regions
                self._listen(place)  # may raise NotSupported, with a hint
                self.memory.attach(self)  # from now on we hear of new segments and regions (``memory.Listener``)

            @property
            def address(self) -> bytes: ...  # b"myfabric:...": what a peer needs to connect to us

            def connect(self, peer, *, hello=b"", timeout=5.0, pool=None) -> Channel: ...

            def explain(self) -> str: ...  # for people

            def _shut(self) -> None: ...  # stop listening; the channels are closed already

            def _forked(self) -> None: ...  # close the child's copies of our sockets

        def open_myfabric(place: str, options: DeviceOptions) -> Device:
            return MyDevice(place, options)

    The device authenticates each peer (``peers.auth.authenticate``), checks who it is (``door.know``), answers its hello
    (``door.greet``), and says that it is there (``door.welcomed``) or is lost (``door.lost``). Channels (``Channel``) resolve
    descriptors, copy, and count notifications in records whose layout is that of ``words/kernels``. The contract is the
    docstring of ``channel``; ``tests/transport/contract/`` holds it against devices of any kind. Often a subclass of one of
    ours is all that is needed. The names of our kinds are taken.
    """
    have_standard_streams()
    kind, _, place = name.partition("://")
    common = {key: options.pop(key) for key in _OPTIONS & options.keys()}
    return _factory(kind, name)(place, DeviceOptions(**common), **options)


def kinds() -> dict[str, str]:
    """The kinds of devices by name, and the package that brings each. No package is imported for this."""
    return {**{point.name: _package(point) for point in entry_points(group=GROUP)}, **dict.fromkeys(_KINDS, "rdmarpc")}


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


def _factory(kind: str, name: str) -> Factory:
    if kind in _KINDS:
        return _KINDS[kind]
    for point in entry_points(group=GROUP, name=kind):
        try:
            return point.load()
        except Exception as error:
            why = f"the device {kind!r} of {_package(point)} cannot be loaded: {error}"
            raise NotSupported(why, device=kind, hint=f"entry point {point.value} of {GROUP}") from error
    raise _unknown(name)


def _unknown(name: str) -> NotSupported:
    hint = "one of auto, shm, cuda, verbs, tcp, verbs://NIC:PORT, auto://ADDRESS[:PORT], tcp://ADDRESS[:PORT]"
    others = [f"{kind} (of {package})" for kind, package in kinds().items() if kind not in _KINDS]
    return NotSupported(f"no device {name!r}", hint=", ".join([hint, *others]))


def _of_host(kind: str, place: str, options: DeviceOptions) -> Device:
    if place:
        raise _unknown(f"{kind}://{place}")
    if kind == "shm":
        return ShmDevice(options)
    from .cuda.device import CudaDevice  # compiles more kernels

    return CudaDevice(options)


def _tcp(place: str, options: DeviceOptions) -> Device:
    if options.require:
        raise NotSupported("require='rdma', and tcp is none", device="tcp", hint="open auto, verbs or shm")
    return TcpDevice(place, options)


def _verbs(place: str, options: DeviceOptions, **own: Any) -> Device:
    # These need libibverbs.
    from .verbs.device import VerbsDevice

    return VerbsDevice(place, options, **own)


# -- auto

_BY_SPEED = ("shm", "verbs", "tcp")
"""The fastest first."""
_UNUSABLE = "no-verbs"
_DOCTOR = "`rdmarpc doctor ADDRESS` says what each device would need"


class Refusal(NamedTuple):
    """Why a device is not used, and what would help."""

    why: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.why} ({self.hint})" if self.hint else self.why

    @staticmethod
    def of(error: Exception) -> Refusal:
        return Refusal(error.message, error.hint) if isinstance(error, RdmaError) else Refusal(str(error))


class AutoDevice(Device):
    """A ``Device`` that opens the others and picks one for each peer (see the module). ``place``: where tcp listens, as for
    ``TcpDevice``. ``channel.device`` is the device that reaches that peer."""

    def __init__(self, place: str, options: DeviceOptions) -> None:
        super().__init__("auto", options, shared=True)
        self.devices: dict[str, Device] = {}
        """The devices that could be opened, by name."""
        self.refused: dict[str, Refusal] = {}
        """The reasons against the devices that could not."""
        self._has_rdma = bool(sysfs.survey())
        self._reasons: weakref.WeakKeyDictionary[Channel, str] = weakref.WeakKeyDictionary()  # of those that fell back
        self._told: set[str] = set()
        self._fallbacks = 0
        each = replace(options, memory=self.memory, arena_limit=None, require="")
        try:
            # Neither question touches a GPU, and opening ``cuda`` does not.
            of_host = "cuda" if driver.kind() and driver.count() else "shm"
            self._open("shm", lambda: _of_host(of_host, "", each))
            if self._has_rdma:
                self._open("verbs", lambda: _open_verbs(each))
            else:
                self.refused["verbs"] = Refusal("this host has no RDMA device")
            if options.require:
                self.refused["tcp"] = Refusal("require='rdma' forbids it")
            else:
                self._open("tcp", lambda: TcpDevice(place, each))
                if place and "tcp" in self.refused:
                    raise NotSupported(self.refused["tcp"].why, device="tcp", hint=self.refused["tcp"].hint)
            if not self.devices:
                raise NotSupported(f"no device opens here: {_list(self.refused)}", device="auto", hint=_DOCTOR)
        except BaseException:
            self.close()
            raise
        self.port = max(device.port for device in self.devices.values())
        for device in self.devices.values():
            device.door.join(self._arrived, lambda channel: self.on_lost(channel))

    def _open(self, kind: str, make: Callable[[], Device]) -> None:
        try:
            self.devices[kind] = make()
        except (RdmaError, OSError) as error:
            if hint_for(error):  # what this process lacks, no other device has
                raise
            self.refused[kind] = Refusal.of(error)

    @property
    def address(self) -> bytes:
        parts = [device.address.decode() for device in self.devices.values()]
        if self._has_rdma and "verbs" in self.refused:
            parts.append(f"{_UNUSABLE}:{quote(self.refused['verbs'].why, safe='')}")
        return f"auto:{','.join(parts)}".encode()

    # -- memory

    def _on_gpu(self, sizes: tuple[int, ...], dtype: torch.dtype, place: torch.device) -> torch.Tensor:
        return self._gpus(place).empty(sizes, dtype=dtype, device=place)

    def register(self, tensor: torch.Tensor | Array) -> Region:
        tensor = as_tensor(tensor)
        return self._gpus(tensor.device).register(tensor) if self._of_gpu(tensor) else super().register(tensor)

    def export(self, tensor: torch.Tensor) -> bytes:
        return self._gpus(tensor.device).export(tensor) if self._of_gpu(tensor) else super().export(tensor)

    def _of_gpu(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_cpu and self.memory.gpu is not None and self.memory.gpu.of(tensor)

    def _gpus(self, place: torch.device | str) -> Device:
        found = self.devices.get("shm")
        if self.memory.gpu is None or found is None:
            why = f"there is no memory of {place} here"
            raise NotSupported(why, device="auto", hint="torch has no GPU here, or shm was refused")
        return found

    def poller(self) -> Poller:
        return self.devices["verbs"].poller() if "verbs" in self.devices else super().poller()

    # -- choosing

    def weigh(self, peer: bytes) -> dict[str, Refusal | None]:
        """The devices, the fastest first, each with why it cannot reach the peer at that address, or ``None`` where it may: as
        far as can be told without asking the peer."""
        parts = _split(peer)
        return {kind: self._refusal(kind, parts) for kind in _BY_SPEED}

    def _refusal(self, kind: str, parts: dict[str, str]) -> Refusal | None:
        ours = self.refused.get(kind)
        told = f"at the peer: {unquote(parts[_UNUSABLE].partition(':')[2])}" if kind == "verbs" and _UNUSABLE in parts else ""
        if ours is not None:
            return Refusal(f"{ours.why}; {told}", ours.hint) if told else ours
        if kind not in parts:
            return Refusal(told or f"the peer has no {kind}")
        if why := self.devices[kind].why_not(parts[kind].encode()):
            return Refusal(why)
        elsewhere = "shm" in parts and parts["shm"].split(":")[1:2] != [host_id()]
        if kind != "shm" and elsewhere and _on_loopback(parts[kind]):
            hint = "give every worker the same secret; a host without a default route may need tcp://INTERFACE"
            return Refusal("the peer listens on loopback only", hint)
        return None

    def why_not(self, peer: bytes) -> str:
        weighed = self.weigh(peer)
        return "" if None in weighed.values() else _list(weighed)

    def connect(self, peer: bytes, *, hello: bytes = b"", timeout: float = 5.0, pool: Pool | None = None) -> Channel:
        self.check()
        deadline = time.monotonic() + of_socket(timeout)
        parts, weighed = _split(peer), self.weigh(peer)
        for kind in [kind for kind in _BY_SPEED if weighed[kind] is None]:
            left = max(deadline - time.monotonic(), 0.001)
            try:
                channel = self.devices[kind].connect(parts[kind].encode(), hello=hello, timeout=left, pool=pool)
            except NotSupported as error:
                weighed[kind] = Refusal.of(error)
                continue
            refusal = weighed["verbs"]
            if kind == "tcp" and refusal is not None and (self._has_rdma or not parts.keys().isdisjoint(("verbs", _UNUSABLE))):
                self._fell_back(channel, parts["tcp"], refusal)
            return channel
        name = peer.decode("ascii", "replace")
        raise NotSupported(f"no device reaches this peer: {_list(weighed)}", peer=name, device="auto", hint=_DOCTOR)

    def _arrived(self, channel: Channel) -> None:
        if self._has_rdma and channel.device.name == "tcp":
            theirs = Refusal("the peer came over tcp", "the log of the peer says why")
            self._fell_back(channel, channel.peer, self.refused.get("verbs", theirs))
        self.door.arrived(channel)

    def _fell_back(self, channel: Channel, peer: str, refusal: Refusal) -> None:
        with self._lock:
            self._fallbacks += 1
            self._reasons[channel] = refusal.why
            told = peer in self._told
            self._told.add(peer)
        if not told:
            logging.getLogger("rdmarpc").warning("%s is reached over tcp, not verbs: %s", peer, refusal)

    # -- what depends on the device that reaches a peer

    def can_lend(self, tensor: torch.Tensor, channel: Channel) -> bool:
        return channel.device.can_lend(tensor, channel)

    def lend(self, tensor: torch.Tensor, channel: Channel) -> RemoteRegion:
        return channel.device.lend(tensor, channel)

    # -- all together

    def explain(self) -> str:
        lines = ["auto: shm within this host, verbs where both ends have a usable port, tcp otherwise; on one arena"]
        lines += [f"  {kind:<14} not used: {refusal}" for kind, refusal in self.refused.items()]
        with self._lock:
            reasons = list(self._reasons.items())
        lines += [f"  over tcp       {channel.peer}: {why}" for channel, why in reasons if channel.error is None]
        return "\n".join([*lines, *self.memory.explain(), *(device.explain() for device in self.devices.values())])

    def counters(self) -> dict[str, int]:
        """As ``Device.counters``, those of all devices added up, and ``fallbacks``."""
        totals = super().counters()
        shared = self.memory.counters().keys()
        for device in self.devices.values():
            for name, value in device.counters().items():
                if name not in shared:
                    totals[name] = totals.get(name, 0) + value
        return {**totals, "fallbacks": self._fallbacks}

    def _shut(self) -> None:
        for device in self.devices.values():
            device.close()

    def _forked(self) -> None:
        """Each device hears of it."""


def _open_verbs(options: DeviceOptions) -> Device:
    device = _verbs("", options)
    try:
        device.pin()  # where that cannot be, verbs is of no use here
    except RdmaError:
        device.close()
        raise
    return device


def _split(address: bytes) -> dict[str, str]:
    """The addresses in an ``auto`` address, by kind of device. An address of a single device is accepted too."""
    parts = address.decode("ascii", "replace").removeprefix("auto:").split(",")
    return {part.partition(":")[0]: part for part in parts}


def _on_loopback(address: str) -> bool:
    """Whether the host of an address ``KIND:HOST:PORT:...`` (``tcp``, ``verbs``) is a loopback address."""
    host = address.partition(":")[2]
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _list(weighed: Mapping[str, Refusal | None]) -> str:
    return "; ".join(f"{kind}: {refusal}" for kind, refusal in weighed.items() if refusal is not None)


_KINDS: dict[str, Factory] = {
    **{kind: partial(_of_host, kind) for kind in ("shm", "cuda")},
    "tcp": _tcp,
    "verbs": _verbs,
    "auto": AutoDevice,
}
