"""What torch may ask of a process group, checked and handed to the queue or to the messages between pairs; its names, its life,
and what is told of it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

from ..base import here
from ..base.here import lies_elsewhere, refuse
from ..options import RpcBackendOptions
from ..transport import NotSupported, PeerLost, RdmaError, TransferTimeout, cuda_driver, kept, nobody, timeouts
from . import calls
from .calls import sum_of
from .engine import Engine
from .meeting import Ranks, named
from .pairs import Pairs
from .queue import Queue, Work, failure
from .staging import Ends, Staging, check, check_apart, check_own, plain, split, unwrapped, writing
from .table import Made, Tensors, collective, written

OF_GROUP = "the timeout of a process group"


def _one(tensors: Any) -> torch.Tensor:
    """The tensor of a list of one, or the tensor itself."""
    if not isinstance(tensors, torch.Tensor):
        if len(tensors) != 1:
            raise ValueError(f"one tensor is expected, got {len(tensors)}")
        tensors = tensors[0]
    return tensors if type(tensors) is torch.Tensor else unwrapped(tensors)


def _listed(tensors: Any) -> Tensors:
    """The list of a list of one, or the list itself."""
    return tensors[0] if tensors and isinstance(tensors[0], (list, tuple)) else tensors


def _parts(flat: torch.Tensor, count: int) -> list[torch.Tensor]:
    return list(flat.chunk(count)) if flat.numel() else [flat] * count


class _Collected(threading.local):
    """The calls of this thread since it began to coalesce; ``None``: it does not."""

    works: list[Work] | None = None


def _event(what: str) -> contextlib.AbstractContextManager[Any]:
    """A profiler's event, where there is a profiler."""
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"rdmarpc:{what}")
    return contextlib.nullcontext()


_log = logging.getLogger("rdmarpc")
_FORKED = "a process group cannot be used in a process that was forked from one of its ranks"


