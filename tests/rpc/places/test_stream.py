"""The command stream: bounded tables, places that are used again, errors that come late, packed sequences, who uses memory."""

from __future__ import annotations

import copy
import ctypes
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from group import results, run_group
from halt import halt
from standing_group import StandingGroup
from torch import nn

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.places import at_place, runners, streams, tensor
from rdmarpc.places.names import place_named
from rdmarpc.transport.tcp.channel import TcpChannel


@pytest.fixture(scope="module")
def group() -> Iterator[StandingGroup]:
    found = StandingGroup(3)
    yield found
    found.end()


def home(found: torch.Tensor) -> torch.Tensor:
    return at_place(found.detach(), None)


def ever_new_shapes() -> None:
    place = rpc.device("worker1")
    x = torch.randn(50, 50)
    there, before = x.to(place), tensor._FORMS
    tensor._FORMS = 20
    try:
        for k in (each for number in range(1, 50) for each in (number, number)):  # the one too many is used again, too
            found = (there[:k].sum(0) + torch.full((50,), float(k), device=place)).relu()
            assert torch.equal(home(found), (x[:k].sum(0) + float(k)).relu()), k
            assert len(tensor._views) <= 20
            assert all(len(stream.known) <= 20 for stream in streams())
            assert rpc.rpc_sync("worker1", geometries) <= 40, k
    finally:
        tensor._FORMS = before


def geometries() -> int:
    """Those that the streams that run here were told and not to forget."""
    return max(len(runner.metas) for some in runners._runners.values() for runner in some.values())


def test_forms_are_forgotten(group):
    group.run(ever_new_shapes)


def asked_again() -> None:
    """A form whose result is a value, or has a size that values choose, is told once."""
    there = torch.randn(7).to(rpc.device("worker1"))
    told = set()
    for _ in range(5):
        assert there[there > 0].sum().item() >= 0
        told.add(next(there._handle.stream.numbers))
    assert max(told) - min(told) <= 5, "a signature in each step"


def test_forms_with_values_are_told_once(group):
    group.run(asked_again)


def long_lists() -> None:
    """Operands of one operator that need more words than the ring has: messages in parts, also behind one that was given up."""
    place = rpc.device("worker1")
    plain = [torch.tensor([float(k)]) for k in range(40_000)]
    there = [each.to(place) for each in plain]
    for _ in range(2):  # asked for, then known
        assert torch.equal(home(torch.cat(there)), torch.cat(plain))
    assert torch.equal(home(nn.utils.get_total_norm(there)), nn.utils.get_total_norm(plain))
    summed = torch._foreach_add(there, [0.5] * len(there))
    assert torch.equal(home(torch.cat(summed)), torch.cat(plain) + 0.5)
    chosen = list(range(5)) * 20_000
    x = torch.randn(5)
    assert torch.equal(home(x.to(place)[chosen]), x[chosen])
    stream = there[0]._handle.stream
    put, parts = stream._ring._put, []

    def interrupted(at, words, taken):
        if len(parts) == 2:
            raise InterruptedError
        parts.append(words)
        put(at, words, taken)

    stream._ring._put = interrupted
    with pytest.raises(InterruptedError):
        torch.cat(there)
    del stream._ring._put
    assert torch.equal(home(torch.cat(there[::2])), torch.cat(plain[::2]))


def test_lists_of_any_length(group):
    group.run(long_lists)


def converted_modules() -> None:
    """Modules change places with their parameters, gradients and hooks; states of others are loaded as before."""
    net, seen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LSTM(3, 3)), []
    weight = net[0].weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.place))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    for place in ("worker1", "worker1", "worker2"):
        net.to(rpc.device(place)).double()
        assert net[0].weight is weight and weight.place == weight.grad.place == place and weight.grad.dtype is torch.float64
    net[1](net[0](torch.randn(4, 3).double())).sum().backward()
    net.load_state_dict(net.state_dict())
    assert seen == ["worker2"] and weight.grad is not None
    net.cpu().float()
    assert type(weight) is nn.Parameter and type(weight.grad) is torch.Tensor and weight.grad.dtype is torch.float32
    net.load_state_dict(net.state_dict())
    assert weight.grad is not None
    net.to("meta").to_empty(device=rpc.device("worker1"))
    assert {each.place for each in net.parameters()} == {"worker1"}


def test_modules_change_places(group):
    group.run(converted_modules)


def much_memory(turns: int = 60) -> None:
    """Far more crosses than the regions hold, in every direction, while earlier tensors live."""
    one, two = rpc.device("worker1"), rpc.device("worker2")
    kept = torch.randn(100, 1000)
    held = kept.to(one)
    for turn in range(turns):
        x = torch.randn(500, 1000)  # 2 MB
        found = x.to(one) * 2
        crossed = found.to(two) + 1
        assert torch.equal(crossed.cpu(), x * 2 + 1), turn
    assert torch.equal(held.cpu(), kept)
    assert sum(region.nbytes for stream in streams() for regions in stream._regions.values() for region in regions) < 200 << 20


