"""``allow=[...]``: what peers may use, and nothing else, in requests, answers and errors."""

from __future__ import annotations

import collections
import datetime
import pickle
import struct
from functools import partial

import allowed_things
import numpy as np
import pytest
import torch
from allowed_things import Failure, Net, Point, add, cached, called_with, dictionary, fails, later, where
from group import results, run_group

import rdmarpc as rpc
from rdmarpc import autograd, nn
from rdmarpc.message import permits
from rdmarpc.message.permits import NotAllowed, Permits
from rdmarpc.optim import DistributedOptimizer
from rdmarpc.places import runners
from rdmarpc.references import handle

ALLOW = [allowed_things, torch.add, torch.nn.functional.relu, torch.optim.SGD]


def allowed():
    return ALLOW


class Evil:
    """Pickled as a call."""

    def __init__(self, module, name, *args):
        self.what, self.args = (module, name), args


def attack(evil):
    """A pickle that calls it, whether or not it exists here."""

    def text(value):
        data = value.encode()
        return b"X" + struct.pack("<I", len(data)) + data

    (module, name), args = evil.what, pickle.dumps(evil.args, 2)[2:-1]
    return b"\x80\x04" + text(module) + text(name) + b"\x93" + args + b"R."


CANARY = "touch CANARY"
ATTACKS = [
    Evil("os", "system", CANARY),
    Evil("posix", "system", CANARY),
    Evil("os", "environ.clear"),
    Evil("subprocess", "call", ["touch", "CANARY"]),
    Evil("subprocess", "Popen", ["touch", "CANARY"]),
    Evil("builtins", "eval", "open('CANARY', 'w')"),
    Evil("builtins", "exec", "open('CANARY', 'w')"),
    Evil("builtins", "compile", "1", "", "eval"),
    Evil("builtins", "open", "CANARY", "w"),
    Evil("builtins", "getattr", "text", "format"),
    Evil("builtins", "setattr", "text", "x", 1),
    Evil("builtins", "__import__", "antigravity"),
    Evil("builtins", "type", "New", (), {}),
    Evil("builtins", "object"),
    Evil("builtins", "map", len, ["a"]),
    Evil("__builtin__", "eval", "open('CANARY', 'w')"),
    Evil("functools", "partial", add, 1),
    Evil("functools", "reduce", add, [1, 2]),
    Evil("operator", "methodcaller", "system", CANARY),
    Evil("operator", "attrgetter", "system"),
    Evil("_operator", "itemgetter", 0),
    Evil("importlib", "import_module", "antigravity"),
    Evil("importlib.util", "find_spec", "os"),
    Evil("pickle", "loads", b"cos\nsystem\n(Vtouch CANARY\ntR."),
    Evil("_pickle", "loads", b"cos\nsystem\n(Vtouch CANARY\ntR."),
    Evil("marshal", "loads", b"N"),
    Evil("runpy", "run_path", "CANARY"),
    Evil("shutil", "rmtree", "CANARY"),
    Evil("ctypes", "CDLL", "libc.so.6"),
    Evil("types", "CodeType"),
    Evil("types", "FunctionType"),
    Evil("copyreg", "add_extension", "os", "system", 1),
    Evil("copyreg", "_reconstructor", Point, object, None),
    Evil("codecs", "open", "CANARY", "w"),
    Evil("socket", "socket"),
    Evil("multiprocessing.util", "spawnv_passfds", b"/bin/sh", [], []),
    Evil("numpy", "load", "CANARY"),
    Evil("numpy", "fromfile", "CANARY"),
    Evil("numpy", "ndarray.tofile", "CANARY"),
    Evil("numpy.testing._private.utils", "runstring", "1", {}),
    Evil("torch", "load", "CANARY"),
    Evil("torch", "save", [], "CANARY"),
    Evil("torch.serialization", "load", "CANARY"),
    Evil("torch.storage", "_load_from_bytes", b""),
    Evil("torch.jit", "load", "CANARY"),
    Evil("torch.jit._serialization", "load", "CANARY"),
    Evil("torch.hub", "load", "CANARY", "model"),
    Evil("torch.ops", "load_library", "CANARY"),
    Evil("torch._ops", "_Ops"),
    Evil("torch.utils.cpp_extension", "load", "CANARY", []),
    Evil("torch._utils", "_rebuild_from_type_v2", add, Point, (1,), {}),
    Evil("torch._utils", "_import_dotted_name", "os.system"),
    Evil("torch._C", "_VariableFunctionsClass.add", 1, 2),
    Evil("rdmarpc.message.reducers", "_find", "os", "system"),
    Evil("rdmarpc.message.reducers", "_load", b""),
    Evil("rdmarpc.references.handle", "_fetch", 1),
    Evil("rdmarpc.gradients.waves", "deliver", 0, b"", ()),
    Evil("rdmarpc.references.handle", "_run", None, "name", (), {}),
    Evil("rdmarpc.places.runners", "open_stream", "k", "worker0", "cpu", 1, b"", b"", 1),
    Evil("rdmarpc.places.runners", "take_large", "k", 1),
    Evil("rdmarpc.places.worker", "Runner"),
    Evil("rdmarpc.message.permits", "use", None),
    Evil("rdmarpc.calls.agent", "current"),
    Evil("cloudpickle.cloudpickle", "_make_function"),
    Evil("cloudpickle.cloudpickle", "subimport", "os"),
    # By way of an allowed module.
    Evil("allowed_things", "os.system", CANARY),
    Evil("allowed_things", "system", CANARY),
    Evil("allowed_things", "subprocess.call", ["touch", "CANARY"]),
    Evil("allowed_things", "torch.load", "CANARY"),
    Evil("allowed_things", "add.__globals__.get", "os"),
    Evil("allowed_things", "add.__call__", 1),
    Evil("allowed_things", "Point.__init__.__globals__.get", "os"),
    Evil("allowed_things", "Point.__subclasses__"),
    Evil("allowed_things", "Point.__class__", "New", (), {}),
    Evil("allowed_things", "__loader__.get_data", "CANARY"),
    Evil("allowed_things", "__builtins__.get", "eval"),
    Evil("allowed_things", "functools.partial", add),
]