groups: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those of this process that were not closed."""
_Group: Any = dist.ProcessGroup  # its annotations are not what it takes


class ProcessGroup(_Group):
    """The collectives, and what else torch asks of a group. Thread-safe: calls of several threads run in the order in which
    they come here."""

    group_name = group_desc = ""

    def __init__(
        self, store: Store, rank: int, ranks: Sequence[int], timeout: timedelta, options: RpcBackendOptions | None, job: Any
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
        groups.add(self)

    def _start(self, what: str, run: calls.Run, outputs: Tensors, ends: Ends | None, limit: float, waits: bool) -> Work:
        """Have a call run: with as little as can be in this thread, if that waits anyway, and no call is before it."""
        if ends is not None or not waits or torch.autograd._profiler_enabled() or not self.queue.take(what):
            return self._submit(what, run, outputs, ends, limit, waits)
        work = Work(nobody, outputs, what)
        try:
            run(self.engine, limit)
        except BaseException as error:
            work.error = kept(error)
            self.engine.fail(error)
        finally:
            self.queue.give()
        work.over = True
        return self._keep(work)

    def _submit(self, what: str, run: calls.Run, outputs: Tensors, ends: Ends | None, limit: float, waits: bool) -> Work:
        """Have a call run. It fails the group if it raises."""
        engine, event = self.engine, _event(what)
        limit = limit or engine.timeout

        def whole() -> None:
            try:
                with event, writing(outputs):
                    if ends is not None:
                        ends.begin(limit)
                    run(engine, limit)
                    if ends is not None:
                        ends.end(limit)
            except BaseException as error:
                engine.fail(error)
                raise

        work = Work(whole, outputs, what)
        try:
            self.queue.submit(work, waits)
        except NotSupported as error:  # what another rank's callback calls goes to another call of this rank
            engine.fail(error)
            raise
        return self._keep(work)

    def _keep(self, work: Work) -> Work:
        """For ``_end_coalescing``, if this thread is coalescing."""
        refuse("it calls a collective")
        if (collected := self.collected.works) is not None:
            collected.append(work)
        return work

    def _check_rank(self, rank: int, what: str) -> None:
        """Raise unless the group has this rank."""
        if not 0 <= rank < self.members_count:
            raise ValueError(f"{what} with rank {rank}, and the group has {self.members_count} ranks")

    def _check_count(self, tensors: Tensors, what: str) -> None:
        if len(tensors) != self.members_count:
            raise ValueError(f"{what} needs a tensor for each of {self.members_count} ranks, got {len(tensors)}")

    def _at_root(self, given: Any, root: int, what: str) -> Tensors:
        """The tensors that only the root of a call gives, one for each rank."""
        self._check_rank(root, what)
        if self.me != root:
            return []
        tensors = _listed(given)
        self._check_count(tensors, what)
        return tensors

    # -- all to all

    @collective
    def allreduce(self, tensors: Any, opts: Any) -> Made:
        tensor = _one(tensors)
        if plain(tensor):
            return calls.all_reduce(tensor, sum_of(opts.reduceOp, tensor.dtype)), [tensor], None, (), True
        ends = Ends(self.staging)
        if tensor.layout is torch.sparse_coo and tensor.is_cpu and not lies_elsewhere(tensor):
            return calls.all_reduce_sparse(tensor, opts.reduceOp), [tensor], ends, (), True
        return self._summed(ends, tensor, opts), [tensor], ends, (), True

    def _summed(self, ends: Ends, tensor: torch.Tensor, opts: Any) -> calls.Run:
        check([tensor], "all_reduce")
        how = sum_of(opts.reduceOp, tensor.dtype)
        return calls.all_reduce(ends.target(tensor, read=True), how)

    @collective
    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Made:
        check_apart(tensors, "all_reduce_coalesced")
        ends = Ends(self.staging)
        return calls.in_turn(self._summed(ends, tensor, opts) for tensor in tensors), tensors, ends, (), True

    @collective
    def reduce(self, tensors: Any, opts: Any) -> Made:
        tensor, mine = _one(tensors), self.me == opts.rootRank
        self._check_rank(opts.rootRank, "reduce")
        check([tensor], "reduce")
        ends, how = Ends(self.staging), sum_of(opts.reduceOp, tensor.dtype)
        data = ends.target(tensor, read=True) if mine else ends.source(tensor)
        return calls.reduce(data, how, opts.rootRank), [tensor], ends, (), mine

    @collective
    def broadcast(self, tensors: Any, opts: Any) -> Made:
        tensor, root = _one(tensors), opts.rootRank
        self._check_rank(root, "broadcast")
        if plain(tensor):
            return calls.broadcast(tensor, root), [tensor], None, (), self.me != root
        check([tensor], "broadcast")
        ends = Ends(self.staging)
        data = ends.source(tensor) if self.me == root else ends.target(tensor)
        return calls.broadcast(data, root), [tensor], ends, (), self.me != root

    @collective
    def barrier(self, opts: Any) -> Made:
        return calls.barrier(), [], None, (), True

    # -- gather

    @collective
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Made:
        outputs, ends = _listed(output_tensors), Ends(self.staging)
        self._check_count(outputs, "all_gather")
        return self._gathered(ends, outputs, _one(input_tensors)), outputs, ends, (), True

    def _gathered(self, ends: Ends, outputs: Tensors, tensor: torch.Tensor, root: int = -1) -> calls.Run:
        """``outputs``: one for each rank; none at ranks that get nothing. ``root``: of a gather."""
        what = "all_gather" if root < 0 else "gather"
        check([tensor, *outputs], what)
        if outputs:
            check_own(outputs[self.me], tensor, what)
            check_apart(outputs, what)
        places = [ends.target(each) for each in outputs]
        return calls.all_to_all(what, places, [ends.source(tensor)] * self.members_count, root)

    @collective
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Made:
        output, input = _one(output), _one(input)
        if plain(output, input) and output.numel() == input.numel() * self.members_count:
            return calls.even("all_gather", output, input), [output], None, [input], True
        ends = Ends(self.staging)
        return self._gathered_into(ends, [output], input), [output], ends, [input], True

    _allgather_base = all_gather_single

    def _gathered_into(self, ends: Ends, outputs: Tensors, tensor: torch.Tensor, root: int = -1) -> calls.Run:
        """``outputs``: one, or none at ranks that get nothing. ``root``: of a gather."""
        what = "all_gather" if root < 0 else "gather"
        check([tensor, *outputs], what)
        places: list[torch.Tensor] = []
        for output in outputs:
            if output.numel() != tensor.numel() * self.members_count:
                why = f"{what} of {self.members_count} times {tensor.numel()} elements into a tensor of {output.numel()}"
                raise ValueError(why)
            places += _parts(ends.target(output), self.members_count)
        return calls.all_to_all(what, places, [ends.source(tensor)] * self.members_count, root)

    @collective
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Made:
        ends = Ends(self.staging)
        runs = (self._gathered_into(ends, [output], tensor) for output, tensor in zip(outputs, inputs, strict=True))
        return calls.in_turn(runs), outputs, ends, inputs, True

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @collective
    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any) -> Made:
        """``output_lists[rank][i]`` gets what that rank has as ``inputs[i]``."""
        if len(output_lists) != self.members_count or any(len(each) != len(inputs) for each in output_lists):
            raise ValueError("all_gather_coalesced needs a list of as many tensors as there are inputs for each rank")
        ends, lists = Ends(self.staging), zip(*output_lists)
        runs = calls.in_turn(self._gathered(ends, outputs, tensor) for outputs, tensor in zip(lists, inputs))
        return runs, [tensor for each in output_lists for tensor in each], ends, (), True

    @collective
    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Made:
        tensor, root, ends = _one(input_tensors), opts.rootRank, Ends(self.staging)
        outputs = self._at_root(output_tensors, root, "gather")
        return self._gathered(ends, outputs, tensor, root), outputs, ends, (), True

    @collective
    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Made:
        """From torch 2.14 on. ``output`` is used at the root only."""
        output, input, root, ends = _one(output), _one(input), opts.rootRank, Ends(self.staging)
        self._check_rank(root, "gather")
        outputs = [output] if self.me == root else []
        return self._gathered_into(ends, outputs, input, root), outputs, ends, [input], True

    gather_into_tensor = gather_single

    # -- scatter

    @collective
    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Made:
        tensor, root, ends = _one(output_tensors), opts.rootRank, Ends(self.staging)
        inputs = self._at_root(input_tensors, root, "scatter")
        check([tensor, *inputs], "scatter")
        if inputs:
            check_own(tensor, inputs[self.me], "scatter")
        place, parts = ends.target(tensor), [ends.source(each) for each in inputs]
        return calls.all_to_all("scatter", [place] * self.members_count, parts, root), [tensor], ends, (), True

    @collective
    def reduce_scatter(self, output_tensors: Any, input_tensors: Any, opts: Any) -> Made:
        output, inputs, ends = _one(output_tensors), _listed(input_tensors), Ends(self.staging)
        check([output, *inputs], "reduce_scatter")
        self._check_count(inputs, "reduce_scatter")
        check_own(output, inputs[self.me], "reduce_scatter")
        how = sum_of(opts.reduceOp, output.dtype)
        run = calls.reduce_scatter(ends.target(output), [ends.source(each) for each in inputs], how)
        return run, [output], ends, (), True

    def _scattered_from(self, ends: Ends, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> calls.Run:
        check([output, tensor], "reduce_scatter")
        if tensor.numel() != output.numel() * self.members_count:
            why = f"reduce_scatter of {tensor.numel()} elements into {self.members_count} times a tensor of {output.numel()}"
            raise ValueError(why)
        parts, how = _parts(ends.source(tensor), self.members_count), sum_of(opts.reduceOp, output.dtype)
        return calls.reduce_scatter(ends.target(output), parts, how)

    @collective
    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Made:
        output, input = _one(output), _one(input)
        if plain(output, input) and input.numel() == output.numel() * self.members_count:
            how = sum_of(opts.reduceOp, output.dtype)
            if how.code >= 0 and how.factor is None:
                return calls.scatter_sum(output, input, how), [output], None, [input], True
        ends = Ends(self.staging)
        return self._scattered_from(ends, output, input, opts), [output], ends, [input], True

    _reduce_scatter_base = reduce_scatter_single

    @collective
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Made:
        ends = Ends(self.staging)
        runs = (self._scattered_from(ends, *each, opts) for each in zip(outputs, inputs, strict=True))
        return calls.in_turn(runs), outputs, ends, inputs, True

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- from each rank to each

    @collective
    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, out_sizes: Sequence[int], in_sizes: Sequence[int], opts: Any
    ) -> Made:
        output, input, size = _one(output), _one(input), self.members_count
        even = not out_sizes and not in_sizes and input.dim() and input.shape[0] % size == 0
        if even and plain(output, input) and output.shape == input.shape:
            return calls.even("all_to_all", output, input), [output], None, [input], True
        check([output, input], "all_to_all")
        ends = Ends(self.staging)
        places = split(ends.target(output).view(output.shape), out_sizes, size, "all_to_all")
        parts = split(ends.source(input).view(input.shape), in_sizes, size, "all_to_all")
        check_own(places[self.me], parts[self.me], "all_to_all")
        return calls.all_to_all("all_to_all", places, parts), [output], ends, [input], True

    alltoall_base = all_to_all_single

    @collective
    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any) -> Made:
        check([*output_tensors, *input_tensors], "all_to_all")
        if len(output_tensors) != self.members_count or len(input_tensors) != self.members_count:
            raise ValueError(f"all_to_all needs a tensor for each of {self.members_count} ranks, both ways")
        check_own(output_tensors[self.me], input_tensors[self.me], "all_to_all")
        check_apart(output_tensors, "all_to_all")
        ends = Ends(self.staging)
        places, parts = [ends.target(each) for each in output_tensors], [ends.source(each) for each in input_tensors]
        return calls.all_to_all("all_to_all", places, parts), output_tensors, ends, input_tensors, True

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As ``barrier``; ``TransferTimeout`` names all ranks that did not come within ``timeout``, in the words of torch."""
        limit = self.engine.timeout if timeout is None else timeout.total_seconds()
        if limit <= 0:
            raise TransferTimeout(f"Rank {self._called} timed out in monitoredBarrier after 0 ms")
        try:
            self._submit("monitored_barrier", calls.barrier("monitored_barrier"), [], None, limit, True).wait()
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

    def _check_peer(self, rank: int, what: str) -> None:
        """Raise unless the group has this rank, and it is another one."""
        self._check_rank(rank, what)
        if rank == self.me:
            raise ValueError(f"{what} between rank {rank} and itself")

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

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Work:
        self._check_peer(srcRank, "recv")
        return self._receive(_one(tensors), srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        return self._receive(_one(tensors), -1, tag)

    def _receive(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        if lies_elsewhere(tensor):
            raise NotSupported("recv cannot write a tensor that lies at a worker", hint="give it a plain tensor")
        written("recv_", (tensor,))
        if plain(tensor) and not torch.autograd._profiler_enabled():
            return self._keep(self.pairs.receive(tensor, src, tag, None, [tensor]))
        check([tensor], "recv")
        with _event("recv"):
            ends = Ends(self.staging)
            put = partial(ends.end, self.pairs.timeout)
            return self._keep(self.pairs.receive(ends.target(tensor), src, tag, put, [tensor]))

    # -- its names, its life, and what is told of it

    def name(self) -> str:
        return "rdmarpc"

    getBackendName = name

    def _get_backend_name(self) -> str:
        """torch asks whether it is gloo to know whether tensors without another device belong on the CPU."""
        return self.name() if cuda_driver.count() else "gloo"

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """A group of these ranks of ours, which meet; ``None`` at the others."""
        if self.me not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'_'.join(map(str, ranks))}"
        limit = timeout or timedelta(seconds=self.engine.timeout)
        store = dist.PrefixStore(f"{name}/", self.store)
        made = ProcessGroup(store, ranks.index(self.me), [self.members.ranks[each] for each in ranks], limit, opts, None)
        made._set_group_name(name)
        made._set_group_desc(group_desc or f"{self.group_desc}:split")
        return made

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, text: str) -> None:
        self.group_desc = text

    # What C++ calls.
    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        return self.group_name

    def getGroupDesc(self) -> str:
        return self.group_desc

    def get_group_store(self) -> Store:
        return self.store

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        """torch asks for what a backend can do: split, coalesce, allocate."""
        if device.type not in ("cpu", cuda_driver.kind()):
            raise RuntimeError(f"the backend rdmarpc takes tensors on the CPU and on CUDA devices, not on {device}")
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False
    supports_reconfigure = supports_window = False

    def register_pre_hook(self, hook_id: int, hook: Any) -> None:
        """Refused: torch (from 2.14 on) would keep the hook, and never call it for a group that is Python."""
        why = "hooks of a process group run in torch's own groups only"
        raise NotSupported(why, hint="add callbacks to the calls' futures")

    register_post_hook = register_abort_hook = register_pre_hook

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device(cuda_driver.kind())] if cuda_driver.count() else [])]

    def _start_coalescing(self, device: torch.device) -> None:
        self.collected.works = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self.collected.works = self.collected.works, None

        def run() -> None:
            for work in works or ():
                work.wait()

        def finish() -> None:
            made.finish(failure(made))

        made = Work(run, [], "coalesced")
        threading.Thread(target=finish, name="rdmarpc-coalesced", daemon=True).start()
        return made

    def _set_sequence_number_for_group(self) -> None:
        """The sequence begins with the group."""

    def _get_sequence_number_for_group(self) -> int:
        return self.engine.sequence

    def set_timeout(self, timeout: timedelta) -> None:
        self.engine.timeout = self.pairs.timeout = timeouts.above_zero(timeout.total_seconds(), OF_GROUP)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End the group here, and every call under way at any rank. Idempotent."""
        self.engine.fail(PeerLost(f"rank {self._called} aborted the process group", status="ABORTED"))
        self._close()

    def shutdown(self) -> None:
        """Leave the group. What was submitted is done before. Idempotent."""
        if not self.queue.ended:
            for work in self.queue.pending():
                try:
                    work.wait()
                except Exception:
                    break
            for text in (*self.engine.unseen(), *self.pairs.unseen()):
                _log.warning("rank %s leaves process group %s: %s", self._called, self.group_name, text)
        self._close()

    def forked(self) -> None:
        """In a forked child: what is under way is the parent's, and so is a group of several ranks. Takes no lock."""
        error = RdmaError(_FORKED, hint="let the parent make the call, or call destroy_process_group and make a group here")
        self.queue.forked(error)
        self.pairs.forked(error)
        self.engine.forked(error)

    def _close(self) -> None:
        self.queue.stop()
        self.pairs.close()
        self.engine.close()
        self.staging.close()
        groups.discard(self)

    def explain(self) -> list[str]:
        """Lines for people: what is under way, and who is missing."""
        engine = self.engine
        name = self.group_name or "without a name"
        who = f"of the ranks {named(self.members.ranks)}, this is rank {self._called}"
        lines = [f"process group {name} {who}: {engine.sequence} calls"]
        if engine.error is not None:
            lines.append(f"  failed: {engine.error}")
        if engine.since:
            lines.append(f"  {engine.told(engine.signature)}, call {engine.sequence}: {engine.missing()}")
        lines += [f"  {text}" for text in self.pairs.waiting()]
        return lines


def _in_child() -> None:
    for group in list(groups):
        group.forked()


here.explained.append(lambda: [line for group in list(groups) for line in group.explain()])
os.register_at_fork(after_in_child=_in_child)
