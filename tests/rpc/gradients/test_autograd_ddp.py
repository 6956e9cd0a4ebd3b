"""DDP inside of contexts: gradients against the same module and graph without RPC, bit by bit, at every replica."""

from __future__ import annotations

import contextlib
import copy
import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc
from group import Meeting, results, run_group
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import rdmarpc as rpc
from rdmarpc import autograd
from rdmarpc.optim import DistributedOptimizer

TINY = 0.00001  # MiB of a bucket: one for each parameter
KEPT: list[Any] = []
"""To the end: gloo's group that dies with its last module may wait for a thread that wants the interpreter's lock."""


def join(meeting: Meeting) -> int:
    torch.set_num_threads(1)
    store = dist.FileStore(meeting._place + "-gloo", -1)
    dist.init_process_group("gloo", store=store, rank=meeting.rank, world_size=2, timeout=timedelta(seconds=20))
    meeting.join(world_size=2)
    return meeting.rank


def ddp(module: nn.Module, **options: Any) -> DistributedDataParallel:
    KEPT.append(DistributedDataParallel(module, **options))
    return KEPT[-1]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def scaled(x, by):
    return x * by


def far(x, by):
    """At the other worker."""
    return rpc.rpc_sync(f"worker{1 - dist.get_rank()}", scaled, (x, by))


class Crossing(nn.Module):
    """Its forward goes to the other worker and comes back: backward reaches its layers in two goes. ``there``: how."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(1), nn.Linear(2, 2).double()
        self.there: Any = far

    def forward(self, x):
        return self.second(self.there(self.first(x), 2.0))


class Halves(nn.Module):
    """Each worker uses one of the two; nobody uses the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList(nn.Linear(3, 2).double() for _ in range(3))

    def forward(self, x):
        return self.parts[dist.get_rank()](x)


