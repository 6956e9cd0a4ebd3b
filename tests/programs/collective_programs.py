"""Programs of ``torch.distributed``, drawn from a seed, as plain source: ``source(recipe(seed))``.

The text defines ``program(w, rank, size)``, which all ranks run, over gloo and over this backend (``collective_calls.World``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import judge
from drawn_programs import drawn

SHAPES = ["()", "(1,)", "(7,)", "(0,)", "(3, 0)", "(4, 6)", "(2, 3, 4)", "(6000,)", "(150, 300)", "(300_001,)"]
SHAPES += ["(32_768,)", "(32_769,)", "(16_385,)", "(131_073,)", "(3, 8191)"]
WHOLE = [f"torch.{name}" for name in ("int8", "uint8", "int32", "int64")]
REAL = [f"torch.{name}" for name in ("float32", "float64", "float16", "bfloat16")]
SUMMED = [*WHOLE, *REAL, "torch.float32", "torch.float64"]
MOVED = [*SUMMED, "torch.bool", "torch.complex64", "torch.complex128"]
ODD = [f"torch.{name}" for name in ("int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "bool")]
FORMS = ["''", "''", "''", "'gaps'", "'turned'", "'later'", "('', 'gaps', 'later')[rank]", "('turned', '')[rank % 2]"]

CALLS = r"""
x = w.made({s}, {d}, {m})
{then}(dist.all_reduce(x, {o}, here.group, async_op={later}), x)

x = w.made({s}, {d}, {m})
{then}(dist.all_reduce(x, group=here.group, op={o}, async_op={later}), x)

x = w.made({s}, {d})
dist.reduce(x, {root}, {o}, here.group)
if rank == {root}:
    w.keep('reduced', x)

x = w.made({s}, {t}, {m})
{then}(dist.broadcast(x, {root}, here.group, async_op={later}), x)

x = w.made({s}, {t})
{then}(dist.broadcast(x, group=here.group, group_src=here.size - 1, async_op={later}), x)

x = w.made({s}, {t}, {m})
out = [w.empty({s}, {t}, <''|'gaps'>) for _ in here.ranks]
{then}(dist.all_gather(out, x, here.group, async_op={later}), out, x)

x = w.made({s1}, {t}, {m})
out = w.empty((here.size * x.shape[0], *x.shape[1:]), {t})
{then}(dist.all_gather_into_tensor(out, x, here.group, async_op={later}), out)

x = w.made({s}, {d})
out = [w.empty({s}, {d}) for _ in here.ranks] if rank == {root} else None
{then}(dist.gather(x, out, {root}, here.group, async_op={later}), out)

parts = [w.made({s}, {t}) for _ in here.ranks]
x = w.empty({s}, {t})
{then}(dist.scatter(x, parts if rank == {root} else None, {root}, here.group, async_op={later}), x, parts)

parts = [w.made({s}, {d}) for _ in here.ranks]
x = w.empty({s}, {d})
{then}(dist.reduce_scatter(x, parts, {o}, here.group, async_op={later}), x, parts)

x = w.made((here.size * 3, 5), {d})
out = w.empty((3, 5), {d})
{then}(dist.reduce_scatter_tensor(out, x, {o}, here.group, async_op={later}), out, x)

x = w.made((here.size * 2, 5), {t}, {m})
out = w.empty(x.shape, {t})
{then}(dist.all_to_all_single(out, x, group=here.group, async_op={later}), out, x)

rows, comes = [here.me + 2 * n for n in range(here.size)], [n + 2 * here.me for n in range(here.size)]
x, out = w.made((sum(rows), 3), {t}), w.empty((sum(comes), 3), {t})
{then}(dist.all_to_all_single(out, x, comes, rows, group=here.group, async_op={later}), out, x)

x = [w.made({s}, {t}) for _ in here.ranks]
out = [w.empty({s}, {t}) for _ in here.ranks]
{then}(dist.all_to_all(out, x, here.group, async_op={later}), out, x)

dist.barrier(<here.group|here.group, async_op=False|group=here.group>)

{then}(dist.barrier(here.group, async_op=True))

dist.monitored_barrier(here.group<|, wait_all_ranks=True|, timeout=datetime.timedelta(seconds=9)>)

several = [w.made(n, {d}) for n in (1, 40, 9000)]
{then}(dist.all_reduce_coalesced(several, {o}, here.group, async_op={later}), several)

several = [w.made(n, torch.float32) for n in (1, 40)]
with dist._coalescing_manager(here.group, async_ops={later}) as found:
    for x in several:
        dist.all_reduce(x, group=here.group)
if {later}:
    found.wait()
w.keep('several', several)

x = torch.sparse_coo_tensor([[0, here.me + 1]], [1.0, 2.0], (8,))
{then}(dist.all_reduce(x, group=here.group, async_op={later}), x)

x = w.made({s}, torch.float32)
future = dist.all_reduce(x, group=here.group, async_op=True).get_future()
w.keep('found', future.then(lambda done: done.value()[0] * 2).wait())

x = w.made({s}, torch.float64)
work = dist.all_reduce(x, group=here.group, async_op=True)
work.wait()
w.keep('state', [work.is_completed(), work.is_success(), x])
work.wait()

dist.all_reduce(w.made({s}, torch.float32), group=here.group, async_op=True)

w.keep('who', [dist.get_rank(here.group), dist.get_world_size(here.group), dist.get_process_group_ranks(here.group)])

