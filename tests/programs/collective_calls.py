"""What programs of ``collective_programs`` use: the same calls over gloo, then over this backend, in the same processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import judge
import torch
import torch.distributed as dist

import rdmarpc as rpc

LIMITS = {"gloo": timedelta(seconds=8), "rdmarpc": timedelta(seconds=30)}
"""Of calls. gloo does not tell other ranks of an error: they come so much later."""


@dataclass
class Here:
    """A group, at one of its members."""

    group: Any
    ranks: list[int]
    me: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass
class Config:
    rows: int
    name: str = "x"


class World:
    """What a program has in its hands: the groups, its data, and what it has seen."""

    options: Any = None
    """Of this backend."""

    def __init__(self, backend: str, rank: int, size: int, folder: str, keep: Callable[[str, Any], None]) -> None:
        self.backend, self.rank, self.size, self.folder, self._keep = backend, rank, size, folder, keep
        self.own, self.common = torch.Generator(), torch.Generator()
        self.pending: list[Any] = []
        self._times = 0
        self.begin()

    def begin(self) -> None:
        self._times += 1
        store, limit = dist.FileStore(f"{self.folder}/{self.backend}{self._times}", -1), LIMITS[self.backend]
        ours = {"pg_options": self.options} if self.options is not None and self.backend == "rdmarpc" else {}
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.size, timeout=limit, **ours)
        every = list(range(self.size))
        self.ranks = [every, every, [0, self.size - 1], [self.size - 1], [1, 0]]
        made = [None, *(dist.new_group(ranks, timeout=limit) for ranks in self.ranks[1:])]
        self.groups = [
            Here(group, sorted(ranks), sorted(ranks).index(self.rank)) if self.rank in ranks else None
            for group, ranks in zip(made, self.ranks)
        ]

    def again(self) -> None:
        self.finish(range(len(self.pending)))
        dist.destroy_process_group()
        self.begin()

    # -- data

    def made(self, shape: Any, dtype: torch.dtype = torch.float32, form: str = "", common: bool = False) -> torch.Tensor:
        """Small whole numbers. gloo takes memory for contiguous that is not: its tensors are."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        drawn = torch.randint(-3, 4, (*shape, 2), generator=self.common if common else self.own)
        if not dtype.is_signed:
            drawn = drawn.abs()
        x = torch.view_as_complex(drawn.double()).to(dtype) if dtype.is_complex else drawn[..., 0].to(dtype)
        if self.backend == "gloo" or not form:
            return x.clone(memory_format=torch.contiguous_format)
        if form == "gaps":
            wide = torch.zeros((*shape, 2), dtype=dtype)
            wide[..., 0] = x
            return wide[..., 0]
        if form == "turned" and x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if form == "later":
            held = torch.zeros(x.numel() + 3, dtype=dtype)
            held[3:] = x.flatten()
            return held[3:].view(shape)
        return x

    def empty(self, shape: Any, dtype: torch.dtype = torch.float32, form: str = "") -> torch.Tensor:
        return self.made(shape, dtype, form).zero_()

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        """For what gloo does not see the strides of."""
        return x.resolve_conj().resolve_neg().contiguous() if self.backend == "gloo" else x

    def bytes(self, x: torch.Tensor) -> torch.Tensor:
        """Of types that gloo has not got."""
        return x.view(torch.uint8) if self.backend == "gloo" else x

    # -- what is seen

    def keep(self, name: str, value: Any = None) -> None:
        self._keep(name, plain(value))

    def then(self, work: Any, *tensors: Any) -> None:
        """Look at what a call has written, once it is over."""
        if work is not None:
            work.wait()
        self.keep("seen", tensors)

    def later(self, work: Any, *tensors: Any) -> None:
        self.pending.append((work, tensors))

    def finish(self, order: Any) -> None:
        for n in order:
            self.then(self.pending[n][0], *self.pending[n][1])
        self.pending.clear()

    @contextlib.contextmanager
    def attempt(self, number: int) -> Iterator[None]:
        """Note what a statement raises; the program goes on. Its data depend on nothing else."""
        self.own.manual_seed(1000 * number + self.rank + 1)
        self.common.manual_seed(number)
        error = None
        try:
            yield
        except Exception as raised:
            error = raised if type(raised).__name__ == "NotSupported" else type(raised)(str(raised)[:300])
        self._keep(f"write {number}", error)

    def wrong(self, call: Callable[[], Any]) -> None:
        """An error at every rank, after which the group is as before. gloo ends the process at some of them."""
        raised = self.backend == "gloo"
        try:
            if not raised:
                call()
        except Exception:
            raised = True
        self.keep("raised", raised)

    def threads(self, *bodies: Callable[[Any], None]) -> None:
        """Each with a list of its own for what it sees. Raises the first error of one."""
        seen: list[list[Any]] = [[] for _ in bodies]

        def run(body: Callable[[Any], None], mine: list[Any]) -> None:
            body(lambda *tensors: mine.append(plain(tensors)))

        with ThreadPoolExecutor(len(bodies)) as pool:
            running = [pool.submit(run, *each) for each in zip(bodies, seen)]
        for each in running:
            each.result()
        self._keep("threads", seen)


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):
            return [str(value.placements), plain(value.to_local())]
        if hasattr(value, "wait"):
            value = value.wait()
        if value.layout is torch.strided:
            return value.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return value.detach().coalesce().to_dense() if value.layout is torch.sparse_coo else value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def reduced(x: torch.Tensor) -> torch.Tensor:
    """A call that calls a collective."""
    dist.all_reduce(x)
    return x


