"""``open_device``, the kinds of devices that it knows, and the kinds that other packages bring by an entry point."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .auto import AutoDevice
from .device import Device, DeviceOptions
from .errors import NotSupported
from .peers.guard import have_standard_streams
from .shm.device import ShmDevice
from .tcp.device import TcpDevice

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
            found: Factory = point.load()
            return found
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


_KINDS: dict[str, Factory] = {
    **{kind: partial(_of_host, kind) for kind in ("shm", "cuda")},
    "tcp": _tcp,
    "verbs": _verbs,
    "auto": AutoDevice,
}
