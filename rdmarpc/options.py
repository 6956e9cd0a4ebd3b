"""Who a worker is and how RPC is set up."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from enum import Enum

from . import constants

_NAME = re.compile(r"[A-Za-z0-9_:-]+")


class BackendType(Enum):
    """Accepted by ``init_rpc(backend=)`` for programs written for torch; there is one implementation."""

    RDMARPC = "RDMARPC"


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's name and id (its rank). Immutable, hashable, picklable."""

    name: str
    id: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) >= 128:
            raise RuntimeError(
                "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than 128 chars, "
                f"but got {self.name}"
            )

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class RpcBackendOptions:
    """Options of ``init_rpc``. The first three are those of torch's ``TensorPipeRpcBackendOptions``.

    ``num_worker_threads``: user functions that may run here at once. ``rpc_timeout``: seconds a call may take by default, 0
    = for ever; also how long ``init_rpc`` waits for the others. ``init_method``: as in ``init_process_group``.
    ``transport``: ``"shm"``, ``"tcp"``, ``"tcp://ADDRESS"``, or ``"auto"`` (shm when all workers share this host).
    ``arena_limit``: bytes of registered memory this worker may use. ``secret``: what every worker must know; by default
    ``RDMARPC_SECRET``, else rank 0 draws one and shares it through the store (then the store is what is trusted).
    ``pickler``: ``"pickle"`` (functions and classes by reference, as in torch), or ``"cloudpickle"``: lambdas, local functions
    and what is defined in ``__main__`` travel by value, as code; it has to be installed at every worker.
    ``peer_timeout``: seconds after which a peer that shows no sign of running, or that the network cut off, is lost (at least
    1; 0: never). A peer whose process ends is lost at once.
    ``timeline``: folder, or file ending in ``.json``, for a timeline of the run (default: ``RDMARPC_TIMELINE``).
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = constants.DEFAULT_INIT_METHOD,
        transport: str = "auto",
        arena_limit: int | None = None,
        secret: str | None = None,
        pickler: str = "pickle",
        peer_timeout: float = constants.DEFAULT_PEER_TIMEOUT_SEC,
        timeline: str | None = None,
    ) -> None:
        if not isinstance(rpc_timeout, int | float):
            raise TypeError(f"rpc_timeout is a number of seconds, got {type(rpc_timeout).__name__}")
        if rpc_timeout < 0:
            raise RuntimeError("RPC Timeout must be non-negative")
        if peer_timeout and not peer_timeout >= 1.0:
            raise RuntimeError(f"peer_timeout must be at least 1 s, or 0 for none, got {peer_timeout}")
        if num_worker_threads <= 0:
            raise RuntimeError(f"num_worker_threads must be positive, got {num_worker_threads}")
        self.num_worker_threads = num_worker_threads
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method
        self.transport = transport
        self.arena_limit = arena_limit
        self.secret = secret
        if pickler not in ("pickle", "cloudpickle"):
            raise ValueError(f"pickler is 'pickle' or 'cloudpickle', got {pickler!r}")
        if pickler == "cloudpickle" and importlib.util.find_spec("cloudpickle") is None:
            raise ImportError("pickler='cloudpickle' needs cloudpickle at every worker: pip install 'rdmarpc[cloudpickle]'")
        self.pickler = pickler
        self.peer_timeout = float(peer_timeout)
        self.timeline = timeline