def judged(text: str, size: int, seed: int, folder: str) -> judge.Verdict:
    """At one rank: the worker of that number. Workers of higher numbers have nothing to do. ``folder``: of this run alone."""
    rank = rpc.get_worker_info().id
    if rank >= size:
        return judge.Verdict("equal")
    names: dict[str, Any] = {}
    exec(compile(text, "drawn.py", "exec"), names)
    os.environ["RDMARPC_COLLECTIVES_DEVICE"] = "tcp" if seed % 2 else "shm"

    def over(backend: str) -> judge.Outcome:
        def program(_: Any, keep: Any) -> None:
            try:
                names["program"](World(backend, rank, size, folder, keep), rank, size)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

        return judge.outcome(program, lambda net, _: net)

    return compared(over("gloo"), over("rdmarpc"))


def compared(one: judge.Outcome, other: judge.Outcome) -> judge.Verdict:
    """Statement by statement. Of one that gloo alone cannot do nothing is compared."""
    if other.error is not None:
        return judge.Verdict("other error", f"the end: {other.error!r} | {one.error!r}")
    theirs, ours = _statements(one.seen), _statements(other.seen)
    verdicts = [(_statement(seen, ours[name]), name) for name, seen in theirs.items()]
    verdict, name = max(verdicts, key=lambda found: judge.rank(found[0]))
    return verdict._replace(detail=f"{name}: {verdict.detail}")


Seen = tuple[list[tuple[str, judge.Leaves]], Exception | None]
"""What a statement has kept, and raised."""


def _statements(seen: list[tuple[str, judge.Leaves]]) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    values: list[tuple[str, judge.Leaves]] = []
    for name, leaves in seen:
        if not name.startswith("write"):
            values.append((name, leaves))
            continue
        raised = leaves[0][1]
        found[name] = values, raised if isinstance(raised, Exception) else None
        values = []
    return found


def _statement(one: Seen, other: Seen) -> judge.Verdict:
    if one[1] is not None:
        return judge.Verdict("equal" if other[1] is None else "same error", f"{other[1]!r} | {one[1]!r}")
    if other[1] is not None:
        refused = type(other[1]).__name__ == "NotSupported"
        return judge.Verdict("refused" if refused else "other error", repr(other[1]))
    return judge.worst_of(one[0], other[0])
