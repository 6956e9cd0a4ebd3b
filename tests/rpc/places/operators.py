"""torch's operator database over tensors that lie at workers, beside the same calls in one process, bit for bit.

``python -m tests.rpc.places.operators [NAMES] --dtypes float32,complex64,int64 --out operators.tsv`` prints a table.
Each operator is run forward, with gradients and in place where it has these, in three modes. ``remote``: all operands at one
worker; twice, because the first call of a form is a question and later ones are posts. ``mixed``: each operand at one of two
workers or here, drawn. ``out``: as ``remote``, with ``out=``, for operators that have it. The dtypes: float32 is what programs
compute in; complex64 has conjugate and negative views, and gradients of its own; int64 has no gradients, other promotions,
and the most operators that raise.

Verdicts: ``equal``; ``refused`` (``NotSupported``, and equal where not); ``different``; ``error`` (raised, where one process
did not, or another type); ``crash`` (a process died, or did nothing for a minute).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path[:0] = [str(Path(__file__).parents[2] / "helpers")]

from forks import forks  # noqa: E402

from rdmarpc.places.geometry import bare, dressed, geometry  # noqa: E402
from rdmarpc.places.stream import meta_of  # noqa: E402
from rdmarpc.places.tensor import RemoteTensor, at_place, wrapper  # noqa: E402
from rdmarpc.transport import NotSupported  # noqa: E402

MODES = ("remote", "mixed", "out")
VERDICTS = ("equal", "refused", "different", "error", "crash")
SAMPLES = 10
_PATIENCE_S = 60.0
_UNINITIALISED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted", "resize_")
"""Operators whose results have no defined values."""
_FOREACH = ("unary", "binary", "pointwise", "reduce", "other")


@functools.cache
def operators() -> dict[str, Any]:
    """All of the database, the foreach operators too, by name."""
    from torch.testing._internal import common_methods_invocations as database  # seconds, and workers need it not

    database.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)  # it hides the random state
    lists = (getattr(database, f"foreach_{kind}_op_db") for kind in _FOREACH)
    return {op.formatted_name: op for op in itertools.chain(database.op_db, *lists)}


class Row(NamedTuple):
    """What became of an operator with a dtype in a mode. ``text``: of the first sample that was not equal."""

    operator: str
    dtype: str
    mode: str
    verdict: str
    samples: int
    text: str


# -- samples, and the same tensors once more, here or at workers


def seed(number: int) -> None:
    """``torch.manual_seed`` for the CPU alone: that one keeps the caller's stack for each kind of device that is not there,
    which takes longer than most operators."""
    torch.default_generator.manual_seed(number)


def samples(op: Any, dtype: torch.dtype, requires_grad: bool, count: int) -> list[Any]:
    """Up to ``count`` of an operator's samples, spread over all of them."""
    seed(7)
    random.seed(7)
    # The database seeds before each sample. Before the first it reads the source of every caller for a unittest, twice.
    with mock.patch("torch.manual_seed", seed), mock.patch("inspect.stack", list):
        found = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), 400))
    return found[:: -(-len(found) // count)] if len(found) > count else found


def twins(value: Any, where: Callable[[], Any]) -> Any:
    """The operands once more, each at the place that ``where`` draws for its storage. What shared memory shares it again."""
    storages: dict[int, tuple[Any, Any, Any]] = {}
    made: dict[int, torch.Tensor] = {}
    given = {id(each): each for each in tree_leaves(value) if isinstance(each, torch.Tensor) and each.layout is torch.strided}
    users = Counter(each.untyped_storage()._cdata for each in given.values())

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = new(tensor.detach()).requires_grad_(tensor.requires_grad)
        return made[id(tensor)]

    def new(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            place = where()
            return at_place(tensor.clone(), place) if tensor.layout is torch.sparse_coo else tensor.clone()
        shape, offset, storage = geometry(tensor), tensor.storage_offset(), tensor.untyped_storage()
        if storage._cdata not in storages:
            copy, place = storage.clone(), where()
            whole = None if place is None else at_place(torch.empty(0, dtype=torch.uint8).set_(copy), place)
            storages[storage._cdata] = copy, place, whole
        copy, place, whole = storages[storage._cdata]
        alone = users[storage._cdata] == 1 and shape.span * shape.dtype.itemsize == storage.nbytes()
        if whole is not None and not alone:
            return wrapper(whole._handle, meta_of(shape), offset, offset)
        plain = torch.empty(0, dtype=tensor.dtype).set_(copy, offset, shape.shape, shape.strides)
        return at_place(dressed(plain, shape), place)

    return tree_map_only(torch.Tensor, twin, value)


# -- one call, and all that may be seen of it


def bits(tensor: torch.Tensor) -> Any:
    """The numbers of a tensor, wherever it lies, as bytes."""
    tensor = at_place(tensor.detach(), None)
    if tensor.layout is torch.sparse_coo:
        return bits(tensor._indices()), bits(tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return bits(tensor.crow_indices()), bits(tensor.col_indices()), bits(tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return bits(tensor.ccol_indices()), bits(tensor.row_indices()), bits(tensor.values())
    flat = bare(tensor).clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def memory(tensor: torch.Tensor) -> int:
    if isinstance(tensor, RemoteTensor):
        return id(tensor._handle)
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def seen(tensor: torch.Tensor, operands: list[torch.Tensor], values: bool) -> dict[str, Any]:
    strided = tensor.layout is torch.strided
    found: dict[str, Any] = {
        "shape": tuple(tensor.shape),
        "dtype": tensor.dtype,
        "layout": tensor.layout,
        "strides": tensor.stride() if strided else None,
        "offset": tensor.storage_offset() if strided else None,
        "conj, neg": (tensor.is_conj(), tensor.is_neg()),
        "requires_grad": tensor.requires_grad,
        "has a node": tensor.grad_fn is not None,
        "is operand": next((i for i, each in enumerate(operands) if each is tensor), None),
        "memory of": next((i for i, each in enumerate(operands) if memory(each) == memory(tensor)), None),
        "view": tensor._is_view(),
    }
    if values:
        found["bits"] = bits(tensor)
    return found


def outcome(
    call: Callable[..., Any], args: Any, kwargs: Any, gradient: Callable[[Any], Any] | None, values: bool
) -> dict[str, Any]:
    """What may be seen of a call: results, gradients of ``gradient(results)``'s sum, operands, random state; or its error."""
    found: dict[str, Any] = {}
    operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    versions = [each._version for each in operands]
    seed(11)
    try:
        results = call(*args, **kwargs)
        found["results"] = [
            seen(each, operands, values) if isinstance(each, torch.Tensor) else repr(each) for each in tree_leaves(results)
        ]
        wanted = [each for each in operands if each.requires_grad]
        if gradient is not None and wanted:
            out = [each for each in tree_leaves(gradient(results)) if isinstance(each, torch.Tensor) and each.requires_grad]
            total = [(each.real if each.is_complex() else each).sum() for each in out]
            grads = torch.autograd.grad(total, wanted, allow_unused=True) if total else ()
            found["gradients"] = [None if each is None else seen(each, [], values) for each in grads]
        found["operands"] = [
            (each._version - before, bits(each) if values else None) for each, before in zip(operands, versions)
        ]
    except Exception as error:
        if isinstance(error, NotSupported):
            raise
        return {"error": type(error).__name__, "text": str(error), "random state": bytes(torch.get_rng_state().numpy())}
    found["random state"] = bytes(torch.get_rng_state().numpy())
    return found


def difference(ours: Any, theirs: Any, path: str = "") -> str:
    """Where two outcomes differ first; "" nowhere."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if "error" in ours or "error" in theirs:
            if ours.get("error") != theirs.get("error"):
                return f"!{ours.get('error')}: {ours.get('text')} (one process: {theirs.get('error')}: {theirs.get('text')})"
            return ""
        keys = dict.fromkeys([*ours, *theirs])
        return next(filter(None, (difference(ours.get(key), theirs.get(key), f"{path}.{key}") for key in keys)), "")
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        return next(filter(None, (difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(ours, theirs)))), "")
    if ours == theirs:
        return ""
    return f"{path[1:]}: {_short(ours)} (one process: {_short(theirs)})"


def _short(value: Any) -> str:
    return f"{len(value)} bytes {value[:16].hex()}" if isinstance(value, bytes) else repr(value)[:100]


# -- an operator


def calls(op: Any, dtype: torch.dtype, mode: str, count: int) -> Iterator[tuple[str, Callable[..., Any], Any, Any, Any]]:
    """Calls of an operator to compare: (what it is, function, arguments, keyword arguments, what gradients are taken of)."""
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    for number, sample in enumerate(samples(op, dtype, grad, count)):
        args = (sample.input, *sample.args)
        still = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, sample.kwargs))
        if mode == "out":
            yield f"sample {number}", _into(op.op), *still, None
            continue
        yield f"sample {number}", op.op, args, sample.kwargs, sample.output_process_fn_grad if grad else None
        if op.inplace_variant is not None:
            yield f"sample {number} in place", op.inplace_variant, *still, None
            if grad and op.supports_inplace_autograd:
                yield f"sample {number} in place with gradients", _on_a_copy(op.inplace_variant), args, sample.kwargs, _same
    errors = getattr(op, "error_inputs_func", None)
    if errors is not None and dtype is torch.float32 and mode != "out":
        for number, wrong in enumerate(itertools.islice(op.error_inputs("cpu"), 6)):
            sample = wrong.sample_input
            yield f"error {number}", op.op, (sample.input, *sample.args), sample.kwargs, None


def _same(value: Any) -> Any:
    return value


def _on_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        copy = tree_map_only(torch.Tensor, torch.Tensor.clone, first)
        found = function(copy, *args, **kwargs)
        return copy if found is None else found

    return call


def _into(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with ``out=``: tensors as its results are, that lie where its results lie."""

    def call(*args: Any, **kwargs: Any) -> Any:
        state = torch.get_rng_state()
        results = function(*args, **kwargs)
        torch.set_rng_state(state)
        if isinstance(results, torch.Tensor):
            out: Any = torch.full_like(results, 1)
        else:
            out = tuple(torch.full_like(each, 1) for each in results)
        found = function(*args, **kwargs, out=out)
        same = [a is b for a, b in zip(tree_leaves(found), tree_leaves(out))]
        return found, out, same

    return call


def varies(function: Callable[..., Any], args: Any, kwargs: Any, gradient: Any, values: bool, before: Any) -> bool:
    """Whether one process does not agree with itself (``torch.linalg.lstsq`` of some LAPACK): there is nothing to compare."""
    again = (outcome(function, *twins((args, kwargs), lambda: None), gradient, values) for _ in range(8))
    return any(difference(each, before) for each in again)


def compare(name: str, dtype: torch.dtype, mode: str, count: int) -> Row:
    """Run an operator at the workers of this process's group and here."""
    from rdmarpc import places

    op = operators()[name]
    workers = [places.stream_to("worker1"), places.stream_to("worker2")]
    draw = random.Random(f"{name} {dtype} {mode}")
    verdict, text, tried = "equal", "", 0
    values = op.name not in _UNINITIALISED

    def fail(kind: str, why: str, what: str) -> None:
        nonlocal verdict, text
        if VERDICTS.index(kind) > VERDICTS.index(verdict):
            verdict, text = kind, f"{what}: {why}"

    for what, function, args, kwargs, gradient in calls(op, dtype, mode, count):
        tried += 1
        theirs = outcome(function, *twins((args, kwargs), lambda: None), gradient, values)
        for _ in range(1 if mode == "mixed" else 2):
            where = (lambda: draw.choice([*workers, None])) if mode == "mixed" else (lambda: workers[0])
            try:
                ours = outcome(function, *twins((args, kwargs), where), gradient, values)
            except NotSupported as error:
                fail("refused", str(error), what)
                continue
            except Exception as error:
                fail("error", f"{type(error).__name__}: {error}", what)
                continue
            if (why := difference(ours, theirs)) and not varies(function, args, kwargs, gradient, values, theirs):
                fail("error" if why[0] == "!" else "different", why.lstrip("!"), what)
        for stream in places.streams():
            try:
                stream.synchronize()
            except Exception as error:
                fail("error", f"late: {type(error).__name__}: {error}", what)
    return Row(name, str(dtype)[6:], mode, verdict, tried, " ".join(text.split())[:300])


# -- processes


def _worker(rank: int, store: str, pipe: Any) -> None:
    import rdmarpc as rpc
    from rdmarpc import places

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    options = rpc.RpcBackendOptions(init_method=f"file://{store}", rpc_timeout=30)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank == 0:
        while (job := pipe.recv()) is not None:
            function, args = job
            try:
                pipe.send(("ok", function(*args)))
            except BaseException as error:
                pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        places.close_streams()
    rpc.shutdown()


class Group:
    """A caller and two workers, in processes of their own. ``ask`` runs a function at the caller."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._pipe, theirs = forks().Pipe()
        store = str(Path(self._folder.name) / "store")
        self.processes = [
            forks().Process(target=_worker, args=(rank, store, theirs if rank == 0 else None), daemon=True) for rank in range(3)
        ]
        for process in self.processes:
            process.start()
        theirs.close()

    def ask(self, function: Callable[..., Any], *args: Any, patience: float = _PATIENCE_S) -> Any:
        """``ChildProcessError`` when a process has died, or is not done in time; the group is of no more use then."""
        try:
            self._pipe.send((function, args))
            if not self._pipe.poll(patience):
                raise ChildProcessError(f"not done after {patience:g} s")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.processes[0].join(5)
            raise ChildProcessError(str(error) or f"the caller died with {self.processes[0].exitcode}") from None
        if dead := [process.exitcode for process in self.processes[1:] if not process.is_alive()]:
            raise ChildProcessError(f"a worker died with {dead[0]}")
        if kind == "error":
            raise RuntimeError(value)
        return value

    def close(self) -> None:
        try:
            self._pipe.send(None)
            for process in self.processes:
                process.join(20)
        except OSError:
            pass
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join(5)
        self._pipe.close()
        self._folder.cleanup()


def run(jobs: list[tuple[str, torch.dtype, str]], count: int, said: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """The verdict of each (operator, dtype, mode)."""
    rows: list[Row] = []
    group: Group | None = None
    try:
        for name, dtype, mode in jobs:
            group = group or Group()
            try:
                row = group.ask(compare, name, dtype, mode, count)
            except ChildProcessError as error:
                group.close()
                group = None
                row = Row(name, str(dtype)[6:], mode, "crash", 0, str(error))
            except RuntimeError as error:
                row = Row(name, str(dtype)[6:], mode, "error", 0, f"before its calls: {str(error).splitlines()[0]}"[:300])
            rows.append(row)
            said(row)
    finally:
        if group is not None:
            group.close()
    return rows


def jobs_of(names: list[str], dtypes: list[torch.dtype], modes: list[str]) -> list[tuple[str, torch.dtype, str]]:
    """Every operator that has a dtype on the CPU. ``names``: these, or those that begin so with a ``*`` behind; none is all."""
    every = operators()
    chosen = [each for each in every if not names or any(_meant(each, name) for name in names)]
    return [
        (each, dtype, mode)
        for each in chosen
        for dtype in dtypes
        for mode in modes
        if dtype in every[each].supported_dtypes("cpu")
        if mode != "out" or (every[each].supports_out and not each.startswith("_foreach"))
    ]


def _meant(operator: str, name: str) -> bool:
    return operator.startswith(name[:-1]) if name.endswith("*") else operator == name


def table(rows: list[Row]) -> str:
    counts = Counter((row.dtype, row.mode, row.verdict) for row in rows)
    lines = [f"{'':24}" + "".join(f"{verdict:>11}" for verdict in VERDICTS) + f"{'equal %':>11}"]
    for dtype, mode in dict.fromkeys((row.dtype, row.mode) for row in rows):
        found = [counts[dtype, mode, verdict] for verdict in VERDICTS]
        lines.append(f"{dtype + ' ' + mode:24}" + "".join(f"{n:11}" for n in found) + f"{100 * found[0] / sum(found):11.1f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help='operators ("add", "linalg_*"); none: all')
    parser.add_argument("--dtypes", default="float32,complex64,int64")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--out", help="a TSV of all verdicts")
    options = parser.parse_args()
    jobs = jobs_of(options.names, [getattr(torch, name) for name in options.dtypes.split(",")], options.modes.split(","))
    started = time.monotonic()
    file = open(options.out, "w") if options.out else None  # noqa: SIM115

    def said(row: Row) -> None:
        if file is not None:
            print(*row, sep="\t", file=file, flush=True)
        if row.verdict != "equal":
            print(f"{row.verdict:10} {row.operator} {row.dtype} {row.mode}: {row.text}", flush=True)

    if file is not None:
        print(*Row._fields, sep="\t", file=file)
    rows = run(jobs, options.samples, said)
    print(table(rows))
    print(f"{len(rows)} in {time.monotonic() - started:.0f} s")
    return int(any(row.verdict not in ("equal", "refused") for row in rows))


if __name__ == "__main__":
    from tests.rpc.places import operators as module  # by the name under which other processes find it

    sys.exit(module.main())
