"""PyTorch's own tests of ``torch.distributed``, as they lie in the installed wheel (``distributed_test.py``), with the backend
``rdmarpc`` in gloo's place.

The module asks for the name of the backend when it is imported, to choose its tests, and again when they run. So it is
imported as for gloo, and as for MPI for the tests that it keeps for MPI (all to all), and given our name afterwards. Nothing of
theirs is copied or patched. It looks at the profiler's events of torch's own backends only; ours have tests of their own.
``load`` is for a process that does nothing else.

``RDMARPC_CONFORMANCE_BACKEND`` names another backend (gloo: what passes there), ``RDMARPC_CONFORMANCE_SIZE`` the number of
ranks."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch_suites import tests_of

MODULE = "torch.testing._internal.distributed.distributed_test"
PLACES = ("gloo", "mpi")
"""Whose tests are run; each is a suite."""
BACKEND = os.environ.get("RDMARPC_CONFORMANCE_BACKEND", "rdmarpc")
SIZE = int(os.environ.get("RDMARPC_CONFORMANCE_SIZE", 3))


class Name(str):
    """The name of the backend, where the tests compare it also that of the backend in whose place it stands."""

    place = ""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == self.place

    __hash__ = str.__hash__


def listed() -> dict[str, list[str]]:
    """Every test, as ``{suite: [test names]}``. Reads their source, imports nothing. Those of MPI: what gloo has not got."""
    import torch

    path = Path(torch.__file__).parent.parent.joinpath(*MODULE.split(".")).with_suffix(".py")
    tests = tests_of(path).get("_DistTestBase", []) if path.exists() else []
    return {"gloo": tests, "mpi": [test for test in tests if "all_to_all" in test and "cuda" not in test]}


def _imported(place: str) -> Any:
    """The module of tests, as for the backend ``place``, under a name of its own: its classes are pickled by reference."""
    found = importlib.util.find_spec(MODULE)
    assert found is not None and found.origin is not None
    os.environ["BACKEND"] = place
    spec = importlib.util.spec_from_file_location(f"{MODULE}_{place}", found.origin)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.BACKEND = Name(BACKEND)
    module.BACKEND.place = place
    os.environ["BACKEND"] = BACKEND
    return module


def load() -> dict[str, type]:
    """``{suite: class}``, ready to be made with the name of a test and given ``rank`` and ``file_name``; a test runs in
    ``around``."""
    os.environ |= {
        "WORLD_SIZE": str(SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "TEMP_DIR": "/nowhere",
        "INIT_METHOD": "file:///nowhere",
    }
    for name in ("backend", "by_name"):  # here, not in every process that is forked
        importlib.import_module(f"rdmarpc.collectives.{name}")
    return {place: _case(_imported(place)) for place in PLACES}


def _case(module: Any) -> type:
    skips = {skip.exit_code: skip.message for skip in module.TEST_SKIPS.values()}

    class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        @property
        def world_size(self) -> int:  # theirs is text
            return SIZE

        @contextlib.contextmanager
        def around(self, test: str) -> Iterator[None]:
            """What torch does around a test, in the process of a rank."""
            if getattr(getattr(type(self), test), "__unittest_skip__", False):
                raise unittest.SkipTest(getattr(type(self), test).__unittest_skip_why__)
            dist = module.dist
            folder = Path(self.file_name).parent / "temp"
            for name in ("barrier", "test_dir"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            os.environ["TEMP_DIR"] = str(folder)
            module.INIT_METHOD = f"file://{folder}/again"
            seconds = module.CUSTOM_PG_TIMEOUT.get(test, module.default_pg_timeout)
            dist.init_process_group(
                BACKEND, self.init_method, timedelta(seconds=seconds), rank=self.rank, world_size=self.world_size
            )
            self._barrier()
            module.torch.testing._internal.common_utils.set_rng_seed()
            try:
                yield
            except SystemExit as end:
                if end.code in skips:
                    raise unittest.SkipTest(skips[end.code]) from None
                raise
            self._barrier()
            dist.destroy_process_group()

    return Case
