"""``RemoteTensor`` as a type: what a program may do with a tensor that lies at a worker, beside the same on plain ones."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import os
import pickle
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lasting import lasting
from operators import Group
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import rdmarpc as rpc
from rdmarpc import places
from rdmarpc.places import RemoteTensor, at_place, place_of, tensor

W1, W2 = "worker1", "worker2"


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    """A caller and two workers, for all tests of this file that break nothing."""
    made = Group()
    pids = {process.pid for process in made.processes}
    lasting.update(pids)
    yield made
    made.close()
    lasting.difference_update(pids)


@pytest.fixture
def own() -> Iterator[Group]:
    """A group for one test, which may end its processes."""
    made = Group()
    yield made
    made.close()


def there(tensor: torch.Tensor, worker: str = W1) -> torch.Tensor:
    found = tensor.detach().to(places.device(worker))
    assert type(found) is RemoteTensor and found.place == worker
    return found.requires_grad_(tensor.requires_grad)


def home(tensor: torch.Tensor) -> torch.Tensor:
    return at_place(tensor.detach(), None)


def same(ours: Any, theirs: torch.Tensor) -> None:
    assert type(ours) in (RemoteTensor, nn.Parameter), type(ours)
    assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    assert torch.equal(home(ours), theirs.detach()), (ours, theirs)


def both(program: Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]) -> None:
    """A program that is given a way to move its tensors gives the same tensors with that as without."""

    def run(move: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        return list(program(move))

    ours, theirs = run(there), run(lambda tensor: tensor)
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs)):
        assert (a is None) == (b is None), number
        if isinstance(b, torch.Tensor):
            assert type(a) is not torch.Tensor, f"{number} is here"
            assert torch.equal(home(a), b.detach()) and a.dtype is b.dtype and a.shape == b.shape, (number, a, b)
        else:
            assert a == b, number


def refused(call: Callable[[], Any], text: str = "") -> None:
    with pytest.raises(rpc.NotSupported, match=text):
        call()


# -- made, moved, brought home


def made() -> None:
    device = places.device(W1)
    for make in (
        lambda **o: torch.zeros(3, 4, **o),
        lambda **o: torch.ones(3, **o),
        lambda **o: torch.full((2, 2), 7, **o),
        lambda **o: torch.arange(10, **o),
        lambda **o: torch.linspace(0, 1, 7, **o),
        lambda **o: torch.eye(4, **o),
        lambda **o: torch.tensor([[1.0, 2.0], [3.0, 4.0]], **o),
        lambda **o: torch.tensor(5, **o),
        lambda **o: torch.randn(5, 5, **o),
        lambda **o: torch.rand(3, dtype=torch.float64, **o),
        lambda **o: torch.randint(0, 9, (4,), **o),
        lambda **o: torch.randperm(9, **o),
        lambda **o: torch.scalar_tensor(2.5, **o),
        lambda **o: torch.as_tensor([1, 2], **o),
        lambda **o: torch.hann_window(8, **o),
        lambda **o: torch.hamming_window(5, True, 0.3, 0.4, **o),
        lambda **o: torch.kaiser_window(7, **o),
        lambda **o: torch.fft.fftfreq(4, **o),
        lambda **o: torch.randperm(9, generator=torch.Generator().manual_seed(1), **o),
    ):
        torch.manual_seed(3)
        ours, state = make(device=device), torch.get_rng_state()
        torch.manual_seed(3)
        theirs = make()
        same(ours, theirs)
        assert torch.equal(state, torch.get_rng_state())
    assert torch.empty(2, 3, device=device).shape == (2, 3)
    assert torch.empty_strided((2, 3), (1, 2), device=device).stride() == (1, 2)
    x = torch.ones(2, 3, device=device)
    for like in (torch.zeros_like(x), x.new_zeros(4), torch.ones_like(x, dtype=torch.int64), torch.empty_like(x)):
        assert type(like) is RemoteTensor and like.place == W1
    leaf = torch.ones(3, device=device, requires_grad=True)
    (leaf * 2).sum().backward()
    assert leaf.is_leaf
    same(leaf.grad, torch.full((3,), 2.0))
    with torch.autocast(device.type, torch.bfloat16):
        same(x @ x.t(), torch.full((2, 2), 3.0, dtype=torch.bfloat16))
    same(torch.amp.GradScaler(device=device.type, init_scale=2.0).scale(x), torch.full((2, 3), 2.0))
    with device:
        made = nn.Linear(20, 30)(torch.arange(60.0).view(3, 20))
        assert type(made) is RemoteTensor and type(made.cpu()) is torch.Tensor
        assert len(made.tolist()) == 3 and made.detach().numpy().shape == (3, 30)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.equal(torch.load(file, map_location=device), torch.ones(2, 3))


def moved() -> None:
    plain = torch.randn(3, 4)
    x = plain.to(places.device(W1))
    same(x, plain)
    y = x.to(places.device(W2))
    assert y.place == W2 and x.place == W1
    same(y, plain)
    assert x.to(places.device(W1)) is x and x.to(torch.float32) is x
    same(x.to(torch.float64), plain.double())
    same(plain.to(places.device(W1), torch.float64), plain.double())
    same(x.to(places.device(W2), torch.float16), plain.half())
    same(x.double(), plain.double())
    assert x.to("meta").is_meta and x.to("meta").stride() == plain.stride()
    same(x.to(torch.zeros(1, dtype=torch.int32)), plain.int())
    brought = x.cpu()
    assert type(brought) is torch.Tensor and torch.equal(brought, plain)
    brought.zero_()
    same(x, plain)
    for shape in (plain.t(), plain[1:, ::2], plain.expand(2, 3, 4), torch.randn(()), torch.randn(0, 3), plain[:, 1]):
        same(there(shape), shape)
        assert there(shape).cpu().stride() == shape.clone().stride()
    odd = torch.arange(20.0)[3:7]
    same(there(odd).view(2, 2), odd.view(2, 2))
    z = torch.randn(4, dtype=torch.complex64)
    same(there(z.conj()).resolve_conj(), z.conj().resolve_conj())
    leaf = torch.randn(3, requires_grad=True)
    leaf.to(places.device(W1)).mul(3).sum().cpu().backward()
    assert torch.equal(leaf.grad, torch.full((3,), 3.0)), leaf.grad
    # This process is a place, too: a copy, as between any two devices, and a leaf stays one.
    for copied in (leaf.to(places.device("worker0")), leaf.to(places.device("worker0"), copy=True)):
        assert type(copied) is torch.Tensor and copied.data_ptr() != leaf.data_ptr()
        assert leaf.is_leaf and "ToCopy" in type(copied.grad_fn).__name__
        copied.sum().backward()
    assert torch.equal(leaf.grad, torch.full((3,), 5.0)), leaf.grad


def numbers() -> None:
    plain = torch.tensor([[1.5, 2.0], [3.0, 4.0]])
    x = there(plain)
    assert x.tolist() == plain.tolist() and x.sum().item() == 10.5 and float(x[0, 0]) == 1.5 and int(x[1, 0]) == 3
    assert bool(x.sum() > 10) and not bool((x < 0).any())
    assert [10, 20, 30][there(torch.tensor(1))] == 20 and len(x) == 2 and [float(row.sum()) for row in x] == [3.5, 7.0]
    array = x.numpy()
    assert (array == plain.numpy()).all() and not array.flags.writeable
    import numpy

    assert (numpy.asarray(x) == plain.numpy()).all()
    with pytest.raises(RuntimeError, match="requires grad"):
        there(plain.requires_grad_()).numpy()
    with torch.no_grad():  # as in the backward of a function of one's own
        assert (there(plain).requires_grad_().numpy() == plain.numpy()).all()
    assert f"{x.sum():.2f}" == "10.50" and W1 in repr(x) and "1.5" in str(x)
    weight = repr(nn.Parameter(x))
    assert weight.startswith("Parameter containing:\ntensor([[") and "requires_grad=True" in weight and W1 in weight
    assert complex(there(torch.tensor(1 + 2j))) == 1 + 2j
    with pytest.raises(RuntimeError):
        bool(x)
    assert x.equal(there(plain.detach())) and torch.allclose(x, there(plain.detach()))
    assert (x == plain).all().item() and 1.5 in x
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        listed, numbers = there(plain.detach().to(dtype)), plain.detach().to(dtype)
        assert torch.equal(torch.tensor([[listed[0, 0]], [listed.sum()]]), torch.tensor([[numbers[0, 0]], [numbers.sum()]]))
    x, plain = x.detach(), plain.detach()
    for ours in (x.clone(), plain.clone()):
        theirs = plain.clone().apply_(abs).map_(plain, max).map2_(plain, plain, min)
        same(there(ours.apply_(abs).map_(x, max).map2_(plain, x, min)), theirs)
    counts: list[Callable[..., torch.Tensor]] = [torch.mul, torch.clamp, torch.clamp_max, torch.nan_to_num]
    for call in (*counts, lambda t, n: t.clamp(max=n), lambda t, n: t.clamp(1, n), lambda t, n: t.clone().clamp_(n)):
        same(call(x, 2.5), call(plain, 2.5))
        asked = x._handle.stream.counts["questions"]
        found = call(x, 3.5)  # a number is no new form
        assert x._handle.stream.counts["questions"] == asked
        same(found, call(plain, 3.5))


class Functional(torch.Tensor):
    """A class with a function, but no dispatch, of its own."""


def named_refusals() -> None:
    x = there(torch.randn(4))
    refused(x.share_memory_)
    refused(x.pin_memory)
    refused(x.storage)
    refused(x.storage_type)
    refused(lambda: torch.from_dlpack(x))
    refused(lambda: x.__dlpack__())
    refused(lambda: x.resize_(9), "resize")
    refused(lambda: x.set_(torch.randn(4).untyped_storage()), "replaced")
    refused(lambda: torch.randn(4).set_(x), "replaced")
    refused(lambda: x.to("remote:99"), "no place")
    refused(lambda: torch.ones(4).as_subclass(Functional) * x, "Functional")
    refused(lambda: nn.LazyLinear(2).to(places.device(W1)), "no shape yet")
    for plain in (
        torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
        torch.randn(4, 4).relu().to_sparse_csr(),
        torch.randn(4, 4).to_mkldnn(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):  # torch's own: its layouts know a few devices
            plain.to(places.device(W1))
    refused(lambda: torch.add(x, 1, out=there(torch.empty(0))), "resized in place: give it its shape before")
    same(torch.add(x, 1), home(x) + 1)  # nothing is left of these errors


# -- copies and files


def copies_of_conjugates() -> None:
    """A deep copy is conjugated and negated in memory, as in one process."""

    def program(move: Any) -> Iterator[Any]:
        x = move(torch.complex(torch.randn(4, 6), torch.randn(4, 6)))
        for each in (x.mH[1:], x.conj().imag, x.conj()[::2]):
            made = copy.deepcopy(each)
            yield from (made, made.stride(), made.is_conj(), made.is_neg())

    both(program)


def copies() -> None:
    x = there(torch.randn(4, 4))
    parts = {"whole": x, "row": x[1], "again": x}
    made = copy.deepcopy(parts)
    assert made["whole"] is made["again"] and made["whole"] is not x
    made["row"].zero_()
    same(made["whole"][1], torch.zeros(4))
    assert home(x)[1].any()
    for leaf in (there(torch.randn(3, requires_grad=True)), nn.Parameter(there(torch.randn(3)))):
        leaf.grad, leaf.note = there(torch.ones(3)), [1]
        twin = home(leaf).requires_grad_()
        twin = nn.Parameter(twin) if isinstance(leaf, nn.Parameter) else twin
        twin.grad, twin.note = torch.ones(3), [1]
        ours, theirs = copy.deepcopy(leaf), copy.deepcopy(twin)
        same(ours, theirs)
        assert isinstance(ours, nn.Parameter) == isinstance(theirs, nn.Parameter) and ours.requires_grad
        assert (ours.grad is None) == (theirs.grad is None) and hasattr(ours, "note") == hasattr(theirs, "note")
    over = {}  # one memory: of a parameter's copy the others are apart, as torch has it
    for place, flat in (("here", torch.arange(4.0)), ("there", there(torch.arange(4.0)))):
        tied = {"parameter": nn.Parameter(flat[:2]), "another": nn.Parameter(flat[1:3]), "flat": flat, "end": flat[3:]}
        over[place] = copy.deepcopy(tied)
        with torch.no_grad():
            over[place]["parameter"].zero_()
            over[place]["flat"].add_(5)
    for name, expected in over["here"].items():
        same(over["there"][name], expected)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(there(torch.ones(2, requires_grad=True)) * 2)
    same(copy.copy(x), home(x))


def files() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(places.device(W1))
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(type(each) is torch.Tensor for each in state.values())
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    plain.load_state_dict(state)
    net.load_state_dict(plain.state_dict())
    for ours, theirs in zip(net.state_dict().values(), plain.state_dict().values()):
        assert type(ours) is RemoteTensor
        assert torch.equal(home(ours), theirs)
    x = there(torch.randn(4))
    loaded = pickle.loads(pickle.dumps({"x": x, "p": nn.Parameter(x)}))
    assert type(loaded["x"]) is torch.Tensor and torch.equal(loaded["x"], home(x)) and isinstance(loaded["p"], nn.Parameter)
    loss = pickle.loads(pickle.dumps(there(torch.ones(2, requires_grad=True)).sum()))
    assert loss.item() == 2 and loss.requires_grad and loss.is_leaf  # as torch pickles what is no leaf
    x.note = "kept"
    assert pickle.loads(pickle.dumps(x)).note == "kept"
    file = io.BytesIO()
    torch.save([x.view(2, 2), x.view(2, 2)[1], x.view(2, 2).t().to(torch.complex64).conj()], file)
    file.seek(0)
    x, row, turned = torch.load(file)
    assert turned.is_conj() and torch.equal(turned.real, x.t())
    row.zero_()
    assert not x[1].any(), "they lie over each other"


def checkpoints(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    net = nn.Linear(3, 4).to(places.device(W1))
    before = {name: home(each).clone() for name, each in net.state_dict().items()}
    dcp.save(net.state_dict(), checkpoint_id=folder, no_dist=True)
    with torch.no_grad():
        for each in net.parameters():
            each.zero_()
    state = net.state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    net.load_state_dict(state)
    for name, each in net.state_dict().items():
        assert type(each) is RemoteTensor and torch.equal(home(each), before[name]), name


# -- modules and optimizers


def modules() -> None:
    def program(move: Any) -> Iterator[Any]:
        net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5), nn.LayerNorm(5))
        if move is there:
            kept = list(net.parameters())
            net.to(places.device(W1))
            assert all(a is b for a, b in zip(kept, net.parameters()))
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for _ in range(3):
            x, y = move(torch.randn(6, 2, 8)), move(torch.randint(0, 5, (6,)))
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            yield loss
        yield from net.state_dict().values()
        net.eval()
        yield net(move(torch.randn(2, 2, 8)))

    both(program)
    lstm = nn.LSTM(3, 4, 2).to(places.device(W1))
    out, (h, _) = lstm(there(torch.randn(5, 2, 3)))
    out.sum().backward()
    assert out.shape == (5, 2, 4) and lstm.weight_ih_l0.grad is not None and type(h) is RemoteTensor


OPTIMIZERS = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "ASGD": {},
    "LBFGS": {"max_iter": 3},
    "Muon": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "SparseAdam": {},
}
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")


def optimizer(name: str, how: dict[str, Any]) -> None:
    def program(move: Any) -> Iterator[Any]:
        if name == "SparseAdam":
            net: nn.Module = nn.Embedding(9, 4, sparse=True)
        else:
            net = nn.Sequential(nn.Linear(4, 6, bias=name != "Muon"), nn.Tanh(), nn.Linear(6, 2, bias=name != "Muon"))
        if move is there:
            net.to(places.device(W1))
        made = getattr(torch.optim, name)(net.parameters(), lr=0.05, **OPTIMIZERS[name], **how)
        schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
        for _ in range(4):
            x = move(torch.randint(0, 9, (5,)) if name == "SparseAdam" else torch.randn(5, 4))

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                made.zero_grad()
                loss = net(x).pow(2).sum()
                loss.backward()
                return loss

            made.step(closure)
            schedule.step()
        yield from net.parameters()
        for state in made.state_dict()["state"].values():
            for _, value in sorted(state.items()):
                if not isinstance(value, torch.Tensor) or value.dim():
                    yield from value if isinstance(value, list) else [value]
                else:
                    yield float(value)
        saved = io.BytesIO()
        torch.save(made.state_dict(), saved)
        saved.seek(0)
        made.load_state_dict(torch.load(saved, weights_only=True))
        if name != "LBFGS":
            made.step(closure)
        yield from net.parameters()

    both(program)


# -- autograd


def long_lists() -> None:
    """Thousands of small tensors in one operation."""
    numbers, rates = torch.arange(14000.0).view(7000, 2), [float(n % 5) for n in range(7000)]

    def program(place: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        tensors = list(place(numbers).unbind(0))
        products = torch._foreach_mul(tensors, tensors)
        torch._foreach_addcmul_(tensors, products, tensors, 0.5)
        torch._foreach_mul_(tensors, rates)
        return torch.stack(tensors), torch.stack(torch._foreach_norm(tensors)), torch.stack(products)

    began = time.monotonic()
    both(program)
    assert time.monotonic() - began < 30, "their number counts, not its square"


def views() -> None:
    def program(move: Any) -> Iterator[Any]:
        x = move(torch.randn(4, 6))
        rows, flat, kept = x[1:3], x.view(-1), x.t()[2:]
        rows.mul_(2)
        yield flat.clone()
        kept[0].zero_()
        flat[::5].add_(1)
        x[x > 1] = 0.5
        x[[0, 2], 1] += 3
        yield rows.clone()
        yield kept.clone()
        base = move(torch.randn(6, requires_grad=True))
        y = base.clone()
        part = y[1:4].view(3, 1)[:2]
        part.mul_(base[:2].view(2, 1))
        y[5] = base[0] * 2
        y.sin().sum().backward()
        yield base.grad
        a, b = move(torch.randn(4, 4)).chunk(2)
        a.copy_(b)
        yield a
        z = move(torch.randn(2, 3, 4))
        z.transpose_(0, 2).squeeze_()
        z.unsqueeze_(0)
        yield z.contiguous()
        yield z.unfold(1, 2, 1).sum(-1)
        yield torch.view_as_real(move(torch.randn(3, dtype=torch.complex64)).conj().resolve_conj())
        yield move(torch.randn(4)).view(torch.int32)
        z, pairs = move(torch.randn(4, 3, dtype=torch.complex64)), move(torch.randn(4, 3, 2))
        for row, pair in zip(z, pairs):  # offsets in elements of another size
            yield row.real + row.imag
            yield row.conj().imag
            yield torch.view_as_complex(pair) * 1

    both(program)


def turned() -> None:
    """Tensors and views that get another shape in place: torch would run views again over the new shape, and give gradients of
    other elements."""

    def program(move: Any) -> Iterator[Any]:
        x = move(torch.randn(4, 4, requires_grad=True))
        row = x.clone()[0]
        row.unsqueeze_(0)  # a view itself
        (row * 2).sum().backward()
        y = x.clone()
        y[0].sin()
        kept = y.detach()  # shares memory, and has no gradient
        y.t_().squeeze_().swapaxes_(0, 1).unsqueeze_(0).transpose_(1, 2)
        (y * y.exp()).sum().backward()
        yield from (x.grad, kept, x.grad.t_().swapdims_(0, 1))
        yield torch.func.grad(lambda z: (z.clone().t_().swapaxes_(0, 1) * z).sum())(x.detach())
        yield torch.func.vmap(lambda z: z.clone().unsqueeze_(0) * 2)(x.detach())
        with torch.no_grad():  # as in the step of an optimizer
            z = x.clone()
            row, flat = z[1:].t(), z.view(-1)
            z.transpose_(0, 1).unsqueeze_(0)
            z[0, 1].mul_(3)
            yield from (z, row, flat, z.is_contiguous())
        z.mul_(x)
        with pytest.raises(RuntimeError, match="created in no_grad mode"):
            row.exp()
        (z * 2).sum().backward()
        yield x.grad
        with torch.inference_mode():
            z = x.clone()
            row = z[0]
            yield from (z.t_(), row)

    def views_in_place(move: Any) -> Iterator[Any]:
        turns = (
            lambda w: w.t_(),
            lambda w: w.transpose_(0, 1).unsqueeze_(0).squeeze_(),
            lambda w: w.swapdims_(-1, 0),
        )
        uses = (
            lambda b, w, c: w.mul_(c).sum() + b.sum(),
            lambda b, w, c: (b.mul_(2), w * c)[1],
            lambda b, w, c: (w.copy_(c), w[0].mul_(5), b * b)[2],
            lambda b, w, c: b[:2, :2] * c + b.sin()[1, 1],
        )
        for mode, turn, use in itertools.product((torch.enable_grad, torch.no_grad, torch.inference_mode), turns, uses):
            x = move(torch.randn(4, 4)).requires_grad_()
            c = move(torch.randn(2, 2)).requires_grad_()
            for base in (x.clone(), move(torch.zeros(4, 4))):
                w = base[1:3, :2]
                with mode():
                    turn(w)
                use(base, w, c).sum().backward()
                yield from (base, w, x.grad, c.grad, w._version)
        b = x.clone()
        pieces = b.unbind()
        turns = (
            lambda: pieces[1].unsqueeze_(0),
            lambda: x[0].unsqueeze_(0),
            lambda: x[0].swapdims_(0, 1),
            lambda: b[0].swapdims_(0, 1),
        )
        for write in turns:
            try:
                write()
                yield write()
            except (IndexError, RuntimeError) as error:
                yield str(error)[:60]

    both(program)
    both(views_in_place)
    x = there(torch.randn(4, 4)).requires_grad_()
    y = x.clone()[0]
    y.register_hook(lambda g: g)
    refused(lambda: y.unsqueeze_(0), "has hooks")
    refused(lambda: x.clone()[:2].as_strided_((2, 2), (2, 1), 1), "gradients would be wrong")
    for turn in (torch.ops.aten.t_, torch.Tensor.t_, lambda row: row.set_(row.detach()[1:])):
        for base in (x.clone(), x.detach().clone()):  # which may get a history yet
            refused(lambda turn=turn, base=base: turn(base[:2]), "gradients would be wrong")
    refused(lambda: setattr(x.clone()[:2], "data", there(torch.zeros(4, 2))), "gradients would be wrong")
    refused(lambda: setattr(there(torch.zeros(4, 4))[:2], "data", there(torch.zeros(5, 5))), "gradients would be wrong")
    y = x.clone()
    row = y[0]
    row.retain_grad()
    for turn in (lambda: setattr(y, "data", there(torch.zeros(5, 5))), lambda: y.set_(y.data.t())):
        refused(turn, "gradients would be wrong")
    refused(lambda: y.unsqueeze_(0), r"hint: .* x = x\.unsqueeze\(")
    assert y.shape == (4, 4)


def turned_under_views() -> None:
    """A tensor gets another shape, or data that lies otherwise, while there are views of it."""

    def program(move: Any) -> Iterator[Any]:
        views = (
            lambda b: b[:2, :2],
            lambda b: b.t(),
            lambda b: b[1:].t()[::2],
            lambda b: b[:1].expand(3, 4),
            lambda b: b.view(-1),
            lambda b: b.unbind(1)[1],
            lambda b: b.detach(),
        )
        turns = (
            lambda b: b.t_(),
            lambda b: torch.ops.aten.transpose_(b, 0, 1),
            lambda b: b.unsqueeze_(1).transpose_(0, 2).squeeze_(),
            lambda b: torch.Tensor.unsqueeze_(b, 1),
            lambda b: b.as_strided_((2, 8), (8, 1)),
            lambda b: setattr(b, "data", b.data.t().contiguous()),
            lambda b: setattr(b, "data", b.data.t()),
            lambda b: setattr(b, "data", move(torch.ones(5, 6))),
        )
        counted = lambda x: x * torch.arange(1.0, x.numel() + 1).view(x.shape)  # noqa: E731
        uses = (
            lambda b, w: counted(w).sum() + counted(b).exp().sum(),
            lambda b, w: (b.mul_(2), counted(w).sum() + (b * b).sum())[1],
            lambda b, w: (b.mul_(2), w.mul_(3), b.add_(1), counted(w * w).sum() + counted(b * b).sum())[3],
        )
        for view, turn, use, mode in itertools.product(views, turns, uses, (torch.enable_grad, torch.no_grad)):
            x = move(torch.arange(16.0).view(4, 4) / 16).requires_grad_()
            b = x.clone()
            w = view(b)
            try:
                with mode():
                    turn(b)
                use(b, w).backward()
                yield from (b, w, x.grad.tolist())  # which torch may have made here, for want of a place
            except RuntimeError as error:
                yield str(error)[:60]
        net = nn.Conv2d(2, 3, 2)
        x = torch.randn(1, 2, 4, 4)
        with torch.no_grad():
            for p in (net.weight, net.bias):
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
        if move is there:
            net.to(places.device(W1))
        kept, turned = net(x), net.weight.transpose(0, 1)
        net.to(memory_format=torch.channels_last)
        (kept.sum() + turned.sum()).backward()
        with torch.no_grad():
            net.weight.mul_(2)
        (net(x).sum() + counted(turned).sum()).backward()
        yield from (net.weight, net.weight.grad, net.bias.grad)

    both(program)


def turned_before_a_history() -> None:
    """A view gets data that lies otherwise, or what it is a view of does, and only then there is a gradient."""
    counted = lambda x: x * torch.arange(1.0, x.numel() + 1).view(x.shape)  # noqa: E731

    def views(move: Any) -> Iterator[Any]:
        turns = (
            lambda w: setattr(w, "data", w.data.t()),
            lambda w: setattr(w, "data", w.data.t().contiguous()),
            lambda w: setattr(w, "data", move(torch.ones(2, 3))),
            lambda w: setattr(w, "data", move(torch.ones(3, 2).double())),
            lambda w: setattr(w, "data", move(torch.ones(4, 4))[2:]),
            lambda w: setattr(w, "data", move(torch.ones(2, 4))),
            lambda w: w.set_(move(torch.ones(2, 4))),
        )
        uses = (
            lambda b, w, p: (b.mul_(p), counted(w).sum() + b.sum())[1],
            lambda b, w, p: counted(w).sum() + b.mul(p).sum(),
            lambda b, w, p: (w.mul_(2), b.mul_(p), w.mul_(3), counted(w).sum() + (b * b).sum())[3],
            lambda b, w, p: (w.mul_(p.sum()), counted(w).sum() + counted(b * b).sum())[1],
        )
        for turn, use, mode in itertools.product(turns, uses, (torch.enable_grad, torch.no_grad)):
            p = move(torch.arange(16.0).view(4, 4) / 16).requires_grad_()
            b = move(torch.ones(4, 4))
            w = b[:2]
            with mode():
                turn(w)
            try:
                use(b, w, p).backward()
                yield from (b, w, p.grad)
            except RuntimeError as error:
                yield str(error)[:60]

    def bases(move: Any) -> Iterator[Any]:
        turns = (
            lambda b: b.t_(),
            lambda b: setattr(b, "data", b.data.t().contiguous()),
            lambda b: setattr(b, "data", move(torch.ones(6, 3))),
            lambda b: b.set_(move(torch.arange(16.0)).view(2, 8)),
        )
        uses = (
            lambda b, w, p: counted(w).sum() + counted(b).exp().sum(),
            lambda b, w, p: (b.mul_(2), counted(w).sum() + (b * b).sum())[1],
            lambda b, w, p: (b.mul_(p.sum()), w.mul_(3), b.add_(1), counted(w).sum() + (b * b).sum())[3],
        )
        hooks = (
            lambda w, seen: None,
            lambda w, seen: w.requires_grad and w.register_hook(seen.append),
            lambda w, seen: w.requires_grad or w.requires_grad_(),
        )
        for tracked, turn, use, hook in itertools.product((True, False), turns, uses, hooks):
            p, seen = move(torch.arange(16.0).view(4, 4) / 16).requires_grad_(), []
            b = p.clone() if tracked else move(torch.ones(4, 4))
            w = b[2:]
            hook(w, seen)
            try:
                with torch.no_grad():
                    turn(b)
                use(b, w, p).backward()
                yield from (b, w, p.grad, w.requires_grad, w.is_leaf, *seen)
            except RuntimeError as error:
                yield str(error)[:40]

    both(views)
    both(bases)


def written_in_part() -> None:
    """What an operation has written before it failed is seen, though a copy of it was made before."""

    def program(move: Any) -> Iterator[Any]:
        for late in (torch.ones(3, dtype=torch.int64), torch.ones(2)):
            x, y, z = move(torch.ones(3)), move(late), move(torch.full((3,), 2.0))
            yield x.tolist()
            with contextlib.suppress(RuntimeError):
                torch._foreach_addcmul_([x, y], [z, z], [z, z], 0.5)
            yield x.tolist()

    both(program)


def versions() -> None:
    def errors(move: Any) -> Iterator[Any]:
        for write in (
            lambda w: w.add_(1),
            lambda w: w.detach().zero_(),
            lambda w: w[0].zero_(),
            lambda w: w.copy_(move(torch.zeros(3))),
            lambda w: torch._foreach_add_([w], 1.0),
            lambda w: torch.add(w.detach(), 1, out=w.detach()),
            lambda w: w.data.zero_(),
            lambda w: w.fill_(2),
            lambda w: w.uniform_(),
        ):
            x = move(torch.ones(3, requires_grad=True))
            w = x.clone()
            y = (w * w).sum()
            before = w._version
            with torch.no_grad():
                write(w)
            yield w._version - before
            try:
                y.backward()
                yield x.grad
            except RuntimeError as error:
                yield str(error).split(";")[0].split("[")[0]
        leaf = move(torch.ones(3, requires_grad=True))
        try:
            leaf.add_(1)
        except RuntimeError as error:
            yield str(error)

    both(errors)


def hooks() -> None:
    def program(move: Any) -> Iterator[Any]:
        seen: list[Any] = []
        x = move(torch.randn(3, requires_grad=True))
        x.register_hook(lambda grad: grad * 2)
        x.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.clone()))
        y = x * 3
        y.register_hook(lambda grad: seen.append(grad.clone()))
        y.retain_grad()
        (y * y).sum().backward()
        yield from seen
        yield x.grad
        yield y.grad
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone() * 1, lambda t: t):
            z = (x.exp() * x).sum()
        yield torch.autograd.grad(z, x)[0]
        yield torch.autograd.grad((x**3).sum(), x, torch.ones_like(x.sum()))[0]

    both(program)


def second_order() -> None:
    def program(move: Any) -> Iterator[Any]:
        w, x = move(torch.randn(4, 3, requires_grad=True)), move(torch.randn(5, 4, requires_grad=True))
        (first,) = torch.autograd.grad((x @ w).tanh().pow(2).sum(), x, create_graph=True)
        penalty = first.norm(2, dim=1).sub(1).pow(2).mean()
        penalty.backward()
        yield from (first, penalty, w.grad, x.grad)
        yield torch.autograd.functional.hessian(lambda v: (v**3).sum(), move(torch.randn(3)))
        yield from torch.autograd.functional.hvp(lambda v: v.sin().sum(), move(torch.randn(3)), move(torch.ones(3)))

    both(program)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2 * ctx.saved_tensors[0]


def contexts() -> None:
    def program(move: Any) -> Iterator[Any]:
        net, x = nn.Linear(4, 4), move(torch.randn(3, 4, requires_grad=True))
        if move is there:
            net.to(places.device(W1))
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
            yield y
            loss = nn.functional.mse_loss(y.float(), x)
        yield from torch.autograd.grad(loss, [x, *net.parameters()])
        dropout = nn.Dropout(0.5)
        yield from torch.autograd.grad(checkpoint(lambda v: dropout(net(v).tanh()), x, use_reentrant=False).sum(), x)
        checkpoint(lambda v: dropout(net(v).tanh()), x, use_reentrant=True).sum().backward()
        yield x.grad
        with torch.no_grad():
            y = net(x)
            yield y.requires_grad
            yield y
        with torch.inference_mode():
            y = net(x)
            yield y.is_inference()
            yield y.add_(1)
            yield y[1:].t()
            torch._foreach_mul_([y, x.detach()], 0.5)
            yield y
            for parts in (x.chunk(2), x.split(2), [x.narrow(0, 1, 2), x.narrow(1, torch.tensor(1), 2)]):
                yield from parts
                yield [(part.is_inference(), part._base is x) for part in parts]
        view = y[1:]
        yield view.is_inference()
        for write in (lambda: view.add_(1), lambda: torch._foreach_add_([y], 1.0)):
            try:
                write()
            except RuntimeError as error:
                yield str(error).split(".")[0]
        yield from torch.autograd.grad(Square.apply(x).sum(), x)
        yield from torch.autograd.grad(nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]).sum(), x)
        with torch.autograd.set_grad_enabled(False):
            yield torch.bernoulli(x.sigmoid())
        with torch.autograd.detect_anomaly(check_nan=True):
            try:
                (x - x).sqrt().sum().mul(0).backward()
            except RuntimeError as error:
                yield "nan" in str(error)

    both(program)


def autocast_in_kernels() -> None:
    """Kernels below autograd call operators that autocast changes (``flags._CALLING``)."""

    def program(move: Any) -> Iterator[Any]:
        x, y = move(torch.randn(4, 4)), move(torch.randn(30, 4))
        s = x.to_sparse()
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                yield torch.sparse.mm(s, x)
                yield torch.sparse.addmm(x, s, x)
                yield torch.addmm(x, s, x)
                yield s @ x
                yield s @ x[0]
                yield torch.mv(x, x[0])
                yield torch.cdist(y, y)
                yield torch.ops.aten._euclidean_dist(y, y)
                yield torch.linalg.pinv(x)
                if hasattr(torch.ops.aten, "_foreach_mm"):  # torch 2.13 has it
                    yield torch.ops.aten._foreach_mm([x], [x])[0]
                yield nn.functional.bilinear(x, x, x[None], x[0, :1])
            yield torch.sparse.mm(s, x)

    both(program)


def one_object() -> None:
    """Kernels ask whether what they read is what they write: of memory with gaps or overlaps by the object alone."""
    i, places_of = torch.arange(4), torch.arange(24).view(4, 6)
    writes: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
        lambda x, y: x.index_put_((i,), y, accumulate=True),
        lambda x, y: x.index_add_(0, i, y),
        lambda x, y: x.index_copy_(0, i, y),
        lambda x, y: x.scatter_(0, places_of * 0, y),
        lambda x, y: x.put_(places_of, y),
        lambda x, y: x.copy_(y),
        lambda x, y: x.add_(y),
        lambda x, y: torch.index_select(x, 0, i, out=y),
        lambda x, y: torch.take(x, places_of, out=y),
        lambda x, y: torch.cat([x], out=y),
        lambda x, y: torch.cat([x[:2], x[2:]], out=y),
    )

    def program(move: Any) -> Iterator[Any]:
        for write in writes:
            for one in (True, False):
                flat = move(torch.randn(80))
                gaps, overlaps = flat.view(8, 10)[1::2, 4:], flat[2:8].expand(4, 6)
                for x in (gaps, overlaps, flat.as_strided((4, 6), (1, 5), 40), flat[24:48].view(6, 4).t()):
                    yield from _written(write, x, x if one else x[:])
        x, y = move(torch.rand(4)), move(torch.rand(4))  # written twice, where it does not lie
        torch._foreach_addcdiv_([y, x, x], [x, y, x], [torch.ones(4), torch.ones(4), x], [1.0, 2.0, 3.0])
        yield from (x, y)
        plain = torch.zeros(4)
        torch._foreach_addcdiv_([plain, x, x], [x, plain, x], [y, y, x], [1.0, 2.0, 3.0])
        yield x

    both(program)


def overlapping_operands() -> None:
    """What kernels refuse, because operands overlap, is refused at its line, though all shapes are known."""
    writes: tuple[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
        lambda x, y, i: x.index_put_((i,), y),
        lambda x, y, i: x.index_add_(0, i, y),
        lambda x, y, i: x.copy_(y),
        lambda x, y, i: x.add_(y),
        lambda x, y, i: x.addcmul_(y, y),
        lambda x, y, i: x.masked_scatter_(y > 0, y),
        lambda x, y, i: torch.mul(y, 2.0, out=x),
        lambda x, y, i: torch.where(y > 0, y, -y, out=x),
        lambda x, y, i: torch.cat([y[:1], y[1:]], out=x),
        lambda x, y, i: torch.max(y, 0, keepdim=True, out=(x[:1], i[None, : y.shape[1]]))[0],
    )
    operands: tuple[Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], ...] = (
        lambda b: (b[:3], b.clone()[:3]),
        lambda b: (b[:3], b[3:6]),
        lambda b: (b[1:4], b[:3]),
        lambda b: (b[:3], b[:3]),
        lambda b: (b[:3], b[:3].t()),
        lambda b: (b[:3, :2], b[:3, 1:]),
        lambda b: (b[:3, :2], b[:3, :2]),
    )

    def program(move: Any) -> Iterator[Any]:
        i = move(torch.tensor([0, 1, 2]))
        for write, chosen in itertools.product(writes, operands):
            b = move(torch.arange(24.0).view(8, 3))
            found = None
            try:
                found = write(*chosen(b), i)
            except (RuntimeError, ValueError) as error:
                yield str(error)[:80]
            yield from (found is None, b.tolist())

    both(program)
    x = there(torch.zeros(64, 8))
    x[3].copy_(x[4])
    before = len(x._handle.stream.known)
    for each in range(5, 64):
        x[each].copy_(x[each - 4])
        x[each, :4].add_(x[64 - each, 4:])
    assert len(x._handle.stream.known) <= before + 1  # wherever they lie, as long as they lie apart


def _written(write: Any, x: torch.Tensor, y: torch.Tensor) -> Iterator[Any]:
    try:
        write(x, y)
        yield x
    except RuntimeError as error:
        yield str(error)[:60]


def drawn_where_it_lies() -> None:
    """The strides of what is drawn give the order of the numbers."""

    def program(move: Any) -> Iterator[Any]:
        mean, std = move(torch.randn(4, 6)), move(torch.rand(4, 6))
        for write in (
            lambda out: torch.normal(mean, std, out=out),
            lambda out: torch.normal(mean, 2.0, out=out),
            lambda out: torch.normal(0.5, std, out=out),
            lambda out: torch.bernoulli(std, out=out),
            lambda out: out.bernoulli_(std),
            lambda out: out.normal_(),
            lambda out: torch.nn.functional.rrelu_(out, training=True),
        ):
            for lies in ((8, 9), (9, 8)):
                out = move(torch.randn(lies))
                out = out[1::2, 3:] if lies == (8, 9) else out[3:, 1::2].t()
                write(out)
                yield out

    both(program)


def resized() -> None:
    """``out=`` of another shape."""
    x, y, out = there(torch.eye(4)), there(torch.rand(4, 6)), there(torch.zeros(0))
    refused(lambda: torch.normal(y, y, out=out), "resized")
    refused(lambda: torch.bernoulli(y, out=out), "resized")
    refused(lambda: torch.linalg.svdvals(y, out=out), "resized")
    refused(lambda: torch.linalg.solve(x, y, out=torch.zeros(4, 6)), "resized")
    refused(lambda: torch.topk(home(y), 2, out=(y[:, 0], torch.zeros(4, dtype=torch.long))), "resized")
    out = y[:, :2] * 1  # made there, where torch resizes it before it sees that it is the operand, too
    refused(lambda: torch.gather(out, 1, torch.zeros(4, 6, dtype=torch.long), out=out), "resized")
    same(out + 0, home(y)[:, :2] * 1)
    for shape in ((0,), (1, 6), (100, 6)):  # what has been sent, in a message or by a write, has other shapes later, too
        out = torch.ones(shape)
        assert home(there(out).sum()).item() == out.numel()
        torch.mul(torch.ones(200, 6), 2.0, out=out)
        assert out.sum() == 2400


def inference() -> None:
    """What is an inference tensor."""

    def program(move: Any) -> Iterator[Any]:
        def seen(x: torch.Tensor) -> list[bool]:
            made = x.data, x.view(torch.int32), x.detach(), x[1:], x.view(2, 2), x + 1, copy.copy(x), copy.deepcopy(x)
            return [each.is_inference() for each in (*made, copy.copy(x[1:]), copy.copy(nn.Parameter(x, False)))]

        x = move(torch.ones(4))
        with torch.inference_mode():
            y = move(torch.ones(4))
            yield seen(x)
            yield seen(y)
        yield seen(y)

    both(program)


def dropped() -> None:
    """The argument of a call may be dropped at once, also where the callee reads it much later."""
    x = torch.randn(200, 200)
    busy = [rpc.rpc_async(W1, time.sleep, (0.1,)) for _ in range(16)]
    futures = [rpc.rpc_async(W1, torch.mul, (there(x), float(n))) for n in range(4)]
    rrefs = [rpc.remote(W1, torch.mul, (there(x), float(n))) for n in range(4)]
    there(x).sum().item()  # tells the stream what has died
    for n in range(4):
        assert torch.equal(futures[n].wait(), x * n) and torch.equal(rrefs[n].to_here(), x * n)
    torch.futures.wait_all(busy)


def functions() -> None:
    def program(move: Any) -> Iterator[Any]:
        x, w = move(torch.randn(5, 3)), move(torch.randn(3, 3))
        yield torch.func.vmap(lambda v: (v @ w).tanh())(x)
        yield torch.func.grad(lambda v: (v @ w).sin().sum())(x)
        yield torch.func.vmap(torch.func.grad(lambda v: (v @ w).pow(2).sum()))(x)
        yield torch.func.jacrev(lambda v: (v @ w).tanh())(x[0])
        yield torch.func.vjp(lambda v: v.exp(), x)[1](move(torch.ones(5, 3)))[0]
        net = nn.Linear(3, 2)
        if move is there:
            net.to(places.device(W1))
        with torch.autograd.forward_ad.dual_level():
            yield from torch.autograd.forward_ad.unpack_dual(torch.autograd.forward_ad.make_dual(x, x.cos()) * w[0])
            dual = torch.autograd.forward_ad.make_dual(x, x.cos())
            tangent = torch.autograd.forward_ad.unpack_dual((dual @ w.requires_grad_()).cpu()).tangent
            yield from torch.autograd.grad(tangent.square().sum(), w)
            w.requires_grad_(False)
        jacobian = torch.autograd.functional.jacobian
        yield jacobian(lambda v: net(v).cpu().tanh(), x[1].clone(), vectorize=True, strategy="forward-mode").tolist()
        yield from torch.func.jvp(torch.sin, (x,), (move(torch.ones(5, 3)),))
        yield torch.func.jacfwd(lambda v: (v @ w).tanh())(x[0])
        yield [each.tolist() for each in torch.func.jvp(lambda v: (v * v).cpu().sin(), (x,), (x.cos(),))]
        flat = move(torch.arange(60.0))
        for begin in (8, 20, 0):  # a tangent begins where its primal does
            yield from torch.func.jvp(torch.sin, (flat[begin : begin + 7],), (torch.ones_like(flat[:7]),))
        yield torch.func.functional_call(net, {"weight": move(torch.ones(2, 3))}, (x,))
        y, tangent = torch.func.linearize(lambda v: net(v @ w).tanh(), x)
        yield from (y, tangent(x.cos()))

    both(program)
    x = there(torch.randn(3))
    refused(lambda: torch.func.linearize(lambda v: v.exp().cpu(), x), "constant")
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda v: v.exp())(x)
    assert torch.equal(home(traced(x + 1)), home((x + 1).exp()))


def data() -> None:
    def program(move: Any) -> Iterator[Any]:
        x = move(torch.randn(3, requires_grad=True))
        x.data.mul_(2)
        yield x
        yield x.is_shared()
        x.data = move(torch.ones(2, 2))
        yield x.detach()
        (x * 3).sum().backward()
        yield x.grad
        parameter = nn.Parameter(move(torch.randn(3)))
        parameter.data = parameter.data.double()
        yield parameter.detach()
        parameter.data.zero_()
        yield parameter.detach()
        parameter.grad = move(torch.ones(3).double())
        parameter.grad = None
        parameter.requires_grad_(False).add_(1)
        yield parameter.detach()

    both(program)


def sparse() -> None:
    def program(move: Any) -> Iterator[Any]:
        net = nn.Embedding(9, 3, sparse=True)
        if move is there:
            net.to(places.device(W1))
        net(move(torch.tensor([1, 2, 1]))).pow(2).sum().backward()
        grad = net.weight.grad
        yield str(grad.layout)
        yield grad._nnz()
        yield grad.to_dense()
        yield grad.coalesce().values()
        torch.optim.SGD(net.parameters(), 0.1).step()
        yield net.weight.detach()
        eye = move(torch.eye(4)).to_sparse()
        yield torch.sparse.mm(eye, move(torch.randn(4, 2)))

    both(program)
    grad = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,))
    x = grad.to(places.device(W1))
    assert torch.equal(home(x).to_dense(), grad.to_dense()) and torch.equal(x.to_dense().cpu(), grad.to_dense())


class Twofold(torch.Tensor):
    """With a dispatch of its own, which knows nothing of workers."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Twofold, lambda each: each.inner * 2, (args, kwargs or {}))
        return func(*args, **kwargs)