@pytest.mark.parametrize("evil", ATTACKS, ids=lambda evil: ".".join(evil.what))
def test_no_pickle_runs_what_is_not_allowed(evil, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    permitted = Permits(ALLOW)
    payload = attack(evil)
    for read in (permitted.loads, permitted.load_plain):
        with pytest.raises(NotAllowed) as raised:
            read(payload)
    assert "is not among what this worker allows" in str(raised.value) and "allow=[..., " in str(raised.value)
    with pytest.raises(NotAllowed):  # as one of Python's own that would be read with more care
        permitted.loads(payload[:-1] + b"}b.")
    if not evil.what[0].startswith("rdmarpc."):
        with pytest.raises(NotAllowed):
            permitted.load_called(payload)
    assert not list(tmp_path.iterdir()) and permitted.refused >= 3


def test_named_in_the_ways_that_old_pickles_have():
    permitted = Permits(ALLOW)
    for payload in (
        b"cos\nsystem\n(Vtrue\ntR.",
        b"(Vtrue\nios\nsystem\n.",
        b"(cos\nsystem\nVtrue\no.",
        b"P1\n.",
        b"\x80\x04\x82\x01.",
    ):
        with pytest.raises((NotAllowed, pickle.UnpicklingError, ValueError)):
            permitted.loads(payload)


def test_classes_and_functions_are_not_built():
    """BUILD sets attributes of whatever it is given."""
    permitted = Permits(ALLOW)
    for module, name in (("allowed_things", "Point"), ("allowed_things", "add"), ("rdmarpc.message.incoming", "landed")):
        for state in (b"}(X\x01\x00\x00\x00xX\x01\x00\x00\x00yu", b"N}(X\x01\x00\x00\x00xX\x01\x00\x00\x00yu\x86"):
            with pytest.raises((NotAllowed, TypeError, AttributeError)):
                permitted.loads(b"\x80\x04c" + f"{module}\n{name}\n".encode() + state + b"b.")
    assert not hasattr(Point, "x") and not hasattr(add, "x")


VALUES = [
    (1, 2.5, "text", b"bytes", None, True, 1j, [1, {2}], {"a": (3,)}, frozenset([4]), range(3), slice(1, 2)),
    Point(1, [Point(2)]),
    np.arange(10),
    np.float32(2.5),
    np.array(["text", None], dtype=object),
    collections.OrderedDict(a=1),
    datetime.datetime(2024, 1, 2),
    torch.float32,
    torch.device("cpu"),
    torch.Size([1, 2]),
    torch.strided,
    torch.channels_last,
    ValueError("text"),
    rpc.PeerLost("text", peer="worker1"),
    add,
    Point,
    Point.move,
    cached,
    torch.add,
    torch.nn.functional.relu,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: getattr(value, "__name__", None) or type(value).__name__)
def test_what_is_allowed_arrives(value):
    made = Permits(ALLOW).loads(pickle.dumps(value, 5))
    if isinstance(value, Exception):
        assert type(made) is type(value) and str(made) == str(value)
    else:
        assert str(made) == str(value)


def test_what_cannot_be_allowed():
    import os

    for item in (os, torch, rpc, pickle):
        with pytest.raises(ValueError, match="cannot be allowed as a whole"):
            rpc.RpcBackendOptions(allow=[item])
    for item in (lambda: 1, "os.system", 5):
        with pytest.raises(TypeError, match="allow takes modules"):
            rpc.RpcBackendOptions(allow=[item])
    with pytest.raises(ValueError, match="not both"):
        rpc.RpcBackendOptions(allow=[], pickler="cloudpickle")


# -- between workers


def touch(path):
    open(path, "w").close()
    return "touched"


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path="CANARY"):
        self.path = path

    def __reduce__(self):
        return touch, (self.path,)


