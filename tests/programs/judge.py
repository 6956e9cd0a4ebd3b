"""Whether a program does the same over a placed model as in one process, bit for bit."""

from __future__ import annotations

import dataclasses
import gc
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

Place = Callable[[nn.Module, Any], nn.Module]
"""Moves what ``{path: worker}`` says. Chosen programs have their own way to say it (``probes.spread``)."""
Program = Callable[[Place, Callable[[str, Any], None]], None]

Recipe = TypeVar("Recipe")
"""What a program is made of, as a module that draws programs has it."""

GOOD = ("equal", "same error", "late error")
"""``late error``: the text of the error of one process, raised later or as another type."""
KINDS = (*GOOD, "refused", "other text", "metadata", "rounded", "other error", "WRONG", "CRASH", "HANG")
"""``other text``: the type of error of one process, with another text. ``metadata``: bits are equal, but not what autograd or
strides say. ``other error``: one process has none, or one of another type."""


class Verdict(NamedTuple):
    kind: str
    detail: str = ""


Leaves = list[tuple[str, Any]]
"""A value's parts that can be compared, with names."""


class Bits(NamedTuple):
    """A tensor as it was when it was noted."""

    tensor: torch.Tensor
    metadata: tuple[Any, ...]


@dataclasses.dataclass
class Outcome:
    seen: list[tuple[str, Leaves]]
    """What the program kept, in order."""
    state: list[tuple[str, Leaves]]
    """Of its models and of the generators here, at the end."""
    error: Exception | None


