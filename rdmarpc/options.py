"""How RPC is set up."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from enum import Enum
from numbers import Real
from typing import Any

import torch

from . import constants
from .ground.device_maps import DeviceLike, DeviceMap, merge, to_devices, to_map
from .message.permits import Permits
from .transport import TlsOptions, check_require, check_secret, check_tls


class BackendType(Enum):
    """Accepted by ``init_rpc(backend=)`` for programs written for torch; there is one implementation, whatever it is called."""

    RDMARPC = "RDMARPC"
    TENSORPIPE = RDMARPC


class RpcBackendOptions:
    """Options of ``init_rpc``. The first five are those of torch's ``TensorPipeRpcBackendOptions``. All are attributes that
    may be changed until ``init_rpc``, which checks them again.

    ``num_worker_threads``: user functions that may run here at once. ``rpc_timeout``: seconds a call may take by default, 0
    = for ever; also how long ``init_rpc`` waits for the others. ``init_method``: as in ``init_process_group``, or
    ``"slurm://"`` in tasks of one ``srun``: rank, size and first host are SLURM's (``slurm://:PORT`` for a port of your own).
    ``device_maps``, ``devices``: see ``set_device_map`` and ``set_devices``.
    ``transport``: ``"auto"``: each worker by the fastest way there is: ``"shm"`` on this host, RDMA (``"verbs"``) where both
    ends have a usable port, ``"tcp"`` otherwise, which is logged and counted (``fallbacks``) where an end has RDMA hardware.
    Or one of them alone, or ``"auto://ADDRESS"``, ``"tcp://ADDRESS"``: see ``transport.open_device``.
    ``require``: ``"rdma"`` makes it an error (``NotSupported``, with what to put right) that a worker can be reached over tcp
    only: in ``init_rpc`` for those who are in the group then. Workers of one host may use shm.
    ``tls``: ``True``: what leaves this host is encrypted (TLS 1.3, proven by ``secret``), or refused: tcp then carries what
    RDMA would. Or ``TlsOptions``: certificates of your own, ``rdma_in_clear``. The same at every worker.
    ``arena_limit``: bytes of registered memory this worker may use. ``secret``: random text of at least 16 bytes that every
    worker must know; by default what ``RDMARPC_SECRET`` says, or the file ``RDMARPC_SECRET_FILE`` (mode 600) holds. Without
    any the workers have to be of one user on one host (``group/job_secret``), else ``AuthenticationError``; or all of them say
    ``insecure`` (or ``RDMARPC_INSECURE=1``): then whoever reaches the store may have any code run in every worker.
    ``pickler``: ``"pickle"`` (functions and classes by reference, as in torch), or ``"cloudpickle"``: lambdas, local functions
    and what is defined in ``__main__`` travel by value, as code; it has to be installed at every worker.
    ``peer_timeout``: seconds after which a peer that shows no sign of running, or that the network cut off, is lost (at least
    1; 0: never). A peer whose process ends is lost at once.
    ``allow``: functions, classes and modules (with all that is defined there, and below a package) that peers may use here; by
    default everything that can be imported. Else a request, an answer or an error that names anything else is ``NotAllowed``;
    it is not even imported. A call that another worker makes needs its function in ``allow`` there; objects that travel, types
    of values that are asked for methods, remote modules and optimizers need their classes where they arrive. ``rdmarpc.wrap``
    in it: peers may place parts of wrapped models here, which may run anything of torch. Not with ``"cloudpickle"``.
    ``timeline``: folder, or file ending in ``.json``, for a timeline of the run (default: ``RDMARPC_TIMELINE``).
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
        """Raises ``TypeError``, ``ValueError``, ``ImportError`` or ``RuntimeError`` for values that cannot be."""
        if not isinstance(self.rpc_timeout, Real):
            raise TypeError(
                f"incompatible constructor arguments: rpc_timeout is a number of seconds, got {type(self.rpc_timeout).__name__}"
            )
        if not self.rpc_timeout >= 0:
            raise RuntimeError("RPC Timeout must be non-negative")
        if self.peer_timeout and not self.peer_timeout >= 1.0:
            raise RuntimeError(f"peer_timeout must be at least 1 s, or 0 for none, got {self.peer_timeout}")
        if self.num_worker_threads <= 0:
            raise RuntimeError(f"num_worker_threads must be positive, got {self.num_worker_threads}")
        check_require(self.require)
        check_tls(self.tls)
        if self.tls and self.insecure and not (isinstance(self.tls, TlsOptions) and self.tls.certificate):
            raise ValueError(
                "tls without certificates is proven by the secret, and insecure puts that into the store for everybody"
            )
        if self.secret:
            check_secret(self.secret.encode())
        if self.pickler not in ("pickle", "cloudpickle"):
            raise ValueError(f"pickler is 'pickle' or 'cloudpickle', got {self.pickler!r}")
        if self.allow is not None:
            if self.pickler == "cloudpickle":
                raise ValueError(
                    "allow=[...] names what peers may use, and pickler='cloudpickle' lets them send code: not both"
                )
            Permits(self.allow)
        if self.pickler == "cloudpickle" and importlib.util.find_spec("cloudpickle") is None:
            raise ImportError("pickler='cloudpickle' needs cloudpickle at every worker: pip install 'rdmarpc[cloudpickle]'")

    def set_device_map(self, to: str, device_map: Mapping[DeviceLike, DeviceLike]) -> None:
        """Where tensors on our devices (CUDA index, text or ``torch.device``) go on worker ``to``; results come back the other
        way. Adds to what was said before; one source has one target, and the reverse, else ``ValueError``. Whether the devices
        exist is checked by ``init_rpc``, at all workers."""
        self.device_maps[to] = merge(self.device_maps.get(to, {}), to_map(device_map))

    def set_devices(self, devices: Iterable[DeviceLike]) -> None:
        """The CUDA devices that maps from and to this worker may use; empty: any. ``ValueError`` for devices of other types."""
        self.devices = to_devices(devices)


TensorPipeRpcBackendOptions = RpcBackendOptions
"""The name that programs written for torch use."""
