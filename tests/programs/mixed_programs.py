"""Programs that mix calls, references, distributed autograd, tensors and models at workers, graphs of steps, threads and modes,
drawn from a seed, as plain source: ``source(recipe(seed))``.

The text defines ``program(place, keep)`` as in ``drawn_programs``; it asks ``mixed_calls.rpc`` for the names of ``rdmarpc``.
Tensors ``t0`` to ``t5``, references ``r0`` and ``r1``, modules ``m0`` to ``m2`` (referenced) and ``n0`` (placed) are read and
written by statements. What a statement raises is kept, and the program goes on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from drawn_programs import drawn

TENSORS = [f"t{n}" for n in range(6)]
REFERENCES = ["r0", "r1"]
MODULES = ["m0", "m1", "m2"]
WORKERS = ["worker1", "worker2"]

LOCAL = """
{T} = {t} + {t}
{T} = {t} * 0.5 - {t}
{T} = torch.tanh({t} @ {t})
{T} = torch.tanh({t})
{T} = torch.where({t} > 0, {t}, {t})
{T} = {t}.<t()|clone()|detach()|detach().requires_grad_()|double()|float()|clone().requires_grad_()>
{T} = torch.cat([{t}[: D // 2], {t}[D // 2 :]])
{T} = torch.zeros(D, D) + {t}
{T} = {t} + torch.full((), 0.5)
{T} = at({t}, "{p}")
{T} = home({t})
{T}.<mul_(0.5)|add_({t}.clone())|copy_({t}.clone())|t().mul_({t}.clone())|data.mul_(0.9)|sub_(1).neg_()>
{T}[1:3].<add_({t}[0:2].clone())|copy_({t}[1:3].clone())|zero_()>
{T}[:, 0] = <{t}[0].clone()|1.0>
torch._foreach_<add_|mul_>([{T}, {t}.clone()], 0.5)
{T} = {t} / {t}.abs().max().item()
{T} = {t} @ torch.eye(D)
""".strip().split("\n")

CALL = [
    "<double|same|in_place|turned|unwatched|needing>, ({t},)",
    "fails, ({t},)",
    "<added|product>, ({t}, {t})",
    "<there|by_way_of>, ({t}, '{p}')",
    "<on|on_late|on_kept|on_fails|later|there|backward_there|trained_there>, ({t}, '{o}')",
]

CALLS = [
    "{T} = rpc.rpc_sync('{w}', {call})",
    "{T} = rpc.rpc_sync('{w}', {call})",
    "{T} = rpc.rpc_sync('{w}', {call})",
    "{T} = rpc.rpc_async('{w}', {call}).wait()",
    "found = rpc.rpc_sync('{w}', pieces, ({t},))\n{T} = torch.cat([found['first'], found['rest'][0]]) + found['rest'][1][0]",
    "{T} = {t} + rpc.rpc_sync('{w}', made).sum()",
    "pending.append(rpc.rpc_async('{w}', {late}))",
    "pending.append(rpc.rpc_async('{w}', {late}))",
    "{T} = pending.pop(<0|-1>).wait()",
    "x = {t}.clone()\nfuture = rpc.rpc_async('{w}', {same}, (x,))\n{local}\n{T} = future.wait() + x\nx.mul_(2)",
    "{T} = rpc.remote('{w}', {call}).to_here()",
    "{r} = rpc.remote('{w}', {late})",
    "{r} = rpc.RRef({t}.detach().clone())",
    "{T} = {r}.to_here()",
    "{T} = {r}.<rpc_sync()|rpc_async()|remote()>.<t()|add(1)|mul(0.5)>{got}",
    "{T} = rpc.rpc_sync('{w}', fetched, ({r},))",
    "{T} = rpc.rpc_sync({r}.owner_name(), written, ({r}, {t}))",
]

_APART = "{0} = (t.detach() if t.grad_fn else t for t in ({0}))".format(", ".join(TENSORS))
"""A backward through a model that has moved since is refused, but for gradients of the time since, which it may leave."""

MODELS = [
    "{T} = {m}.rpc_sync().forward({t})",
    "{T} = {m}.rpc_sync().scaled({t}, 0.9)",
    "x = {t}.clone()\nfuture = {m}.rpc_async().forward(x)\ntry:\n    {local}\nfinally:\n    {T} = future.wait()",
    "{T} = {m}.remote().forward({t}).to_here()",
    "{T} = rpc.rpc_sync('{w}', <forwarded|forwarded_late>, ({m}, {t}))",
    "{m}.rpc_sync().fails({t})",
    "keep('weights', {m}.rpc_sync().weights())",
    "keep('gradients', rpc.rpc_sync({m}.owner_name(), local_gradients_of, ({m},)))",
    "{T} = n0({t})",
    "{T} = rpc.rpc_sync('{w}', applied, (<n0|copy.deepcopy(n0)>, {t}))",
    "{T} = rpc.rpc_sync('{w}', <double|in_place|same>, (n0.<one|two>.weight<|.t()|.detach()>,))",
    "with torch.no_grad():\n    n0.<one|two>.weight.<mul_(0.9)|add_({t} * 0.1)|copy_({t}.clone())>",
    "state = copy.deepcopy(n0.state_dict())\n{T} = n0({t})\nn0.load_state_dict(state)",
    "file = io.BytesIO()\ntorch.save({'n': n0.state_dict(), 't': {t}}, file)\nfile.seek(0)\nloaded = torch.load(file)\n"
    "n0.load_state_dict(loaded['n'])\n{T} = loaded['t']",
    "n0.load_state_dict(rpc.rpc_sync({m}.owner_name(), state_of, ({m},)))",
    "{T} = copy.deepcopy(n0)({t})",
    "with tempfile.TemporaryDirectory() as folder:\n    rpc.save_checkpoint({'n': n0, 'o': optimizer}, folder)\n"
    "    {T} = n0({t})\n"
    "    with torch.no_grad():\n        n0.one.weight.mul_(0.5)\n"
    "    with torch.inference_mode(False):\n        rpc.load_checkpoint({'n': n0, 'o': optimizer}, folder)",
    f"closed(n0)\n{_APART}",
    "{T} = <torch.rand_like({t})|F.dropout({t}, 0.5)|torch.randn(D, D) + {t}|torch.randperm(D) * 1.0 + {t}>",
    "{T}.register_hook(lambda g: g * <2|0.5>)",
    "{T} = torch.utils.checkpoint.checkpoint(n0, {t}, use_reentrant=False)",
    "{T} = torch.func.<grad|grad_and_value>(lambda v: (v * v).sum())({t}.detach()).<clone()|__getitem__(0)>",
    "{T} = torch.func.vmap(lambda v: v * {t}.detach())({t}.detach()).sum(0)",
    "found = rpc.rpc_sync('{w}', same, (optimizer.state_dict(),))\nkeep('state', found['state'])",
    "found = rpc.rpc_sync('{w}', same, ({'a': [{t}, {t}], 'b': n0.state_dict()},))\n"
    "{T} = found['a'][0] + found['b']['two.weight']",
    "{T} = rpc.rpc_sync('{w}', same, ({t}<[::2]|[1:2]|[:, 1]|[:0]|.sum()|.half()|"
    ".to(torch.complex64)|.gt(0)|.argmax(1)>,)).contiguous().sum().real + {t}",
    "distributed.load_state_dict(distributed.state_dict())",
    f"closed(n0)\n{_APART}\nn0 = place(n0, {{'<one|two|norm|>': '{{w}}'}})",
]

SERVED = [
    "served(<{t}|{t}.detach()>).sum().backward()\nserved.optimizer.step()\nserved.optimizer.zero_grad()",
    "{T} = served({t})",
    "{T} = served({t}).detach()",
    "{T} = rpc.rpc_sync('{w}', applied, (served, {t}))",
    "served.load_state_dict(copy.deepcopy(served.state_dict()))",
    "served.load_state_dict(rpc.rpc_sync({m}.owner_name(), state_of, ({m},)))",
    "with torch.no_grad():\n    served.two.weight.<mul_(0.9)|add_({t} * 0.1)|copy_({t}.clone())>",
    "keep('served', seen(*served.parameters(), *served.buffers()))",
    "keep('served', served.optimizer.state_dict())",
]

TRAINING = [
    "optimizer.zero_grad()\n(n0({t}) * {t}).sum().backward()\noptimizer.step()",
    "n0({t}).sum().backward()",
    "{t}.sum().backward(retain_graph=True)",
    "({t} * {t}).sum().backward(retain_graph=True)",
    "optimizer.step()",
    "keep('loss', in_batches(n0, {t}.detach(), {t}.detach()))\noptimizer.step()",
    "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
]

REPEATED = [
    "for call in range(<3|4|6>):\n    {T}, {U} = graphed({t}.detach(), {t}.detach())\n"
    "    keep('repeated', seen({t}, *n0.parameters(), *n0.buffers()))",
    "{T}, {U} = graphed({t}.detach(), {t}.detach())",
    "{T}, {U} = graphed({t}.detach(), {t}.detach())",
]

MODES = {
    "no_grad": "torch.no_grad()",
    "inference": "torch.inference_mode()",
    "autocast": "torch.autocast('cpu', torch.bfloat16)",
    "dtype": "default_dtype(torch.float64)",
    "strict": "deterministic()",
    "device": "made_on('worker1')",
    "saved": "torch.autograd.graph.save_on_cpu()",
    "anomaly": "torch.autograd.detect_anomaly()",
}

OPTIMIZERS = [  # fused ones write unseen by autograd, but where a graph is posted again
    "SGD(PARAMS, lr=0.1, momentum=<0|0.9>, <foreach=True|foreach=False|fused=True|weight_decay=0.1>)",
    "Adam(PARAMS, lr=0.01, <foreach=True|foreach=False|fused=True|amsgrad=True>)",
    "AdamW(PARAMS, lr=0.01, <foreach=True|foreach=False|fused=True>)",
    "Adagrad(PARAMS, lr=0.05)",
]


@dataclass(frozen=True)
class Part:
    """A statement, or a block of them."""

    kind: str
    text: str = ""
    body: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Recipe:
    seed: int
    setup: tuple[str, ...]
    served: bool
    step: tuple[str, ...]
    body: tuple[Part, ...]


def recipe(seed: int) -> Recipe:
    dice = random.Random(seed)
    width = dice.choice([4, 4, 6, 12, 40, 200])
    placements = ["{'': 'worker1'}", "{'one': 'worker1', 'two': 'worker2'}", "{'norm': 'worker2'}", "{'two': 'worker1'}"]
    params = "[p for p in n0.parameters()]"
    setup = (
        f"D = {width}",
        f"draw = torch.Generator().manual_seed({seed})",
        *(f"{name} = {_made(dice)}" for name in TENSORS),
        f"n0 = place(Net(D, 3), {dice.choice(placements)})",
        f"optimizer = torch.optim.{drawn(dice.choice(OPTIMIZERS), dice).replace('PARAMS', params)}",
        f"m0 = rpc.remote('{dice.choice(WORKERS)}', Net, (D, 5))",
        f"remote_module = rpc.nn.RemoteModule('{dice.choice(WORKERS)}', Net, (D, 7))",
        "m1, m2 = remote_module.get_module_rref(), rpc.RRef(n0)",
        f"r0, r1 = rpc.remote('{dice.choice(WORKERS)}', same, (t0.clone(),)), rpc.RRef(t1.detach().clone())",
        f"owners = {dice.choice(['(m0,)', '(m0, m1)', '(m1, m2)', '(m0, m1, m2)', '(m2,)'])}",
        "references = [p for m in owners for p in rpc.rpc_sync(m.owner_name(), parameters_of, (m,))]",
        "distributed = rpc.optim.DistributedOptimizer(torch.optim."
        + drawn(dice.choice(OPTIMIZERS), dice).replace("(PARAMS,", ", references,"),
    )
    step = tuple(_statement(dice, dice.choice(LOCAL), ["a", "b", "c", "e"]) for _ in range(dice.choice([1, 2, 3, 4])))
    if dice.random() < 0.3:
        step += (_statement(dice, dice.choice(CALLS[:3]), ["a", "b", "c", "e"]),)
    elif dice.random() < 0.6:  # not with a call: a backward pass of torch's ends at what came in a context
        step += (
            _statement(dice, "optimizer.zero_grad()\n(n0({t}) * {t}).sum().backward()\noptimizer.step()", ["a", "b", "c", "e"]),
        )
    served = dice.random() < 0.3
    if served:
        options = dice.choice(["torch.optim.SGD, name='M', lr=0.1, momentum=0.9", "torch.optim.Adam, name='M', lr=0.01"])
        servers = dice.choice(["['worker1']", "['worker1', 'worker2']"])
        setup += (f"served = rpc.serve(Net(D, 9), {servers}, {options})".replace("'M'", f"'M{seed}'"),)
    return Recipe(seed, setup, served, step, _body(dice, dice.choice([6, 10, 16, 24]), Inside(served=served)))


def _made(dice: random.Random) -> str:
    text = "torch.randn(D, D, generator=draw)"
    place = dice.choice(["", "", "worker1", "worker2"])
    text = f"at({text}, '{place}')" if place else text
    return text + dice.choice(["", ".requires_grad_()", ".t()", ""])


class Inside(NamedTuple):
    """Of what a statement is a part."""

    depth: int = 0
    context: bool = False
    thread: bool = False
    served: bool = False

    def deeper(self, **more: bool) -> Inside:
        return self._replace(depth=self.depth + 1, **more)


def _body(dice: random.Random, length: int, inside: Inside) -> tuple[Part, ...]:
    tables = [LOCAL, LOCAL, CALLS, CALLS]
    if not inside.thread:
        tables += [MODELS, MODELS, REPEATED, *([SERVED, SERVED] if inside.served else [])]
        tables += [] if inside.context else [TRAINING]
    kinds = ["no_grad", "inference", "autocast"]
    kinds += [] if inside.thread else ["strict", "device", "saved", "anomaly"]
    kinds += [] if inside.thread or inside.served else ["dtype"]  # servers count in their own
    kinds += [] if inside.context else ["context"] * 6 + ["left"]
    kinds += [] if inside.context or inside.thread or inside.depth else ["threads"]
    parts = []
    for _ in range(length):
        if inside.depth < 3 and dice.random() < 0.16:
            kind = dice.choice(kinds)
            parts.append(Part(kind, *_block(dice, kind, inside)))
        else:
            parts.append(Part("statement", _statement(dice, dice.choice(dice.choice(tables)), TENSORS)))
        if dice.random() < 0.2:
            parts.append(Part("statement", f"keep('seen', seen({dice.choice(TENSORS)}))"))
    return tuple(parts)


def _block(dice: random.Random, kind: str, inside: Inside) -> tuple[str, tuple[Part, ...]]:
    length = dice.choice([1, 2, 4, 6])
    if kind == "threads":
        own = inside.deeper(thread=True, served=False)
        return "", tuple(Part("thread", "", _body(dice, length, own)) for _ in range(2))
    if kind in ("context", "left"):
        losses = " + ".join(dice.sample(TENSORS, dice.choice([1, 2, 3])))
        losses = f"({losses}).sum()" + dice.choice(["", "", f", ({dice.choice(TENSORS)} * 2).sum()"])
        losses += dice.choice(["", "", "], again"])
        return losses, _body(dice, length, inside.deeper(context=True))
    # A backward pass within autocast would run under it here alone.
    return MODES[kind], _body(dice, length, inside.deeper(context=inside.context or kind == "autocast"))


def _statement(dice: random.Random, text: str, tensors: list[str]) -> str:
    once = {"T": dice.choice(tensors), "U": dice.choice(tensors), "r": dice.choice(REFERENCES), "m": dice.choice(MODULES)}

    def hole(found: re.Match[str]) -> str:
        name = found[1]
        if name in once:
            return once[name]
        if name == "call" or name == "late":
            text = drawn(dice.choice(CALL), dice)
            return _filled(text.replace("{t}", "{t}.clone()") if name == "late" else text)
        if name == "local":
            return _filled(drawn(dice.choice(LOCAL), dice))
        choices = {
            "t": tensors,
            "w": [*WORKERS, *WORKERS, *WORKERS, "worker0"],
            "o": [*WORKERS, *WORKERS, "worker0"],
            "p": WORKERS,
            "same": ["double", "same", "in_place", "turned"],
        }
        return dice.choice(choices[name]) if name in choices else found[0]

    def _filled(text: str) -> str:
        return re.sub(r"\{(\w+)\}", hole, text)

    text = _filled(drawn(text, dice))
    got = ".to_here()" if ".remote()." in text else ".wait()" if ".rpc_async()." in text else ""
    return text.replace("{got}", got)


def source(made: Recipe) -> str:
    """The program's text."""
    counter = iter(range(10**6))
    lines = [
        "import contextlib, copy, io, tempfile, threading",
        "import torch",
        "import torch.nn.functional as F",
        "import mixed_calls",
        "from mixed_calls import *",
        "",
        "def program(place, keep):",
        f"    torch.manual_seed({made.seed})",
        "    rpc, attempt, pending = mixed_calls.rpc, attempts(keep), []",
        *_in(list(made.setup)),
        "    def step(a, b):",
        "        c, e = a * 2, b + a",
        *_in(_in([line for text in made.step for line in text.split("\n")])),
        "        return c.detach() * 1, e.detach() * 1",
        "    graphed = rpc.graphed(step)",
        *_in(_lines(made.body, counter)),
        f"    keep('tensors', seen({', '.join(TENSORS)}, *n0.parameters()))",
        "    keep('optimizer', optimizer)",
        "    keep('distributed', distributed.state_dict()['state'])",
        "    for m in (m0, m1):",
        "        keep('state', rpc.rpc_sync(m.owner_name(), state_of, (m,)))",
        *(["    keep('served', seen(*served.parameters()))", "    closed(served)"] if made.served else []),
        "    for r in (r0, r1):",
        "        with attempt(-1):",
        "            keep('reference', seen(r.to_here()))",
        "",
    ]
    return "\n".join(lines)


def _lines(parts: tuple[Part, ...], counter: Iterator[int]) -> list[str]:
    lines: list[str] = []
    names = ", ".join(TENSORS)
    for part in parts:
        if part.kind == "statement":
            lines += [f"with attempt({next(counter)}):", *_in(part.text.split("\n"))]
        elif part.kind == "left":
            lines += ["kept = pending, r0, r1", "with contextlib.suppress(ZeroDivisionError), rpc.autograd.context():"]
            lines += _in(["pending = []", *_lines(part.body, counter), "1 / 0"])
            lines += ["pending, r0, r1 = kept", f"{names} = settled({names})"]
        elif part.kind == "context":
            lines += ["kept = pending, r0, r1", "with rpc.autograd.context() as context:", "    pending = []"]
            lines += _in(_lines(part.body, counter))
            lines += [f"    with attempt({next(counter)}):"]
            loss, _, rest = part.text.partition("], ")
            lines += _in(_in([f"rpc.autograd.backward(context, [{loss}]{', retain_graph=True' if rest else ''})"]))
            lines += _in(_in([f"rpc.autograd.backward(context, [{loss}])"])) if rest else []
            lines += _in(_in([f"found = [rpc.autograd.get_gradients(context).get(t) for t in ({names}, *n0.parameters())]"]))
            lines += _in(_in(["keep('gradients', [None if g is None else g.detach().contiguous() for g in found])"]))
            lines += _in(_in(["for m in (m0, m1):"]))
            lines += _in(_in(["    keep('there', rpc.rpc_sync(m.owner_name(), gradients_of, (context, m)))"]))
            lines += _in(_in(["distributed.step(context)"]))
            lines += ["pending, r0, r1 = kept", f"{names} = settled({names})"]
        elif part.kind == "threads":
            for number, thread in enumerate(part.body):
                lines += [f"def thread{number}(keep, {names}):", "    attempt, pending = attempts(keep), []"]
                lines += ["    r0, r1 = rpc.RRef(t0.clone()), rpc.remote('worker1', same, (t1.clone(),))"]
                lines += [*_in(_lines(thread.body, counter)), f"    keep('tensors', seen({names}))"]
            lines += [f"in_threads(keep, [{', '.join(f'thread{n}' for n in range(len(part.body)))}], [{names}])"]
        else:
            lines += [f"with {part.text}:", *_in(_lines(part.body, counter) or ["pass"]), f"{names} = settled({names})"]
    return lines


def _in(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def smaller(made: Recipe) -> Iterator[Recipe]:
    """The same with one thing less."""
    for body in _less(made.body):
        yield replace(made, body=body)
    for n in range(len(made.step)):
        yield replace(made, step=made.step[:n] + made.step[n + 1 :])


def _less(parts: tuple[Part, ...]) -> Iterator[tuple[Part, ...]]:
    half = len(parts) // 2
    if half > 1:
        yield parts[:half]
        yield parts[half:]
    for n, part in enumerate(parts):
        yield parts[:n] + parts[n + 1 :]
        if part.kind in MODES:
            yield parts[:n] + part.body + parts[n + 1 :]
    for n, part in enumerate(parts):
        for body in _less(part.body):
            yield (*parts[:n], replace(part, body=body), *parts[n + 1 :])
