"""Whole training programs, drawn from a seed, as plain source: ``source(recipe(seed))``.

The text defines ``program(place, keep)``. ``place(net, placement)`` gives the model whose parameters and buffers lie where
``placement`` says; ``keep(name, value)`` notes a value. Run as a script, it does so in one process and prints.
"""

from __future__ import annotations

import random
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace

from program_blocks import BLOCKS, D
from program_blocks import DRAWS as DRAWING_BLOCKS
from program_loops import DRAWS as DRAWING_FEATURES
from program_loops import EXCLUDES, FEATURES, LOSSES, OPTIMIZERS
from torch import nn

V = 5
"""Width of a result."""

WORKERS = ("worker1", "worker2", "worker3")

HEADER = f"""\
import collections, copy, dataclasses, io, random
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import prune

D, V = {D}, {V}
"""

SCRIPT = """
if __name__ == "__main__":
    program(lambda net, placement: net, lambda name, value: print(name, value, sep=": "))
"""

INLETS = {
    "tokens": ("nn.Embedding(11, D)", "self.inlet(x)", "torch.randint(0, 11, (rows, length), generator=draw)"),
    "padded": ("nn.Embedding(11, D, 0, <None|1.0>)", "self.inlet(x)", "torch.arange(rows * length).view(rows, -1) % 11"),
    "sparse": ("nn.Embedding(11, D, sparse=True)", "self.inlet(x)", "torch.randint(0, 11, (rows, length), generator=draw)"),
    "numbers": ("nn.Linear(6, D)", "self.inlet(x)", "torch.randn(rows, length, 6, generator=draw)"),
    "images": ("nn.Conv1d(3, D, 3, padding=1)", "self.inlet(x).mT", "torch.randn(rows, 3, length, generator=draw)"),
}  # fmt: skip
"""Its module, what it makes of ``x``, and an ``x``."""

RESULTS = {
    "tensor": ("out", "result"),
    "dict": ('{"out": out, "hidden": x}', 'result["out"]'),
    "tuple": ("(x, (out,))", "result[1][0]"),
    "dataclass": ("Result(out, [x])", "result.out"),
    "named": ("Named(out, x)", "result.out"),
    "ordered": ('collections.OrderedDict(out=out, shape=x.shape, n=3)', 'result["out"]'),
}  # fmt: skip

CLASSES = {
    "dataclass": "@dataclasses.dataclass\nclass Result:\n    out: torch.Tensor\n    rest: list\n",
    "named": 'Named = collections.namedtuple("Named", "out hidden")\n',
}


@dataclass(frozen=True)
class Recipe:
    """What a program is made of. Each ``dice`` draws the alternatives of its own text alone: dropping one leaves the rest."""

    seed: int
    inlet: str
    result: str
    classes: bool
    loss: tuple[str, int]
    optimizer: tuple[str, int]
    blocks: tuple[tuple[str, str, int], ...]
    """Attribute, kind and dice of each."""
    features: tuple[tuple[str, int], ...]
    placement: tuple[tuple[str, str], ...]
    steps: int = 4
    varying: bool = False
    quiet: bool = False
    """Nothing is read before the end, but for what features read."""


def recipe(seed: int, draws: bool = True) -> Recipe:
    """``draws=False`` leaves out what draws random numbers on the model's tensors."""
    dice = random.Random(seed)
    inlet = dice.choice([*INLETS, "tokens", "numbers"])
    classes = dice.random() < 0.5
    kinds = [dice.choice(list(BLOCKS)) for _ in range(dice.choice([1, 2, 2, 3, 3, 4]))]
    if len(kinds) > 1 and dice.random() < 0.15:
        kinds.append("=b0")  # the first block once more
    features = dice.sample(list(FEATURES), dice.choice([0, 1, 2, 2, 3, 3, 4, 5]))
    for group in EXCLUDES:
        several = [name for name in features if name in group]
        features = [name for name in features if name not in several[1:]]
    found = Recipe(
        seed=seed,
        inlet=inlet,
        result=dice.choice(["tensor", *RESULTS]),
        classes=classes,
        loss=(dice.choice(LOSSES[classes]), dice.randrange(10**6)),
        optimizer=(dice.choice(OPTIMIZERS), dice.randrange(10**6)),
        blocks=tuple((f"b{n}", kind, dice.randrange(10**6)) for n, kind in enumerate(kinds)),
        features=tuple((name, dice.randrange(10**6)) for name in features),
        placement=(),
        steps=dice.choice([2, 3, 3, 4]),
        varying=dice.random() < 0.3,
        quiet=dice.random() < 0.3,
    )
    if not draws:
        found = replace(
            found,
            blocks=tuple(block for block in found.blocks if block[1] not in DRAWING_BLOCKS),
            features=tuple(feature for feature in found.features if feature[0] not in DRAWING_FEATURES),
        )
    paths = module_paths(found)
    workers = WORKERS[: dice.choice([1, 2, 2, 3])]
    entries = {"": dice.choice(workers)} if dice.random() < 0.3 else {}
    for _ in range(dice.choice([0, 1, 2, 3, 4]) if entries else dice.choice([1, 2, 2, 3, 4])):
        entries[dice.choice(paths)] = dice.choice(workers)
    if dice.random() < 0.03:
        entries = {}
    return replace(found, placement=tuple(entries.items()))


