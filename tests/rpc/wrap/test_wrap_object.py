"""A wrapped model is the object that it was: its class, names and states; what its modules do when states are loaded; files."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import warnings
from abc import ABC
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
from beside import assert_same, batches, beside, both, home, sgd, step, wrap
from nets import NETS, Cnn, Language
from torch import nn
from torch.nn.utils import parametrizations

import rdmarpc as rpc
from rdmarpc import places

DATA = batches(3, 6, 20)
PLACEMENT = {"part": "worker1", "head": "worker2"}


class Part(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(20, 20), nn.Linear(20, 20), nn.BatchNorm1d(20)
        self.register_buffer("passing", torch.ones(20), persistent=False)

    def forward(self, x):
        return self.norm(self.b(torch.tanh(self.a(x)))) * self.gain * self.passing


class Renamed(Part):
    """By hooks of both directions."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(_to_old_names)
        self._register_load_state_dict_pre_hook(_from_old_names)


def _to_old_names(module: Any, state: Any, prefix: str, metadata: Any) -> None:
    state[prefix + "first.bias"] = state.pop(prefix + "a.bias") * 4


def _from_old_names(state: Any, prefix: str, *others: Any) -> None:
    if prefix + "first.bias" in state:
        state[prefix + "a.bias"] = state.pop(prefix + "first.bias") / 2


class Counted(Part):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_counted)


def _counted(module: Any, keys: Any) -> None:
    module.gain *= 3


class Extra(Part):
    """A state that is no tensor, and a way of its own to load."""

    def get_extra_state(self) -> Any:
        return {"gain": self.gain}

    def set_extra_state(self, state: Any) -> None:
        self.gain = state["gain"] * 2

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        state[prefix + "a.bias"] = state[prefix + "a.bias"] + 1
        super()._load_from_state_dict(state, prefix, *others)


class Net(nn.Module):
    kind: type[nn.Module] = Part

    def __init__(self) -> None:
        super().__init__()
        self.body, self.part, self.head = nn.Linear(20, 20), type(self).kind(), nn.Linear(20, 4)

    def forward(self, x, *, scale: float = 1.0):
        return self.head(self.part(torch.relu(self.body(x)))) * scale


KINDS = {"plain": Part, "renamed": Renamed, "counted": Counted, "extra": Extra}


def of_kind(kind: str) -> type[Net]:
    return type(Net.__name__, (Net,), {"kind": KINDS[kind]})


def states(kind: str) -> None:
    """Taken, loaded whole and in parts, strictly or not, from other models and into them."""

    def program(net: Any) -> Iterator[Any]:
        optimizer = sgd(net)
        yield step(net, optimizer, *DATA[0])
        first = copy.deepcopy(net.state_dict())
        yield step(net, optimizer, *DATA[1])
        yield list(net.state_dict()), net.state_dict(prefix="x.", keep_vars=True), str(net.load_state_dict(first))
        yield step(net, optimizer, *DATA[1]), net.part.gain
        yield str(net.part.load_state_dict(copy.deepcopy(net.part.state_dict())))
        state = {**net.state_dict(), "part.c.weight": torch.ones(2), "body.bias": torch.ones(20)}
        state.pop("part.b.weight")
        yield str(net.load_state_dict(state, strict=False))
        torch.manual_seed(3)
        other = of_kind(kind)()
        yield str(net.load_state_dict(other.state_dict())), step(net, optimizer, *DATA[2])
        yield str(other.load_state_dict(net.state_dict())), other(DATA[0][0]), other.state_dict()
        yield str(net.load_state_dict(other.state_dict(), assign=True)), net(DATA[0][0])

    beside(program, of_kind(kind), PLACEMENT)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_loaded_as_in_one_process(drive, kind):
    drive(states, kind)


