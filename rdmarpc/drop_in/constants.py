"""Names of constants that torch's modules take from C++."""

from ..constants import DEFAULT_INIT_METHOD as _DEFAULT_INIT_METHOD
from ..constants import DEFAULT_NUM_WORKER_THREADS as _DEFAULT_NUM_WORKER_THREADS
from ..constants import DEFAULT_RPC_TIMEOUT_SEC as _DEFAULT_RPC_TIMEOUT_SEC
from ..constants import UNSET_RPC_TIMEOUT as _UNSET_RPC_TIMEOUT

__all__ = ["_DEFAULT_INIT_METHOD", "_DEFAULT_NUM_WORKER_THREADS", "_DEFAULT_RPC_TIMEOUT_SEC", "_UNSET_RPC_TIMEOUT"]
