"""The options of ``init_rpc``."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from numbers import Real
from typing import Any

import torch

from . import constants
from .message.device_maps import DeviceLike, DeviceMap, merge, to_devices, to_map
from .message.permits import Permits
from .transport import Channel, Device, TlsOptions, check_require, check_secret, check_tls, open_device, timeouts


class BackendType(Enum):
    """Accepted by ``init_rpc(backend=)`` for programs written for torch. There is one implementation, so both names mean the
    same."""

    RDMARPC = "RDMARPC"
    TENSORPIPE = RDMARPC


class RpcBackendOptions:
    """Options of ``init_rpc``. The first five are those of torch's ``TensorPipeRpcBackendOptions``. All are attributes and may
    be changed until ``init_rpc``, which checks them again.

    * ``num_worker_threads``: how many user functions may run here at once. Where all of them wait for other workers, threads
      are added; with ``1``, functions run one after the other, and none is added.
    * ``rpc_timeout``: seconds that a call may take by default, 0: no limit. ``init_rpc`` waits as long for the other workers.
    * ``init_method``: as in ``init_process_group``; or ``"slurm://"`` in tasks of one ``srun``, where rank, size and first host
      are SLURM's (``slurm://:PORT`` for a port of your own).
    * ``device_maps``, ``devices``: see ``set_device_map`` and ``set_devices``.
    * ``transport``: ``"auto"`` reaches each worker by the fastest device: ``"shm"`` on this host, RDMA (``"verbs"``) where both
      ends have a usable port, ``"tcp"`` otherwise. A worker that is reached by tcp although an end has RDMA hardware is logged
      and counted (``fallbacks``). Or one of these devices alone, or ``"auto://ADDRESS"``, ``"tcp://ADDRESS"``: see
      ``transport.open_device``.
    * ``require``: ``"rdma"`` makes it an error (``NotSupported``, with what to put right) that a worker can be reached over tcp
      only. ``init_rpc`` raises it for the workers that are in the group then. Workers of one host may use shm.
    * ``tls``: ``True`` encrypts what leaves this host (TLS 1.3, proven by ``secret``) or refuses to send it; tcp then carries
      what RDMA would carry. Or ``TlsOptions``: certificates of your own, ``rdma_in_clear``. The same at every worker.
    * ``arena_limit``: bytes of registered memory that this worker may use.
    * ``secret``: random text of at least 16 bytes that every worker must know. Default: ``RDMARPC_SECRET``, or the content of
      the file ``RDMARPC_SECRET_FILE`` (mode 600). Without any, all workers have to be of one user on one host
      (``links/group/members``), else ``AuthenticationError``.
    * ``insecure`` (or ``RDMARPC_INSECURE=1``), at every worker: no secret is needed. Then every process that reaches the store
      can run any code in every worker.
    * ``pickler``: ``"pickle"`` (functions and classes by reference, as in torch), or ``"cloudpickle"``: lambdas, local
      functions and definitions of ``__main__`` travel by value, as code. It has to be installed at every worker.
    * ``peer_timeout``: seconds after which a peer that shows no sign of life, or that the network cut off, is lost (at least 1;
      0: never). A peer whose process ends is lost at once.
    * ``allow``: functions, classes and modules (with everything that is defined there, and below a package) that peers may use
      here. Default: everything that can be imported. A request, an answer or an error that names anything else is
      ``NotAllowed``, and is not even imported. A call needs its function in ``allow`` at the callee. Objects that travel, types
      of values whose methods are called, remote modules and optimizers need their classes in ``allow`` where they arrive.
      ``rdmarpc.wrap`` in it lets peers place parts of wrapped models here, which may run anything of torch. Not with
      ``"cloudpickle"``.
    * ``timeline``: a folder, or a file ending in ``.json``, for a timeline of the run. Default: ``RDMARPC_TIMELINE``.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceLike, DeviceLike]] | None = None,
        devices: Iterable[DeviceLike] | None = None,
        transport: str = "auto",
        require: str = "",
        tls: bool | TlsOptions = False,
        arena_limit: int | None = None,
        secret: str | None = None,
        insecure: bool = False,
        pickler: str = "pickle",
        peer_timeout: float = constants.DEFAULT_PEER_TIMEOUT_SEC,
        timeline: str | None = None,
        allow: Iterable[Any] | None = None,
    ) -> None:
        self.num_worker_threads = num_worker_threads
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method
        self.device_maps: dict[str, DeviceMap] = {}
        self.devices: list[torch.device] = []
        self.transport = transport
        self.require = require
        self.tls = tls
        self.arena_limit = arena_limit
        self.secret = secret
        self.insecure = insecure
        self.pickler = pickler
        self.peer_timeout = peer_timeout
        self.timeline = timeline
        self.allow = None if allow is None else list(allow)
        self.validate()
        for to, given in (device_maps or {}).items():
            self.set_device_map(to, given)
        self.set_devices(devices or [])

    def validate(self) -> None:
        """Raise ``TypeError``, ``ValueError``, ``ImportError`` or ``RuntimeError`` for invalid values."""
        if isinstance(self.rpc_timeout, Real) and not self.rpc_timeout >= 0:
            raise RuntimeError("RPC Timeout must be non-negative")
        self.rpc_timeout = timeouts.seconds(self.rpc_timeout, "incompatible constructor arguments: rpc_timeout")
        self.peer_timeout = timeouts.seconds(self.peer_timeout, "peer_timeout")
        if self.peer_timeout and self.peer_timeout < 1.0:
            raise RuntimeError(f"peer_timeout must be at least 1 s, or 0 for none, got {self.peer_timeout}")
        if self.num_worker_threads <= 0:
            raise RuntimeError(f"num_worker_threads must be positive, got {self.num_worker_threads}")
        check_require(self.require)
        check_tls(self.tls)
        if self.tls and self.insecure and not (isinstance(self.tls, TlsOptions) and self.tls.certificate):
            why = "tls without certificates is proven by the secret, and insecure puts that into the store for everybody"
            raise ValueError(why)
        if self.secret:
            check_secret(self.secret.encode())
        if self.pickler not in ("pickle", "cloudpickle"):
            raise ValueError(f"pickler is 'pickle' or 'cloudpickle', got {self.pickler!r}")
        if self.allow is not None:
            if self.pickler == "cloudpickle":
                why = "allow=[...] names what peers may use, and pickler='cloudpickle' lets them send code: not both"
                raise ValueError(why)
            Permits(self.allow)
        if self.pickler == "cloudpickle" and importlib.util.find_spec("cloudpickle") is None:
            raise ImportError("pickler='cloudpickle' needs cloudpickle at every worker: pip install 'rdmarpc[cloudpickle]'")

    def set_device_map(self, to: str, device_map: Mapping[DeviceLike, DeviceLike]) -> None:
        """Say which device of worker ``to`` receives tensors of our devices (CUDA index, text or ``torch.device``). Results
        come back by the inverse map. The map is added to earlier ones. Raises ``ValueError`` unless each source has one
        target, and each target one source. ``init_rpc`` checks at all workers whether the devices exist."""
        self.device_maps[to] = merge(self.device_maps.get(to, {}), to_map(device_map))

    def set_devices(self, devices: Iterable[DeviceLike]) -> None:
        """The CUDA devices that device maps from and to this worker may use; empty: any. Raises ``ValueError`` for devices of
        other types."""
        self.devices = to_devices(devices)


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """The name that programs written for torch use. ``_transports`` and ``_channels`` chose among TensorPipe's ways; the first
    time they are given, a warning says what is used instead."""

    _told = False

    def __init__(
        self, *, _transports: Sequence[str] | None = None, _channels: Sequence[str] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if (_transports or _channels) and not TensorPipeRpcBackendOptions._told:
            TensorPipeRpcBackendOptions._told = True
            given = {"_transports": _transports, "_channels": _channels}
            logging.getLogger("rdmarpc").warning(
                "%s: these are TensorPipe's. rdmarpc reaches each worker by transport=%r: 'auto' (the fastest of 'shm', "
                "'verbs' and 'tcp') or one of these",
                ", ".join(f"{name}={value!r}" for name, value in given.items() if value),
                self.transport,
            )


def open_by(options: RpcBackendOptions, kind: str, secret: bytes, on_connect: Callable[[Channel], bytes]) -> Device:
    """A device of this kind. ``secret``, ``on_connect``: see ``open_device``."""
    return open_device(
        kind,
        require=options.require,
        tls=options.tls,
        secret=secret,
        arena_limit=options.arena_limit,
        on_connect=on_connect,
        peer_timeout=options.peer_timeout,
    )
