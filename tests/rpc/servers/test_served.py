"""``serve``: parameters at servers give the bits that training in one process gives."""

from __future__ import annotations

import copy
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from group import die, dismiss, results, run_group, until_dismissed
from halt import halt
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import rdmarpc as rpc
from rdmarpc.servers import server as serving
from rdmarpc.servers.model import place
from rdmarpc.servers.servers import _open
from rdmarpc.transport import PeerLost

SERVERS = ["worker1", "worker2"]


class Net(nn.Module):
    """A convolution in channels-last order, batch norm, a frozen layer, one that is used now and then, a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.features.to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.rare = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.last.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, rare: bool = False) -> torch.Tensor:
        x = self.features(x).mean((2, 3))
        x = torch.relu(self.frozen(x))
        if rare:
            x = x + torch.relu(self.rare(x))
        return self.last(torch.tanh(self.tied(x) * self.scale))


def on_workers(body: Callable[[int], Any], workers: int, rank: int) -> Any:
    """``body(rank)`` runs at the first so many; the others only serve."""
    try:
        return body(rank) if rank < workers else None
    finally:
        rpc.shutdown()


def twins() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    net = Net()
    return net, copy.deepcopy(net)


def batch(number: int, worker: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * number + worker)
    return torch.randn(4, 1, 6, 6, generator=generator), torch.randint(0, 8, (4,), generator=generator)


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key


def assert_same_optimizer(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, entries in theirs["state"].items():
        assert ours["state"][index].keys() == entries.keys()
        for key, value in entries.items():
            mine = ours["state"][index][key]
            assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, (index, key)


def kept() -> int:
    """How many models this server keeps."""
    return sum(len(table) for table in serving._servers.values())


# -- one worker


def train_alone(rank: int) -> None:
    net, twin = twins()
    served = rpc.serve(net, SERVERS, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3)
    mine, theirs = served.optimizer, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    assert isinstance(mine, torch.optim.SGD)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5) for optimizer in (mine, theirs)]
    landing = {name: parameter.data_ptr() for name, parameter in served.named_parameters()}
    gradients = sum(p.nbytes for p in twin.parameters() if p.requires_grad)
    rare = sum(p.nbytes for p in twin.rare.parameters())
    counts = [served.counters()]

    def step(number: int, rare: bool = False) -> None:
        x, y = batch(number)
        found = []
        for model, optimizer in ((served, mine), (twin, theirs)):
            loss = F.cross_entropy(model(x, rare=rare), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        assert found[0] == found[1], number
        for schedule in schedules:
            schedule.step()
        served.pull()
        counts.append(served.counters())

    for number in range(8):
        step(number)
    staged = [after["bytes_staged"] - before["bytes_staged"] for before, after in pairwise(counts)]
    assert staged == [gradients - rare] + [0] * 7
    steady = [{key: count[key] for key in ("registrations", "rpc_messages")} for count in counts[1:]]
    assert steady == [steady[0]] * 8
    posts = [after["posts"] - before["posts"] for before, after in pairwise(counts)]
    # A write there and one back; and to ask for the counters, a call there and back.
    assert posts[1:] == [4 * len(SERVERS)] * 7, posts
    before = served.counters(everywhere=False)["posts"]
    mine.step()
    theirs.step()
    assert served.counters(everywhere=False)["posts"] == before + len(SERVERS)
    assert_same(served.state_dict(), twin.state_dict())
    step(8, rare=True)
    for number in range(9, 12):
        step(number, rare=number % 2 == 0)
    assert counts[-1]["bytes_staged"] - counts[8]["bytes_staged"] == gradients
    assert_same(served.state_dict(), twin.state_dict())
    assert_same_optimizer(mine.state_dict(), theirs.state_dict())
    assert {name: parameter.data_ptr() for name, parameter in served.named_parameters()} == landing

    # The ablation: everything that crosses is copied once more, at both ends.
    served.staging = "always"
    before = served.counters()["bytes_staged"]
    step(12)
    everything = sum(p.nbytes for p in twin.parameters())
    assert served.counters()["bytes_staged"] - before == gradients - rare + everything
    served.staging = "traced"
    step(13)
    assert counts[-1]["bytes_staged"] == counts[-2]["bytes_staged"]

    # Evaluation right after a step, and with the model's own parts.
    served.eval(), twin.eval()
    assert not net.training and not served.features.training
    x, _ = batch(0)
    assert torch.equal(served(x), twin(x))
    served.train(), twin.train()

    # States there and back.
    states = [copy.deepcopy(part.state_dict()) for part in (served, mine, *schedules[:1])]
    for number in (14, 15):
        step(number)
    for part, state in zip((served, mine, schedules[0]), states):
        part.load_state_dict(copy.deepcopy(state))
    for part, state in zip((twin, theirs, schedules[1]), states):
        part.load_state_dict(copy.deepcopy(state))
    for number in (16, 17):
        step(number)
    assert_same(served.state_dict(), twin.state_dict())

    # Two optimizers over different parameters, one of them with a group of its own later.
    kinds = [(torch.optim.Adam, "features"), (torch.optim.SGD, "last")]
    ours = [served.new_optimizer(kind, getattr(served, part).parameters(), lr=0.01) for kind, part in kinds]
    others = [kind(getattr(twin, part).parameters(), lr=0.01) for kind, part in kinds]
    for number in range(18, 24):
        x, y = batch(number)
        for model, optimizers in ((served, ours), (twin, others)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if number == 21:
                optimizers[1].add_param_group({"params": [model.scale], "lr": 0.5})
            for optimizer in optimizers:
                optimizer.step()
        assert_same(served.state_dict(), twin.state_dict())
    for optimizer, other in zip(ours, others):
        assert_same_optimizer(optimizer.state_dict(), other.state_dict())
    # A closure, clipping, gradients that add up over two backwards.
    for model, optimizer in ((served, ours[0]), (twin, others[0])):
        optimizer.zero_grad(set_to_none=False)
        for number in (24, 25):
            F.cross_entropy(model(batch(number)[0]), batch(number)[1]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step(lambda model=model: model(batch(0)[0]).sum().detach())
    assert_same(served.state_dict(), twin.state_dict())
    assert _open and all(rpc.rpc_sync(server, kept) == 1 for server in SERVERS)
    served.close()
    served.close()
    assert not _open and not any(rpc.rpc_sync(server, kept) for server in SERVERS)
    assert_same(net.state_dict(), twin.state_dict())
    with pytest.raises(rpc.RdmaError, match="closed"):
        mine.step()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_one_worker_two_servers(transport):
    results(run_group(partial(on_workers, train_alone, 1), 3, transport=transport))


# -- several workers


def train_together_or_serve(rank: int) -> None:
    if rank < 2:
        train_together(rank)
    else:
        register_optimizer_step_pre_hook(lambda *_: time.sleep(random.choice([0, 0, 0, 0.003])))


def train_together(rank: int) -> None:
    net, twin = twins()
    if rank:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()  # what counts is what the first worker brings
    workers = ["worker0", "worker1"]
    served = rpc.serve(
        net, ["worker2", "worker3"], torch.optim.AdamW, lr=1e-2, workers=workers, placement="balanced", timeout=20
    )
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    assert_same(dict(net.named_parameters()), dict(twin.named_parameters()))
    net.features[1].eval(), twin.features[1].eval()  # its statistics are each worker's own
    for number in range(40):
        time.sleep(random.choice([0, 0, 0, 0.003]))
        rare = [number % 3 == 0, number % 4 == 0]
        served.optimizer.zero_grad()
        x, y = batch(number, rank)
        loss = F.cross_entropy(served(x, rare=rare[rank]), y)
        loss.backward()
        served.optimizer.step()
        # The same in one process: everybody's gradients, added in the order of the workers.
        sums: dict[str, torch.Tensor] = {}
        for worker in range(2):
            twin.zero_grad()
            x, y = batch(number, worker)
            expected = F.cross_entropy(twin(x, rare=rare[worker]), y)
            expected.backward()
            assert worker != rank or loss.item() == expected.item(), number
            for name, parameter in twin.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
        for name, parameter in twin.named_parameters():
            parameter.grad = sums.get(name)
        optimizer.step()
        assert_same(dict(served.named_parameters()), dict(twin.named_parameters()))
    assert_same_optimizer(served.optimizer.state_dict(), optimizer.state_dict())
    served.close()


def test_two_workers_two_servers():
    results(run_group(partial(on_workers, train_together_or_serve, 4), 4))


# -- what goes wrong


class Breaks(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        raise ZeroDivisionError("no step today")


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def one_step(served: Any) -> None:
    served(torch.ones(1, 4)).sum().backward()
    served.optimizer.step()


def some_end(what: str, rank: int) -> float:
    """Seconds until worker0 heard of it; workers 0 and 1 train, 2 and 3 serve."""
    if rank > 1:
        try:
            rpc.shutdown(timeout=50)
        except rpc.RdmaError:
            pass
        return 0.0
    kind = Breaks if what == "step" else torch.optim.SGD
    servers = ["worker2"] if what == "step" else ["worker2", "worker3"]
    served = rpc.serve(linear(), servers, kind, lr=0.1, workers=["worker0", "worker1"], timeout=30)
    if what != "step":
        one_step(served)
        served.pull()
    if what == "worker" and rank == 1:
        die()
    if what == "server" and rank == 1:
        rpc.rpc_async("worker2", die)
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError if what == "step" else PeerLost, match="no step" if what == "step" else "is lost"):
        for _ in range(1000):
            one_step(served)
    took = time.monotonic() - start
    served.close()
    if what != "worker":  # who leaves ends the servers, and the other worker has to ask one for the reason
        dismiss(f"worker{1 - rank}")
        until_dismissed()
    rpc.shutdown(graceful=False)
    return took


@pytest.mark.parametrize("what", ["worker", "server", "step"])
def test_what_ends_one_is_an_error_of_all(what):
    outcomes = run_group(partial(some_end, what), 4)
    dead = {"worker": 1, "server": 2, "step": -1}[what]
    for rank, outcome in enumerate(outcomes):
        if rank != dead:
            assert not outcome.error, f"worker {rank}: {outcome.text}"
    assert all(outcomes[rank].result < 25 for rank in (0, 1) if rank != dead)


def served_to_two(rank: int) -> Any:
    """The model that workers 0 and 1 train, pulled once. ``None`` at worker 2, which has served until it was dismissed."""
    if rank == 2:
        until_dismissed()
        rpc.shutdown(graceful=False)
        return None
    served = rpc.serve(linear(), ["worker2"], torch.optim.SGD, lr=0.1, workers=["worker0", "worker1"], timeout=20)
    served.pull()
    return served


def another_one_dies(rank: int) -> None:
    """Workers 0 and 1 train, 2 serves."""
    served = served_to_two(rank)
    if served is None:
        return
    if rank == 1:
        die()
    with pytest.raises(PeerLost, match="worker1") as raised:
        one_step(served)
        served.pull()
    assert raised.value.peer == "worker1"
    one = torch.optim.SGD
    for use in (
        served.counters,
        served.optimizer.state_dict,
        lambda: served.load_state_dict(linear().state_dict()),
        lambda: served.new_optimizer(one, lr=0.5),
    ):
        with pytest.raises(PeerLost, match="worker1") as raised:
            use()
        assert raised.value.peer == "worker1"
    served.close()
    dismiss("worker2")
    rpc.shutdown(graceful=False)


@pytest.mark.parametrize("device", ["shm", "tcp"])
def test_the_death_of_another_worker_is_told_by_its_name(device: str) -> None:
    outcomes = run_group(another_one_dies, 3, transport=device)
    for rank in (0, 2):
        assert not outcomes[rank].error, f"worker {rank}: {outcomes[rank].text}"


def gives_up_for_a_loss(lost: PeerLost, named: str, rank: int) -> None:
    """Workers 0 and 1 train, 2 serves. Worker 1 finds somebody lost whom worker 0 still has, and closes the model."""
    served = served_to_two(rank)
    if served is None:
        return
    if rank == 1:

        def pull() -> None:
            raise lost

        served._there.trainer.pull = pull
        served.close()
        until_dismissed()
    else:
        with pytest.raises(PeerLost, match="'worker1' has closed the model: worker worker3 is lost") as raised:
            one_step(served)
            served.pull()
        assert f"{raised.value.peer} {raised.value.status}" == named
        served.close()
        dismiss("worker1", "worker2")
    rpc.shutdown(graceful=False)


@pytest.mark.parametrize("named", ["worker3 EOF", "worker1 SILENT"])
def test_who_gives_up_for_a_loss_says_whom_it_lost(named: str) -> None:
    """Also where that is itself, which others gave up while it was stopped."""
    status = "EOF" if named == "worker3 EOF" else "GIVEN_UP"
    lost = PeerLost("worker worker3 is lost: as it says", peer="worker3", status=status)
    results(run_group(partial(gives_up_for_a_loss, lost, named), 3))


def closes_late(what: str, rank: int) -> None:
    """Worker 0 trains in vain, 1 serves, 2 ought to train, too."""
    timeout, workers = 8.0, ["worker0", "worker2"]
    if rank != 1:
        served = rpc.serve(linear(), ["worker1"], torch.optim.SGD, lr=0.1, workers=workers, timeout=timeout)
        served.pull()
    if rank == 0:
        server = rpc.rpc_sync("worker1", os.getpid)
        one_step(served)
        if what == "a server":
            halt(server)
        with pytest.raises(rpc.TransferTimeout):
            served.pull()
        start = time.monotonic()
        served.close()
        took = time.monotonic() - start
        os.kill(server, signal.SIGCONT)
        assert took < 0.9 * timeout
        dismiss("worker2")
    elif rank == 2:
        until_dismissed()
        served.close()
    rpc.shutdown()


@pytest.mark.parametrize("what", ["a worker", "a server"])
def test_closing_after_a_timeout_does_not_wait_again(what: str) -> None:
    results(run_group(partial(closes_late, what), 3, peer_timeout=40.0))


def refusals(rank: int) -> None:
    def refused(says: str, *args: Any, kind: type[BaseException] = ValueError, **options: Any) -> None:
        with pytest.raises(kind, match=says):
            rpc.serve(*args, **options)

    net = linear()
    refused("worker9", net, ["worker9"])
    refused("each once", net, ["worker1", "worker1"])
    refused("must be a list of names", net, "worker1")
    refused("must be a list of names", net, torch.optim.SGD, ["worker1"])
    refused("workers and servers", net, ["worker0"], kind=rpc.NotSupported)
    refused("must have 'worker0'", net, ["worker1"], workers=["worker1"])
    refused("no server for 'bias'", net, ["worker1"], placement={"weight": "worker1"})
    refused("not one of servers", net, ["worker1"], placement={"": "worker2"})
    refused("placement='best'", net, ["worker1"], placement="best")
    refused("staging='never'", net, ["worker1"], staging="never")
    refused("without an optimizer", net, ["worker1"], lr=0.1)
    refused("Invalid learning rate", net, ["worker1"], torch.optim.SGD, lr=-1.0)
    refused("no parameters", nn.ReLU(), ["worker1"])
    refused("no shape yet", nn.LazyLinear(3), ["worker1"], kind=rpc.NotSupported)
    refused("has .'pull'. of its own", nn.ModuleDict({"pull": linear()}), ["worker1"], kind=rpc.NotSupported)
    for _ in range(2):
        refused("did not come", net, ["worker1"], workers=["worker0", "worker2"], timeout=1.0, kind=rpc.TransferTimeout)
    assert not _open and rpc.rpc_sync("worker1", kept) == 0

    embedding = nn.Embedding(10, 4, sparse=True)
    served = rpc.serve(embedding, ["worker1"], torch.optim.SGD, lr=0.1)
    served(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(rpc.NotSupported, match="sparse"):
        served.optimizer.step()
    embedding.weight.grad = torch.ones(10, 4)  # nothing was sent, so it goes on
    served.optimizer.step()
    with pytest.raises(rpc.NotSupported, match="LBFGS"):
        served.new_optimizer(torch.optim.LBFGS)
    with pytest.raises(rpc.NotSupported, match="before serve"):
        served.double()
    with pytest.raises(rpc.NotSupported, match="assign"):
        served.load_state_dict(served.state_dict(), assign=True)
    with pytest.raises(ValueError, match="of that model"):
        served.new_optimizer(torch.optim.SGD, net.parameters(), lr=0.1)
    served.close()

    frozen = linear().requires_grad_(False)
    frozen.bias.requires_grad_(True)
    served = rpc.serve(frozen, ["worker1", "worker2"], torch.optim.SGD, lr=0.1)
    served.requires_grad_(True)
    with pytest.raises(rpc.NotSupported, match=r"freeze parameters after serve\(\)"):
        one_step(served)
    frozen.weight.requires_grad_(False)
    served.optimizer.zero_grad()
    bias = frozen.bias.detach().clone()
    one_step(served)
    assert torch.equal(served.state_dict()["bias"], bias - 0.1)
    served.close()

    deep = nn.Sequential(linear(), linear())
    served = rpc.serve(deep, ["worker1"], torch.optim.SGD, lr=0.1)
    kept_graph = served(torch.ones(1, 4)).sum()
    one_step(served)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept_graph.backward()
    served.close()


def test_what_it_refuses():
    results(run_group(partial(on_workers, refusals, 1), 3))


# -- where parameters go


def test_placements():
    net = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5))
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert place(net, ["a", "b", "c"], "round_robin") == dict(zip(names, "abca"))
    assert place(net, ["a", "b"], "balanced") == dict(zip(names, "abbb"))
    assert place(net, ["a", "b"], {"1": "b", "1.bias": "a", "": "a"}) == dict(zip(names, "aaba"))


def on_driver(body: Callable[[], Any], rank: int) -> Any:
    try:
        return body() if rank == 0 else None
    finally:
        rpc.shutdown()


def combining() -> None:
    with pytest.raises(rpc.NotSupported, match="Breaks may combine parameters"):
        rpc.serve(linear(), ["worker1", "worker2"], Breaks, lr=0.1)


def test_an_optimizer_that_may_combine_parameters_has_one_server():
    results(run_group(partial(on_driver, combining), 3))
