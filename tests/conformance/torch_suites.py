"""PyTorch's own RPC tests, as they lie in the installed wheel, with rdmarpc under the names of ``torch.distributed.rpc``.

``rdmarpc.install`` comes before they are imported; nothing of theirs is copied or patched. Call ``load`` only in a process that
does nothing else.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
from functools import cache
from pathlib import Path
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
    "scripts": f"{_ROOT}.rpc.jit.rpc_test",
    "script_autograd": f"{_ROOT}.rpc.jit.dist_autograd_test",
}
BACKEND = os.environ.get("RDMARPC_CONFORMANCE_BACKEND", "rdmarpc")
"""Of the process groups of ``ddp``: gloo is the other one that runs."""


@cache
def listed() -> dict[str, list[str]]:
    """Every test of the installed torch, as ``{suite (class name): [test names]}``. Reads their sources, imports nothing."""
    import torch

    found: dict[str, list[str]] = {}
    for module in MODULES.values():
        path = Path(torch.__file__).parent.parent.joinpath(*module.split(".")).with_suffix(".py")
        if path.exists():
            found |= tests_of(path)
    return found


def tests_of(path: Path) -> dict[str, list[str]]:
    """The tests of a file, by the class in which they stand."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            tests = [item.name for item in node.body if isinstance(item, ast.FunctionDef) and item.name.startswith("test_")]
            if tests:
                found[node.name] = tests
    return found


_modules: list[Any] = []


def _kept(*args: Any, **kwargs: Any) -> Any:
    """DDP modules, kept to the end: gloo's group that dies with its last module holds the interpreter's lock and waits for its
    threads, one of which may want it (torch alone hangs so, now and then)."""
    import torch.nn.parallel

    _modules.append(torch.nn.parallel.DistributedDataParallel(*args, **kwargs))
    return _modules[-1]


class _Groups:
    """``torch.distributed`` for tests that ask it for gloo: they get ``BACKEND``."""

    def __getattr__(self, name: str) -> Any:
        import torch.distributed as dist

        return getattr(dist, name)

    def init_process_group(self, backend: str, **kwargs: Any) -> None:
        import torch.distributed as dist

        dist.init_process_group(BACKEND if backend == "gloo" else backend, **kwargs)


def load(names: tuple[str, ...] = tuple(MODULES)) -> dict[str, type]:
    """Import the tests; returns ``{suite: class}``, ready to be made with the name of a test and given ``rank`` and
    ``file_name``. The classes are put into this module, so that their instances can be pickled by reference."""
    import rdmarpc

    rdmarpc.install()
    import torch.distributed.rpc as rpc
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed.rpc.rpc_agent_test_fixture import RpcAgentTestFixture

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
            module.dist = _Groups()  # type: ignore[attr-defined]
        for suite in listed():
            theirs = vars(module).get(suite)
            if isinstance(theirs, type) and theirs.__module__ == module.__name__:
                bases = (theirs,) if issubclass(theirs, RpcAgentTestFixture) else (theirs, RpcAgentTestFixture)
                found[suite] = type(suite, (Fixture, *bases, TestCase), {"__module__": __name__})
    globals().update(found)
    return found
