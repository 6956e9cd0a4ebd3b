"""What tests of references pass around: values, functions that use them, and a look into every worker's tables."""

from __future__ import annotations

import gc
import threading
import time

import torch

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.references.forks import Fork


def unsettled(store):
    """Forks whose introduction or deletion has come without the other."""
    return (
        len(store.unsettled.early)
        + len(store.unsettled.refused)
        + sum(len(each.parked) for each in list(store._values.values()))
    )


def unsent(mail):
    return sum(len(entries) for entries in list(mail._out.values()))


def tables():
    """Everything that a worker knows about references, as numbers."""
    gc.collect()
    context = agent.current().rrefs
    context.collect()
    return {
        "values": len(context),
        "unsettled": unsettled(context.store),
        "unsent": unsent(context.mail),
        "forks": sum(type(item) is Fork for item in gc.get_objects()),
        **context.debug_info(),
    }


def wait_until_empty(ranks, seconds=30.0):
    """Until no table of any of these workers holds anything."""
    deadline = time.monotonic() + seconds
    while True:
        found = {rank: rpc.rpc_sync(f"worker{rank}", tables) for rank in ranks}
        left = {rank: {name: count for name, count in table.items() if count} for rank, table in found.items()}
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


class Thing:
    """A value with methods."""

    def __init__(self, number=0, seconds=0.0):
        time.sleep(seconds)
        self.number = number

    def add(self, other, times=1):
        self.number += other * times
        return self.number

    def sleep(self, seconds):
        time.sleep(seconds)
        return "slept"

    def itself(self):
        return rpc.RRef(self)

    def named(self, name, form, timeout=0.0, **others):
        return name, form, timeout, others

    @staticmethod
    def double(number):
        return 2 * number

    @classmethod
    def name(cls):
        return cls.__name__

    @rpc.functions.async_execution
    def later(self, seconds):
        future = torch.futures.Future()
        threading.Timer(seconds, future.set_result, (f"later {self.number}",)).start()
        return future


def raises(kind=ValueError):
    raise kind("on purpose")


def value_of(reference):
    assert reference.confirmed_by_owner()
    return reference.to_here()


kept: list = []


def keep(reference):
    kept.append(reference)


def give(position=-1):
    return kept[position]


def forget():
    kept.clear()


def make(value):
    return rpc.RRef(value)


def is_own(reference):
    reference.local_value()
    return reference.is_owner() and reference.confirmed_by_owner()


def pair_of(first, second):
    return [first, second]