known = here.group or dist.group.WORLD
w.keep('who', [dist.get_group_rank(known, rank), dist.get_global_rank(known, here.me)])

x = nn.Parameter(w.made({s}))
with torch.no_grad():
    dist.all_reduce(x, group=here.group)
(x * x).sum().backward()
w.keep('gradient', [x, x.grad])

with torch.inference_mode():
    x = w.made({s})
    dist.<all_reduce(x|broadcast(x, here.ranks[0]>, group=here.group)
w.keep('x', x)

x = w.made({s}, {d})
dist.all_reduce(x[<1:|:1|...>], group=here.group)
w.keep('x', x)

x = np.arange(6.0) * (rank + 1)
dist.all_reduce(torch.from_numpy(x), group=here.group)
w.keep('x', x.tolist())

x = w.made((3, 4), torch.complex64)
dist.all_reduce(<x|x.real.clone()|x[0]>, group=here.group)
w.keep('x', x)

x = w.made({s}, {d})
work = dist.all_reduce(x, {o}, here.group, async_op=True)
del x
work.wait(<|datetime.timedelta(seconds=9)|timeout=datetime.timedelta(seconds=9)>)
w.keep('x', work.result())

big = w.empty((here.size, 5), {t})
dist.all_gather(list(big<|.unbind(0)>), w.made(5, {t}), here.group)
w.keep('x', big)

big = w.made((here.size * 5,), {t})
dist.all_gather_into_tensor(big, big[here.me * 5 : here.me * 5 + 5], here.group)
w.keep('x', big)

big = w.made((here.size * 5,), {d})
dist.reduce_scatter_tensor(big[here.me * 5 : here.me * 5 + 5], big.clone(), {o}, here.group)
w.keep('x', big)

parts = [w.made(5, {t}) for _ in here.ranks]
x = parts[here.me]
dist.scatter(x, parts if rank == {root} else None, {root}, here.group)
w.keep('x', x)

x = w.made((6,), {t})
x = w.flat(x.expand(3, 6) if rank == {root} else w.empty((3, 6), {t}))
dist.broadcast(x, {root}, here.group)
w.keep('x', x)

x = w.flat(w.made((6, 4), {t})<.expand(6, 4)|.t()|.flip(0)|[::2]|[:, 1]|.unsqueeze(0).expand(3, 6, 4)>)
out = [torch.zeros(x.shape, dtype=x.dtype) for _ in here.ranks]
dist.all_gather(out, x, here.group)
w.keep('x', out)

x = w.made((3, 4), torch.complex64)
y = w.flat(x.<imag|real|conj().imag|mT|resolve_conj()|view(torch.float32)>)
dist.all_reduce(y, group=here.group)
w.keep('x', y)

xs = [w.made(n) for n in (3, 500, 70_000)]
works = [dist.all_reduce(x, group=here.group, async_op=True) for x in xs]
w.threads(lambda seen: [work.wait() for work in <works|works[::-1]>])
w.keep('x', xs)

xs = [w.made(n) for n in (3, 500, 70_000)]
futures = [dist.all_reduce(x, group=here.group, async_op=True).get_future() for x in xs]
w.keep('x', [each.wait() for each in torch.futures.collect_all(futures).wait()])

xs = [w.made(n) for n in (3, 500)]
future = dist.all_reduce(xs[0], group=here.group, async_op=True).get_future()
found = future.then(lambda done: [done.value()[0].clone(), 3])
dist.all_reduce(xs[1], group=here.group)
w.keep('x', [found.wait(), xs])

x = w.made(4).requires_grad_()
y = x * 2
dist.<all_reduce(y|broadcast(y, here.ranks[0]>, group=here.group)
w.keep('x', [y, y.requires_grad])

x = w.made(4).requires_grad_()
y = x * x
dist.all_reduce(y.detach(), group=here.group)
y.sum().backward()
w.keep('x', [y, x.grad])

x = w.made(4).requires_grad_()
dist.all_reduce(x<.data|.detach()|>, group=here.group)
w.keep('x', x)

for turn in range(<3|30>):
    x = w.made({s}, {d})
    dist.all_reduce(x, {o}, here.group)
    w.keep('x', x)

x = w.made((2_000_000,), <torch.float32|torch.float16|torch.int8|torch.float64>)
{then}(dist.all_reduce(x, {o2}, here.group, async_op={later}), x)

x = w.made({s}, torch.float32)
work = dist.all_reduce(x, group=here.group, async_op=True)
w.again() if False else None
y = w.made({s}, torch.float32)
dist.all_reduce(y, group=here.group)
work.wait()
w.keep('x', [x, y])

x = w.made({s1}, {b})
dist.broadcast(w.bytes(x), {root}, here.group)
w.keep('x', x.view(torch.uint8))

x = w.made({s1}, {b})
out = [w.empty({s1}, {b}) for _ in here.ranks]
dist.all_gather([w.bytes(each) for each in out], w.bytes(x), here.group)
w.keep('x', [each.view(torch.uint8) for each in out])

x = w.made({s}, {f}, {m})
if w.backend == 'gloo':
    dist.all_reduce(x, group=here.group)
    x.div_(here.size)
else:
    dist.all_reduce(x, dist.ReduceOp.AVG, here.group)
w.keep('x', x)

x = w.made({s}, {f})
factor = <0.5|2.0|torch.tensor([4.0])>
if w.backend == 'gloo':
    dist.all_reduce(x.mul_(float(factor)), group=here.group)
else:
    dist.all_reduce(x, dist._make_nccl_premul_sum(factor), here.group)
w.keep('x', x)

out = [w.empty((n + 1) * <3|9000>, {t}) for n in range(here.size)]
x = w.made(out[here.me].shape, {t}, {m})
if w.backend == 'gloo':
    out[here.me].copy_(x)
    for n in range(here.size):
        dist.broadcast(out[n], here.ranks[n], here.group)
else:
    dist.all_gather(out, x, here.group)
w.keep('x', out)

parts = [w.made((n + 1) * <3|9000>, {d}) for n in range(here.size)]
x = w.empty(parts[here.me].shape, {d})
if w.backend == 'gloo':
    for part in parts:
        dist.all_reduce(part, {o}, here.group)
    x.copy_(parts[here.me])
else:
    dist.reduce_scatter(x, parts, {o}, here.group)
w.keep('x', x)

big = w.made((here.size * 7 + 6,), {d})
out, x = big[<1|3|6>:][:7], big[: here.size * 7]
dist.reduce_scatter_tensor(out, x.clone() if w.backend == 'gloo' else x, {o}, here.group)
w.keep('x', out)

big = w.made((here.size * 7,), {t})
x = big[<1|3|6>:][:7]
dist.all_gather_into_tensor(big, x.clone() if w.backend == 'gloo' else x, here.group)
w.keep('x', big)

x = w.made((here.size * 4, 3), {t})
dist.all_to_all_single(x, x.clone() if w.backend == 'gloo' else x, group=here.group)
w.keep('x', x)

x, out = w.made(here.size * 6, {t}), w.empty(here.size * here.size * 6, {t})
if rank % 2 or w.backend == 'gloo':
    dist.all_gather(list(out.chunk(here.size)), x, here.group)
else:
    dist.all_gather_into_tensor(out, x, here.group)
parts, y = w.made(here.size * 6, {d}), w.empty(6, {d})
if rank % 2 and w.backend != 'gloo':
    dist.reduce_scatter(y, list(parts.chunk(here.size)), {o}, here.group)
else:
    dist.reduce_scatter_tensor(y, parts, {o}, here.group)
w.keep('x', [out, y])

x = w.made({s}, {d}).view(-1)
x = x if rank % 2 else x.view(1, -1, 1)
dist.all_reduce(x, {o}, here.group)
w.keep('x', x)

for n in range(<20|540>):
    x = w.made(n + 1)
    dist.all_reduce(x, group=here.group)
    w.keep('x', x.sum())

works = []
for n in (200_000, 3, 900_000, 40_000):
    x = w.made(n, {d2})
    works.append((dist.all_reduce(x, group=here.group, async_op=True), x))
    y = w.made(n // 2, {d2})
    dist.all_reduce(y, group=here.group)<|; dist.barrier(here.group)>
    w.keep('y', y)
for work, x in works[::<1|-1>]:
    w.then(work, x)
""".strip().split("\n\n")

OBJECTS = r"""
found = [None] * here.size
dist.all_gather_object(found, {v}, here.group)
w.keep('found', found)

found = [{v}, {v}] if rank == {root} else [None, None]
dist.broadcast_object_list(found, {root}, here.group)
w.keep('found', found)

found = [None] * here.size if rank == {root} else None
dist.gather_object({v}, found, {root}, here.group)
w.keep('found', found)

found = [None]
dist.scatter_object_list(found, [{v} for _ in here.ranks] if rank == {root} else None, {root}, here.group)
w.keep('found', found)
""".strip().split("\n\n")
VALUES = r"""
{'rank': rank, 'text': 'x' * (rank * 3000)}
w.made((3, 4), torch.bfloat16)
[None, (1, 2.5), {4}, b'\x00' * 70_000]
Config(rank, 'é')
{'deep': [{'t': w.made((5,)).t()}, w.made(())]}
nn.Linear(2, 2).double().weight.dtype
torch.float16
""".strip().split("\n")

PAIRS = r"""
x, y = w.made({s2}, {t}), w.empty({s2}, {t})
if rank == 0:
    dist.send(x, 1, tag=3)
elif rank == 1:
    w.keep('source', dist.recv(y, <0|None|src=0>, tag=3))
w.keep('y', y)

one, two = w.made({s2}, {t}), w.made({s2}, {t})
a, b = w.empty({s2}, {t}), w.empty({s2}, {t})
right, left = (rank + 1) % size, (rank - 1) % size
works = [dist.isend(one, right, tag=1), dist.irecv(b, left, tag=2), dist.isend(two, right, tag=2), dist.irecv(a, left, tag=1)]
for n in <range(4)|reversed(range(4))|(2, 0, 3, 1)>:
    works[n].wait()
w.keep('came', [a, b])

out, into = w.made({s2}, {t}), w.empty({s2}, {t})
swaps = [dist.P2POp(dist.isend, out, (rank + 1) % size), dist.P2POp(dist.irecv, into, (rank - 1) % size)]
for work in dist.batch_isend_irecv(<swaps|swaps[::-1]>):
    work.wait()
w.keep('into', into)

x, y = w.made({s2}, {t}), w.empty({s2}, {t})
if rank == 0:
    works = [dist.isend(x, other) for other in range(1, size)]
    [work.wait() for work in works]
else:
    dist.recv(y)
dist.barrier()
w.keep('y', y)

if rank == 0:
    dist.send_object_list([{v}, {v}], 1)
elif rank == 1:
    found = [None, None]
    w.keep('from', dist.recv_object_list(found, 0))
    w.keep('found', found)

x = w.made({s2}, {t})
if rank == 0:
    w.later(dist.isend(x, 1, tag=7), x)
elif rank == 1:
    y = w.empty({s2}, {t})
    w.later(dist.irecv(y, 0, tag=7), y)

x, y = w.made({s2}), w.empty({s2})
for _ in range(5 if here.size > 1 else 0):
    if here.me == 0:
        dist.send(x, group=here.group, group_dst=here.size - 1)
    if here.me == here.size - 1:
        dist.recv(y, group=here.group, group_src=0)
w.keep('y', y)

sizes = [5, 70_000, 1, 300_000, 9000, 2]
if rank == 0:
    for n in sizes:
        x = w.made(n, {t})
        w.later(dist.isend(x, 1, tag=n), x)
elif rank == 1:
    for n in <sizes|sizes[::-1]|sorted(sizes)>:
        x = w.empty(n, {t})
        dist.recv(x, <0|None>, tag=n)
        w.keep('x', x)

x, y = w.made({s2}, {t}), w.empty({s2}, {t})
works = [dist.isend(x, (rank + 1) % size, tag=9)]
z = w.made({s}, {d})
dist.all_reduce(z, {o})
dist.barrier()
works.append(dist.irecv(y, (rank - 1) % size, tag=9))
for work in works<|[::-1]>:
    work.wait()
w.keep('x', [y, z])

def swap(seen):
    x, y = torch.full((200_000,), float(rank)), torch.zeros(200_000)
    for turn in range(6):
        works = [dist.isend(x + turn, (rank + 1) % size, tag=4), dist.irecv(y, (rank - 1) % size, tag=4)]
        for work in works:
            work.wait()
        seen(y)
def add(seen):
    for n in (10, 300_000, 50, 700_000):
        x = torch.full((n,), float(rank))
        dist.all_reduce(x)
        seen(x)
w.threads(swap, add)

x = w.made(<7|6000|130_001>, {b})
y = w.empty(x.shape, {b})
works = [dist.isend(w.bytes(x), (rank + 1) % size), dist.irecv(w.bytes(y), (rank - 1) % size)]
for work in works:
    work.wait()
w.keep('y', y.view(torch.uint8))

x = w.made((6, 5), {t})
y = w.empty((6, 5), {t}, <'gaps'|'turned'|''>)
x = w.flat(x<.t().contiguous().t()|[::2].repeat(2, 1)|.flip(1)>)
works = [dist.isend(x, (rank + 1) % size), dist.irecv(y, (rank - 1) % size)]
for work in works:
    work.wait()
w.keep('y', y)
""".strip().split("\n\n")

FUNCTIONS = r"""
w.keep('x', funcol.all_reduce(w.made({s}), <'sum'|'max'|'avg'>, group))

x = funcol.all_gather_tensor(w.made({s1}, {t}), <0|-1>, group)
w.keep('x', x)

x = funcol.reduce_scatter_tensor(w.made((here.size * 2, here.size * 3)), 'sum', <0|1>, group)
w.keep('x', x + 1)

x = funcol.all_to_all_single(w.made((here.size * 2, 3), {t}), None, None, group)
w.keep('x', x)

x = funcol.broadcast(w.made({s}, {t}), 0, group)
w.keep('x', x)

x = funcol.all_reduce_coalesced([w.made({s}), w.made(3)], 'sum', group)
w.keep('x', x)

x = funcol.all_gather_into_tensor_coalesced([w.made((2, 3)), w.made(3)], group)
w.keep('x', x)

x = w.made((here.size * 2, 3)).requires_grad_()
how = <('all_gather_tensor', 0)|('reduce_scatter_tensor', 'sum', 0)|('all_to_all_single', None, None)>
y = getattr(funcol, how[0] + '_autograd')(x, *how[1:], group)
(y * y).sum().backward()
w.keep('x', [y, x.grad])

x = w.made({s}).requires_grad_()
y = dnn.all_reduce(x<|, op=dist.ReduceOp.SUM>, group=group)
(y * x).sum().backward()
w.keep('x', [y, x.grad])

x = w.made({s1}).requires_grad_()
y = torch.cat(dnn.all_gather(x, group=group))
(y * y).sum().backward()
w.keep('x', [y, x.grad])

x = w.made((4,)).requires_grad_()
y = dnn.<broadcast(x, 0, group=group)|reduce(x, 0, group=group)>
(y * 3).sum().backward()
w.keep('x', x.grad)

x = w.made((here.size * 2,)).requires_grad_()
y = dnn.all_to_all_single(torch.empty(here.size * 2), x, group=group)
(y * y).sum().backward()
w.keep('x', [y, x.grad])

x = [w.made((3,)).requires_grad_() for _ in here.ranks]
y = dnn.reduce_scatter(torch.empty(3), x, group=group)
(y * y).sum().backward()
w.keep('x', [y, [each.grad for each in x]])

x = [w.made((3,)).requires_grad_() for _ in here.ranks]
y = dnn.all_to_all([torch.empty(3) for _ in x], x, group=group)
sum((each * each).sum() for each in y).backward()
w.keep('x', [y, [each.grad for each in x]])

x = funcol.all_reduce(w.made({s}), 'sum', group)
x = funcol.all_reduce(x * 2, 'sum', group)
w.keep('x', x.wait())

with CommDebugMode() as mode:
    x = funcol.all_reduce(w.made(3), 'sum', group)
w.keep('x', [mode.get_total_counts(), x])
""".strip().split("\n\n")

TENSORS = r"""
x = distribute_tensor(w.made((5, 7), common=True), mesh, [{p}])
w.keep('x', [x, x.full_tensor()])

x = distribute_tensor(w.made((6, 4), common=True), mesh, [{p}]).redistribute(placements=[{p}])
w.keep('x', x)

a, b = (distribute_tensor(w.made((6, 6), common=True), mesh, [{p}]) for _ in range(2))
w.keep('x', (<a @ b|a + b|a * b|torch.cat([a, b])|a.t() @ b|(a @ b).softmax(-1)>).full_tensor())

x = distribute_tensor(w.made((6, 4), common=True), mesh, [{p}])
x = <x.sum()|x.mean(0)|x.max()|x.argmax(1)|x.std()|x.norm()|x[1]|x.view(-1)|x.cumsum(0)|x.topk(2)[0]|x.t()>
w.keep('x', x.full_tensor())

x = DTensor.from_local(w.made((3, 4)), mesh, [<Partial()|Partial('max')|Shard(0)|Shard(1)>])
w.keep('x', x.redistribute(placements=[<Replicate()|Shard(0)|Shard(1)>]))

x = distribute_tensor(w.made((6, 4), common=True), mesh, [{p}]).requires_grad_()
y = (x * x).redistribute(placements=[{p}])
y.<sum()|full_tensor().sum()|to_local().sum()>.backward()
w.keep('x', x.grad)

net = parallelize_module(net_of(w), mesh, {'0': ColwiseParallel(), '2': RowwiseParallel()})
w.keep('net', trained(net, w, common=True))

net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
first, last = ColwiseParallel(output_layouts=Shard(1)), RowwiseParallel(input_layouts=Shard(1))
net = parallelize_module(net, mesh, {'0': first, '1': SequenceParallel(), '2': last})
w.keep('y', net(w.made((2, 6, 8), common=True)))

net = distribute_module(net_of(w), mesh, input_fn=lambda _, x, mesh: distribute_tensor(x[0], mesh, [Replicate()]))
w.keep('net', trained(net, w, common=True))

x = torch.distributed.tensor.<zeros|ones>((6, 3), device_mesh=mesh, placements=[{p}])
w.keep('x', x.shape)

grid = init_device_mesh('cpu', (size, 1), mesh_dim_names=('a', 'b'))
x = distribute_tensor(w.made((4, 6), common=True), grid, [<Shard(0)|Replicate()|Shard(1)>, <Shard(0)|Shard(1)>])
w.keep('x', [x, x.full_tensor(), grid.get_local_rank('a'), grid['a'].size(), grid.get_coordinate()])
""".strip().split("\n\n")
PLACEMENTS = ["Shard(0)", "Shard(1)", "Replicate()"]

TRAINING = r"""
net = DDP(net_of(w), bucket_cap_mb=<0.001|25>, gradient_as_bucket_view=<True|False>
    <|, static_graph=True|, find_unused_parameters=True|, broadcast_buffers=False>)
w.keep('net', trained(net, w))

net = DDP(net_of(w)<|, gradient_as_bucket_view=True>)
with net.no_sync():
    net(w.made((3, 8))).sum().backward()
w.keep('gradients', [p.grad for p in net.parameters()])
w.keep('net', trained(net, w))

net = DDP(net_of(w))
net.register_comm_hook(<None|dist.group.WORLD>, default_hooks.<fp16_compress_hook|allreduce_hook>)
w.keep('net', trained(net, w))

net = DDP(net_of(w), gradient_as_bucket_view=<True|False>)
state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2<|, warm_start=False|, use_error_feedback=False>)
net.register_comm_hook(state, powerSGD_hook.<powerSGD_hook|batched_powerSGD_hook>)
w.keep('net', trained(net, w, steps=4))

net = DDP(net_of(w))
with net.join():
    for _ in range(2 + rank):
        net(w.made((3, 8))).sum().backward()
w.keep('net', list(net.parameters()))

net = DDP(net_of(w), static_graph=<True|False>)
a = net(w.made((3, 8)))
b = net(w.made((3, 8)))
(a.sum() + b.sum()).backward()
w.keep('gradients', [p.grad for p in net.parameters()])

net = DDP(net_of(w), find_unused_parameters=<True|False>)
loss = net.module[0](w.made((3, 8))).sum()
loss.backward()
w.keep('gradients', [p.grad for p in net.parameters()])

net = DDP(checkpointed(w))
w.keep('net', trained(net, w))

net = DDP(net_of(w))
optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.<SGD, momentum=0.9|Adam|AdamW>, lr=0.01,
    parameters_as_bucket_view=<True|False>)
w.keep('net', trained(net, w, optimizer))
optimizer.consolidate_state_dict(0)
if rank == 0:
    w.keep('state', optimizer.state_dict())

net = net_of(w)
local, averager = torch.optim.SGD(net.parameters(), lr=0.1), averagers.PeriodicModelAverager(period=2, warmup_steps=1)
optimizer = PostLocalSGDOptimizer(local, averager)
w.keep('net', trained(net, w, optimizer, steps=4))

net = net_of(w)
for layer in net[::2]:
    fully_shard(layer, mesh=mesh<|, reshard_after_forward=False>)
fully_shard(net, mesh=mesh
    <|, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)|, offload_policy=CPUOffloadPolicy(False)>)
