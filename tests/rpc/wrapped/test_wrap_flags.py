"""Flags of torch that a forward or a loop sets around operations: the bits of one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from called import identity
from test_wrap import both, drive
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from twins import train_both

import rdmarpc as rpc


@contextlib.contextmanager
def lasting(set: Callable[[Any], object], value: Any, before: Any) -> Any:
    set(value)
    yield
    set(before)


@contextlib.contextmanager
def dtype(value: torch.dtype) -> Any:
    with lasting(torch.set_default_dtype, value, torch.get_default_dtype()):
        yield


def precision() -> Any:
    return lasting(torch.set_float32_matmul_precision, "medium", "highest")


FLAGS: dict[str, Callable[[], Any]] = {
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "denormal": lambda: lasting(torch.set_flush_denormal, True, False),
    "precision": precision,
    "dtype": lambda: dtype(torch.float64),
    "deterministic": lambda: lasting(torch.use_deterministic_algorithms, True, False),
}


class Mixed(nn.Module):
    """What each flag changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 8, 3), nn.Linear(288, 96)

    def forward(self, x):
        y = self.out(self.conv(x.view(-1, 3, 8, 8)).flatten(1)) + torch.ones(1) * 0.1
        q, k, v = y.view(-1, 3, 1, 96).expand(-1, 3, 70, 96).unbind(1)
        z = F.scaled_dot_product_attention(q, k.cumsum(1), v.cos())
        return (z * 1e-42 * 1e30).float().sum(1) + y.float().mean() + z.float().mean(1)


class Net(nn.Module):
    """``flag`` is set around an operation of its own (``own``), and around a part."""

    def __init__(self, flag: str, own: bool) -> None:
        super().__init__()
        self.first, self.mixed, self.last = nn.Linear(20, 576), Mixed(), nn.Linear(96, 4)
        self.flag, self.own = flag, own

    def forward(self, x):
        x = self.first(x)
        with FLAGS[self.flag]():
            x = Mixed.forward(self.mixed, x) if self.own else self.mixed(x)
        return self.last(x)


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(3, 20, generator=generator), torch.tensor([0, 1, 2])) for _ in range(3)]


def in_forward(flag: str, own: bool) -> None:
    placement = {"first": "worker1", "last": "worker1"} if own else {"mixed": "worker1"}
    model, twin = both(lambda: Net(flag, own), placement)
    train_both(model, twin, data())
    assert "the forward sets torch's " in model.captured, (flag, own, model.captured)
    model.close()


def around(flag: str) -> None:
    model, twin = both(lambda: nn.Sequential(nn.Linear(20, 576), Mixed(), nn.Linear(96, 4)), {"1": "worker1"})
    train_both(model, twin, data())
    x = data()[0][0]
    with FLAGS[flag]():
        outputs = [network(x) for network in (model, twin)]
        assert torch.equal(*outputs)
        assert model.captured.startswith("here: torch's ")
    train_both(model, twin, data())
    model.close()


class Leaves(nn.Module):
    """Sets a flag for good."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(20, 576), Mixed()

    def forward(self, x):
        x = self.b(self.a(x))
        torch.backends.mkldnn.set_flags(False)
        return x


def for_good() -> None:
    """The first forward begins before it, the others after it."""
    found = []
    for network in both(lambda: nn.Sequential(Leaves(), nn.Linear(96, 4)), {"0.b": "worker1"}):
        torch.backends.mkldnn.set_flags(True)
        try:
            found.append([network(x).detach() for x, _ in data()])
            assert not torch.backends.mkldnn.enabled
        finally:
            torch.backends.mkldnn.set_flags(True)
    assert all(map(torch.equal, *found))


def scenario() -> None:
    for flag in FLAGS:
        in_forward(flag, own=True)
        in_forward(flag, own=False)
        around(flag)
    for_good()


@pytest.mark.timeout(300)
def test_flags() -> None:
    drive(scenario, 2, timeout=250.0)


class Choosing(nn.Module):
    """Attention by the kernels that an attribute names: enumerations of C++, whose class has another name in its module."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.kernels, self.first = nn.Linear(8, 8), [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], SDPBackend.MATH

    def forward(self, x):
        one = self.line(x).view(1, 1, -1, 8)
        with sdpa_kernel(self.kernels):
            some = F.scaled_dot_product_attention(one, one, one)
        with sdpa_kernel(self.first):
            return (some + F.scaled_dot_product_attention(one, one, one)).view(-1, 8)


def kernels_in_a_part() -> None:
    for capture in ("fx", "eager", "here"):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 8), Choosing(), nn.Linear(8, 2))
        twin = copy.deepcopy(net)
        model = rpc.wrap(net, {"1": "worker1"}, capture=capture)
        assert model[1].first == SDPBackend.MATH and model[1].kernels == twin[1].kernels
        for number in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            if number == 2:
                model[1].first = twin[1].first = SDPBackend.FLASH_ATTENTION
            losses = [network(x).square().mean() for network in (model, twin)]
            for loss in losses:
                loss.backward()
            assert torch.equal(*(loss.detach() for loss in losses))
        assert all(torch.equal(p.grad.clone(), q.grad) for p, q in zip(model.parameters(), twin.parameters()))
        model.close()
    assert rpc.rpc_sync("worker1", identity, (SDPBackend.MATH,)) == SDPBackend.MATH
    assert rpc.rpc_sync("worker1", identity, (SDPBackend,)) is SDPBackend


def test_parts_name_kernels_of_attention():
    drive(kernels_in_a_part)
