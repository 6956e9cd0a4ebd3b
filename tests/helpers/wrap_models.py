"""Models for the tests of ``wrap``: top-level classes, so that they can travel."""

from __future__ import annotations

import queue
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from called import held
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(inplace=True), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.classifier = nn.Linear(8 * 16, 10)

    def forward(self, x):
        x = self.features(x)
        return self.classifier(torch.flatten(F.relu(self.middle(x)), 1))


class Skip(nn.Module):
    """``a`` feeds ``b`` and ``c``; the caller's scale comes between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        y = F.relu(self.a(x))
        z = torch.tanh(self.b(y)) * self.scale
        return self.c(z + y)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(20, 8), nn.Linear(20, 6)

    def forward(self, x, y):
        left = torch.relu(self.left(x))
        return left, {"right": self.right(y), "both": (left.sum(1), 3)}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(14, 4)

    def forward(self, pair):
        left, rest = pair
        return self.out(torch.cat([left, rest["right"]], 1)) * rest["both"][1] + rest["both"][0][:, None]


class TuplesAndInputs(nn.Module):
    """Two tensor inputs, one by name; a part that gives a nested structure; two outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.join = Pair(), Join()

    def forward(self, x, *, y, double=False):
        made = self.pair(x, y)
        out = self.join(made)
        return {"out": out * 2 if double else out, "left": made[0]}


class PingPong(nn.Module):
    """Remote, caller, remote, caller; and ``first`` is used by ``third`` past the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Linear(20, 20) for _ in range(4))

    def forward(self, x):
        a = torch.tanh(self.first(x))
        b = torch.tanh(self.second(a))
        c = torch.tanh(self.third(a + b))
        return self.fourth(c)[:, :4]


class Forked(nn.Module):
    """Two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(20, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        y = torch.tanh(self.trunk(x))
        return self.one(y), self.two(y)


class Failing(nn.Module):
    """Raises in its forward or backward when the input says so (its first element)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 4)

    def forward(self, x):
        code = 0 if isinstance(x, FakeTensor) else int(x[0, 0])
        if code == 100:
            raise KeyError("the forward of this part fails")
        return Fuse.apply(self.layer(x), code == 200)


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, blow):
        ctx.blow = blow
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.blow:
            raise ZeroDivisionError("the backward of this part fails")
        return grad, None


class Slow(nn.Module):
    def __init__(self, seconds: float = 0.03) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(20, 4), seconds

    def forward(self, x):
        if not isinstance(x, FakeTensor):
            time.sleep(self.seconds)
        return self.layer(x)


class Held(nn.Module):
    """Its forward ends when its process is asked to ``let_go("forward")`` (``called``)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 4)

    def forward(self, x):
        if not isinstance(x, FakeTensor):
            held("forward")
        return self.layer(x)


class Dawdling(nn.Module):
    """A layer that mostly is quick, forward and backward, and sometimes sleeps; at the twin too."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        super().__init__()
        self.layer, self.chance = nn.Linear(inputs, outputs), random.Random(seed)

    def forward(self, x):
        if not isinstance(x, FakeTensor):
            dawdle(self.chance)
        return Pause.apply(self.layer(x), self.chance)


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, chance):
        ctx.chance = chance
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dawdle(ctx.chance)
        return grad, None


def dawdle(chance: random.Random) -> None:
    pick = chance.random()
    if pick < 0.002:
        time.sleep(chance.random() * 0.02)
    elif pick < 0.05:
        time.sleep(chance.random() * 5e-4)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(20, 4)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else x


class Selecting(nn.Module):
    """Its output's shape depends on data."""

    def forward(self, x):
        return x[x > 0]


class Counting(nn.Module):
    """Branches on data, as far as Python sees."""

    def forward(self, x):
        return x[: int((x > 0).sum()) % 2 + 1]


class Keeping(nn.Module):
    """Keeps its last input: the slot must not be overwritten under it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 4)
        self.kept = None

    def forward(self, x):
        if isinstance(x, FakeTensor):
            return self.layer(x)
        if self.kept is not None and not torch.equal(self.kept, self.copy):
            raise AssertionError("an input that was kept has changed")
        self.kept, self.copy = x, x.detach().clone()
        return self.layer(x)


class Positional(nn.Module):
    """The gradient of ``shift`` is the very tensor that came in."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8, 20))

    def forward(self, x):
        return x + self.shift.unsqueeze(0).squeeze(0)


class SharedInPlace(nn.Module):
    """``b`` writes into what ``c`` reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(20, 20), nn.ReLU(inplace=True), nn.Linear(20, 4)

    def forward(self, x):
        y = self.a(x)
        return self.b(y)[:, :4] + self.c(y)


class Recurrent(nn.Module):
    """Sequences of any length: what comes out of the recurrent layers has their length, the rest has not."""

    def __init__(self, kind: str = "LSTM", **options: bool) -> None:
        super().__init__()
        width = 24 if options.get("bidirectional") else 12
        self.embedding = nn.Embedding(50, 10)
        self.first = getattr(nn, kind)(10, 12, batch_first=True, **options)
        self.second = getattr(nn, kind)(width, 12, batch_first=True, **options)
        self.head = nn.Linear(width, 4)

    def forward(self, tokens):
        y, _ = self.first(self.embedding(tokens))
        y, _ = self.second(torch.tanh(y))
        return self.head(y.mean(1))


class Sizes(nn.Module):
    """Sizes of tensors of one worker are used at others, and given back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        batch, length, width = x.shape
        y = torch.tanh(self.a(x))
        flat = y.reshape(batch * length, width)
        z = self.b(flat).view(y.size(0), -1, width) / y.size(1)
        start = z.new_zeros(z.shape[0], 1, 6)
        return self.c(torch.cat([start, z], 1)).sum((0, 1)), z.size(1) + 1