def kinds_that_stay_here() -> None:
    """Tensors that cannot lie at a worker are here, and so is what is computed with them."""

    def program(move: Any) -> Iterator[Any]:
        x, w = move(torch.randn(4, 4)).requires_grad_(), move(torch.randn(4, 4)).requires_grad_()
        plain = torch.eye(4).to_sparse_csr()
        dense = []
        for _ in range(2):
            dense += [torch.sparse.mm(plain, w), x.relu().to_sparse_csr() @ w, w.to_sparse_csc().to_dense()]
            dense += [x.to_sparse_bsr((2, 2)).to_dense() * w, torch.addmm(x, plain, w), x.to_mkldnn().to_dense() + w]
            quantized = torch.quantize_per_tensor(w, 0.1, 0, torch.quint8)
            dense += [quantized.dequantize() * x, quantized.int_repr() + 0.5 * x, torch.relu(quantized).dequantize() + w]
            ragged = torch.nested.as_nested_tensor([x[:2] * w[:2], x[:3]])
            dense += [F.linear(F.gelu(F.linear(ragged, w)), x).to_padded_tensor(0.0)]
            rows = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
            dense += [F.linear(rows, w).values(), (w[0] * rows).values()]
            packed = torch.ao.nn.quantized.dynamic.Linear(4, 4)
            packed.set_weight_bias(torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8), torch.ones(4))
            dense += [packed(x.detach()) * w]
        dense += [w * Twofold(torch.ones(4, 4)), Twofold(torch.ones(4, 4)) @ w]
        dense += torch._foreach_add([w, x], [Twofold(torch.ones(4, 4)), torch.ones(4, 4)])
        added = w * 1
        added += Twofold(torch.ones(4, 4))
        for each in [*dense, added]:
            yield each.detach().cpu().tolist()
        sum(each.sum() * (1 + number) for number, each in enumerate(dense)).backward()
        yield x.grad
        yield w.grad

    both(program)
    before = values_at(W1)
    for _ in range(40):
        there(torch.eye(4)).to_sparse_csr()
    assert values_at(W1) < before + 40, "what a worker has made in vain is freed there"