w.keep('net', trained(net, w<|, torch.optim.Adam(net.parameters(), foreach=True)>))

net = net_of(w)
fully_shard(net, mesh=mesh)
net.set_requires_gradient_sync(False)
net(w.made((3, 8))).sum().backward()
net.set_requires_gradient_sync(True)
net(w.made((3, 8))).sum().backward()
w.keep('norm', torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0))
w.keep('gradients', [p.grad for p in net.parameters()])

net = net_of(w)
fully_shard(net, mesh=mesh)
first = <True|False>
state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=first))
w.keep('state', state)
set_model_state_dict(net, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=first))
w.keep('net', list(net.parameters()))

strategy = ShardingStrategy.<FULL_SHARD|SHARD_GRAD_OP|NO_SHARD>
net = FSDP(net_of(w), device_id=torch.device('cpu'), use_orig_params=<True|False>, sharding_strategy=strategy)
w.keep('net', trained(net, w))
with FSDP.summon_full_params(net):
    w.keep('whole', list(net.parameters()))

net = net_of(w)
fully_shard(net, mesh=mesh)
folder = shared_folder(w)
state = {'net': get_model_state_dict(net)}
dcp.save(state, checkpoint_id=folder)
with torch.no_grad():
    for p in net.parameters():
        p.mul_(2)