class BombError(Exception):
    def __reduce__(self):
        return touch, ("CANARY",)


def gives_a_bomb():
    return Bomb()


def raises_a_bomb():
    raise BombError("boom", 7)


def refers_to_a_bomb():
    return rpc.RRef(Bomb())


def restricted(rank):
    """Worker 1 allows ``ALLOW``, worker 0 everything."""
    try:
        return requests() if rank == 0 else None
    finally:
        rpc.shutdown()


def requests():
    tensor = torch.arange(3.0)
    assert rpc.rpc_sync("worker1", add, (1,), {"right": 5}) == 6
    assert rpc.rpc_sync("worker1", add, (tensor, torch.ones(3))).tolist() == [1, 2, 3]
    assert rpc.rpc_sync("worker1", add, (torch.ones(100_000), 1)).sum() == 200_000
    assert rpc.rpc_sync("worker1", torch.add, (tensor, 1)).tolist() == [1, 2, 3]
    assert rpc.rpc_sync("worker1", torch.nn.functional.relu, (-tensor,)).sum() == 0
    assert rpc.rpc_async("worker1", later, (Point(3),)).wait() == Point(3)
    assert rpc.rpc_sync("worker1", called_with, (add, 1, 2)) == 3
    with pytest.raises(Failure, match="text") as raised:
        rpc.rpc_sync("worker1", fails, ("text",))
    assert raised.value.number == 7
    with pytest.raises(NotAllowed, match=r"test_allow.touch is not among.*\n.*allow=\[\.\.\., test_allow.touch\]"):
        rpc.rpc_sync("worker1", touch, ("CANARY",))
    for function, args in (
        (add, (Bomb(), 1)),
        (called_with, (touch, "CANARY")),
        (torch.mul, (tensor, 2)),
        (Point(1).move, (1,)),
        (Bomb, ()),
        (eval, ("1",)),
        (scripted, (tensor,)),
        (called_with, (handle._fetch, 0)),
    ):
        with pytest.raises(NotAllowed, match="is not among what this worker allows"):
            rpc.rpc_sync("worker1", function, args)
    # References: values of allowed classes have methods, those that only travel have none.
    point = rpc.remote("worker1", Point, (1,))
    assert point.rpc_sync().move(2) == 3 and point.to_here().x == 3
    for name, args in (("__init__", (5,)), ("__setattr__", ("x", 9)), ("__reduce__", ())):
        if name == "__init__":
            assert point.rpc_sync().__getattr__(name)(*args) is None  # it is the class's own
            continue
        with pytest.raises(NotAllowed):
            point.rpc_sync().__getattr__(name)(*args)
    with pytest.raises(NotAllowed, match=r"allow=.*builtins\.dict"):
        rpc.remote("worker1", dictionary).rpc_sync().pop("a")
    with pytest.raises(NotAllowed, match=r"torch.*Tensor"):
        rpc.remote("worker1", add, (tensor, 1)).rpc_sync().numpy()
    # Modules, gradients, optimizers.
    net = nn.RemoteModule("worker1", Net)
    assert net.forward(tensor).tolist() == [0, 1, 2]
    with pytest.raises(NotAllowed, match="Linear"):
        nn.RemoteModule("worker1", torch.nn.Linear, (1, 1)).forward(tensor)
    with pytest.raises((NotAllowed, ValueError)):
        nn.RemoteModule("worker1", touch, ("CANARY",)).forward(tensor)
    with pytest.raises(NotAllowed, match="Adam"):
        DistributedOptimizer(torch.optim.Adam, net.remote_parameters(), lr=0.5)
    optimizer = DistributedOptimizer(torch.optim.SGD, net.remote_parameters(), lr=0.5)
    with autograd.context() as context_id:
        loss = net.forward(tensor.requires_grad_()).sum()
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    assert net.forward(tensor.detach()).tolist() == [0, 0.5, 0]
    with pytest.raises(NotAllowed, match=r"rdmarpc\.places\.runners"):
        rpc.rpc_sync("worker1", runners.counters_here)
    assert rpc.rpc_sync("worker1", where) != 0
    return rpc.counters()["refused_names"]