def grads(module: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def same(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        assert (one is None) == (other is None), (found, wanted)
        if one is not None:
            if one.is_sparse:
                one, other = one.coalesce().to_dense(), other.coalesce().to_dense()
            assert torch.equal(one, other), (one, other)


def twins(make: Any, **options: Any) -> tuple[DistributedDataParallel, DistributedDataParallel]:
    return ddp(make(), **options), ddp(make(), **options)


def every_option_of_ddp(rank: int) -> None:
    """Each option of DDP over three contexts, in front of and behind calls, with ``.grad`` left alone."""
    for kind, chosen in [
        (net, {}),
        (net, {"bucket_cap_mb": TINY}),
        (net, {"gradient_as_bucket_view": True}),
        (net, {"gradient_as_bucket_view": True, "bucket_cap_mb": TINY}),
        (net, {"static_graph": True}),
        (net, {"static_graph": True, "gradient_as_bucket_view": True}),
        (net, {"find_unused_parameters": True}),
        (Halves, {"find_unused_parameters": True}),
        (Halves, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
        (Crossing, {}),
        (Crossing, {"bucket_cap_mb": TINY, "gradient_as_bucket_view": True}),
        (Crossing, {"static_graph": True}),
        (lambda: nn.EmbeddingBag(10, 3, sparse=True).double(), {}),
    ]:
        ours, alone = twins(kind, **chosen)
        alone.load_state_dict(ours.state_dict())
        if kind is Crossing:
            alone.module.there = scaled
        for number in range(3):
            x = torch.randn(5, 3, dtype=torch.float64)
            if kind not in (net, Crossing, Halves):
                x = torch.randint(10, (4, 2))
            with autograd.context() as context_id:
                y = ours(x)
                autograd.backward(context_id, [(far(y, 2.0) * y).sum()])
                got = autograd.get_gradients(context_id)
                found = [got.pop(parameter, None) for parameter in ours.parameters()]
                assert not got
            y = alone(x)
            (scaled(y, 2.0) * y).sum().backward()
            same(found, grads(alone))
            alone.zero_grad()
            same(grads(ours)[1:], [None] * (len(found) - 1))
            first = next(ours.parameters())
            if number == 0 and kind is net:
                first.grad = torch.full_like(first, 7.0)
            assert first.grad is None if kind is not net else torch.equal(first.grad, torch.full_like(first, 7.0))


def several_passes_in_a_context(rank: int) -> None:
    """Several passes in one context, without and with averaging; the hooks of communication; contexts that overlap."""
    for hook in (None, fp16_compress_hook):
        ours, alone = twins(net)
        for each in (ours, alone):
            if hook is not None:
                each.register_comm_hook(None, hook)
        for _ in range(2):
            inputs = [torch.randn(5, 3, dtype=torch.float64) for _ in range(3)]
            with autograd.context() as context_id:
                for number, x in enumerate(inputs):
                    with ours.no_sync() if number < 2 else contextlib.nullcontext():
                        loss = far(ours(x), 3.0).sum()
                    autograd.backward(context_id, [loss])
                found = [autograd.get_gradients(context_id)[each] for each in ours.parameters()]
            for number, x in enumerate(inputs):
                with alone.no_sync() if number < 2 else contextlib.nullcontext():
                    loss = scaled(alone(x), 3.0).sum()
                loss.backward()
            same(found, grads(alone))
            alone.zero_grad()
    # What a context has is its own, also where DDP lends out views of its buckets.
    ours = ddp(net(), gradient_as_bucket_view=True)
    x = torch.ones(2, 3, dtype=torch.float64)
    with autograd.context() as context_id:
        autograd.backward(context_id, [ours(x).sum()])
        kept = list(autograd.get_gradients(context_id).values())
        copies = [each.clone() for each in kept]
        thread = threading.Thread(target=elsewhere, args=(ours, 5 * x))
        thread.start()
        thread.join(20)
        same(kept, copies)
        ours(7 * x).sum().backward()
        same(kept, copies)


def elsewhere(module: nn.Module, x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        autograd.backward(context_id, [module(x).sum()])


def beside_other_leaves(rank: int) -> None:
    """A model of which DDP has a part, beside leaves of both workers; two at once, in threads; a copy of a module."""

    def train(seed: int, ours: nn.Module, alone: nn.Module, own: torch.Tensor, x: torch.Tensor) -> None:
        with autograd.context() as context_id:
            loss = (far(ours(x * 1.0), own) * own).sum() + far(own, own).sum()
            autograd.backward(context_id, [loss])
            got = autograd.get_gradients(context_id)
            found = [got[each] for each in [*ours.parameters(), own]]
        ((alone(x * 1.0) * own * own).sum() + (own * own).sum()).backward()
        out[seed] = found, [*grads(alone), own.grad]

    out: dict[int, Any] = {}
    threads = []
    for seed in (11, 12):  # the generator is the process's: all is drawn before two threads run
        group = dist.new_group([0, 1])
        ours, alone = (ddp(net(seed), process_group=group, bucket_cap_mb=TINY) for _ in range(2))
        own = torch.randn(2, dtype=torch.float64, requires_grad=True)
        x = torch.randn(4, 3, dtype=torch.float64) + rank
        threads.append(threading.Thread(target=train, args=(seed, ours, alone, own, x)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for found, wanted in out.values():
        for one, other in zip(found, wanted):
            assert torch.allclose(one, other, rtol=1e-14, atol=1e-14)
    assert len(out) == 2
    copied = copy.deepcopy(ddp(net()))
    KEPT.append(copied)
    weight = torch.ones(2, 3, dtype=torch.float64) * (rank + 1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [copied(weight).sum()])
        found = [autograd.get_gradients(context_id)[each] for each in copied.parameters()]
    (copied(weight).sum()).backward()
    same(found, grads(copied))


def hooks_of_accumulators(rank: int) -> None:
    """Behind an accumulator, as torch RPC runs them: once, with the gradient; they may work on ``.grad``. What a context cannot
    serve is refused by name."""
    if rank == 0:
        leaf, seen = torch.ones(3, requires_grad=True), []
        accumulator = leaf.expand_as(leaf).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda outputs, inputs: seen.append((outputs, inputs[0].clone())))
        for direct in (False, True):
            with autograd.context() as context_id:
                start = leaf if direct else leaf * 1
                loss = (rpc.rpc_sync("worker1", scaled, (start, 2.0)) * leaf).sum() + far(leaf, 3.0).sum()
                rpc.rpc_sync("worker1", scaled, (leaf, 2.0))  # takes no part
                autograd.backward(context_id, [loss])
                assert torch.equal(autograd.get_gradients(context_id)[leaf], torch.full((3,), 7.0))
            outputs, gradient = seen.pop()
            assert outputs == () and not seen and leaf.grad is None
            assert torch.equal(gradient, torch.full((3,), 7.0))
        handle = accumulator.register_hook(lambda *_: setattr(leaf, "grad", leaf.grad * 10))
        accumulator.register_prehook(lambda gradients: (gradients[0] + 1,))
        with autograd.context() as context_id:
            autograd.backward(context_id, [far(leaf, 3.0).sum()])
            assert torch.equal(autograd.get_gradients(context_id)[leaf], torch.full((3,), 40.0))
        handle.remove()
        leaf.register_post_accumulate_grad_hook(lambda _: None)
        for start in (leaf, leaf * 1):
            with autograd.context() as context_id, pytest.raises(RuntimeError, match="register_post_accumulate_grad_hook"):
                autograd.backward(context_id, [far(start, 3.0).sum()])
    delayed = net().float()
    parameters = [(name, each) for name, each in delayed.named_parameters() if name == "0.bias"]
    late = ddp(delayed, delay_all_reduce_named_params=parameters, param_to_hook_all_reduce=delayed[2].bias)
    with autograd.context() as context_id, pytest.raises(RuntimeError, match="delay_all_reduce_named_params="):
        autograd.backward(context_id, [late(torch.ones(1, 3)).sum()])


def embedded(rows: torch.Tensor) -> torch.Tensor:
    return TABLE[0](rows)


TABLE: list[nn.EmbeddingBag] = []


def table() -> list[Any]:
    """On the parameter server: references to what it has."""
    torch.manual_seed(5)
    TABLE[:] = [nn.EmbeddingBag(20, 3, mode="sum").double()]
    return [RPC[0].RRef(each) for each in TABLE[0].parameters()]


def weights() -> list[torch.Tensor]:
    return [each.detach().clone() for each in TABLE[0].parameters()]


RPC: list[Any] = []
"""The module that the program below runs over: ours, or torch's."""


def use(name: str) -> None:
    RPC[:] = [rpc if name == "rdmarpc" else torch.distributed.rpc]


def recommendation(rank: int, over: str) -> list[Any]:
    """PyTorch's example of DDP with a parameter server: what one trainer saw. The trainers step one after the other."""
    import torch.distributed.autograd as torch_autograd
    from torch.distributed.optim import DistributedOptimizer as TorchOptimizer

    use(over)
    api, ours = RPC[0], over == "rdmarpc"
    grad, optimizer = (autograd, DistributedOptimizer) if ours else (torch_autograd, TorchOptimizer)
    api.rpc_sync("worker1", use, (over,)) if rank == 0 else None
    owned = api.rpc_sync("worker1", table) if rank == 0 else None
    dist.barrier()
    torch.manual_seed(6)
    dense = ddp(nn.Linear(3, 2).double())
    found: list[Any] = []
    remote = owned if rank == 0 else []
    opt = optimizer(torch.optim.SGD, remote + [api.RRef(each) for each in dense.parameters()], lr=0.1)
    torch.manual_seed(7 + rank)
    for _ in range(3):
        rows, target = torch.randint(20, (4, 2)), torch.randint(2, (4,))
        with grad.context() as context_id:
            out = dense(api.rpc_sync("worker1", embedded, (rows,)))
            loss = nn.functional.cross_entropy(out, target)
            grad.backward(context_id, [loss])
            dist.barrier()
            opt.step(context_id)
            dist.barrier()
        found.append(loss.detach().clone())
    return found + [each.detach().clone() for each in dense.parameters()] + api.rpc_sync("worker1", weights)


def as_torch(meeting: Meeting) -> None:
    """The same program over torch RPC, in the same processes, first."""
    import torch.distributed.rpc as torch_rpc

    rank = join(meeting)
    place = f"file://{meeting._place}-torch"
    torch_rpc.init_rpc(
        f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=torch_rpc.TensorPipeRpcBackendOptions(init_method=place)
    )
    wanted = recommendation(rank, "torch")
    torch_rpc.shutdown()
    found = recommendation(rank, "rdmarpc")
    same(found, wanted)
    there: list[Any] = [None, None]
    dist.all_gather_object(there, found[3:5])
    same(*there)  # the replicas stay equal
    rpc.shutdown()


def test_the_example_of_ddp_and_rpc_is_torchs():
    results(run_group(as_torch, 2, dynamic=True))


def with_gloo(promise: Callable[[int], None], meeting: Meeting) -> None:
    rank = join(meeting)
    torch.manual_seed(100 + rank)
    promise(rank)
    dist.barrier()
    rpc.shutdown()


PROMISES = [every_option_of_ddp, several_passes_in_a_context, beside_other_leaves, hooks_of_accumulators]


@pytest.mark.parametrize("promise", PROMISES)
def test_ddp_in_contexts_is_ddp(promise: Callable[[int], None]):
    results(run_group(functools.partial(with_gloo, promise), 2, dynamic=True))


def test_modules_from_before_the_import_are_found(tmp_path):
    program = f"""
import gc, torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0, world_size=1)
before = DistributedDataParallel(nn.Linear(2, 2))
gc.freeze()
from rdmarpc.gradients.behind import replicas

after = DistributedDataParallel(nn.Linear(2, 2))
for each in (before, after):
    assert [found.module() for found in replicas.of(each.module.weight)] == [each]
assert not replicas.of(nn.Linear(2, 2).weight) and gc.get_freeze_count()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