dcp.load(state, checkpoint_id=folder)
set_model_state_dict(net, state['net'])
w.keep('net', list(net.parameters()))

folder = shared_folder(w)
state = {'x': w.made((3, 4), common=True), 'n': rank}
dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group()).result()
state['x'].zero_()
dcp.load(state, checkpoint_id=folder)
w.keep('state', state)

net = DDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)))
w.keep('y', net(w.made((6, 8))))
w.keep('buffers', list(net.buffers()))

net = replicate(net_of(w))
w.keep('net', trained(net, w))

net = pipelined(w, rank, size, <'ScheduleGPipe'|'Schedule1F1B'|'ScheduleInterleaved1F1B'>)
w.keep('net', net)

net = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 3))
net = DDP(net<|, find_unused_parameters=True>)
net(torch.tensor([rank, 3, 5 + rank])).sum().backward()
w.keep('gradients', [p.grad for p in net.parameters()])

net = net_of(w)
net[0].bfloat16()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = net[0], net[2]
    def forward(self, x):
        return self.b(self.a(x.bfloat16()).float())
w.keep('net', trained(DDP(Net()), w))

net = net_of(w)
net[0].requires_grad_(False)
w.keep('net', trained(DDP(net), w, torch.optim.SGD(net[2].parameters(), lr=0.1)))

