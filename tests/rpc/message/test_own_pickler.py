"""Pickling that a program brings along: a pickler of its own, and every other hook of torch's. Honoured, or refused by name."""

from __future__ import annotations

import copyreg
import io
import pickle
import zlib
from collections import ChainMap

import cloudpickle
import pytest
import torch
from called import double, identity
from group import results, run_group
from torch import nn
from torch.multiprocessing import reductions

import rdmarpc as rpc
from rdmarpc import internal

THERE = "worker1"


class ByValue:
    """The whole call in one pickle."""

    def __init__(self):
        self.calls = 0

    def serialize(self, call):
        self.calls += 1
        return cloudpickle.dumps(call), []


class LikeTorchs(internal._InternalRPCPickler):
    """As programs write it after torch's own: tensors and references beside the pickle."""

    def __init__(self):
        super().__init__()
        self._dispatch_table[complex] = lambda value: (complex, (value.real, -value.imag))

    def serialize(self, call):
        file = io.BytesIO()
        table = self._dispatch_table
        table[rpc.api.PyRRef] = self._py_rref_reducer
        table[rpc.RRef] = self._rref_reducer
        kind = type("Own", (cloudpickle.Pickler,), {"dispatch_table": ChainMap(table, cloudpickle.Pickler.dispatch_table)})
        pickler = kind(file)
        internal._thread_local_tensor_tables.send_tables = []
        pickler.dump(call)
        tensors = internal._thread_local_tensor_tables.send_tables
        del internal._thread_local_tensor_tables.send_tables
        return file.getvalue(), tensors


class Counted(internal._InternalRPCPickler):
    calls = 0

    def serialize(self, call):
        self.calls += 1
        return super().serialize(call)


class SharedMemory(internal._InternalRPCPickler):
    """As in a test of torch's: tensors travel as names of shared memory."""

    def __init__(self):
        super().__init__()
        tensors = dict.fromkeys((torch.Tensor, nn.Parameter), reductions.reduce_tensor)
        storages = dict.fromkeys(torch._storage_classes, reductions.reduce_storage)
        self._dispatch_table = copyreg.dispatch_table | tensors | storages


class Compressed:
    def serialize(self, call):
        return zlib.compress(pickle.dumps(call)), []


@rpc.functions.async_execution
def later(x):
    return rpc.rpc_async("worker0", double, (x,))


@rpc.functions.async_execution
def never_later(x):
    return x


def a_future(x):
    return rpc.rpc_async("worker0", double, (x,))


def fails(text):
    raise ValueError(text)


@torch.jit.script
def scripted(x):
    return x * 3