def home(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the value in this process's memory."""
    found = tensor.detach().cpu().clone().as_subclass(torch.Tensor)
    return found.rename(None) if any(getattr(found, "names", ())) else found  # torch before 2.13


def judged(program: Program, place: Place) -> Verdict:
    """One process is the oracle: the same program runs over ``place``'s models, and all that can be seen is compared."""
    return compared(outcome(program, lambda net, _: net), outcome(program, place))


def outcome(program: Program, place: Place) -> Outcome:
    _reset()
    seen: list[tuple[str, Leaves]] = []
    nets: list[nn.Module] = []

    def placed(net: nn.Module, placement: Any = None) -> nn.Module:
        net = place(net, placement)
        nets.append(net)
        return net

    def keep(name: str, value: Any) -> None:
        seen.append((name, list(leaves(name, value))))

    state: list[tuple[str, Leaves]] = []
    error: Exception | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program(placed, keep)
        except Exception as raised:
            error = raised
        try:
            for net in nets:
                state.append(("state", list(leaves("state", net))))
        except Exception as raised:
            error = error or raised
        state.append(("generators", list(leaves("generators", [torch.get_rng_state(), random.getstate()]))))
        while nets:
            if callable(close := getattr(nets.pop(), "close", None)):
                close()
        gc.collect()
    return Outcome(seen, state, error)


def _reset() -> None:
    """What a program may have changed for all of the process."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Tensors are copied now."""
    if isinstance(value, torch.Tensor):
        yield from _tensor(name, value)
    elif isinstance(value, nn.Module):
        owners: dict[int, str] = {}
        for path, p in value.named_parameters(remove_duplicate=False):
            if (first := owners.setdefault(id(p), path)) != path:
                yield f"{name}.{path}", f"is {first}"
                continue
            yield from _tensor(f"{name}.{path}", p)
            yield from leaves(f"{name}.{path}.grad", p.grad)
        for path, b in value.named_buffers():
            yield from _tensor(f"{name}.{path}", b)
        yield f"{name} keys", list(value.state_dict())
    elif isinstance(value, torch.optim.Optimizer):
        yield from leaves(name, value.state_dict())
    elif isinstance(value, Mapping):
        yield f"{name} keys", [str(key) for key in value]
        for key, item in value.items():
            yield from leaves(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        yield f"{name} length", len(value)
        for n, item in enumerate(value):
            yield from leaves(f"{name}[{n}]", item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(f"{name}.{field.name}", getattr(value, field.name))
    else:
        yield name, value if isinstance(value, Exception) else (type(value).__name__, said(value))


def _tensor(name: str, value: torch.Tensor) -> Iterator[tuple[str, Any]]:
    node = type(value.grad_fn).__name__ if value.grad_fn is not None else None
    metadata = (value.requires_grad, value.is_leaf, node, isinstance(value, nn.Parameter))
    if value.layout == torch.sparse_coo:
        yield f"{name} sparse", (tuple(value.shape), value.is_coalesced(), metadata)
        yield from _tensor(f"{name} indices", value.detach()._indices())
        yield from _tensor(f"{name} values", value.detach()._values())
        return
    strides = value.stride() if value.layout == torch.strided else None
    yield name, Bits(home(value), (strides, value.is_complex() and value.is_conj(), *metadata))


def said(value: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", str(value))


def compared(one: Outcome, other: Outcome) -> Verdict:
    if _refuses(other.error):
        return Verdict("refused", said(other.error))
    late = one.error is not None and len(one.seen) != len(other.seen)
    length = min(len(one.seen), len(other.seen)) if late or other.error is not None else len(one.seen)
    found = worst_of(one.seen[:length], other.seen[:length] if late else other.seen)
    if one.error is None and other.error is None:
        parted = found.kind in ("refused", "other error")  # what follows has its reason in that
        return found if parted else max(found, worst_of(one.state, other.state), key=rank)
    if found.kind == "WRONG":
        return found
    if one.error is None or other.error is None:
        said_so = _told(other.error) if other.error is not None else f"nothing, not {_told(one.error)}"
        return Verdict("other error" if other.error is not None else "WRONG", said_so)
    text = said(one.error)
    if late or type(one.error) is not type(other.error):
        return Verdict("late error" if text in said(other.error) else "other error", _told(other.error))
    if text != said(other.error):
        return Verdict("other text", f"{said(other.error)} | {text}")
    found = max(found, worst_of(one.state, other.state), key=rank)
    return Verdict("same error", text) if found.kind == "equal" else found


def rank(verdict: Verdict) -> int:
    return KINDS.index(verdict.kind)


def _refuses(value: Any) -> bool:
    """By name: ``rdmarpc.NotSupported``, also where an error of torch's has it as its cause."""
    while isinstance(value, BaseException):
        if any(kind.__name__ == "NotSupported" for kind in type(value).__mro__):
            return True
        value = value.__cause__
    return False


def _told(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({last[0].filename.rpartition('/')[2]}:{last[0].lineno})" if last else ""
    notes = "".join(f" {said(note)}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {said(error)}{notes}{where}"


def worst_of(one: list[tuple[str, Leaves]], other: list[tuple[str, Leaves]]) -> Verdict:
    """Up to a refusal, or an error of one alone, whose name says that later values depend on it."""
    worst = Verdict("equal")
    for n, ((name, a), (other_name, b)) in enumerate(zip(one, other)):
        if name != other_name:
            found = _same(None, b[0][1])
            return Verdict(found.kind, f"{n}: {other_name} is kept, not {name}: {found.detail}")
        found = _group(a, b)
        if rank(found) > rank(worst):
            worst = Verdict(found.kind, f"{n}: {found.detail}")
        if found.kind in ("refused", "other error") and name.startswith("write"):
            return worst
    if len(one) != len(other):
        return Verdict("WRONG", f"{len(other)} values are kept, not {len(one)}")
    return worst


def _group(one: Leaves, other: Leaves) -> Verdict:
    if len(other) == 1 and isinstance(error := other[0][1], Exception) and not isinstance(one[0][1], Exception):
        return Verdict("refused" if _refuses(error) else "other error", f"{other[0][0]}: {_told(error)}")
    worst = Verdict("equal")
    for (name, a), (other_name, b) in zip(one, other):
        if name != other_name:  # an error in the place of several values, say
            return max(worst, _same(None, b), Verdict("other error", f"{other_name}, not {name}"), key=rank)
        found = _same(a, b)
        if rank(found) > rank(worst):
            worst = Verdict(found.kind, f"{name}: {found.detail}")
    if len(one) != len(other):
        return max(worst, Verdict("WRONG", f"{len(other)} parts, not {len(one)}"), key=rank)
    return worst


def _same(a: Any, b: Any) -> Verdict:
    if _refuses(b):
        return Verdict("refused", said(b))
    if isinstance(a, Exception) and isinstance(b, Exception):
        if type(a) is not type(b):
            return Verdict("other error", _told(b))
        return Verdict("equal") if said(a) == said(b) else Verdict("other text", f"{said(b)} | {said(a)}")
    if isinstance(b, Exception):
        return Verdict("other error", _told(b))
    if not (isinstance(a, Bits) and isinstance(b, Bits)):
        return Verdict("equal") if type(a) is type(b) and a == b else Verdict("WRONG", f"{str(b)[:200]}, not {str(a)[:200]}")
    if (a.tensor.shape, a.tensor.dtype) != (b.tensor.shape, b.tensor.dtype):
        return Verdict("WRONG", f"{b.tensor.dtype} {list(b.tensor.shape)}, not {a.tensor.dtype} {list(a.tensor.shape)}")
    if (kind := closeness(a.tensor, b.tensor)) != "equal":
        return Verdict(kind, f"{b.tensor.flatten()[:6].tolist()}, not {a.tensor.flatten()[:6].tolist()}")
    return Verdict("equal") if a.metadata == b.metadata else Verdict("metadata", f"{b.metadata}, not {a.metadata}")


def closeness(a: torch.Tensor, b: torch.Tensor) -> str:
    """``equal`` in every bit (a NaN is any NaN), ``rounded``, or ``WRONG``."""
    a, b = a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return "equal" if torch.equal(a, b) else "WRONG"
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    a, b = a.contiguous(), b.contiguous()
    if bool(((a.view(words) == b.view(words)) | (a.isnan() & b.isnan())).all()):
        return "equal"
    scale = float(a.double().nan_to_num(0, 0, 0).abs().max())
    near = 0.05 if a.element_size() == 2 else 1e-3
    return "rounded" if torch.allclose(a.double(), b.double(), near, 1e-4 * scale, equal_nan=True) else "WRONG"


def shrunk(made: Recipe, smaller: Callable[[Recipe], Iterator[Recipe]], fails: Callable[[Recipe], bool]) -> Recipe:
    """A recipe that still ``fails`` and of which nothing can be taken away."""
    while less := next((less for less in smaller(made) if fails(less)), None):
        made = less
    return made


def less(parts: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Either half of them, and all but one."""
    half = len(parts) // 2
    if half > 1:
        yield parts[:half]
        yield parts[half:]
    for n in range(len(parts)):
        yield parts[:n] + parts[n + 1 :]