net = DDP(net_of(w))
loss = net(w.made((4, 8))).sum()
loss.backward(retain_graph=True)
loss.backward()
w.keep('gradients', [p.grad for p in net.parameters()])

net = copy.deepcopy(DDP(net_of(w)))
w.keep('net', trained(net, w))

one, two = DDP(net_of(w)), DDP(net_of(w))
(one(w.made((4, 8))) * two(w.made((4, 8)))).sum().backward()
w.keep('gradients', [p.grad for net in (one, two) for p in net.parameters()])

net = DDP(net_of(w), process_group=w.groups[<1|2>].group)
w.keep('net', trained(net, w))

net = net_of(w)
DDP._set_params_and_buffers_to_ignore_for_model(net, ['0.weight'])
net = DDP(net)
net(w.made((4, 8))).sum().backward()
w.keep('gradients', [p.grad for p in net.parameters()])

net = DDP(net_of(w))
with torch.autocast('cpu', torch.bfloat16):
    loss = net(w.made((4, 8))).float().sum()
loss.backward()
w.keep('gradients', [p.grad for p in net.parameters()])

net = DDP(net_of(w))
net(w.made((4, 8)))
net.eval()
with torch.no_grad():
    net(w.made((4, 8)))
net.train()
w.keep('net', trained(net, w))

