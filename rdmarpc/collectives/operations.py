"""What torch may ask of a process group, checked and handed to the queue or to the messages between pairs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..options import RpcBackendOptions
from ..transport import NotSupported, RdmaError, TransferTimeout, timeouts
from . import calls, sparse
from .binding import written
from .binding.forms import forms
from .ends import Ends
from .engine import Engine
from .meeting import Ranks
from .pairs import Pairs
from .queue import Queue, Work, nothing
from .staging import Staging
from .sums import sum_of
from .tensors import check, check_apart, check_own, plain, split, unwrapped, writing

Tensors = Sequence[torch.Tensor]
OF_GROUP = "the timeout of a process group"
_UNSET = timedelta(milliseconds=-1)
"""What torch has for no timeout in the options of a call."""


def _limit(options: Any) -> float:
    """The timeout of a call's options in seconds; 0: that of the group. Raises ``ValueError`` unless it is longer than 0, or
    unset."""
    found = getattr(options, "timeout", None)
    if not isinstance(found, timedelta) or found == _UNSET:
        return 0.0
    return timeouts.above_zero(found.total_seconds(), "the timeout of a collective")


def _one(tensors: Any) -> torch.Tensor:
    """The tensor of a list of one, or the tensor itself."""
    if not isinstance(tensors, torch.Tensor):
        if len(tensors) != 1:
            raise ValueError(f"one tensor is expected, got {len(tensors)}")
        tensors = tensors[0]
    return tensors if type(tensors) is torch.Tensor else unwrapped(tensors)


class _Collected(threading.local):
    """The calls of this thread since it began to coalesce; ``None``: it does not."""

    works: list[Work] | None = None


_Group: Any = dist.ProcessGroup  # its annotations are not what it takes


class Collectives(_Group):
    """The collectives. Thread-safe: calls of several threads run in the order in which they come here."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        options: RpcBackendOptions | None = None,
        job: Any = None,
    ) -> None:
        """``ranks``: what torch calls the members, ``rank``: the place of this one among them. ``options``: how the device of
        this process is opened, if no group has opened it yet. ``job``: the group whose ranks these are, if it is another."""
        super().__init__(rank, len(ranks))
        self.store, self.me, self.members_count = store, rank, len(ranks)
        self._called = ranks[rank]
        limit = timeouts.above_zero(timeout.total_seconds(), OF_GROUP)
        self.members = Ranks(store, rank, ranks, limit, options, job)
        self.engine = Engine(self.members, limit)
        self.pairs = Pairs(self.members, limit)
        self.queue = Queue(f"rdmarpc-group-{rank}")
        domain = self.members.domain
        self.staging = Staging(domain.device if domain is not None else None)
        self.collected = _Collected()
        self._group_name = self._group_desc = ""

    def _submit(self, what: str, run: calls.Run, outputs: Tensors, options: Any, ends: Ends | None = None) -> Work:
        """Have a call run. It fails the group if it raises."""
        engine, event, limit = self.engine, _event(what), _limit(options) or self.engine.timeout

        def whole() -> None:
            try:
                with event, writing(outputs):
                    if ends is None:
                        run(engine)
                        return
                    ends.begin(limit)
                    run(engine)
                    ends.end(limit)
            except BaseException as error:
                engine.fail(error)
                raise

        work = Work(whole, outputs, what)
        try:
            self.queue.submit(work, not getattr(options, "asyncOp", True))
        except NotSupported as error:  # what another rank's callback calls goes to another call of this rank
            engine.fail(error)
            raise
        return self._keep(work)

    def _keep(self, work: Work) -> Work:
        """For ``_end_coalescing``, if this thread is coalescing."""
        if (collected := self.collected.works) is not None:
            collected.append(work)
        return work

    def _check_rank(self, rank: int, what: str) -> None:
        """Raise unless the group has this rank."""
        if not 0 <= rank < self.members_count:
            raise ValueError(f"{what} with rank {rank}, and the group has {self.members_count} ranks")

    def _submit_all(self, what: str, runs: Sequence[calls.Run], outputs: Tensors, options: Any, ends: Ends) -> Work:
        """Several as one call."""

        def run(engine: Engine) -> None:
            for each in runs:
                each(engine)

        return self._submit(what, run, outputs, options, ends)

    # -- all to all

    @forms("allreduce")
    def allreduce(self, tensors: Any, opts: Any) -> Work:
        tensor = _one(tensors)
        operation = opts.reduceOp
        if plain(tensor):
            run = calls.all_reduce(tensor, sum_of(operation, tensor.dtype), _limit(opts))
            written.in_place("allreduce_", (tensor,))
            return _at_once(self, "all_reduce", run, [tensor], opts)
        if tensor.layout is torch.sparse_coo and tensor.is_cpu:
            run = sparse.all_reduce(tensor, operation, _limit(opts))
            written.in_place("allreduce_", (tensor,))
            return self._submit("all_reduce", run, [tensor], opts)
        ends = Ends(self.staging)
        run = self._summed(ends, tensor, operation, _limit(opts))
        written.in_place("allreduce_", (tensor,))
        return self._submit("all_reduce", run, [tensor], opts, ends)

    def _summed(self, ends: Ends, tensor: torch.Tensor, operation: Any, limit: float) -> calls.Run:
        check([tensor], "all_reduce")
        how = sum_of(operation, tensor.dtype)
        return calls.all_reduce(ends.target(tensor, read=True), how, limit)

    @forms("allreduce_coalesced")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Work:
        check_apart(tensors, "all_reduce_coalesced")
        ends = Ends(self.staging)
        runs = [self._summed(ends, tensor, opts.reduceOp, _limit(opts)) for tensor in tensors]
        written.in_place("allreduce_coalesced_", tensors)
        return self._submit_all("all_reduce", runs, tensors, opts, ends)

    @forms("reduce")
    def reduce(self, tensors: Any, opts: Any) -> Work:
        tensor = _one(tensors)
        self._check_rank(opts.rootRank, "reduce")
        check([tensor], "reduce")
        ends, how = Ends(self.staging), sum_of(opts.reduceOp, tensor.dtype)
        data = ends.target(tensor, read=True) if self.me == opts.rootRank else ends.source(tensor)
        written.in_place("reduce_", (tensor,), writes=self.me == opts.rootRank)
        return self._submit("reduce", calls.reduce(data, how, opts.rootRank, _limit(opts)), [tensor], opts, ends)

    @forms("broadcast")
    def broadcast(self, tensors: Any, opts: Any) -> Work:
        tensor = _one(tensors)
        self._check_rank(opts.rootRank, "broadcast")
        if plain(tensor):
            written.in_place("broadcast_", (tensor,), writes=self.me != opts.rootRank)
            return _at_once(self, "broadcast", calls.broadcast(tensor, opts.rootRank, _limit(opts)), [tensor], opts)
        check([tensor], "broadcast")
        ends = Ends(self.staging)
        data = ends.source(tensor) if self.me == opts.rootRank else ends.target(tensor)
        written.in_place("broadcast_", (tensor,), writes=self.me != opts.rootRank)
        return self._submit("broadcast", calls.broadcast(data, opts.rootRank, _limit(opts)), [tensor], opts, ends)

    @forms("barrier")
    def barrier(self, opts: Any) -> Work:
        run = calls.barrier(timeout=_limit(opts))
        return _at_once(self, "barrier", run, [], opts)

    # -- gather

    @forms("allgather")
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        outputs = output_tensors[0] if isinstance(output_tensors[0], (list, tuple)) else output_tensors
        tensor = _one(input_tensors)
        ends = Ends(self.staging)
        run = self._gathered(ends, outputs, tensor, _limit(opts))
        written.in_place("allgather_", outputs)
        return self._submit("all_gather", run, outputs, opts, ends)

    def _gathered(self, ends: Ends, outputs: Tensors, tensor: torch.Tensor, limit: float) -> calls.Run:
        check([tensor, *outputs], "all_gather")
        if len(outputs) != self.members_count:
            raise ValueError(f"all_gather needs a tensor for each of {self.members_count} ranks, got {len(outputs)}")
        check_own(outputs[self.me], tensor, "all_gather")
        check_apart(outputs, "all_gather")
        places, data = [ends.target(each) for each in outputs], ends.source(tensor)
        return calls.all_to_all("all_gather", places, [data] * self.members_count, tensor.dtype, timeout=limit)

    @forms("all_gather_single")
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        output, input = _one(output), _one(input)
        if plain(output, input) and output.numel() == input.numel() * self.members_count:
            run = calls.even("all_gather", output, input, _limit(opts))
            written.from_to("_allgather_base_", (input,), (output,))
            return _at_once(self, "all_gather", run, [output], opts)
        ends = Ends(self.staging)
        run = self._gathered_into(ends, output, input, _limit(opts))
        written.from_to("_allgather_base_", (input,), (output,))
        return self._submit("all_gather", run, [output], opts, ends)

    _allgather_base = all_gather_single

    def _gathered_into(self, ends: Ends, output: torch.Tensor, tensor: torch.Tensor, limit: float) -> calls.Run:
        check([tensor, output], "all_gather")
        if output.numel() != tensor.numel() * self.members_count:
            raise ValueError(
                f"all_gather of {self.members_count} times {tensor.numel()} elements into a tensor of {output.numel()}"
            )
        flat = ends.target(output)
        places = list(flat.chunk(self.members_count)) if flat.numel() else [flat] * self.members_count
        return calls.all_to_all("all_gather", places, [ends.source(tensor)] * self.members_count, tensor.dtype, timeout=limit)

    @forms("all_gather_single_coalesced")
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        ends, limit = Ends(self.staging), _limit(opts)
        runs = [self._gathered_into(ends, output, tensor, limit) for output, tensor in zip(outputs, inputs, strict=True)]
        written.from_to("allgather_into_tensor_coalesced_", inputs, outputs)
        return self._submit_all("all_gather", runs, outputs, opts, ends)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @forms("allgather_coalesced")
    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """``output_lists[rank][i]`` gets what that rank has as ``inputs[i]``."""
        if len(output_lists) != self.members_count or any(len(each) != len(inputs) for each in output_lists):
            raise ValueError("all_gather_coalesced needs a list of as many tensors as there are inputs for each rank")
        ends, lists = Ends(self.staging), zip(*output_lists)
        runs = [self._gathered(ends, outputs, tensor, _limit(opts)) for outputs, tensor in zip(lists, inputs)]
        every = [tensor for each in output_lists for tensor in each]
        written.in_place("allgather_coalesced_", every)
        return self._submit_all("all_gather", runs, every, opts, ends)

    @forms("gather")
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        tensor = _one(input_tensors)
        root, ends = opts.rootRank, Ends(self.staging)
        outputs = self._at_root(output_tensors, root, "gather")
        check([tensor, *outputs], "gather")
        if outputs:
            check_own(outputs[self.me], tensor, "gather")
            check_apart(outputs, "gather")
        places, data = [ends.target(each) for each in outputs], ends.source(tensor)
        run = calls.all_to_all(
            "gather", places, [data] * self.members_count, tensor.dtype, root, _limit(opts), sends=self.me != root
        )
        written.in_place("gather_", outputs)
        return self._submit("gather", run, outputs, opts, ends)

    def _at_root(self, given: Any, root: int, what: str) -> Tensors:
        """The tensors that only the root of a call gives, one for each rank."""
        self._check_rank(root, what)
        tensors: Tensors = given[0] if given and isinstance(given[0], (list, tuple)) else given
        if self.me != root:
            return []
        if len(tensors) != self.members_count:
            raise ValueError(f"{what} needs a tensor for each of {self.members_count} ranks, got {len(tensors)}")
        return tensors

    @forms("scatter")
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        tensor = _one(output_tensors)
        root, ends = opts.rootRank, Ends(self.staging)
        inputs = self._at_root(input_tensors, root, "scatter")
        check([tensor, *inputs], "scatter")
        if inputs:
            check_own(tensor, inputs[self.me], "scatter")
        place, parts = ends.target(tensor), [ends.source(each) for each in inputs]
        run = calls.all_to_all(
            "scatter",
            [place] * self.members_count,
            parts,
            tensor.dtype,
            root,
            _limit(opts),
            receives=self.me != root,
        )
        written.in_place("scatter_", (tensor,))
        return self._submit("scatter", run, [tensor], opts, ends)

    # -- scatter

    @forms("reduce_scatter")
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Work:
        output = _one(output_tensors)
        inputs = input_tensors[0] if isinstance(input_tensors[0], (list, tuple)) else input_tensors
        ends = Ends(self.staging)
        run = self._scattered(ends, output, inputs, opts)
        written.in_place("reduce_scatter_", (output,))
        return self._submit("reduce_scatter", run, [output], opts, ends)

    def _scattered(self, ends: Ends, output: torch.Tensor, inputs: Tensors, opts: Any) -> calls.Run:
        check([output, *inputs], "reduce_scatter")
        if len(inputs) != self.members_count:
            raise ValueError(f"reduce_scatter needs a tensor for each of {self.members_count} ranks, got {len(inputs)}")
        check_own(output, inputs[self.me], "reduce_scatter")
        how = sum_of(opts.reduceOp, output.dtype)
        return calls.reduce_scatter(ends.target(output), [ends.source(each) for each in inputs], how, _limit(opts))

    def _scattered_from(self, ends: Ends, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> calls.Run:
        check([output, tensor], "reduce_scatter")
        if tensor.numel() != output.numel() * self.members_count:
            raise ValueError(
                f"reduce_scatter of {tensor.numel()} elements into {self.members_count} times a tensor of {output.numel()}"
            )
        flat, how = ends.source(tensor), sum_of(opts.reduceOp, output.dtype)
        parts = list(flat.chunk(self.members_count)) if flat.numel() else [flat] * self.members_count
        return calls.reduce_scatter(ends.target(output), parts, how, _limit(opts))

    @forms("reduce_scatter_single")
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Work:
        output, input = _one(output), _one(input)
        if plain(output, input) and input.numel() == output.numel() * self.members_count and self.engine.folds:
            how = sum_of(opts.reduceOp, output.dtype)
            if how.code >= 0 and how.factor is None:
                run = calls.scatter_sum(output, input, how, _limit(opts))
                written.from_to("_reduce_scatter_base_", (input,), (output,))
                return _at_once(self, "reduce_scatter", run, [output], opts)
        ends = Ends(self.staging)
        run = self._scattered_from(ends, output, input, opts)
        written.from_to("_reduce_scatter_base_", (input,), (output,))
        return self._submit("reduce_scatter", run, [output], opts, ends)

    _reduce_scatter_base = reduce_scatter_single

    @forms("reduce_scatter_single_coalesced")
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Work:
        ends = Ends(self.staging)
        runs = [self._scattered_from(ends, output, tensor, opts) for output, tensor in zip(outputs, inputs, strict=True)]
        written.from_to("reduce_scatter_tensor_coalesced_", inputs, outputs)
        return self._submit_all("reduce_scatter", runs, outputs, opts, ends)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _at_once(group: Collectives, what: str, run: calls.Run, outputs: Tensors, options: Any) -> Work:
    """As ``_submit``, with as little as can be: in this thread, if it waits anyway, and no call is before it."""
    if getattr(options, "asyncOp", True) or torch.autograd._profiler_enabled() or not group.queue.take(what):
        return group._submit(what, run, outputs, options)
    work = Work(nothing, outputs, what)
    try:
        run(group.engine)
    except BaseException as error:
        work.error = error
        group.engine.fail(error)
    finally:
        group.queue.give()
    work.over = True
    return group._keep(work)


class Pairwise(Collectives):
    """What goes from each rank to each, and messages between two."""

    @forms("all_to_all_single")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any,
    ) -> Work:
        output, input, size = _one(output), _one(input), self.members_count
        even = not output_split_sizes and not input_split_sizes and input.dim() and input.shape[0] % size == 0
        if even and plain(output, input) and output.shape == input.shape:
            run = calls.even("all_to_all", output, input, _limit(opts))
            written.from_to("alltoall_base_", (input,), (output,))
            return _at_once(self, "all_to_all", run, [output], opts)
        check([output, input], "all_to_all")
        ends = Ends(self.staging)
        places = split(ends.target(output).view(output.shape), output_split_sizes, self.members_count, "all_to_all")
        parts = split(ends.source(input).view(input.shape), input_split_sizes, self.members_count, "all_to_all")
        check_own(places[self.me], parts[self.me], "all_to_all")
        run = calls.all_to_all("all_to_all", places, parts, input.dtype, timeout=_limit(opts))
        written.from_to("alltoall_base_", (input,), (output,))
        return self._submit("all_to_all", run, [output], opts, ends)

    alltoall_base = all_to_all_single

    @forms("alltoall")
    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any) -> Work:
        check([*output_tensors, *input_tensors], "all_to_all")
        if len(output_tensors) != self.members_count or len(input_tensors) != self.members_count:
            raise ValueError(f"all_to_all needs a tensor for each of {self.members_count} ranks, both ways")
        check_own(output_tensors[self.me], input_tensors[self.me], "all_to_all")
        check_apart(output_tensors, "all_to_all")
        ends = Ends(self.staging)
        places, parts = [ends.target(each) for each in output_tensors], [ends.source(each) for each in input_tensors]
        run = calls.all_to_all("all_to_all", places, parts, input_tensors[0].dtype, timeout=_limit(opts))
        written.from_to("alltoall_", input_tensors, output_tensors)
        return self._submit("all_to_all", run, output_tensors, opts, ends)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As ``barrier``; ``TransferTimeout`` names all ranks that did not come within ``timeout``, in the words of torch."""
        limit = self.engine.timeout if timeout is None else timeout.total_seconds()
        if limit <= 0:
            raise TransferTimeout(f"Rank {self._called} timed out in monitoredBarrier after 0 ms")
        try:
            self._submit("monitored_barrier", calls.barrier("monitored_barrier", limit), [], _Here()).wait()
        except RdmaError as error:
            text = f"{self._absent(wait_all_ranks, limit)}: {error.message}"
            raise type(error)(text, peer=error.peer, device=error.device, status=error.status, hint=error.hint) from None

    def _absent(self, every: bool, limit: float) -> str:
        """What torch says after a ``monitored_barrier`` that failed here."""
        streams = self.engine.streams
        absent = [self.members.ranks[rank] for rank in streams.lanes if streams.awaits(rank)] if streams is not None else []
        if self.me or not absent:
            came = f"Rank {self._called} successfully reached monitoredBarrier"
            return f"{came}, but received errors while waiting for send/recv from rank 0"
        whom = f"Ranks {', '.join(map(str, absent))}" if every else f"Rank {absent[0]}"
        return f"{whom} failed to pass monitoredBarrier in {limit * 1000:.0f} ms"

    # -- pairs

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Work:
        tensor = _one(tensors)
        self._check_peer(dstRank, "send")
        if plain(tensor) and not torch.autograd._profiler_enabled():
            return self._keep(self.pairs.send(tensor, dstRank, tag, [tensor]))
        check([tensor], "send")
        with _event("send"):
            ends = Ends(self.staging)
            data = ends.source(tensor)
            ends.begin(self.pairs.timeout)
            return self._keep(self.pairs.send(data, dstRank, tag, [tensor]))

    def _check_peer(self, rank: int, what: str) -> None:
        """Raise unless the group has this rank, and it is another one."""
        self._check_rank(rank, what)
        if rank == self.me:
            raise ValueError(f"{what} between rank {rank} and itself")

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Work:
        self._check_peer(srcRank, "recv")
        return self._receive(_one(tensors), srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._receive(_one(tensors), -1, tag)

    def _receive(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        written.in_place("recv_", (tensor,))
        if plain(tensor) and not torch.autograd._profiler_enabled():
            return self._keep(self.pairs.receive(tensor, src, tag, None, [tensor]))
        check([tensor], "recv")
        with _event("recv"):
            ends = Ends(self.staging)
            return self._keep(
                self.pairs.receive(ends.target(tensor), src, tag, partial(ends.end, self.pairs.timeout), [tensor])
            )


class _Here:
    asyncOp = False


def _event(what: str) -> contextlib.AbstractContextManager[Any]:
    """A profiler's event, where there is a profiler."""
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"rdmarpc:{what}")
    return contextlib.nullcontext()