def test_places_are_used_again(group):
    group.run(much_memory)


def embedded(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return F.embedding(index, table)


def late() -> None:
    one, two = rpc.device("worker1"), rpc.device("worker2")
    table, other = torch.randn(5, 3), torch.ones(3, 3)
    there, elsewhere = table.to(one), other.to(two)
    good, bad = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 30])
    expected = (embedded(table, good) + other).sum().item()
    for _ in range(3):
        assert (embedded(there, good.to(one)) + elsewhere).sum().item() == expected
        wrong = embedded(there, bad.to(one))  # nothing waits
        with pytest.raises(IndexError, match="index out of range") as found:
            (wrong + elsewhere).sum().item()
        assert "worker1" in found.value.__notes__[0] and "in embedded" in found.value.__notes__[0]
        with pytest.raises(rpc.RdmaError, match="not computed"):
            wrong.sum().item()


def test_an_error_comes_late_and_names_its_line(group):
    group.run(late)


def late_at_once() -> None:
    """Two threads find an error at the same time, each with its own stream locked as a copy may have it."""
    table, bad, both = torch.randn(5, 3), torch.tensor([1, 2, 30]), threading.Barrier(2)
    found: list[BaseException] = []

    def asks(worker: str) -> None:
        place = rpc.device(worker)
        there, index = table.to(place), bad.to(place)
        embedded(there, bad.clamp(max=4).to(place))  # the form is known: a wrong one is not asked for
        for _ in range(3):
            both.wait(20)
            with there._handle.stream.lock:
                wrong = embedded(there, index)
                both.wait(20)
                try:
                    wrong.sum().item()
                except (IndexError, rpc.RdmaError) as error:
                    found.append(error)
            both.wait(20)
            assert torch.equal(home(there + 1), table + 1)

    threads = [threading.Thread(target=asks, args=(worker,)) for worker in ("worker1", "worker2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(found) == 6 and any(type(each) is IndexError for each in found)


def test_two_threads_find_an_error_at_once(group):
    group.run(late_at_once)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell = nn.Linear(4, 6), nn.GRU(6, 5, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(torch.tanh(self.first(x)), lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0], batch_first=True)[0]


def packed(placement: dict[str, str]) -> None:
    torch.manual_seed(0)
    alone = Packed()
    placed = rpc.wrap(copy.deepcopy(alone), placement)
    for lengths in ([4, 3, 1], [4, 4, 2], [3, 2, 2]):
        x = torch.randn(3, 4, 4)
        for net in (alone, placed):
            net.zero_grad()
            net(x, torch.tensor(lengths)).pow(2).sum().backward()
        assert all(torch.equal(a.grad, home(b.grad)) for a, b in zip(alone.parameters(), placed.parameters()))


@pytest.mark.parametrize(
    "placement", [{"first": "worker1"}, {"cell": "worker1"}, {"": "worker1"}, {"first": "worker1", "cell": "worker2"}]
)
def test_packed_sequences(group, placement):
    group.run(packed, placement)


def others_use_it() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    view = net[1].weight.view(-1)
    with pytest.raises(rpc.NotSupported, match="used by 1 tensors outside"):
        rpc.wrap(net, {"0": "worker1", "1": "worker2"})
    assert all(type(p) is nn.Parameter for p in net.parameters()), "nothing has moved"
    del view
    kept = torch.ones(1, 4)
    net[1].register_buffer("row", kept[0])
    with pytest.raises(rpc.NotSupported, match="used by 1 tensors outside"):
        rpc.wrap(net, {"1": "worker1"})
    del net[1].row
    loss = net(torch.randn(2, 4, requires_grad=True)).sum()
    with pytest.raises(rpc.NotSupported):  # the graph has saved a weight
        rpc.wrap(net, {"0": "worker1"})
    del loss
    loss = net[0](torch.randn(2, 4)).sum()
    placed = rpc.wrap(net, {"0": "worker1", "1": "worker2"})
    with pytest.raises(rpc.NotSupported, match="before its parameters were moved"):
        loss.backward()
    x = torch.randn(2, 4)
    expected = home(placed(x))
    part = placed[1:]
    assert torch.equal(home(part(placed[0](x))), expected)
    again = pickle.loads(pickle.dumps(placed))
    assert type(again) is nn.Sequential and type(again[0].weight) is nn.Parameter and torch.equal(again(x), expected)


def test_memory_that_others_use_is_not_left_behind(group):
    group.run(others_use_it)


def addresses() -> None:
    """Libraries read bytes through an address, and find by it what is shared."""
    x = torch.randn(7, 5)
    there, other = x.to(rpc.device("worker1")), x.to(rpc.device("worker1"))
    assert there.data_ptr() == there.detach().data_ptr() != other.data_ptr()
    assert ctypes.string_at(there.data_ptr(), x.nbytes) == x.numpy().tobytes()
    assert there.untyped_storage().data_ptr() == there.t().untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    there.mul_(2)
    assert ctypes.string_at(there.data_ptr(), x.nbytes) == (x * 2).numpy().tobytes()
    assert there[2, 3].data_ptr() == there.data_ptr() + 4 * 13 and there.data_ptr() == there.untyped_storage().data_ptr()
    crossed = (there + 1).to(rpc.device("worker2"))
    assert crossed.untyped_storage().nbytes() == x.nbytes
    with pytest.raises(TypeError):
        torch.zeros(35).set_(there.untyped_storage())
    plain = torch.zeros(7, 5)
    plain.data = there
    assert type(plain) is torch.Tensor and torch.equal(plain + 0, x * 2)


def alignments() -> None:
    """Products here of a gradient that is a part of one at a worker: a kernel adds up by the alignment of its operands."""
    for rows in (8, 300):
        torch.manual_seed(3)
        start, queue, keys = torch.randn(rows, 8), torch.randn(8, 32), torch.randn(rows, 8)
        grads = []
        for near in (keys, keys.to(rpc.device("worker1"))):
            z = start.clone().requires_grad_()
            F.cross_entropy(
                torch.cat([(z * near).sum(1, keepdim=True), z @ queue], 1), torch.zeros(rows, dtype=torch.long)
            ).backward()
            grads.append(z.grad)
        assert torch.equal(*map(home, grads))
    net = nn.Linear(3, 3)
    net.bias.data = torch.arange(20.0)[5:8]
    rpc.wrap(net, {"": "worker1"}).close()
    assert net.bias.data_ptr() % 64 == 20 and net.bias.tolist() == [5, 6, 7]
    there = torch.arange(20000.0).to(rpc.device("worker1"))
    for part in (there, there[3:5], there[5:], there[7::3]):
        copy = at_place(part, None)
        address = part.storage_offset() * 4 % 64
        assert copy.data_ptr() % 64 == address and torch.equal(copy, home(part))
        plain = torch.zeros(0)
        plain.data = part
        for own in (part.cpu(), plain):
            assert own.data_ptr() % 64 == address and own.data_ptr() != copy.data_ptr() and torch.equal(own, copy)
        one, two = (place_named(rpc.device(name)) for name in ("worker1", "worker2"))
        crossed = at_place(part, two)
        for moved in (crossed, at_place(crossed, one), at_place(copy, two)):
            assert at_place(moved, None).data_ptr() % 64 == address
            assert at_place(moved[1:], None).data_ptr() % 64 == (address + 4 * moved.stride(0)) % 64
            assert torch.equal(at_place(moved, None), home(part))
            assert torch.equal(pickle.loads(pickle.dumps(moved)), home(part))


def test_addresses_are_those_of_copies(group):
    group.run(addresses)


def test_copies_here_keep_their_alignment(group):
    group.run(alignments)


def flags() -> None:
    place = rpc.device("worker1")
    there = torch.tensor([1, 2]).to(place)
    torch.set_default_dtype(torch.float64)
    try:
        assert (there / 3).dtype is torch.float64 and torch.equal(home(there / 3), torch.tensor([1, 2]) / 3)
        assert rpc.rpc_sync("worker1", torch.get_default_dtype) is torch.float32  # that of its own programs
    finally:
        torch.set_default_dtype(torch.float32)
    assert (there / 3).dtype is torch.float32
    large = torch.arange(20000.0)
    lies = large.to(place)
    torch.set_default_device("meta")  # as "cuda" in many programs: what lies at a worker comes home all the same
    try:
        copies = there.cpu(), lies.cpu(), lies[5:].cpu(), there.tolist(), float(lies.numpy()[7])
    finally:
        torch.set_default_device(None)
    assert copies[0].tolist() == [1, 2] == copies[3] and torch.equal(copies[1], large) and copies[4] == 7.0
    assert torch.equal(copies[2], large[5:])
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="deterministic"):
            F.interpolate(torch.ones(1, 1, 4, 4, device=place), size=(2, 2), mode="bicubic").sum().item()
            torch.ones(4, device=place).put_(torch.tensor([0], device=place), torch.tensor([1.0], device=place))
    finally:
        torch.use_deterministic_algorithms(False)
    image, kernel = (torch.ones(1, 1, size, size, device=place) for size in (4, 3))
    for precision in ("bf16", "none"):
        torch.backends.mkldnn.conv.fp32_precision = precision
        F.conv2d(image, kernel).sum().item()
        assert rpc.rpc_sync("worker1", precision_of_convolutions) == precision


def precision_of_convolutions() -> str:
    return torch.backends.mkldnn.conv.fp32_precision


def test_flags_of_the_caller_hold_there(group):
    group.run(flags)


def several_threads() -> None:
    """Crossings of several threads in both directions, and questions, on the same streams."""
    one, two = rpc.device("worker1"), rpc.device("worker2")
    wrong: list[int] = []

    def run(seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        for turn in range(25):
            x = torch.randn(40, 40, generator=dice)
            found = (x.to(one) @ x.to(one)).to(two) + x.to(two).to(one).to(two)
            if not torch.equal(found.cpu(), x @ x + x):
                wrong.append(turn)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_threads_share_streams(group):
    group.run(several_threads)


def send_only_what_is_registered(says: bool) -> None:
    TcpChannel.registered_only = says


def in_the_arena() -> int:
    """How many of the tensors that this worker's streams hold, and did not get from elsewhere, lie in its arena."""
    arena = agent.current().device.arena
    held = [each for some in runners._runners.values() for runner in some.values() for each in runner.values.values()]
    return sum(hasattr(each, "made_by") and arena.find(each.data_ptr(), each.nbytes) is not None for each in held)


def made_where_it_is_sent_from() -> None:
    """What crosses is made in the arena from the third time on, if torch has a form of the operator for that; not the rest."""
    for worker in ("worker1", "worker2"):
        rpc.rpc_sync(worker, send_only_what_is_registered, (True,))
    one, two = rpc.device("worker1"), rpc.device("worker2")
    weight, x, index = torch.randn(40, 40), torch.randn(40, 40), torch.arange(40)
    kept = []
    for turn in range(5):
        product = x.to(one) @ weight.to(one)
        hidden, chosen = torch.tanh(product), product[index.to(one) % (turn + 2) == 0]
        crossed = torch.relu(hidden.to(two)) + 1, torch.relu(product).to(two), chosen.to(two)
        kept += [product, hidden, crossed]
        product = x @ weight
        assert torch.equal(crossed[0].cpu(), torch.relu(torch.tanh(product)) + 1)
        assert torch.equal(crossed[1].cpu(), torch.relu(product))
        assert torch.equal(crossed[2].cpu(), product[index % (turn + 2) == 0])
    assert rpc.rpc_sync("worker1", in_the_arena) == 3  # the tanh: it crosses, and the others do not, or have no such form
    for worker in ("worker1", "worker2"):
        rpc.rpc_sync(worker, send_only_what_is_registered, (False,))


def test_what_crosses_is_made_where_it_is_sent_from():
    group = StandingGroup(3, transport="tcp")
    try:
        group.run(made_where_it_is_sent_from)
    finally:
        group.end()


def counted(graphed: bool, rank: int) -> None:
    """Worker 1 sends to worker 2, whose ring is full: what it was to take of that is taken later, and copies stay in step."""
    if rank == 0:
        first, last = (rpc.rpc_sync(f"worker{each}", os.getpid) for each in (1, 2))
        source, there = torch.arange(8.0).to(rpc.device("worker1")), rpc.device("worker2")

        (source[:1] + 1).to(there)  # there is a stream from now on
        target = next(each for each in streams() if each.worker == "worker2")
        move = rpc.graphed(lambda x: (x + 1).to(there)) if graphed else lambda x: at_place(x + 1, target)
        kept = [move(source) for _ in range(9)]
        many = [torch.zeros(1, device=there) for _ in range(4097)]
        dies = threading.Timer(1.5, many.clear)  # while the post waits that fails
        try:
            halt(last)
            dies.start()
            with pytest.raises(rpc.TransferTimeout, match="has not run anything"):
                while True:
                    kept.append(move(source))
            dies.join()
            os.kill(last, signal.SIGCONT)
            kept[-1].cpu()
            halt(first)
            wake = threading.Timer(0.5, os.kill, (first, signal.SIGCONT))
            wake.start()
            assert torch.equal(move(source + 1).cpu(), torch.arange(8.0) + 2)
            wake.join()
            assert all(torch.equal(each.cpu(), torch.arange(8.0) + 1) for each in kept[-9:])
        finally:
            for pid in (first, last):
                os.kill(pid, signal.SIGCONT)
    rpc.shutdown()


@pytest.mark.parametrize("graphed", [False, True], ids=["posted", "graphed"])
def test_a_copy_that_was_posted_to_one_of_its_ends_only(graphed):
    results(run_group(partial(counted, graphed), 3, rpc_timeout=2, peer_timeout=30))
