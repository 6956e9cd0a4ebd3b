"""Arrays of cupy as arguments and results. On CUDA with the real one; elsewhere with a stand-in over the GPU in software
(``softcupy``), which tests what is ours: orders of streams, lifetimes, and that nothing goes through the host.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import gpu
import numpy as np
import pytest
import torch
from called import identity
from group import Outcome, results, run_group

import rdmarpc as rpc

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
CUPY = {"SOFTCUPY": "1"}


@pytest.fixture(autouse=True)
def with_cupy() -> None:
    if gpu.TYPE == "cuda":
        pytest.importorskip("cupy")


def run(scenario: Any, **options: Any) -> list[Any]:
    return results(group(scenario, **options))


def group(scenario: Any, **options: Any) -> list[Outcome]:
    return run_group(scenario, gpu=True, environment=dict(CUPY), **options)


def fill_later(array: Any, value: float, ms: float) -> None:
    """A slow kernel on cupy's current stream: after ``ms`` the array (float32) holds ``value``. Returns at once."""
    import cupy

    gpus = torch.get_device_module(gpu.TYPE)
    with gpus.stream(gpus.ExternalStream(cupy.cuda.get_current_stream().ptr, device=array.device.id)):
        gpu.fill_later(torch.from_dlpack(array), value, ms)


def counters() -> dict[str, int]:
    from rdmarpc.calls import agent

    return agent.current().counters()


# -- what arrives


@dataclass
class Holder:
    name: str
    array: Any


def described(value: Any) -> Any:
    """What came, as its worker sees it."""
    return type(value).__module__, type(value).__name__, value.device.id, value.shape, value.get()


def imported() -> bool:
    return "cupy" in sys.modules


def same(left: Any, right: Any) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bool((left.get() == right.get()).all())


def arguments_and_results(rank: int) -> Any:
    found = None
    if rank == 0:
        import cupy

        assert not rpc.rpc_sync("worker1", imported)
        ramp = cupy.asarray(np.arange(1000, dtype=np.float32))
        module, name, device, shape, values = rpc.rpc_sync("worker1", described, (ramp,))
        assert (module, name, device, shape) == ("cupy", "ndarray", 0, (1000,)) and (values == np.arange(1000)).all()
        for array in (
            ramp,
            ramp.reshape(10, 100).T,
            ramp.reshape(10, 100)[2:7],
            ramp[::3],
            ramp[5:6].reshape(()),
            ramp[:0],
            cupy.asarray(np.array([True, False, True])),
            cupy.asarray(np.array([1, 2, 65535], dtype=np.uint16)),
            cupy.asarray(np.array([1 + 2j, 3 - 4j], dtype=np.complex64)),
            cupy.asarray(np.array(2.5)),
        ):
            for back in (rpc.rpc_sync("worker1", identity, (array,)), rpc.rpc_async("worker1", identity, (array,)).wait()):
                assert type(back) is cupy.ndarray and same(back, array)
                assert back.strides == array.strides
        back = rpc.rpc_sync("worker1", identity, (ramp[::-1],))
        assert (back.get() == np.arange(1000)[::-1]).all()
        things = {
            "list": [ramp, 3],
            "held": Holder("x", ramp),
            "tensor": torch.ones(3),
            "on gpu": torch.ones(3, device=gpu.device()),
        }
        back = rpc.rpc_sync("worker1", identity, (things,))
        assert back["list"][0] is back["held"].array and same(back["list"][0], ramp) and back["held"].name == "x"
        assert back["tensor"].eq(1).all() and back["on gpu"].cpu().eq(1).all() and back["list"][1] == 3
        held = rpc.remote("worker1", identity, (Holder("there", ramp),))
        assert same(held.to_here().array, ramp) and same(rpc.rpc_sync("worker1", identity, (held,)).to_here().array, ramp)
        assert same(rpc.rpc_sync("worker0", identity, (ramp,)), ramp)  # a call to oneself
        assert same(rpc.rpc_async("worker1", identity, (ramp,)).then(lambda done: done.wait()).wait(), ramp)
        found = counters(), rpc.rpc_sync("worker1", counters)
    rpc.shutdown()
    return found


def test_arrays_go_from_gpu_to_gpu_as_arrays() -> None:
    here, there = run(arguments_and_results)[0]
    assert here["gpu_bytes_direct"] > 40_000 and there["gpu_bytes_direct"] > 40_000
    assert here["bytes_staged"] == there["bytes_staged"] == 0