def written() -> None:
    """A state's tensors are the model's own, as in one process; a copy that was kept is a copy."""

    def program(net: Any) -> Iterator[Any]:
        optimizer = sgd(net)
        state, kept = net.state_dict(), copy.deepcopy(net.state_dict())
        state["part.a.weight"].mul_(0.5)
        net.state_dict(keep_vars=True)["head.bias"].data.add_(1)
        yield step(net, optimizer, *DATA[0])
        yield state, kept
        net.part.passing.mul_(2)
        net.get_parameter("body.weight").data.zero_()
        yield step(net, optimizer, *DATA[1])

    beside(program, Net, {**PLACEMENT, "body": "worker1"})


def test_what_is_written_into_a_state_is_written_into_the_model(drive):
    drive(written)


WRONG: dict[str, dict[str, Any]] = {
    "shapes": {"body.weight": torch.zeros(3, 3), "part.norm.running_mean": torch.zeros(2), "head.bias": torch.zeros(1)},
    "no tensors": {"body.bias": 3, "head.weight": None},
    "keys below a tensor": {"head.weight.more": torch.zeros(1), "part": torch.zeros(1)},
}


def unfitting() -> None:
    """What does not fit has torch's words, and what fits is loaded."""
    for wrong in WRONG.values():
        for strict in (True, False):

            def program(net: Any, wrong: Any = wrong, strict: bool = strict) -> Iterator[Any]:
                state = {name: value + 1 for name, value in home(net.state_dict()).items()}
                try:
                    yield str(net.load_state_dict({**state, **wrong}, strict=strict))
                except RuntimeError as error:
                    yield str(error)

            beside(program, Net, PLACEMENT)


def test_states_that_do_not_fit(drive):
    drive(unfitting)


def files() -> None:
    """A saved state is read by a process that knows nothing of workers; a plain one by a wrapped model."""
    model, twin = both(Net, PLACEMENT)
    optimizers = [sgd(each) for each in (model, twin)]
    for x, y in DATA:
        assert_same(step(model, optimizers[0], x, y), step(twin, optimizers[1], x, y))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizers[0].state_dict()}, file)
    file.seek(0)
    found = torch.load(file)  # weights_only: plain tensors
    assert all(type(value) is torch.Tensor for value in found["model"].values())
    assert_same(found["model"], twin.state_dict())
    assert_same(found["optimizer"], optimizers[1].state_dict())
    again, optimizer = Net(), sgd(twin)
    again.load_state_dict(found["model"])
    optimizer.load_state_dict(copy.deepcopy(found["optimizer"]))  # which keeps the tensors that it is given
    model.load_state_dict(found["model"])
    optimizers[0].load_state_dict(found["optimizer"])
    assert_same([step(model, optimizers[0], *DATA[0]), model(DATA[1][0])], [step(twin, optimizer, *DATA[0]), twin(DATA[1][0])])


def test_files(drive):
    drive(files)


def _names(file: io.BytesIO) -> set[str]:
    """What a reader of it has to know."""
    file.seek(0)
    return set(torch.serialization.get_unsafe_globals_in_checkpoint(file))


def pickled() -> None:
    """A pickle, and a file, of the whole model is a model that is all where it is read, which need not know of workers."""
    model, twin = both(Net, PLACEMENT)
    assert model.__class__ is Net
    file, other = io.BytesIO(), io.BytesIO()
    torch.save(model, file)
    torch.save(twin, other)
    assert _names(file) == _names(other)
    file.seek(0)
    for plain in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert type(plain) is Net
        assert {type(p) for p in plain.parameters()} == {nn.Parameter}
        assert {type(p.data) for p in plain.parameters()} == {torch.Tensor}
        other = copy.deepcopy(twin)
        assert_same(step(plain, sgd(plain), *DATA[0]), step(other, sgd(other), *DATA[0]))
        assert_same(plain.state_dict(), other.state_dict())
    step(model, sgd(model), *DATA[0])
    x = DATA[0][0].clone().requires_grad_()
    with rpc.autograd.context() as context:  # a module in a call has parameters of its own, wherever they lay
        rpc.autograd.backward(context, [rpc.rpc_sync("worker2", nn.Module.__call__, (model, x)).sum()])
        assert list(rpc.autograd.get_gradients(context)) == [x]