def crossing() -> None:
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    x, y = there(a), there(b, W2)
    same(x @ y, a @ b)
    x.copy_(y)
    same(x, b)
    x.copy_(a)
    same(x, a)
    plain = torch.empty(64, 64)
    plain.copy_(y)
    assert torch.equal(plain, b)
    same(there(a[:1].expand(64, 64)) + y, a[:1] + b)
    with pytest.raises(RuntimeError, match=r"overlap|single memory"):
        there(a[:1]).expand(64, 64).add_(y)
    for shape in (a.t(), a[::2, 1:9], a[3, 5:9].expand(4, 4), a[0, 0], a[:0]):
        moved = there(shape, W2).to(places.device(W1))
        same(moved, shape.clone())
        same(there(shape, W2) * x[0, 0], shape * a[0, 0])
    leaf = torch.randn(64, 64, requires_grad=True)
    (leaf.to(places.device(W1)) @ y).sum().cpu().backward()
    twin = leaf.detach().clone().requires_grad_()
    (twin @ b).sum().backward()
    assert torch.equal(home(leaf.grad), twin.grad)
    for worker in (W1, W2):
        torch.manual_seed(5)
        x = there(torch.randn(2, 2), worker)
        x.normal_()
        torch.manual_seed(5)
        torch.randn(2, 2)
        same(x, torch.empty(2, 2).normal_())