@torch.jit.script
def scripted(tensor):
    return tensor


def asks(rank):
    """Worker 0 allows ``ALLOW``, and asks worker 1, which may answer anything."""
    try:
        return answers() if rank == 0 else None
    finally:
        rpc.shutdown()


def answers():
    with pytest.raises(NotAllowed, match=r"test_allow\.touch"):
        rpc.rpc_sync("worker1", gives_a_bomb)
    with pytest.raises(NotAllowed, match=r"test_allow\.touch"):
        rpc.rpc_async("worker1", gives_a_bomb).wait()
    with pytest.raises(RuntimeError, match=r"(?s)BombError could not be rebuilt here.*boom") as raised:
        rpc.rpc_sync("worker1", raises_a_bomb)
    assert type(raised.value) is RuntimeError
    reference = rpc.rpc_sync("worker1", refers_to_a_bomb)
    with pytest.raises(NotAllowed, match=r"test_allow\.Bomb"):
        reference._get_type()
    with pytest.raises(NotAllowed, match=r"test_allow\.touch"):
        reference.to_here()
    tensor = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="backward fails"), autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker1", fails_backward, (tensor,)).sum()])
    assert rpc.rpc_sync("worker1", add, (1, 2)) == 3
    return rpc.counters()["refused_names"]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise BombError("backward fails")


def fails_backward(tensor):
    return Fails.apply(tensor)


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_requests_use_what_the_callee_allows(device, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results(run_group(restricted, 2, transport=device, each={1: {"allow": allowed}}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_answers_and_errors_use_what_the_caller_allows(device, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert results(run_group(asks, 2, transport=device, each={0: {"allow": allowed}}))[0] >= 6
    assert not list(tmp_path.iterdir())


def test_one_setting_a_process():
    before = permits.current
    try:
        permits.use(Permits([]))
        with pytest.raises(NotAllowed):
            permits.loads(pickle.dumps(add))
    finally:
        permits.use(before)


# -- models


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.second(torch.cat([torch.relu(self.first(x)), x], dim=-1))


def trained(model, optimizer):
    """The values after two steps."""
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def as_here(found):
    expected = Two()
    for name, value in trained(expected, torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)).items():
        assert torch.equal(found[name], value), name


def served():
    model = rpc.serve(Two(), ["worker1"], torch.optim.SGD, lr=0.1, momentum=0.9)
    as_here(trained(model, model.optimizer))
    model.optimizer.load_state_dict(model.optimizer.state_dict())
    model.load_state_dict(model.state_dict())
    assert model.counters()["steps"] == 2
    model.close()


def served_in_vain():
    with pytest.raises(NotAllowed, match=r"torch\.optim\.sgd\.SGD is not among.*\n.*allow=\[\.\.\., torch\.optim\.sgd\.SGD\]"):
        rpc.serve(Two(), ["worker1"], torch.optim.SGD, lr=0.1)
    model = rpc.serve(Two(), ["worker1"])  # no class of anybody's
    model(torch.ones(2, 4))
    model.close()


def wrapped():
    model = rpc.wrap(Two(), {"first": "worker1", "second": "worker1"})
    as_here(trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
    model.load_state_dict(model.state_dict())
    model.close()


def moved():
    assert (torch.ones(3).to(rpc.device("worker1")) + 1).sum().item() == 6


def wrapped_in_vain():
    with pytest.raises(NotAllowed, match=r"runners\.open_stream is not among.*\n.*allow=\[\.\.\., rdmarpc\.wrap\]"):
        rpc.wrap(Two(), {"first": "worker1"})


def one_model(use, rank):
    try:
        if rank == 0:
            use()
    finally:
        rpc.shutdown()


def nothing():
    return []


def optimizers():
    return [torch.optim.SGD]


def parts_of_models():
    return [rpc.wrap]


def tensors():
    return [rpc.device]


@pytest.mark.parametrize(
    ("use", "given"),
    [
        (served, optimizers),
        (served_in_vain, nothing),
        (wrapped, parts_of_models),
        (moved, tensors),
        (wrapped_in_vain, optimizers),
    ],
    ids=lambda value: value.__name__,
)
def test_models_at_others_need_what_these_allow(use, given):
    """Who trains allows nothing at all."""
    results(run_group(partial(one_model, use), 2, each={0: {"allow": nothing}, 1: {"allow": given}}))