def test_a_pickle_of_the_model(drive):
    drive(pickled)


def the_object() -> None:
    net = Net()
    shapes = [(name, p.shape, p.dtype, p.requires_grad) for name, p in net.named_parameters()]
    names = [name for name, _ in net.named_modules()]
    model = wrap(net, PLACEMENT)
    assert isinstance(model, Net) and isinstance(model.part, Part) and isinstance(model.head, nn.Linear)
    assert [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()] == shapes
    assert [name for name, _ in model.named_modules()] == names
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in model.parameters())
    assert next(model.parameters()).device == torch.device("cpu")
    assert type(wrap(Net(), PLACEMENT)) is type(model)  # which ``torch.func.stack_module_state`` asks
    assert inspect.signature(model.forward) == inspect.signature(net.forward)
    assert "(a): Linear(in_features=20, out_features=20" in repr(model) and "20" in str(model.part.a.weight)
    assert model.get_submodule("part.a") is model.part.a and model.part.a.in_features == 20
    assert sum(p.numel() for p in model.parameters()) == sum(shape.numel() for _, shape, _, _ in shapes)
    with pytest.raises(AttributeError, match="nothing"):
        model.part.nothing  # noqa: B018
    x = torch.randn(3, 20)
    assert_same(rpc.RRef(model).rpc_sync().forward(x), model(x))

    class Closes(nn.Linear):
        transfers = 3

        def close(self) -> str:
            return "its own"

    own = wrap(Closes(20, 4), {"": "worker1"})
    assert own.close() == "its own" and own.transfers == 3
    places.WrappedModel.close(own)
    assert type(own.weight.data) is torch.Tensor
    with pytest.raises(rpc.NotSupported, match=r"has .'replace'. of its own"):
        wrap(nn.ModuleDict({"replace": nn.Linear(2, 2)}), {"": "worker1"})


def test_it_is_the_object_that_it_was(drive):
    drive(the_object)


class Interface(Protocol):
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...


class Slotted:
    __slots__ = ()


Item = TypeVar("Item")


class Abstract(ABC, Cnn):
    """Instances have a ``__dict__``, and what comes first among the bases has none."""


class Typed(Generic[Item], Cnn):
    pass


class TypedAgain(Typed[int]):
    pass


class Structural(Interface, Cnn):
    __init__, forward = Cnn.__init__, Cnn.forward


class Mixed(Slotted, Cnn):
    pass


def bases_without_a_dict() -> None:
    for kind in (Abstract, Typed, TypedAgain, Structural, Mixed):
        torch.manual_seed(1)
        net, twin, other = kind(), kind(), kind()
        twin.load_state_dict(net.state_dict())
        model = wrap(net, {"classifier": "worker1"})
        assert model is net and model.__class__ is kind and type(model).__name__ == kind.__name__
        assert type(wrap(other, {"classifier": "worker2"})) is type(model)
        x = torch.randn(2, 1, 8, 8)
        assert_same([model(x), copy.deepcopy(model)(x), pickle.loads(pickle.dumps(model))(x)], [twin(x)] * 3)
        parametrizations.weight_norm(model.classifier)
        parametrizations.weight_norm(twin.classifier)
        assert_same(step(model, sgd(model), x, torch.tensor([1, 2])), step(twin, sgd(twin), x, torch.tensor([1, 2])))
        model.close()
        assert model.__class__ is kind
        assert_same(model(x), twin(x))


def test_classes_whose_first_base_has_no_dict(drive):
    drive(bases_without_a_dict)


