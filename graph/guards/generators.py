"""The random generators that each process has of its own: their states, and whether somebody has drawn from them."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...transport import NotSupported

PYTHON, NUMPY = "Python's random", "numpy.random"
_WORDS = 624


def generators() -> dict[str, Any]:
    """The states of the generators that are each process's own, but torch's."""
    found: dict[str, Any] = {PYTHON: random.getstate()}
    if "numpy" in sys.modules:
        found[NUMPY] = sys.modules["numpy"].random.get_state()
    return found


def drawn_since(states: dict[str, Any]) -> list[str]:
    """Those that are in another state than in ``states``."""
    now = generators() if states else {}
    return [name for name, state in states.items() if not _equal(state, now[name])]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "tobytes"):  # an array of numpy's
        return one.tobytes() == other.tobytes()
    return one == other


def draw_again(states: dict[str, Any]) -> None:
    """Put them back."""
    if states:
        random.setstate(states[PYTHON])
    if NUMPY in states:
        sys.modules["numpy"].random.set_state(states[NUMPY])


def torch_mark(gpu: torch.device | None = None) -> bytes:
    """Something that is another one after every draw from torch's generators of the CPU and of this accelerator."""
    state = torch.default_generator.get_state().numpy().tobytes()
    if gpu is not None:
        generator = torch.get_device_module(gpu).default_generators[gpu.index or 0]
        state += generator.get_state().numpy().tobytes()
    return state


def python_marks() -> dict[str, Any]:
    """By generator that is none of torch's, something that is another one after every draw. Faster than their states."""
    found = {PYTHON: _python_mark()}
    if "numpy" in sys.modules:
        generator = sys.modules["numpy"].random.mtrand._rand
        # Half of the normal numbers are kept from the draw before.
        found[NUMPY] = _numpy_mark(generator._bit_generator), generator.get_state(legacy=False)["has_gauss"]
    return found


def _reader() -> Callable[[], Any]:
    """Reads where Python's generator stands from its memory, if that is laid out as known: ``getstate`` makes 625 objects."""
    trial = random.Random(7)
    place = id(trial) + object.__basicsize__
    for _ in range(3):
        trial.random()
        words = trial.getstate()[1]
        if ctypes.c_int.from_address(place).value != words[-1] or ctypes.c_uint32.from_address(place + 4).value != words[0]:
            return random.getstate
    inner: Any = random._inst
    place = id(inner) + object.__basicsize__
    index, first = ctypes.c_int.from_address(place), ctypes.c_uint32.from_address(place + 4)
    return lambda: (index.value, first.value, inner.gauss_next)  # every other gauss() is kept from the call before


_python_mark = _reader()


def _numpy_mark(generator: Any) -> Any:
    try:
        place = generator.ctypes.state_address
    except AttributeError:  # somebody has set another kind of generator
        return repr(generator.state)
    if type(generator).__name__ != "MT19937":
        return repr(generator.state)
    return ctypes.c_int.from_address(place + 4 * _WORDS).value, ctypes.c_uint32.from_address(place).value


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Refuse a trace that draws from torch's generator: it would draw once and for all. The generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        yield
        if not torch.equal(before, torch.get_rng_state()):
            raise drawn_once("torch's generator, not from a traced operation")


def drawn_once(what: str) -> NotSupported:
    return NotSupported(
        f"the forward draws random numbers from {what}, which a trace would do once and for all",
        hint="a part that lies at one worker as a whole may do so",
    )