def module_paths(made: Recipe) -> list[str]:
    net: nn.Module = loaded(model_source(made)).Net()
    return [name for name, _ in net.named_modules() if name and "parametrizations" not in name]


def loaded(text: str) -> types.ModuleType:
    module = sys.modules["drawn_model"] = types.ModuleType("drawn_model")  # dataclasses look there
    exec(text, module.__dict__)
    return module


def drawn(text: str, dice: int | random.Random) -> str:
    """With one of each ``<a|b>``."""
    rng = random.Random(dice) if isinstance(dice, int) else dice
    return re.sub(r"<([^<>]*\|[^<>]*)>", lambda found: rng.choice(found[1].split("|")), text)


def model_source(made: Recipe) -> str:
    parts, built, forward = [HEADER, CLASSES.get(made.result, "")], [], []
    module, enter, _ = INLETS[made.inlet]
    names = [name for name, _, _ in made.blocks]
    for name, kind, dice in made.blocks:
        if kind.startswith("="):
            forward += [f"x = self.{kind[1:]}(x)"] if kind[1:] in names else []
            continue
        title = kind.title().replace("_", "") + name[1:]
        parts.append(f"class {title}(nn.Module):\n" + textwrap.indent(drawn(BLOCKS[kind], dice).strip(), "    ") + "\n")
        built.append(f"self.{name} = {title}()")
        forward.append(f"x = self.{name}(x)")
    inner = [
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.inlet = {drawn(module, made.seed)}",
        *(f"        {line}" for line in built),
        "        self.head = nn.Linear(D, V)",
        "    def forward(self, x):",
        f"        x = {enter}",
        *(f"        {line}" for line in forward),
        "        out = self.head(x)",
        f"        return {RESULTS[made.result][0]}",
    ]
    return "\n".join([*parts, "\n".join(inner), ""])


def source(made: Recipe) -> str:
    """The program's text."""
    points: dict[str, list[str]] = {}
    for name, dice in made.features:
        rng = random.Random(dice)
        for point, text in FEATURES[name].items():
            points.setdefault(drawn(point, rng), []).extend(drawn(text, rng).strip("\n").split("\n"))
    optimizer, made_by = _optimizer(made)
    if optimizer.startswith("LBFGS"):
        points["backward"] = []
        points["step"] = ["def closure():", "    optimizer.zero_grad()", "    loss = measure(read(net(x)), y)"]
        points["step"] += ["    loss.backward()", "    return loss", "optimizer.step(closure)"]
    rows, length = ("2 + step % 3", "3 + step % 2") if made.varying else ("3", "4")
    target = "torch.randint(0, V, (rows, length), generator=draw)"
    y = target if made.classes else "torch.randn(rows, length, V, generator=draw)"
    taken = [*points.get("batch", []), "optimizer.zero_grad()"]
    inner = ["loss = measure(read(net(x)), y)", *points.get("loss", [])]
    for manager in points.get("around", []):
        inner = [f"with {manager}:", *_in(inner)]
    taken += [*inner, *points.get("backward", ["loss.backward()"]), *points.get("grads", [])]
    taken += [*points.get("step", ["optimizer.step()"]), *points.get("stepped", [])]
    taken += [] if made.quiet else ['keep("loss", loss)', 'keep("gradients", [p.grad for p in net.parameters()])']
    if caught := points.get("caught"):
        taken = ["try:", *_in(taken), f"except {caught[0]} as error:", '    keep("caught", error)']
    body = [
        f"torch.manual_seed({made.seed})",
        "net = Net()",
        *points.get("unplaced", []),
        f"net = place(net, {dict(made.placement)})",
        *points.get("setup", []),
        *made_by,
        *points.get("made", []),
        f"draw = torch.Generator().manual_seed({made.seed})",
        f"for step in range({made.steps}):",
        *_in([f"rows, length = {rows}, {length}", f"x = {INLETS[made.inlet][2]}", f"y = {y}", *taken]),
        *points.get("end", []),
        'keep("net", net)',
        'keep("optimizer", optimizer)',
    ]
    return "\n".join([model_source(made), *_helpers(made), "def program(place, keep):", *_in(body), SCRIPT])