def before() -> None:
    """An optimizer and gradients from before ``wrap`` go along."""
    torch.manual_seed(1)
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [sgd(net) for net in nets]
    for net, optimizer in zip(nets, optimizers):
        step(net, optimizer, *DATA[0])
    model = wrap(nets[0], PLACEMENT)
    assert_same([p.grad for p in model.parameters()], [p.grad for p in nets[1].parameters()])
    assert_same([step(model, optimizers[0], *DATA[1]) for _ in "ab"], [step(nets[1], optimizers[1], *DATA[1]) for _ in "ab"])
    assert_same(model.state_dict(), nets[1].state_dict())


def test_an_optimizer_of_before_wrap(drive):
    drive(before)


def tied() -> None:
    """Tied weights stay one tensor, at one worker, also where they have entries at two."""
    ids = torch.randint(20, (4, 6))
    for placement in (
        {"tokens": "worker1"},
        {"layers": "worker2", "head": "worker1"},
        {"tokens": "worker1", "head": "worker2"},
    ):
        model, twin = both(Language, placement)
        assert model.head.weight is model.tokens.weight and model.head.weight.place == "worker1"
        optimizers = [sgd(each) for each in (model, twin)]
        for _ in range(3):
            assert_same(*(step(each, o, ids, ids[:, 0]) for each, o in zip((model, twin), optimizers)))
        assert_same(model.state_dict(), twin.state_dict())


def test_tied_weights(drive):
    drive(tied)