net = DDP(net_of(w))
seen = []
handle = net.module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
w.keep('net', [trained(net, w), seen])

net = DDP(net_of(w))
def hook(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / size)
net.register_comm_hook(None, hook)
w.keep('net', trained(net, w))

net = DDP(net_of(w), bucket_cap_mb=0.001)
def hook(state, bucket):
    parts = [torch.empty_like(bucket.buffer()) for _ in range(size)]
    work = dist.all_gather(parts, bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: sum(parts) / size)
net.register_comm_hook(None, hook)
w.keep('net', trained(net, w))

net = DDP(net_of(w))
net(w.made((4, 8))).sum().backward()
del net
gc.collect()

net = net_of(w)
net[2].weight = nn.Parameter(torch.randn(5, 12))
fully_shard(net, mesh=init_device_mesh('cpu', (1, size), mesh_dim_names=('a', 'b')))
w.keep('net', trained(net, w))

net = net_of(w)
fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.shape[-1] % size == 0 else None)
w.keep('net', trained(net, w))

net = net_of(w)
fully_shard(net, mesh=mesh)
handle = net.unshard(async_op=<True|False>)
handle and handle.wait()
w.keep('whole', [p.shape for p in net.parameters()])
net.reshard()
w.keep('net', trained(net, w))

net = net_of(w).<double()|bfloat16().float()>
fully_shard(net, mesh=mesh)
x = w.made((4, 8)).to(next(net.parameters()).dtype)
net(x).sum().backward()
w.keep('gradients', [p.grad for p in net.parameters()])

