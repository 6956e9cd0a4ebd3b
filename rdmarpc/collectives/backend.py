"""The process group that torch uses: its operations, checked and handed to the queue."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..ground import reports
from ..transport import PeerLost
from . import calls, sparse
from .engine import Engine
from .meeting import Members
from .pairs import Pairs
from .queue import Queue, Work
from .sums import sum_of
from .tensors import check, source, split, target

Back = list[Callable[[], object]]
Tensors = Sequence[torch.Tensor]
_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _limit(options: Any) -> float:
    """The timeout of a call's options in seconds; 0: that of the group."""
    found = getattr(options, "timeout", None)
    return max(found.total_seconds(), 0.0) if isinstance(found, timedelta) else 0.0


def _one(tensors: Any) -> torch.Tensor:
    """The tensor of a list of one, or the tensor itself."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"one tensor is expected, got {len(tensors)}")
    found: torch.Tensor = tensors[0]
    return found


_Group: Any = dist.ProcessGroup  # its annotations are not what it takes


class Collectives(_Group):
    """The collectives. Thread-safe: calls of several threads run in the order in which they come here."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store, self.me, self.members_count = store, rank, size
        self.members = Members(store, rank, size, timeout.total_seconds())
        self.engine = Engine(self.members, timeout.total_seconds())
        self.pairs = Pairs(self.members, timeout.total_seconds())
        self.queue = Queue(f"rdmarpc-group-{rank}")
        self._collected = threading.local()
        self._group_name = self._group_desc = ""
        _groups.add(self)

    def _submit(self, what: str, run: calls.Run, outputs: Tensors, options: Any, back: Back | None = None) -> Work:
        """Have a call run. It fails the group if it raises."""
        engine = self.engine

        def whole() -> None:
            try:
                with torch.no_grad():
                    run(engine)
                    for each in back or ():
                        each()
            except BaseException as error:
                engine.fail(error)
                raise

        started: Callable[[], None] = whole
        if torch.autograd._profiler_enabled():

            def started() -> None:
                with torch.profiler.record_function(f"rdmarpc:{what}"):
                    whole()

        work = Work(started, outputs, what)
        self.queue.submit(work, not getattr(options, "asyncOp", True))
        if (collected := getattr(self._collected, "works", None)) is not None:
            collected.append(work)
        return work

    # -- all to all

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        tensor = _one(tensors)
        opts = dist.AllreduceOptions() if opts is None else opts
        operation = getattr(opts, "reduceOp", opts)
        if tensor.layout is torch.sparse_coo:
            return self._submit("all_reduce", sparse.all_reduce(tensor, operation, _limit(opts)), [tensor], opts)
        check([tensor], "all_reduce")
        back: Back = []
        how = sum_of(operation, tensor.dtype)
        return self._submit(
            "all_reduce", calls.all_reduce(target(tensor, back, read=True), how, _limit(opts)), [tensor], opts, back
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        back: Back = []
        runs = []
        for tensor in tensors:
            check([tensor], "all_reduce")
            how = sum_of(opts.reduceOp, tensor.dtype)
            runs.append(calls.all_reduce(target(tensor, back, read=True), how, _limit(opts)))
        return self._submit("all_reduce", _each(runs), tensors, opts, back)

    def reduce(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        tensor, opts = _one(tensors), dist.ReduceOptions() if opts is None else opts
        check([tensor], "reduce")
        back: Back = []
        how = sum_of(opts.reduceOp, tensor.dtype)
        data = target(tensor, back, read=True) if self.me == opts.rootRank else source(tensor)
        return self._submit("reduce", calls.reduce(data, how, opts.rootRank, _limit(opts)), [tensor], opts, back)

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> Work:
        tensor, opts = _one(tensors), dist.BroadcastOptions() if opts is None else opts
        check([tensor], "broadcast")
        back: Back = []
        data = source(tensor) if self.me == opts.rootRank else target(tensor, back)
        return self._submit("broadcast", calls.broadcast(data, opts.rootRank, _limit(opts)), [tensor], opts, back)

    def barrier(self, opts: Any = None) -> Work:
        opts = dist.BarrierOptions() if opts is None else opts
        return self._submit("barrier", calls.barrier(timeout=_limit(opts)), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As ``barrier``; ``TransferTimeout`` names all ranks that did not come within ``timeout``."""
        limit = timeout.total_seconds() if timeout else 0.0
        self._submit("monitored_barrier", calls.barrier("monitored_barrier", limit), [], _Here()).wait()

    # -- gather

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, *_: Any) -> Work:
        outputs = output_tensors[0] if isinstance(output_tensors[0], (list, tuple)) else output_tensors
        tensor, opts = _one(input_tensors), c10d.AllgatherOptions() if opts is None else opts
        run, back = self._gathered(outputs, tensor, _limit(opts))
        return self._submit("all_gather", run, outputs, opts, back)

    def _gathered(self, outputs: Tensors, tensor: torch.Tensor, limit: float) -> tuple[calls.Run, Back]:
        check([tensor, *outputs], "all_gather")
        if len(outputs) != self.members_count:
            raise ValueError(f"all_gather needs a tensor for each of {self.members_count} ranks, got {len(outputs)}")
        back: Back = []
        places, data = [target(each, back) for each in outputs], source(tensor)
        if places[self.me].numel() != data.numel():
            raise ValueError(f"all_gather of {data.numel()} elements into a tensor of {places[self.me].numel()}")
        return calls.all_to_all("all_gather", places, [data] * self.members_count, tensor.dtype, timeout=limit), back

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        opts = c10d.AllgatherOptions() if opts is None else opts
        run, back = self._gathered_into(output, input, _limit(opts))
        return self._submit("all_gather", run, [output], opts, back)

    _allgather_base = all_gather_single

    def _gathered_into(self, output: torch.Tensor, tensor: torch.Tensor, limit: float) -> tuple[calls.Run, Back]:
        check([tensor, output], "all_gather")
        if output.numel() != tensor.numel() * self.members_count:
            raise ValueError(
                f"all_gather of {self.members_count} times {tensor.numel()} elements into a tensor of {output.numel()}"
            )
        back: Back = []
        places = (
            list(target(output, back).chunk(self.members_count)) if output.numel() else [output.view(-1)] * self.members_count
        )
        return calls.all_to_all("all_gather", places, [source(tensor)] * self.members_count, tensor.dtype, timeout=limit), back

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        opts = c10d.AllgatherOptions() if opts is None else opts
        made = [self._gathered_into(output, tensor, _limit(opts)) for output, tensor in zip(outputs, inputs, strict=True)]
        back = [each for _, some in made for each in some]
        return self._submit("all_gather", _each([run for run, _ in made]), outputs, opts, back)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Work:
        """``output_lists[rank][i]`` gets what that rank has as ``inputs[i]``."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        if len(output_lists) != self.members_count or any(len(each) != len(inputs) for each in output_lists):
            raise ValueError("all_gather_coalesced needs a list of as many tensors as there are inputs for each rank")
        made = [self._gathered([each[at] for each in output_lists], tensor, _limit(opts)) for at, tensor in enumerate(inputs)]
        back = [each for _, some in made for each in some]
        outputs = [tensor for each in output_lists for tensor in each]
        return self._submit("all_gather", _each([run for run, _ in made]), outputs, opts, back)

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, *_: Any) -> Work:
        tensor, opts = _one(input_tensors), dist.GatherOptions() if opts is None else opts
        root, back = opts.rootRank, list[Any]()
        outputs = output_tensors[0] if output_tensors and isinstance(output_tensors[0], (list, tuple)) else output_tensors
        if (len(outputs) if self.me == root else self.members_count) != self.members_count:
            raise ValueError(f"gather needs a tensor for each of {self.members_count} ranks, got {len(outputs)}")
        outputs = outputs if self.me == root else []
        check([tensor, *outputs], "gather")
        places = [target(each, back) for each in outputs]
        run = calls.all_to_all(
            "gather", places, [source(tensor)] * self.members_count, tensor.dtype, root, _limit(opts), sends=self.me != root
        )
        return self._submit("gather", run, outputs, opts, back)

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, *_: Any) -> Work:
        tensor, opts = _one(output_tensors), dist.ScatterOptions() if opts is None else opts
        root, back = opts.rootRank, list[Any]()
        inputs = input_tensors[0] if input_tensors and isinstance(input_tensors[0], (list, tuple)) else input_tensors
        if (len(inputs) if self.me == root else self.members_count) != self.members_count:
            raise ValueError(f"scatter needs a tensor for each of {self.members_count} ranks, got {len(inputs)}")
        inputs = inputs if self.me == root else []
        check([tensor, *inputs], "scatter")
        place = target(tensor, back)
        run = calls.all_to_all(
            "scatter",
            [place] * self.members_count,
            [source(each) for each in inputs],
            tensor.dtype,
            root,
            _limit(opts),
            receives=self.me != root,
        )
        return self._submit("scatter", run, [tensor], opts, back)

    # -- scatter

    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, *_: Any) -> Work:
        output, opts = _one(output_tensors), dist.ReduceScatterOptions() if opts is None else opts
        inputs = input_tensors[0] if isinstance(input_tensors[0], (list, tuple)) else input_tensors
        run, back = self._scattered(output, inputs, opts)
        return self._submit("reduce_scatter", run, [output], opts, back)

    def _scattered(self, output: torch.Tensor, inputs: Tensors, opts: Any) -> tuple[calls.Run, Back]:
        check([output, *inputs], "reduce_scatter")
        if len(inputs) != self.members_count:
            raise ValueError(f"reduce_scatter needs a tensor for each of {self.members_count} ranks, got {len(inputs)}")
        if inputs[self.me].numel() != output.numel():
            raise ValueError(f"reduce_scatter of {inputs[self.me].numel()} elements into a tensor of {output.numel()}")
        back: Back = []
        how = sum_of(opts.reduceOp, output.dtype)
        return calls.reduce_scatter(target(output, back), [source(each) for each in inputs], how, _limit(opts)), back

    def _scattered_from(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> tuple[calls.Run, Back]:
        check([output, tensor], "reduce_scatter")
        if tensor.numel() != output.numel() * self.members_count:
            raise ValueError(
                f"reduce_scatter of {tensor.numel()} elements into {self.members_count} times a tensor of {output.numel()}"
            )
        flat = source(tensor)
        return self._scattered(
            output, list(flat.chunk(self.members_count)) if flat.numel() else [flat] * self.members_count, opts
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        run, back = self._scattered_from(output, input, opts)
        return self._submit("reduce_scatter", run, [output], opts, back)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        made = [self._scattered_from(output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)]
        back = [each for _, some in made for each in some]
        return self._submit("reduce_scatter", _each([run for run, _ in made]), outputs, opts, back)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


class Pairwise(Collectives):
    """What goes from each rank to each, and messages between two."""

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        opts = dist.AllToAllOptions() if opts is None else opts
        check([output, input], "all_to_all")
        back: Back = []
        places = split(target(output, back).view(output.shape), output_split_sizes, self.members_count, "all_to_all")
        parts = split(source(input).view(input.shape), input_split_sizes, self.members_count, "all_to_all")
        run = calls.all_to_all("all_to_all", places, parts, input.dtype, timeout=_limit(opts))
        return self._submit("all_to_all", run, [output], opts, back)

    alltoall_base = all_to_all_single

    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None, *_: Any) -> Work:
        opts = dist.AllToAllOptions() if opts is None else opts
        check([*output_tensors, *input_tensors], "all_to_all")
        if len(output_tensors) != self.members_count or len(input_tensors) != self.members_count:
            raise ValueError(f"all_to_all needs a tensor for each of {self.members_count} ranks, both ways")
        back: Back = []
        places, parts = [target(each, back) for each in output_tensors], [source(each) for each in input_tensors]
        run = calls.all_to_all("all_to_all", places, parts, input_tensors[0].dtype, timeout=_limit(opts))
        return self._submit("all_to_all", run, output_tensors, opts, back)

    # -- pairs

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        tensor = _one(tensors)
        check([tensor], "send")
        with _Recorded("send"):
            return self._keep(self.pairs.send(source(tensor), dst, tag, [tensor]))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        return self._receive(_one(tensors), src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._receive(_one(tensors), -1, tag)

    def _receive(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        check([tensor], "recv")
        plain = tensor.detach()
        whole = plain.is_contiguous()
        data = plain if whole else torch.empty(plain.shape, dtype=plain.dtype)
        with _Recorded("recv"):
            return self._keep(self.pairs.receive(data.view(-1), src, tag, None if whole else plain, [tensor]))

    def _keep(self, work: Work) -> Work:
        if (collected := getattr(self._collected, "works", None)) is not None:
            collected.append(work)
        return work


class ProcessGroup(Pairwise):
    """All of it, and the group itself."""

    def getBackendName(self) -> str:
        return "rdmarpc"

    def name(self) -> str:
        return "rdmarpc"

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        return self._group_name

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text

    @property
    def group_desc(self) -> str:
        return self._group_desc

    # What C++ calls.
    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        return self._group_name

    def getGroupDesc(self) -> str:
        return self._group_desc

    def get_group_store(self) -> dist.Store:
        return self.store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _start_coalescing(self, device: torch.device) -> None:
        self._collected.works = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._collected.works = self._collected.works, None

        def run() -> None:
            for work in works:
                work.wait()

        made = Work(run, [], "coalesced")
        threading.Thread(target=_finish, args=(made,), name="rdmarpc-coalesced", daemon=True).start()
        return made

    def _set_sequence_number_for_group(self) -> None:
        """The sequence begins with the group."""

    def _get_sequence_number_for_group(self) -> int:
        return self.engine.sequence

    def set_timeout(self, timeout: timedelta) -> None:
        self.engine.timeout = self.pairs.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End the group here, and every call under way at any rank. Idempotent."""
        self.engine.fail(PeerLost(f"rank {self.me} aborted the process group", status="ABORTED"))
        self._close()

    def shutdown(self) -> None:
        """Leave the group. What was submitted is done before. Idempotent."""
        if not self.queue.ended:
            for work in self.queue.pending():
                try:
                    work.wait()
                except Exception:
                    break
        self._close()

    def _close(self) -> None:
        self.queue.stop()
        self.pairs.close()
        self.engine.close()
        _groups.discard(self)

    def explain(self) -> list[str]:
        """Lines for people: what is under way, and who is missing."""
        engine = self.engine
        name = self.group_name or "without a name"
        lines = [f"process group {name}: rank {self.me} of {self.members_count}, {engine.sequence} calls"]
        if engine.error is not None:
            lines.append(f"  failed: {engine.error}")
        if engine.since:
            lines.append(f"  {engine.signature}, call {engine.sequence}: {engine.missing()}")
        lines += [f"  {text}" for text in self.pairs.waiting()]
        return lines


class _Here:
    asyncOp = False


class _Recorded:
    """A profiler's event, where there is a profiler."""

    def __init__(self, what: str) -> None:
        self._event = torch.profiler.record_function(f"rdmarpc:{what}") if torch.autograd._profiler_enabled() else None

    def __enter__(self) -> None:
        if self._event is not None:
            self._event.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self._event is not None:
            self._event.__exit__(*exc)


def _finish(work: Work) -> None:
    error: BaseException | None = None
    try:
        work.run()
    except BaseException as failed:
        error = failed
    work.finish(error)


def _each(runs: Sequence[calls.Run]) -> calls.Run:
    def run(engine: Engine) -> None:
        for each in runs:
            each(engine)

    return run


def _explain() -> list[str]:
    return [line for group in list(_groups) for line in group.explain()]


reports.sources.append(_explain)
