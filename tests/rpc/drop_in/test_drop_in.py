"""Programs that import ``torch.distributed.rpc``, run by ``rdmarpc run``; the names of torch's modules beside ours."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rdmarpc.tools import run

PROGRAM = Path(__file__).with_name("stood_in_program.py")


def python(*arguments: str, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@contextmanager
def port() -> Iterator[str]:
    """A port that nobody else is given meanwhile; who asks for it by number may listen there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("localhost", 0))
        yield str(holder.getsockname()[1])


def test_every_way_to_start_a_process(tmp_path: Path) -> None:
    """With the ``sitecustomize`` of the user's, which ours hides."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['SEEN'] = 'yes'\n")
    with port() as held:
        lines = python("-m", "rdmarpc", "run", "--", str(PROGRAM), held, PYTHONPATH=str(tmp_path)).splitlines()
    ways = ("fork", "forkserver", "spawn", "subprocess")
    assert sorted(lines) == [f"{how} rdmarpc [2.0, 2.0] [3.0] 3" for how in ways]
    seen = "import os, sys; print(os.environ['SEEN'], 'torch' in sys.modules, 'rdmarpc.api' in sys.modules)"
    assert python("-m", "rdmarpc", "run", "-c", seen, PYTHONPATH=str(tmp_path)) == "yes False False\n"


def test_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Not Python's, which the program's interpreter would print; what comes after ``--`` is the program's."""
    for option in ("-h", "--help"):
        with pytest.raises(SystemExit) as ended:
            run.main([option])
        assert ended.value.code == 0 and capsys.readouterr().out == run.USAGE
    with pytest.raises(SystemExit, match="usage: rdmarpc run"):
        run.main([])


def test_packages_that_take_our_names_have_them() -> None:
    code = """
        import torch
        import torch.nn.parallel
        assert torch.distributed.rpc.is_available() and torch.distributed.autograd.is_available()
        from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizers = torch.distributed.optim
        assert not hasattr(optimizers, "Nothing")
        from torch.distributed.optim import *
        import rdmarpc.optim
        assert DistributedOptimizer is rdmarpc.optim.DistributedOptimizer is optimizers.optimizer.DistributedOptimizer
    """
    python("-m", "rdmarpc", "run", "-c", textwrap.dedent(code))


def test_install_in_a_running_program() -> None:
    """Names that were taken before mean ours afterwards, also in torch's own modules."""
    code = """
        import torch, torch.distributed.rpc as rpc
        from torch.distributed.rpc import RRef, init_rpc
        import rdmarpc
        for name in ("AllGatherStates", "PyRRef", "RpcAgent", "TensorPipeAgent", "backend_registry"):
            assert hasattr(rpc, name) and hasattr(rdmarpc, name) and name not in rdmarpc.__all__
        rdmarpc.install()
        rdmarpc.install()
        assert rpc.RRef is RRef is rdmarpc.RRef is torch.nn.parallel.distributed.RRef is torch._jit_internal.RRef
        assert init_rpc is rdmarpc.init_rpc and rpc.api.rpc_sync is rdmarpc.rpc_sync
        assert rpc.backend_registry.backend_registered("TENSORPIPE") and rpc.PyRRef is RRef
        try:
            rpc._invoke_rpc_builtin
        except AttributeError as error:
            assert "agent in C++" in str(error)
        rpc.api.rpc_sync = 5
        assert rdmarpc.api.rpc_sync == 5
    """
    python("-c", textwrap.dedent(code))


NAMES = """
    import importlib, json, pkgutil, sys, types, typing
    import torch
    names = ["torch._C._distributed_rpc", "torch._C._distributed_autograd"]
    for family in ("rpc", "autograd", "nn", "optim"):
        top = importlib.import_module(f"torch.distributed.{family}")
        below = pkgutil.walk_packages(getattr(top, "__path__", []), top.__name__ + ".")
        names += [top.__name__, *(found.name for found in below)]
    theirs = {name: sys.modules.get(name) or importlib.import_module(name) for name in names if "templates" not in name}

    def own(module, key, value):
        # What a module has imported from typing, or from outside of these modules, is nobody's interface.
        if key.startswith("__") or hasattr(typing, key):
            return False
        home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        return not isinstance(home, str) or home in theirs or home.startswith("torch.distributed.rpc")

    listed = {name: sorted(key for key, value in vars(module).items() if own(name, key, value))
              for name, module in theirs.items()}
    import rdmarpc
    rdmarpc.install()
    from rdmarpc.tools import hook
    absent, _ = hook.differences()
    unexplained = []
    for name, keys in listed.items():
        if name not in hook.MEANT:
            if name.startswith(("torch.distributed.rpc.", "torch._C")) and not name.startswith(tuple(absent)):
                unexplained.append(name)
            continue
        ours = importlib.import_module(name)
        unexplained += [f"{name}.{key}" for key in keys
                        if f"{name}.{key}" not in absent
                        and not hasattr(ours, key) and not hook.known(name, key)]
    # Not its own, but found where torch has them.
    from torch.distributed.rpc import Store
    from torch.distributed.rpc.rref_proxy import rpc_async, functions
    assert Store is torch.distributed.Store and rpc_async is rdmarpc.rpc_async
    assert torch.distributed.rpc.options.rpc_contants is torch.distributed.rpc.constants
    print(json.dumps([unexplained, sum(map(len, listed.values()))]))
"""


def test_every_name_of_torch_is_ours_or_has_a_reason() -> None:
    unexplained, count = json.loads(python("-W", "ignore", "-c", textwrap.dedent(NAMES)))
    assert not unexplained and count > 250