net, folder = net_of(w), shared_folder(w)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.Adam(net.parameters())
w.keep('net', trained(net, w, optimizer))
found, state = get_state_dict(net, optimizer)
dcp.save({'n': found, 'o': state}, checkpoint_id=folder)
w.keep('more', trained(net, w, optimizer))
dcp.load({'n': found, 'o': state}, checkpoint_id=folder)
set_state_dict(net, optimizer, model_state_dict=found, optim_state_dict=state)
w.keep('again', trained(net, w, optimizer))

net = net_of(w)
optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
net = DDP(net)
with Join([net, optimizer]):
    for _ in range(2 + rank):
        optimizer.zero_grad()
        net(w.made((3, 8))).sum().backward()
        optimizer.step()
w.keep('net', list(net.parameters()))

net = DDP(net_of(w))
net.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
w.keep('net', trained(net, w))

net = DDP(net_of(w))
state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], 1)
net.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
w.keep('net', trained(net, w, steps=3))

net = DDP(net_of(w))
with rpc.autograd.context() as context:
    rpc.autograd.backward(context, [net(w.made((4, 8))).sum()])
    found = rpc.autograd.get_gradients(context)
    w.keep('gradients', [found[p] for p in net.parameters()])

net = DDP(nn.Sequential(nn.Linear(8, 4), nn.SyncBatchNorm(4)))

sampler = DistributedSampler(list(range(11)), shuffle=True, seed=3<|, drop_last=True>)
w.keep('x', list(sampler))

x = sharded(w)
w.keep('x', x)
""".strip().split("\n\n")

OTHER = r"""
gloo = dist.new_group(backend='gloo', timeout=datetime.timedelta(seconds=9))
x, y = w.made({s}), w.made({s})
work = dist.all_reduce(x, async_op=True)
dist.all_reduce(y, group=gloo)
work.wait()
w.keep('x', [x, y])
dist.destroy_process_group(gloo)

x = w.made((4,)).to(rpc.device(f'worker{(rank + 1) % size}'))
found = [None] * size
dist.all_gather_object(found, x.cpu())
w.keep('x', found)

x = w.made((4, 3), {t}).to(rpc.device(f'worker{rank}'))
<dist.broadcast(x, 0)|dist.broadcast(x[1:], 0)|dist.broadcast(x.t(), 0)>
w.keep('x', x.cpu())

w.keep('x', rpc.rpc_async(f'worker{rank}', reduced, (w.made(4),)).wait())

with torch.no_grad(), torch.profiler.profile() as seen:
    x = w.made({s}, {d})
    dist.all_reduce(x)
w.keep('x', x)

pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
x = w.made({s}, {d})
dist.all_reduce(x)
w.keep('x', x)

gc.collect()

dist.barrier()
torch.manual_seed(4)

x = w.made((3, 4))
y = DTensor.from_local(x, mesh, [Shard(0)])
z = y.redistribute(placements=[Replicate()], async_op=True)
w.keep('x', (z + 1).to_local())

x = funcol.all_gather_tensor(w.made((2, 3)), 0, group)
w.keep('x', [x[0], x.t() @ x, x.sum(0), torch.cat([x, x])])

x = funcol.all_reduce(w.made((2, 3)), 'sum', group)
del x
x = w.made(3)
dist.all_reduce(x)
w.keep('x', x)

x = w.made((2, 3))
funcol.all_reduce_inplace(x, 'sum', group)
w.keep('x', x)

w.finish(<range(len(w.pending))|reversed(range(len(w.pending)))|sorted(range(len(w.pending)), key=lambda n: n * 7 % 5)>)

w.finish(range(len(w.pending)))

w.again()
mesh, group = DeviceMesh.from_group(dist.group.WORLD, 'cpu'), dist.group.WORLD

made = dist.new_group(<|[0]|[0, 1]|list(range(size))>)
if rank == 0:
    dist.all_reduce(w.made(4), group=made) if dist.get_world_size(made) == 1 else None
dist.destroy_process_group(made) if dist.get_rank(made) >= 0 else None

mine, groups = dist.new_subgroups(<1|size>)
x = w.made({s}, {d})
dist.all_reduce(x, group=mine)
w.keep('x', x)

mine, _ = dist.new_subgroups_by_enumeration([[n] for n in range(size)])
x = w.made({s}, {d})
dist.all_reduce(x, group=mine)
w.keep('x', x)

def body(number):
    group, x = w.groups[number].group if w.groups[number] else None, w.made(500)
    def run(seen):
        for turn in range(10):
            dist.all_reduce(x, dist.ReduceOp.MAX, group)
            seen(x)
    return run
w.threads(body(0), body(1))

def body(number):
    x, y = w.made(500), w.empty(500)
    def run(seen):
        for turn in range(5):
            if rank == 0:
                dist.send(x, 1, tag=number)
            elif rank == 1:
                dist.recv(y, 0, tag=number)
                seen(y)
    return run
w.threads(body(1), body(2), body(3))

if rank < 2:
    x = rpc.rpc_sync(f'worker{1 - rank}', doubled, (w.made({s}),))
    w.keep('x', x)

future = rpc.rpc_async(f'worker{rank}', doubled, (w.made({s}),))
x = w.made({s}, {d})
dist.all_reduce(x)
w.keep('x', [x, future.wait()])

x = w.made({s}, {t}).to(rpc.device(f'worker{(rank + 1) % size}'))
<dist.all_reduce(x)|dist.broadcast(x, 0)>
w.keep('x', x.cpu())

