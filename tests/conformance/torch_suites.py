"""PyTorch's own RPC tests, as they lie in the installed wheel, bound to rdmarpc instead of ``torch.distributed.rpc``.

Before a module of tests is imported, the names it imports (``torch.distributed.rpc`` and modules below) are made to mean
ours: then every ``import``, decorator and default in it binds to rdmarpc by itself; nothing of theirs is copied or patched.
Call ``load`` only in a process that does nothing else.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = "torch.testing._internal.distributed"
MODULES = {
    "rpc": f"{_ROOT}.rpc.rpc_test",
    "faulty": f"{_ROOT}.rpc.faulty_agent_rpc_test",
    "parameter_server": f"{_ROOT}.rpc.examples.parameter_server_test",
    "reinforcement_learning": f"{_ROOT}.rpc.examples.reinforcement_learning_rpc_test",
    "autograd": f"{_ROOT}.rpc.dist_autograd_test",
    "optimizer": f"{_ROOT}.rpc.dist_optimizer_test",
    "remote_module": f"{_ROOT}.nn.api.remote_module_test",
    "ddp": f"{_ROOT}.ddp_under_dist_autograd_test",
}
_TARGET = "torch.distributed.rpc"
_PICKLED = ("on", "device", "is_device_map_set", "is_scriptable", "module_rref")
"""What torch's handle of a remote module takes along and ours has as well (``generated_methods`` is the class's here)."""


@cache
def listed() -> dict[str, list[str]]:
    """Every test of the installed torch, as ``{suite (class name): [test names]}``. Reads their sources, imports nothing."""
    import torch

    found: dict[str, list[str]] = {}
    for module in MODULES.values():
        path = Path(torch.__file__).parent.parent.joinpath(*module.split(".")).with_suffix(".py")
        if not path.exists():
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                tests = [item.name for item in node.body if isinstance(item, ast.FunctionDef) and item.name.startswith("test_")]
                if tests:
                    found[node.name] = tests
    return found


def _absent(name: str) -> Any:
    """Stands for what rdmarpc does not have, so that the module that imports it can be imported: whoever calls it fails."""

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"rdmarpc has no {name}")

    return missing


class StandIn(ModuleType):
    """A module that answers to torch's name and means ours; ``more`` is what this runner adapts."""

    def __init__(self, name: str, meant: ModuleType | None, **more: Any) -> None:
        super().__init__(name)
        self.__dict__.update(_meant=meant, __path__=[], **more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return getattr(self._meant, name)
        except AttributeError:
            return _absent(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, ModuleType) and self._meant is not None:
            setattr(self._meant, name, value)
        else:
            super().__setattr__(name, value)


def _ours(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"rdmarpc.{name}")
    except ModuleNotFoundError:
        return None


def _substitute() -> None:
    import torch
    import torch._dynamo  # DDP imports it, in each process if nobody has before
    import torch.distributed.rpc
    import torch.testing._internal.common_distributed  # what looks at the original while it is imported comes first

    import rdmarpc

    class Options(rdmarpc.RpcBackendOptions):
        """The tests choose TensorPipe's transports by two private options that have no counterpart."""

        def __init__(self, *, _transports: Any = None, _channels: Any = None, **options: Any) -> None:
            super().__init__(**options)

    from torch.distributed.rpc.internal import RPCExecMode  # only names the form of call that a test is to use

    below = {name: StandIn(f"{_TARGET}.{name}", _ours(name)) for name in ("api", "internal", "functions", "constants")}
    below["internal"].__dict__["RPCExecMode"] = RPCExecMode
    stand_in = StandIn(_TARGET, rdmarpc, TensorPipeRpcBackendOptions=Options, **below)
    sys.modules[_TARGET] = stand_in
    for name, module in below.items():
        sys.modules[f"{_TARGET}.{name}"] = module
    torch.distributed.rpc = stand_in  # type: ignore[assignment]
    _substitute_nn()
    _substitute_autograd()
    _substitute_optim()
    # It was imported already, with the names of the original.
    from torch.testing._internal import dist_utils

    importlib.reload(dist_utils)


def _substitute_optim() -> None:
    import torch.distributed.optim  # the original's own parts come first

    import rdmarpc

    name = "torch.distributed.optim"
    torch.distributed.optim = sys.modules[name] = StandIn(name, rdmarpc.optim)  # type: ignore[assignment]


def _substitute_nn() -> None:
    import torch.distributed.nn

    import rdmarpc

    name = "torch.distributed.nn"
    handle = StandIn(f"{name}.api.remote_module", rdmarpc.nn, _REMOTE_MODULE_PICKLED_ATTRIBUTES=_PICKLED)
    api = StandIn(f"{name}.api", rdmarpc.nn, remote_module=handle)
    for module in (handle, api, StandIn(name, rdmarpc.nn, api=api)):
        sys.modules[module.__name__] = module
    torch.distributed.nn = sys.modules[name]


def _substitute_autograd() -> None:
    import torch.distributed.autograd

    import rdmarpc
    from rdmarpc.gradients import record

    # Nodes are told apart by their names there.
    record.RECEIVED.name = lambda node: "torch::distributed::autograd::RecvRpcBackward"
    name = "torch.distributed.autograd"
    torch.distributed.autograd = sys.modules[name] = StandIn(name, rdmarpc.autograd)  # type: ignore[assignment]


_modules: list[Any] = []


def _kept(*args: Any, **kwargs: Any) -> Any:
    """DDP modules, kept to the end: gloo's group that dies with its last module holds the interpreter's lock and waits for its
    threads, one of which may want it (torch alone hangs so, now and then)."""
    import torch.nn.parallel

    _modules.append(torch.nn.parallel.DistributedDataParallel(*args, **kwargs))
    return _modules[-1]


def load(names: tuple[str, ...] = tuple(MODULES)) -> dict[str, type]:
    """Import the tests; returns ``{suite: class}``, ready to be made with the name of a test and given ``rank`` and
    ``file_name``. The classes are put into this module, so that their instances can be pickled by reference."""
    _substitute()
    import torch.distributed.rpc as rpc
    from torch.testing._internal.common_utils import TestCase

    class Fixture:
        """What torch's own fixture says about TensorPipe, said about rdmarpc."""

        @property
        def rpc_backend(self) -> Any:
            return rpc.BackendType.TENSORPIPE

        @property
        def rpc_backend_options(self) -> Any:
            return rpc.TensorPipeRpcBackendOptions(init_method=self.init_method)  # type: ignore[attr-defined]

        def get_shutdown_error_regex(self) -> str:
            return ".*"

        def get_timeout_error_regex(self) -> str:
            return "RPC ran for more than"

    found: dict[str, type] = {}
    for short in names:
        if importlib.util.find_spec(MODULES[short]) is None:
            continue
        module = importlib.import_module(MODULES[short])
        if short == "ddp":
            module.DistributedDataParallel = _kept  # type: ignore[attr-defined]
        for suite in listed():
            theirs = vars(module).get(suite)
            if isinstance(theirs, type) and theirs.__module__ == module.__name__:
                found[suite] = type(suite, (Fixture, theirs, TestCase), {"__module__": __name__})
    globals().update(found)
    return found