class Net(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.scale = scale

    def forward(self, x):
        return self.scale(x * self.weight)


class Plain:
    def __init__(self, number):
        self.number = number


def own_picklers(rank):
    if rank == 0:
        factor = 7
        large = torch.ones(200_000)
        for pickler in (ByValue(), LikeTorchs(), Counted()):
            by_value = not isinstance(pickler, Counted)
            with rpc.api._use_rpc_pickler(pickler):
                assert rpc.api._default_pickler is pickler
                for x in (torch.ones(3), large):
                    if by_value:
                        assert torch.equal(rpc.rpc_sync(THERE, lambda x: x * factor, (x,)), x * 7)
                        assert torch.equal(rpc.rpc_async(THERE, lambda x, k: x * k, (x,), {"k": 2}).wait(), x * 2)
                        assert torch.equal(rpc.remote(THERE, lambda x: x * factor, (x,)).to_here(), x * 7)
                    for to in (THERE, "worker0"):
                        assert torch.equal(rpc.rpc_sync(to, double, (x,)), 2 * x)
                    assert torch.equal(rpc.rpc_sync(THERE, later, (x,)), 2 * x)
                    assert torch.equal(rpc.rpc_sync(THERE, scripted, (x,)), 3 * x)
                    assert torch.equal(rpc.rpc_sync(THERE, torch.add, (x, 1)), x + 1)
                with pytest.raises(ValueError, match="by hand"):
                    rpc.rpc_sync(THERE, fails, ("by hand",))
                with pytest.raises(RuntimeError, match=r"must return a torch.futures.Future object, but got <class 'int'>"):
                    rpc.rpc_sync(THERE, never_later, (1,))
                with pytest.raises(RuntimeError, match=r"Can not pickle torch.futures.Future"):
                    rpc.rpc_sync(THERE, a_future, (1,))
                module = rpc.nn.RemoteModule(THERE, Net, ((lambda x: x * 5) if by_value else double,))
                assert module(torch.ones(2)).sum() == (10 if by_value else 4)
                rref = rpc.RRef(torch.ones(2))
                if isinstance(pickler, ByValue):
                    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
                        rpc.rpc_sync(THERE, identity, (rref,))
                    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
                        rpc.remote(THERE, Net, (double,)).rpc_sync().forward(1)
                elif by_value:
                    assert rpc.rpc_sync(THERE, lambda r: r.to_here() * 2, (rref,)).sum() == 4
                    there = rpc.remote(THERE, Net, (lambda x: x + 1,))
                    assert there.rpc_sync().forward(torch.ones(1)) == 2
                    assert there.rpc_async().forward(torch.ones(1)).wait() == 2
                    assert there.remote().forward(torch.ones(1)).to_here() == 2
                    assert rpc.rpc_sync(THERE, identity, (1 + 2j,)) == 1 - 2j
                with rpc.autograd.context() as context:
                    t = torch.ones(3, requires_grad=True)
                    loss = rpc.rpc_sync(THERE, double, (t,)).sum()
                    if not isinstance(pickler, ByValue):
                        rpc.autograd.backward(context, [loss])
                        assert rpc.autograd.get_gradients(context)[t].sum() == 6
            assert rpc.api._default_pickler is internal._internal_rpc_pickler
        assert pickler.calls > 10
        with rpc.api._use_rpc_pickler(Compressed()), pytest.raises(pickle.UnpicklingError):
            rpc.rpc_sync(THERE, double, (1,))
        rpc.api._default_pickler = by_value = ByValue()
        assert rpc.rpc_sync(THERE, lambda: factor) == 7 and by_value.calls == 1
        rpc.api._default_pickler = internal._internal_rpc_pickler
        with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):  # by the version of Python
            rpc.rpc_sync(THERE, lambda: factor)
        assert rpc.rpc_sync(THERE, double, (3,)) == 6  # the job goes on
    rpc.shutdown()


def test_a_programs_own_pickler():
    results(run_group(own_picklers))


def set_to_seven(net):
    with torch.no_grad():
        net.weight.fill_(7)


def shares(rank):
    torch.multiprocessing.set_sharing_strategy("file_system")
    if rank == 0:
        net = nn.Linear(1, 2).share_memory()
        with rpc.api._use_rpc_pickler(SharedMemory()):
            rpc.rpc_sync(THERE, set_to_seven, (net,))
        assert (net.weight == 7).all()
    rpc.shutdown()


def test_a_programs_own_table_of_classes():
    results(run_group(shares))


def number(value):
    return value.number


def hooks(rank):
    if rank == 0:
        internal._internal_rpc_pickler._register_reducer(Plain, lambda value: (Plain, (value.number + 1,)))
        internal._internal_rpc_pickler._register_reducer(Plain, lambda value: (Plain, (value.number + 100,)))
        assert rpc.rpc_sync(THERE, number, (Plain(1),)) == 2  # as in torch, the first one counts
        copyreg.pickle(Compressed, lambda value: (Plain, (5,)))
        assert rpc.rpc_sync(THERE, number, (Compressed(),)) == 5
        for name in ("_pickler", "_unpickler", "_run_function", "_handle_exception", "serialize", "deserialize"):
            with pytest.raises(AttributeError, match=rf"internal.{name} cannot be replaced(.|\n)*_use_rpc_pickler"):
                setattr(internal, name, cloudpickle.CloudPickler)
        data, tensors = internal.serialize([torch.ones(2), "text"])
        assert internal.deserialize(data, tensors)[1] == "text" and internal.deserialize(pickle.dumps(3), []) == 3
    rpc.shutdown()


def test_the_other_hooks_of_pickling():
    results(run_group(hooks))