# -- threads, memory, errors


def threads(count: int = 6, turns: int = 30) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            generator = torch.Generator().manual_seed(number)
            plain = torch.randn(40, 40, generator=generator)
            worker = (W1, W2)[number % 2]
            for turn in range(turns):
                x = there(plain, worker).requires_grad_()
                y = (x @ x.t()).relu().sum() * turn
                y.backward()
                twin = plain.clone().requires_grad_()
                (twin @ twin.t()).relu().sum().mul(turn).backward()
                assert torch.equal(home(x.grad), twin.grad), (number, turn)
                other = x.detach().to(places.device((W1, W2)[turn % 2])) + shared[turn % 2]
                assert torch.equal(home(other), plain + 1)
        except BaseException as error:
            errors.append(error)

    shared = [there(torch.ones(40, 40), worker) for worker in (W1, W2)]
    running = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for each in running:
        each.start()
    for each in running:
        each.join(50)
    assert not any(each.is_alive() for each in running), "a thread hangs"
    if errors:
        raise errors[0]


def _count(table: str = "values") -> int:
    from rdmarpc.places import runners

    return sum(len(getattr(runner, table)) for held in list(runners._runners.values()) for runner in list(held.values()))


def values_at(worker: str) -> int:
    """How many tensors a worker holds for its callers."""
    gc.collect()
    for stream in places.streams():
        stream.urgent = True  # a few small ones that have died wait for others
        stream.synchronize()
        stream.synchronize()
    return rpc.rpc_sync(worker, _count)