class Overlapping(nn.Module):
    """Parameters over one memory, and an attribute over a parameter's, as ``spectral_norm`` of old has it before a forward. A
    buffer that is a view of what nobody else has, as tables of positions are."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(30)
        self.scale, self.shift = nn.Parameter(memory[:20]), nn.Parameter(memory[10:])
        self.seen = self.shift.data
        self.register_buffer("table", torch.randn(20, 1).transpose(0, 1))
        self.head = nn.utils.spectral_norm(nn.Linear(20, 4))

    def forward(self, x):
        return self.head(x * self.scale + self.shift + self.table) + self.seen.sum()


def overlapping() -> None:
    """What lies over each other does so at the worker, and at home again, whether or not the model has run between."""
    for rounds in (0, 2):
        model, twin = both(Overlapping, {"": "worker1"})
        optimizers = [sgd(each) for each in (model, twin)]
        for x, y in DATA[:rounds]:
            assert_same(*(step(each, o, x, y) for each, o in zip((model, twin), optimizers)))
        model.close()
        for x, y in DATA:
            assert_same(*(step(each, o, x, y) for each, o in zip((model, twin), optimizers)))
        assert_same([model.state_dict(), model.seen], [twin.state_dict(), twin.seen])


def test_overlapping_tensors(drive):
    drive(overlapping)


def shared() -> None:
    """A module that two models have; a model that is given to ``wrap`` again, for other parts; one inside of another."""
    nets = []
    for _ in range(2):
        torch.manual_seed(1)
        encoder = nn.Linear(20, 20)
        nets.append((nn.Sequential(encoder, nn.Linear(20, 4)), nn.Sequential(encoder, nn.Tanh(), Net())))
    (one, other), twins = nets
    wrap(one, {"1": "worker1"})
    wrap(other[2], PLACEMENT)
    wrap(other[2], {"body": "worker2"})
    for number, (x, y) in enumerate(DATA):
        for mine, theirs in zip((one, other), twins):
            assert_same(step(mine, sgd(mine), x, y), step(theirs, sgd(theirs), x, y), f"step {number}")
    assert_same(other.state_dict(), twins[1].state_dict())


def test_modules_of_several_models(drive):
    drive(shared)


class Slotted(nn.Linear):
    __slots__ = ("scale",)


def bad() -> None:
    """Errors before anything has moved, with what there is instead."""
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "blocks": nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))})
    for placement, text in (
        ({"nose": "worker1"}, r"'nose'.*'a', 'blocks'"),
        ({"a": "worker9"}, r"'worker9'.*'worker0', 'worker1', 'worker2'"),
        ({"blocks.9": "worker1"}, r"'blocks.9'.*no '9' in 'blocks'.*'0', '1', '2', '3'"),
        ({"blocks.2-7": "worker1"}, r"no '4' in 'blocks'"),
        ({"blocks.3-2": "worker1"}, r"the range '3-2' is empty"),
        ({"blocks.0-1": "worker1", "blocks.1": "worker2"}, r"two entries for 'blocks.1'"),
        ({"a": "worker1/nonsense"}, "placement puts 'a' on"),
        ({"a": ["worker1", "worker1"]}, "each once"),
        ({"a": ["worker1", "worker9"]}, "worker9"),
    ):
        with pytest.raises(ValueError, match=text):
            places.wrap(net, placement)
    assert all(type(p.data) is torch.Tensor for p in net.parameters())
    for layers in ((nn.LazyLinear(3),), (nn.Linear(2, 2), nn.LazyLinear(3))):
        with pytest.raises(rpc.NotSupported, match="no shape yet"):
            places.wrap(nn.Sequential(*layers), {"0": "worker1"})
    for options in ({"chunks": 0}, {"chunks": 1 << 17}, {"outputs": "elsewhere"}):
        with pytest.raises(ValueError):
            places.wrap(nn.Sequential(nn.Linear(2, 2)), {"0": "worker1"}, **options)


def test_errors_of_wrap(drive):
    drive(bad)


def refused() -> None:
    """What no tensor that lies elsewhere can do has an error with a name, not a crash and no wrong number."""
    model, twin = both(lambda: nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4)), {"0": "worker1"})
    x, weight = DATA[0][0], model[0].weight
    plain = torch.zeros(20, 20)
    direction = torch.randn_like(x)
    assert_same(torch.func.jvp(model, (x,), (direction,)), torch.func.jvp(twin, (x,), (direction,)))
    convolved = lambda x: nn.functional.conv1d(x.t(), weight.detach()[..., None])  # noqa: E731
    scripted = torch.jit.script(model)
    assert_same(scripted(x), twin(x))
    attempts = {
        "jit.trace": lambda: torch.jit.trace(model, x),
        "jit.trace of a convolution": lambda: torch.jit.trace(convolved, x),
        "a script's file": lambda: torch.jit.save(scripted, io.BytesIO()),
        "a frozen script's file": lambda: torch.jit.freeze(scripted.eval()).save_to_buffer(),
        "a trace's file": lambda: torch.jit.trace(lambda x: x @ weight.detach(), x).save_to_buffer(),
        "dlpack": lambda: torch.from_dlpack(weight.detach()),
        "dlpack of old": lambda: torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight.detach())).sum().item(),
        "shared memory": lambda: weight.detach().share_memory_(),
        "shared memory of a loader": lambda: weight.detach()._typed_storage(),
        "a storage": lambda: plain.set_(weight.detach().untyped_storage()),
        "a numpy array of it": lambda: np_dlpack(weight.detach()),
    }
    for name, attempt in attempts.items():
        with warnings.catch_warnings(), pytest.raises((rpc.NotSupported, RuntimeError, TypeError, BufferError)):
            warnings.simplefilter("ignore")
            attempt()
            raise AssertionError(f"{name} was not refused")
    assert_same(model(x), twin(x))
    assert_same(convolved(x), nn.functional.conv1d(x.t(), twin[0].weight.detach()[..., None]))
    with torch.profiler.profile(with_stack=True, profile_memory=True) as results:
        twin(x).sum().backward()
    before = [parameter.grad for parameter in twin.parameters()]
    with pytest.raises(rpc.NotSupported, match="weak references"):
        places.wrap(twin, {"": "worker1"})
    assert all(parameter.grad is gradient for parameter, gradient in zip(twin.parameters(), before))
    del results
    assert_same([p.grad for p in wrap(twin, {"": "worker1"}).parameters()], before)


def views_of_parameters() -> None:
    """One that the program has is in the way of a move. One that it has no more, in a reference cycle, is not."""
    model, kept = nn.Linear(20, 4), []
    kept += [model.weight.detach(), kept]
    with pytest.raises(rpc.NotSupported, match="1 tensors outside of the model"):
        wrap(model, {"": "worker1"})
    gc.disable()
    try:
        del kept
        wrap(model, {"": "worker1"})
    finally:
        gc.enable()


def test_views_of_parameters(drive):
    drive(views_of_parameters)


def np_dlpack(tensor: torch.Tensor) -> Any:
    import numpy as np

    return np.from_dlpack(tensor)


def test_what_cannot_be_is_refused_by_name(drive):
    drive(refused)


def deep() -> None:
    """Entries at any depth: the deeper one wins, a range stands for several, and ``rank:`` names a worker, too."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20)) for _ in range(4))
            self.head = parametrizations.weight_norm(nn.Linear(20, 4))

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    for placement, parts in (
        (
            {"blocks": "worker1", "blocks.1.0": "worker2", "blocks.3": "worker0"},
            {"blocks.0": "worker1", "blocks.1.0": "worker2", "blocks.1.2": "worker1", "blocks.2": "worker1"},
        ),
        (
            {"blocks.0-1": "worker1", "blocks.2-3": "worker2", "head": "rank:1"},
            {"blocks.0": "worker1", "blocks.1": "worker1", "blocks.2": "worker2", "blocks.3": "worker2", "head": "worker1"},
        ),
        ({"head": "worker2"}, {"head": "worker2"}),
        ({}, {}),
    ):
        model, twin = both(Nested, placement)
        found = {name: p.place for name, p in model.named_parameters() if isinstance(p, places.RemoteTensor)}
        names = [name for name, _ in twin.named_parameters()]
        assert found == {name: worker for part, worker in parts.items() for name in names if name.startswith(f"{part}.")}
        optimizers = [sgd(each) for each in (model, twin)]
        for x, y in DATA:
            assert_same(*(step(each, o, x, y) for each, o in zip((model, twin), optimizers)), str(placement))
        assert_same(model.state_dict(), twin.state_dict())