def mapped(rank: int) -> None:
    if rank == 0:
        import cupy

        other = 1 if gpu.TYPE == "softgpu" else 0
        with cupy.cuda.Device(other):
            array = cupy.full(1000, 4.0)
        assert rpc.rpc_sync("worker1", described, (array,))[2] == 0
        back = rpc.rpc_sync("worker1", identity, (array,))
        assert back.device.id == other and (back.get() == 4).all()
    rpc.shutdown()


def test_device_maps_hold_for_arrays() -> None:
    other = 1 if gpu.TYPE == "softgpu" else 0
    run(mapped, each={0: {"device_maps": {"worker1": {other: 0}}}})


# -- the order of streams


def doubled(value: Any) -> Any:
    """By cupy, on its current stream."""
    made = value.copy()
    fill_later(made, 2 * float(value[:1].get()[0]), 50.0)
    return made


def on_streams(rank: int) -> None:
    """Nothing of this waits on the host, but ``get``."""
    if rank == 0:
        import cupy

        array = cupy.full(100_000, 1.0)
        for turn in range(1, 5):
            with cupy.cuda.Stream(non_blocking=True) as stream:
                fill_later(array, float(turn), 100.0)
                before = gpu.host_waits()
                if turn % 2:
                    back = rpc.rpc_sync("worker1", identity, (array,))
                else:
                    future = rpc.rpc_async("worker1", identity, (array,))
                    future.then(lambda done: None)  # so a thread of the pool may be the one that unpickles
                    back = future.wait()
                assert gpu.host_waits() == before
                assert (back.get() == turn).all()
                assert (rpc.rpc_async("worker1", doubled, (array,)).wait().get() == 2 * turn).all()
                stream.synchronize()
    rpc.shutdown()


def test_the_current_streams_of_cupy_are_followed() -> None:
    run(on_streams)


def let_go(rank: int) -> None:
    """An array dies while cupy's stream still has to read it. Its memory is torch's, and is not given out before."""
    if rank == 0:
        import cupy

        value = cupy.full(100_000, 1.0)
        for turn in range(8):
            with cupy.cuda.Stream(non_blocking=True) as stream:
                back = (
                    rpc.rpc_sync("worker1", identity, (value,))
                    if turn % 2
                    else rpc.rpc_async("worker1", identity, (value,)).wait()
                )
                fill_later(cupy.empty(1), 0.0, 100.0)
                copied = back.copy()
                del back
                others = [rpc.rpc_sync("worker1", identity, (cupy.full(100_000, 9.0),)) for _ in range(3)]
                assert (copied.get() == 1).all()
                stream.synchronize()
                del others
    rpc.shutdown()


def test_memory_of_an_array_outlives_what_its_stream_reads() -> None:
    run(let_go)


# -- what is refused


def hide() -> None:
    sys.modules["cupy"] = None  # type: ignore[assignment]


def refused(rank: int) -> None:
    if rank == 0:
        import cupy

        with pytest.raises(Exception, match=r"cupy\.ndarray of dtype \|V8.*\(in args\[0\]\['here'\], a ndarray\)"):
            rpc.rpc_sync("worker1", identity, ({"here": cupy.empty(3, "V8")},))
        rpc.rpc_sync("worker1", hide)
        with pytest.raises(RuntimeError, match="Install cupy here"):
            rpc.rpc_sync("worker1", identity, (cupy.full(3, 1.0),))
    rpc.shutdown()


def test_what_cannot_travel_is_said() -> None:
    run(refused)


def allowed() -> list[Any]:
    import called

    return [called, sys.modules[__name__]]


def careful(rank: int) -> None:
    if rank == 0:
        import cupy

        array = cupy.full(1000, 3.0)
        with pytest.raises(RuntimeError, match="nothing is imported for a peer"):
            rpc.rpc_sync("worker1", identity, (array,))
        rpc.rpc_sync("worker1", load)
        assert same(rpc.rpc_sync("worker1", identity, (array,)), array)
    rpc.shutdown()


def load() -> None:
    import cupy  # noqa: F401


def test_with_allow_cupy_is_not_imported_for_a_peer() -> None:
    run(careful, allow=allowed)