def written_while_it_is_copied() -> None:
    """A thread that copies a tensor which another one writes has the old values or the new; later copies have the new."""
    posted, written, torchs = threading.Event(), threading.Event(), tensor._moved

    def held(*args: Any) -> torch.Tensor:
        found = torchs(*args)
        posted.set()
        assert written.wait(20)
        return found

    x, other = there(torch.ones(40)), there(torch.zeros(40), W2)
    for had in (False, True):  # another copy
        x.fill_(1)
        if had:
            x.cpu()
        posted.clear()
        written.clear()
        with ThreadPoolExecutor(1) as threads:
            tensor._moved = held
            try:
                found = threads.submit(torch.add, other, x)
                assert posted.wait(20)
            finally:
                tensor._moved = torchs
            x.add_(1)
            written.set()
            same(found.result(20), torch.ones(40))
        same(other + x, torch.full((40,), 2.0))


def frees() -> None:
    before = {worker: values_at(worker) for worker in (W1, W2)}
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(places.device(W1))
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(5):
        net(there(torch.randn(4, 8), W2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert values_at(W1) > before[W1]
    try:
        net(there(torch.randn(4, 7))).sum()
    except RuntimeError:
        pass
    big = there(torch.randn(1 << 20))
    view = big[5:]
    del big
    assert view.sum().item() == view.cpu().sum().item()
    del net, optimizer, view
    after = {worker: eventually_same(worker, before[worker]) for worker in before}
    assert after == before


def freed_at_once() -> None:
    """Operations with tensors of several places keep none of them until Python looks for cycles; nor do errors."""
    net, seen = nn.Linear(4, 4).to(places.device(W1)), []

    def fails(step: Any) -> None:
        x = there(torch.ones(2, 4))
        seen.append(weakref.ref(x))
        step(x)

    at_once, late = lambda x: x @ x, lambda x: x.index_select(0, there(torch.tensor([7]))).sum().item()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            net(torch.ones(2, 4)).sum().backward()
        assert [each._use_count() for each in net.parameters()] == [1, 1]
        for step in (at_once, late):
            for _ in range(2):
                with contextlib.suppress(RuntimeError, IndexError):
                    fails(step)
        assert len(seen) == 4 and all(ref() is None for ref in seen)
    finally:
        gc.enable()


def forgets_what_raised() -> None:
    """A worker keeps nothing of the form of a call that has only raised; and takes it anew when it does not."""
    x, index = there(torch.randn(5, 3)), there(torch.tensor([7]))
    values_at(W1)
    before = rpc.rpc_sync(W1, _count, ("signatures",))
    for _ in range(20):
        with pytest.raises(IndexError):
            x[index]
    values_at(W1)
    assert rpc.rpc_sync(W1, _count, ("signatures",)) - before < 5
    index.fill_(4)
    same(x[index], home(x)[4:])
    asked = x._handle.stream.counts["questions"]
    found = x[index]
    assert x._handle.stream.counts["questions"] == asked
    same(found, home(x)[4:])


def eventually_same(worker: str, wanted: int) -> int:
    for _ in range(50):
        if (found := values_at(worker)) == wanted:
            break
        time.sleep(0.05)
    return found


def late_errors() -> None:
    index = there(torch.tensor([0, 1]))
    x = there(torch.randn(3, 3))
    for _ in range(2):
        same(x.index_select(0, index), home(x)[:2])
    index.fill_(7)
    found = x.index_select(0, index)  # posted: nobody knows yet
    with pytest.raises((IndexError, RuntimeError), match="index") as caught:
        found.sum().item()
    assert "index_select" in "".join([str(caught.value), *caught.value.__notes__]), caught.value
    same(x + 1, home(x) + 1)
    with pytest.raises(Exception, match="not computed"):
        found.cpu()
    y = there(torch.randn(3, 3), W2)
    found = x.index_select(0, index)
    with pytest.raises((IndexError, RuntimeError), match="index_select"):
        (y[:2] + found.to(places.device(W2))).cpu()
    same(y + x, home(y) + home(x))
    for classes, text in (([0, 3], "smaller than num_classes"), ([0, -1], "non-negative")):
        with pytest.raises(RuntimeError, match=text):
            F.one_hot(there(torch.tensor(classes)), 3).cpu()
    with pytest.raises(RuntimeError, match=r"shape|size"):
        x @ there(torch.randn(4, 4))
    with pytest.raises(TypeError):
        x + "text"
    same(x + 1, home(x) + 1)


def caught() -> None:
    """What a matrix does not allow is caught at its line, and tried again."""

    def program(move: Any) -> Iterator[Any]:
        x, added = move(-torch.eye(3)), 0.25
        while True:
            try:
                yield torch.linalg.cholesky(x + added * torch.eye(3))
                return
            except torch.linalg.LinAlgError as error:
                yield str(error)
            added *= 2

    both(program)


def collectives() -> None:
    """What a collective writes is at the worker afterwards, and in plain tensors beside."""
    import torch.distributed as dist

    for backend in ("gloo", "rdmarpc"):  # the one is C++, which passes torch's dispatcher
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            collectives_of_a_group()
        finally:
            dist.destroy_process_group()


def collectives_of_a_group() -> None:
    import torch.distributed as dist

    x = there(torch.arange(4.0))
    for gather in (dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_to_all_single):
        for given, into in ((x, torch.zeros(4)), (home(x), there(torch.zeros(4))), (x, there(torch.zeros(4), W2))):
            gather(into, given)
            assert (into + 1).tolist() == [1, 2, 3, 4], gather.__name__
    listed = [there(torch.zeros(4))]
    dist.all_gather(listed, x)
    dist.all_reduce(listed[0], async_op=True).wait()
    same(listed[0] + 1, torch.arange(1.0, 5))
    refused(lambda: dist.recv(x), "recv")
    refused(lambda: dist.all_gather(listed, home(x)), "all_gather")
    refused(lambda: dist.scatter(home(x), listed, 0), "scatter")


def no_memory() -> None:
    x = there(torch.ones(4))
    with pytest.raises((RuntimeError, MemoryError), match=r"allocate|memory"):
        torch.empty(1 << 50, device=places.device(W1)).sum().item()
    with pytest.raises((RuntimeError, MemoryError), match=r"allocate|memory"):
        x.new_zeros(1 << 50).sum().item()
    same(x + 1, torch.full((4,), 2.0))


def graph_is_plain() -> None:
    x = there(torch.randn(3, requires_grad=True))
    y = (x * 2).sum()
    assert "MulBackward" in type(y.grad_fn.next_functions[0][0]).__name__
    assert x.device == torch.device("cpu") and x.is_leaf and not y.is_leaf and isinstance(x, torch.Tensor)
    assert x.element_size() == 4 and x.nbytes == 12 and x.numel() == 3 and x.storage_offset() == 0
    assert hash(x) == hash(x) and x in [x]
    # opt_einsum chooses by it what multiplies, and made an array of numpy's
    assert {type(each).__module__.partition(".")[0] for each in (x, y, nn.Parameter(x))} == {"torch"}
    assert pickle.loads(pickle.dumps(RemoteTensor)) is RemoteTensor
    assert place_of(x) is not None and place_of(torch.ones(1)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(torch.zeros(2, device=places.device(W1)), RemoteTensor)


CHECKS = (
    made, moved, numbers, named_refusals, copies, copies_of_conjugates, files, modules, long_lists, views, turned,
    turned_under_views, turned_before_a_history, written_in_part, versions, hooks, second_order, contexts,
    autocast_in_kernels, one_object, overlapping_operands, drawn_where_it_lies, resized, inference, dropped, functions,
    data, sparse, kinds_that_stay_here, crossing, threads, frees, freed_at_once, forgets_what_raised, late_errors, caught,
    collectives, no_memory, graph_is_plain, written_while_it_is_copied,
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_as_in_one_process(group: Group, check: Callable[[], None]) -> None:
    group.ask(check)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(group: Group, name: str) -> None:
    ways: list[dict[str, Any]] = [{}]
    if name not in ("LBFGS", "SparseAdam", "Muon"):
        ways += [{"foreach": True}, {"foreach": False}]
    if name in FUSED:
        ways.append({"fused": True})
    for how in ways:
        group.ask(optimizer, name, how)


def test_distributed_checkpoints(group: Group, tmp_path: Path) -> None:
    group.ask(checkpoints, str(tmp_path))


# -- processes that end


UNREAD: list[torch.Tensor] = []


def unread() -> torch.Tensor:
    return UNREAD[0]


def use_after_death(pid: int) -> float:
    x = there(torch.randn(4))
    same(x, home(x))
    UNREAD[:] = [x * 2]
    os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(rpc.PeerLost):
        while True:
            (x + 1).cpu()
    with pytest.raises(rpc.PeerLost):
        x.sum().item()
    with pytest.raises(rpc.PeerLost, match=W1):  # where the result of a call lies, and not its caller
        rpc.rpc_sync(rpc.get_worker_info(), unread, timeout=10)
    same(there(torch.ones(3), W2) + 1, torch.full((3,), 2.0))
    return time.monotonic() - started


def test_a_worker_dies(own: Group) -> None:
    with pytest.raises(ChildProcessError, match="a worker died with -9"):
        own.ask(use_after_death, own.processes[1].pid, patience=40)


def in_a_fork() -> None:
    x = there(torch.ones(3))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            (x + 1).cpu()
        except RuntimeError as error:
            status = 0 if "fork" in str(error) else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + 20
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError("the fork hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(found[1]) == 0, found
    same(x + 1, torch.full((3,), 2.0))


def test_a_forked_child(own: Group) -> None:
    own.ask(in_a_fork)


def after_close() -> None:
    x = there(torch.ones(3))
    places.close_streams()
    with pytest.raises(RuntimeError, match="shut down"):
        x.sum().item()
    same(there(torch.ones(3)) + 1, torch.full((3,), 2.0))


def test_after_the_end(own: Group) -> None:
    own.ask(after_close)