def test_placements_at_any_depth(drive):
    drive(deep)


def transformers_fast_path() -> None:
    """Attention in eval: where one process takes torch's fast path, the numbers are those; with a mask it makes nested tensors,
    which are here, wherever the mask lies."""
    model, twin = both(lambda: nn.TransformerEncoder(_layer(), 3), {"layers.0": "worker1", "layers.1": "worker2"})
    there = rpc.device("worker1")
    model.eval(), twin.eval()
    x = torch.randn(4, 10, 32)
    mask = torch.arange(10)[None] >= torch.tensor([10, 6, 10, 3])[:, None]
    for given in ({}, {"src_key_padding_mask": mask}):
        with torch.no_grad():
            assert_same(model(x, **given), twin(x, **given))
            assert_same(model(x.to(there), **{name: each.to(there) for name, each in given.items()}), twin(x, **given))
        assert_same(model(x, **given), twin(x, **given))  # with gradients: the general path in both


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)


def test_attention_in_evaluation(drive):
    drive(transformers_fast_path)


def mixed_precision_of_types() -> None:
    """Parameters of several types, complex and frozen ones, a model without parameters, one of one layer."""
    for make in (lambda: Cnn().double(), lambda: Cnn().bfloat16(), NETS["spectral"].make):

        def program(net: Any) -> Iterator[Any]:
            kind = next(net.parameters()).dtype
            x = torch.randn(4, 20) if not isinstance(net, Cnn) else torch.randn(4, 1, 8, 8, dtype=kind)
            optimizer = sgd(net)
            for _ in range(2):
                yield step(net, optimizer, x, torch.arange(4))

        beside(program, make, {name: "worker1" for name, _ in make().named_children()})


def test_types_of_parameters(drive):
    drive(mixed_precision_of_types)