class Looped(nn.Module):
    """Its part walks along the first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Walk()

    def forward(self, x):
        return torch.tanh(self.layer(x)) * x.size(0)


class Walk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)

    def forward(self, x):
        state, states = x[0], []
        for at in range(len(x)):
            state = torch.tanh(self.cell(state + x[at]))
            states.append(state)
        return torch.stack(states)


class Packed(nn.Module):
    """Packed inside: how long its output is depends on the values of ``lengths``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(10, 12, batch_first=True, bidirectional=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


class Sentences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.packed, self.head = nn.Embedding(50, 10), Packed(), nn.Linear(24, 4)

    def forward(self, tokens, lengths):
        return self.head(torch.relu(self.packed(self.embedding(tokens), lengths))).sum(1)


class Ends(nn.Module):
    """What crosses was made by a linear layer, and then changed in place and reshaped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width), nn.ReLU(inplace=True), nn.Flatten())
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        return self.head(self.body(x))


class Fan(nn.Module):
    """One tensor for two workers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.left, self.right = nn.Linear(width, 8), nn.Linear(width, 8)

    def forward(self, x):
        y = self.trunk(x)
        return self.left(y) + self.right(y)


class Joined(nn.Module):
    """The operation between the parts makes what crosses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, 8)

    def forward(self, x):
        return self.two(self.one(x) * 2.0)


class Spoiled(nn.Module):
    """``two`` writes into what it gets; what it gives is made by an operation that takes no ``out=``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Sequential(nn.ReLU(inplace=True), nn.LayerNorm(width))
        self.three = nn.Linear(width, 8)

    def forward(self, x):
        return self.three(self.two(self.one(x)))


class Alternate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.turn = nn.Linear(width, width), 0

    def forward(self, x):
        y = self.layer(x)
        if isinstance(x, FakeTensor):
            return y * 2.0
        self.turn += 1
        return y * 2.0 if self.turn % 2 else y + y


class Alternating(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = Alternate(width), nn.Linear(width, 8)

    def forward(self, x):
        return self.two(self.one(x))


class Hoard(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(width, width), []

    def forward(self, x):
        y = self.layer(x)
        if not isinstance(x, FakeTensor):
            self.kept.append((y, y.detach().clone()))
            assert all(torch.equal(old, copy) for old, copy in self.kept)
        return y


class Hoarding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = Hoard(width), nn.Linear(width, 8)

    def forward(self, x):
        return self.two(self.one(x))


LOG: queue.SimpleQueue[tuple[str, str, int]] = queue.SimpleQueue()
"""What the ``Logged`` parts of this process did, in order: name, "forward" or "backward", how many came before. No list: parts
must not change globals that could be compared."""


def take_log() -> list[tuple[str, str, int]]:
    taken = []
    while not LOG.empty():
        taken.append(LOG.get())
    return taken


class Logged(nn.Module):
    """Notes each forward and backward in ``LOG``, and as an empty file in ``folder`` when it is over. ``after``: (name, kind,
    number) of what has to be over before, by own (kind, number); each forward and backward takes up to ``delay`` seconds
    more."""

    def __init__(self, name: str, folder: str = "", after: dict | None = None, delay: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 20)
        self.name, self.folder, self.after, self.delay = name, folder, after or {}, delay
        self.forwards = self.backwards = 0

    def forward(self, x):
        if isinstance(x, FakeTensor):
            return torch.tanh(self.layer(x))
        result = Note.apply(torch.tanh(self.layer(x)), self)
        self.note("forward", self.forwards)
        self.forwards += 1
        return result

    def note(self, kind: str, number: int) -> None:
        if self.delay:
            time.sleep(random.SystemRandom().uniform(0, self.delay))  # of no generator that a part must not draw from
        if (kind, number) in self.after:
            flag = Path(self.folder) / "-".join(map(str, self.after[kind, number]))
            deadline = time.monotonic() + 20
            while not flag.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.name} {kind} {number} waits for {flag.name}")
                time.sleep(0.001)
        LOG.put((self.name, kind, number))
        if self.folder:
            (Path(self.folder) / f"{self.name}-{kind}-{number}").touch()


class Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, part):
        ctx.part = part
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.part.note("backward", ctx.part.backwards)
        ctx.part.backwards += 1
        return grad, None


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(20, 20), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.layer(x))


class Write(nn.Module):
    def forward(self, x):
        return x.detach().mul_(2.0) + x if Written.spoil and not isinstance(x, FakeTensor) else x * 1.0


class Written(nn.Module):
    """What runs behind ``one`` writes into its result, but not while it is traced."""

    spoil = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.write = nn.Sequential(nn.Linear(width, width), nn.Tanh()), Write()

    def forward(self, x):
        return self.write(self.one(x))


class Linger(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        if not isinstance(x, FakeTensor):
            time.sleep(4.0)
        return self.layer(x)


class Late(nn.Module):
    """``one`` takes four seconds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.two, self.one = nn.Linear(width, 8), Linger(width)

    def forward(self, x):
        return self.two(self.one(x))