x = w.made((4,)).to(rpc.device(f'worker{(rank + 1) % size}'))
out = [torch.empty(4) for _ in range(size)]
dist.all_gather(out, x)
w.keep('x', out)

here.group and w.keep('name', here.group.<size()|rank()>)
""".strip().split("\n\n")

WRONG = """
dist.broadcast(w.made(3), <size|-5|99>)
dist.all_gather([w.empty(3)], w.made(3))
dist.all_gather([w.empty(3) for _ in range(size + 1)], w.made(3))
dist.all_gather([w.empty(4) for _ in range(size)], w.made(3))
dist.all_gather_into_tensor(w.empty(3 * size + 1), w.made(3))
dist.all_gather_into_tensor(w.empty(3 * size, torch.int64), w.made(3))
dist.reduce_scatter_tensor(w.empty(3), w.made(3 * size + 1))
dist.all_to_all_single(w.empty(size), w.made(size), [1] * size, [2] * size)
dist.all_to_all_single(w.empty(size * 2), w.made(size))
dist.all_to_all_single(w.empty(2 * size + 1), w.made(2 * size + 1))
dist.all_reduce(w.made(3, torch.int32), dist.ReduceOp.PREMUL_SUM)
dist.all_reduce(w.made(3, torch.complex64), dist.ReduceOp.<MAX|PRODUCT|MIN>)
dist.<send|isend|recv|irecv>(w.made(3), rank)
dist.<isend|irecv>(w.made(3), <size|-2>)
dist.new_group([0, size])
dist.all_reduce(w.made(3).to('meta'))
dist.all_reduce(w.made(4).expand(3, 4))
dist.all_reduce(torch.quantize_per_tensor(w.made(3), 0.1, 0, torch.qint8))
dist.all_gather_object([None] * size, threading.Lock())
""".strip().split("\n")

WEIGHTS = [(CALLS, 10), (OBJECTS, 2), (PAIRS, 4), (FUNCTIONS, 3), (TENSORS, 2), (TRAINING, 2), (OTHER, 4), (WRONG, 1)]

HEAD = """
import copy, datetime, gc, os, threading
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from collective_calls import *
from collective_nets import *

def program(w, rank, size):
    torch.manual_seed(SEED)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    attempt, group = w.attempt, dist.group.WORLD
"""


@dataclass(frozen=True)
class Recipe:
    seed: int
    size: int
    body: tuple[str, ...]


def recipe(seed: int) -> Recipe:
    dice = random.Random(seed)
    size, length = dice.choice([2, 2, 3]), dice.choice([6, 10, 16, 24])
    tables = [table for table, weight in WEIGHTS for _ in range(weight)]
    if size > 2:  # gloo adds up in another order
        tables = [table for table in tables if table is not TENSORS and table is not TRAINING]
    return Recipe(seed, size, tuple(_statement(dice, dice.choice(tables)) for _ in range(length)))


def _statement(dice: random.Random, table: list[str]) -> str:
    dtype, shape, later = dice.choice(SUMMED), dice.choice(SHAPES), dice.choice(["False", "True", "True"])
    sums = ["SUM", "SUM", "PRODUCT", "MIN", "MAX", *(["BAND", "BOR", "BXOR"] if dtype in WHOLE else [])]
    once = {
        "s": shape,
        "s1": shape if shape != "()" else "(1,)",
        "s2": shape if shape not in ("(0,)", "(3, 0)") else "(1,)",  # gloo receives nothing of nobody
        "d": dtype,
        "t": dice.choice(MOVED),
        "b": dice.choice(ODD),
        "f": dice.choice(REAL),
        "d2": dice.choice(["torch.float32", "torch.int32", "torch.float64"]),
        "m": dice.choice(FORMS),
        "o": f"dist.ReduceOp.{dice.choice(sums)}",
        "o2": f"dist.ReduceOp.{dice.choice(sums[:5])}",
        "root": dice.choice(["here.ranks[-1]", "here.ranks[0]"]),
        "later": later,
        "then": "w.later" if later == "True" and dice.random() < 0.5 else "w.then",
    }
    free = {"v": VALUES, "p": PLACEMENTS}

    def hole(found: re.Match[str]) -> str:
        return once.get(found[1]) or (dice.choice(free[found[1]]) if found[1] in free else found[0])

    text = re.sub(r"\{(\w+)\}", hole, drawn(dice.choice(table), dice))
    if table is WRONG:
        return f"w.wrong(lambda: {text})"
    if "here" not in text:
        return text
    grouped = table in (CALLS, OBJECTS, PAIRS)
    number = dice.choice([0, 0, 0, 1, 1, 2, 3, 4]) if grouped else 0
    return f"here = w.groups[{number}]\n" + ("if here:\n" + "\n".join(_in(text.split("\n"))) if grouped else text)


def source(made: Recipe) -> str:
    """The program's text."""
    lines = [HEAD.replace("SEED", str(made.seed)).strip("\n")]
    for number, text in enumerate(made.body):
        lines += _in([f"with attempt({number}):", *_in(text.split("\n"))])
    lines += _in([f"with attempt({len(made.body)}):", "    w.finish(range(len(w.pending)))", "dist.barrier()"])
    return "\n".join(lines) + "\n"


def _in(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def smaller(made: Recipe) -> Iterator[Recipe]:
    """The same with one thing less."""
    for body in judge.less(made.body):
        yield replace(made, body=body)