PLAIN_POINTS = {"unplaced", "setup", "made", "around", "loss", "backward", "grads", "stepped", "<unplaced|setup>"}
PYTHON = re.compile(r"keep\(|step ==|step %|held|append|optimizer|print|schedule|random|item\(")
"""What a feature does in Python in every step, or not in every one: a graph (``rdmarpc.graphed``) has none of it."""


def graphed_source(made: Recipe, calls: int = 10) -> str:
    """The text of a program whose step is one function of ``x`` and ``y``, of one form, that is called again and again; the
    model says what is made of the function (``graph``)."""
    features = [each for each in made.features if set(FEATURES[each[0]]) <= PLAIN_POINTS | {"end"}]
    features = [each for each in features if not any(PYTHON.search(t) for p, t in FEATURES[each[0]].items() if p != "end")]
    points: dict[str, list[str]] = {}
    for name, dice in features:
        rng = random.Random(dice)
        for point, text in FEATURES[name].items():
            points.setdefault(drawn(point, rng), []).extend(drawn(text, rng).strip("\n").split("\n"))
    inner = ["loss = measure(read(net(x)), y)", *points.get("loss", [])]
    for manager in points.get("around", []):
        inner = [f"with {manager}:", *_in(inner)]
    step = ["def step(x, y):", *_in(["optimizer.zero_grad()", *inner, *points.get("backward", ["loss.backward()"])])]
    step += _in([*points.get("grads", []), "optimizer.step()", *points.get("stepped", []), "return loss, [net.head.bias]"])
    y = "torch.randint(0, V, (3, 4), generator=draw)" if made.classes else "torch.randn(3, 4, V, generator=draw)"
    text, made_by = _optimizer(replace(made, features=tuple(features)))
    if text.startswith("LBFGS"):
        made_by = ["optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)"]
    body = [
        f"torch.manual_seed({made.seed})",
        "net = Net()",
        *points.get("unplaced", []),
        f"net = place(net, {dict(made.placement)})",
        *points.get("setup", []),
        *made_by,
        *points.get("made", []),
        *step,
        "step = getattr(net, 'graph', lambda step: step)(step)",
        f"draw = torch.Generator().manual_seed({made.seed})",
        "rows, length = 3, 4",
        f"for call in range({calls}):",
        *_in([f"x = {INLETS[made.inlet][2]}", f"y = {y}", "loss, seen = step(x, y)", 'keep("loss", loss.detach())']),
        *_in(['keep("bias", seen[0].detach())', 'keep("gradients", [p.grad for p in net.parameters()])']),
        *points.get("end", []),
        'keep("net", net)',
        'keep("optimizer", optimizer)',
    ]
    return "\n".join([model_source(made), *_helpers(made), "def program(place, keep):", *_in(body), SCRIPT])


def _helpers(made: Recipe) -> list[str]:
    return [
        f"def read(result):\n    return {RESULTS[made.result][1]}\n",
        f"def measure(out, y):\n    return {drawn(*made.loss)}\n",
        "def trained(net):\n    return [p for p in net.parameters() if p.requires_grad]\n",
    ]


def _optimizer(made: Recipe) -> tuple[str, list[str]]:
    text, rng = made.optimizer[0], random.Random(made.optimizer[1])
    text = drawn(text, rng)
    groups = '[{"params": trained(net)[:2], "lr": 0.02}, {"params": trained(net)[2:]}]'
    ways = ["net.parameters()", "net.parameters()", "trained(net)", groups]
    if not {"swapped", "new_parameter"} & {name for name, _ in made.features}:  # they add groups without names
        ways.append("net.named_parameters()")
    params = rng.choice(ways)
    if made.inlet == "sparse":
        params = '[p for name, p in net.named_parameters() if "inlet" not in name]'
    return text, [f"optimizer = torch.optim.{text.replace('PARAMS', params)}"]


def _in(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def smaller(made: Recipe) -> Iterator[Recipe]:
    """The same with one thing less."""
    for field in ("features", "blocks", "placement"):
        value = getattr(made, field)
        for n in range(len(value)):
            less = replace(made, **{field: value[:n] + value[n + 1 :]})
            paths = {name for name, _, _ in less.blocks} | {"", "inlet", "head"}
            yield replace(less, placement=tuple(entry for entry in less.placement if entry[0].split(".")[0] in paths))
    if made.steps > 1:
        yield replace(made, steps=made.steps - 1)
    plain = {"result": "tensor", "varying": False, "quiet": False, "inlet": "numbers", "optimizer": ("SGD(PARAMS, lr=0.1)", 0)}
    for field, value in plain.items():
        if getattr(made, field) != value:
            yield replace(made, **{field: value})
