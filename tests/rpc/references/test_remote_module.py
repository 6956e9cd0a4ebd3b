"""``rdmarpc.nn.RemoteModule``: modules on other workers, their handles, and how their tensors travel."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time

import pytest
import torch
from group import die, results, run_group
from timing import eventually
from torch import nn

import rdmarpc as rpc
from rdmarpc.calls import agent
from rdmarpc.nn import RemoteModule

ROWS, WIDTH = 64, 1024  # an activation of float32: 256 KiB
open_gate = threading.Event()
kept: list[torch.Tensor] = []


class Net(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor, shift: float = 0.0, *, word: str = "") -> tuple[torch.Tensor, str]:
        return self.linear(x) * self.scale + shift, word


def seeded(*args, **kwargs) -> Net:
    torch.manual_seed(3)
    return Net(*args, **kwargs)


def scripted() -> nn.Module:
    torch.manual_seed(3)
    return torch.jit.script(nn.Linear(16, 8))


class NoModule:
    pass


class Fails(nn.Module):
    def __init__(self) -> None:
        raise KeyError("no such table")


class Refuses(nn.Module):
    def forward(self, x):
        raise ArithmeticError(f"cannot take {tuple(x.shape)}")


class Gated(nn.Module):
    """Cannot be made before another call has come to its worker."""

    def __init__(self) -> None:
        super().__init__()
        assert open_gate.wait(20)

    def forward(self, x):
        return x + 1


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.05)
        return x + 1


class Mode(nn.Module):
    def forward(self):
        return self.training


class Keeps(nn.Module):
    """Changes what it got, gives it back, and keeps it."""

    def forward(self, x):
        x += 1
        kept.append(x)
        return x


class Join(nn.Module):
    """Takes a reference: it is made when the owner of that has confirmed it."""

    def __init__(self, other) -> None:
        super().__init__()
        self.other = other

    def forward(self, x):
        return x + self.other.to_here()


class WhereAmI(nn.Module):
    def forward(self, x, nested):
        return x.device.type, nested["y"][0].device.type, [torch.ones(2)]


class Parent(nn.Module):
    """A model with a part elsewhere."""

    def __init__(self, part: RemoteModule) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.part(x)[0])


def counters() -> dict[str, int]:
    return agent.current().counters()


def values() -> int:
    agent.current().rrefs.collect()
    return counters()["rrefs"]


def pass_gate() -> None:
    open_gate.set()


# -- making and calling


def forms(rank):
    if rank == 0:
        here = seeded(16, 8, bias=False)
        x = torch.randn(4, 16)
        expected = here(x, 1.5, word="a")
        for place, on in (("worker1", "worker1"), ("worker1/cpu", "worker1"), ("rank:1", 1), ("rank:1/cpu", 1)):
            there = RemoteModule(place, seeded, (16, 8), {"bias": False})
            assert isinstance(there, nn.Module)
            assert (there.on, there.device, there.is_device_map_set, there.is_scriptable) == (on, "cpu", False, False)
            assert there.get_module_rref() is there.module_rref
            assert there.module_rref.owner_name() == "worker1"
            assert repr(there) == f"RemoteModule(on={on!r}, device='cpu')"
            for got in (
                there.forward(x, 1.5, word="a"),
                there(x, shift=1.5, word="a"),
                there.forward_async(x, 1.5, word="a").wait(),
            ):
                assert torch.equal(got[0], expected[0])
                assert got[1] == "a"
        assert RemoteModule("worker0", Mode)() is True  # on this worker
        assert torch.equal(RemoteModule("worker1", scripted)(x), scripted()(x))
    rpc.shutdown()


def test_a_module_is_made_and_called_where_it_is():
    results(run_group(forms))


def with_map(rank):
    if rank == 0:
        assert RemoteModule("rank:1", Mode).is_device_map_set
        assert not RemoteModule("rank:0", Mode).is_device_map_set
    rpc.shutdown()


def test_a_device_map_to_its_worker_is_told():
    results(run_group(with_map, each={0: {"device_maps": {"worker1": {"cpu": "cpu"}}}}))


def test_without_rpc():
    with pytest.raises(AssertionError, match="RemoteModule only works in RPC"):
        RemoteModule("worker1", Mode)


BAD_PLACES = (
    ("worker1/foo", RuntimeError, "Expected one of .+ device type at start of device string"),
    ("worker1/cpu2", RuntimeError, "Invalid device string: 'cpu2'"),
    ("worker1/", RuntimeError, "Device string must not be empty"),
    (
        "worker1/cpu/cpu",
        ValueError,
        "Could not parse remote_device: worker1/cpu/cpu. The valid format is '<workername>/<device>'",
    ),
    ("/", ValueError, "Could not parse remote_device: /. "),
    ("cpu", ValueError, "Could not parse remote_device: cpu. "),
    ("worker7", RuntimeError, "could not find destination name worker7"),
)


def bad_places(rank):
    if rank == 0:
        for place, kind, text in BAD_PLACES:
            with pytest.raises(kind, match=text):
                RemoteModule(place, Mode)
        with pytest.raises(Exception, match="<lambda>"):  # what cannot be sent is known at once
            RemoteModule("worker1", lambda: nn.Linear(1, 1))
    rpc.shutdown()


def test_places_that_are_none():
    results(run_group(bad_places))


def errors(rank):
    if rank == 0:
        text = r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of <class nn.Module>"
        foreign = RemoteModule.init_from_module_rref("worker1", rpc.remote("worker1", NoModule))
        for bad, kind, pattern in (
            (RemoteModule("worker1", NoModule), ValueError, text),
            (RemoteModule("worker1", Fails), KeyError, "no such table"),
            (foreign, ValueError, text),
        ):
            for use in (bad.forward, bad, bad.remote_parameters, bad.train, bad.eval):
                with pytest.raises(kind, match=pattern):
                    use()
            future = bad.forward_async()
            for _ in range(2):
                with pytest.raises(kind, match=pattern):
                    future.wait()
        refuses = RemoteModule("worker1", Refuses)
        for _ in range(2):
            with pytest.raises(ArithmeticError, match=r"cannot take \(3,\)"):
                refuses(torch.ones(3))
            with pytest.raises(ArithmeticError, match=r"cannot take \(3,\)"):
                refuses.forward_async(torch.ones(3)).wait()
        with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'x'"):
            refuses()
        with pytest.raises(TypeError, match=r"in args\[1\]"):
            refuses(torch.ones(3), threading.Lock())
    rpc.shutdown()


def test_errors_come_with_their_types():
    results(run_group(errors))


def background(rank):
    if rank == 0:
        module = RemoteModule("worker1", Gated)
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rpc._set_rpc_timeout(0.2)
            module(torch.ones(1))
        rpc._set_rpc_timeout(20.0)
        rpc.rpc_sync("worker1", pass_gate)
        assert module(torch.ones(1)).item() == 2
    rpc.shutdown()


def test_modules_are_made_in_the_background():
    results(run_group(background))


def one_thread(rank):
    if rank == 0:
        for number in range(20):
            joined = RemoteModule("worker1", Join, (rpc.remote("worker2", torch.ones, (2,)),))
            got = joined.forward_async(torch.ones(2)).wait() if number % 2 else joined(torch.ones(2))
            assert got.tolist() == [2.0, 2.0]
    rpc.shutdown()


def test_a_call_holds_no_thread_that_its_module_needs_to_be_made():
    results(run_group(one_thread, 3, num_worker_threads=1))


# -- what a handle can and cannot do

NOT_SUPPORTED = (
    *("register_buffer", "register_parameter", "add_module", "apply", "cuda", "ipu", "xpu", "cpu", "type", "float", "double"),
    *("half", "bfloat16", "to", "register_backward_hook", "register_forward_pre_hook", "register_forward_hook", "state_dict"),
    *("load_state_dict", "named_parameters", "buffers", "named_buffers", "children", "named_children", "modules"),
    *("named_modules", "requires_grad_", "zero_grad", "share_memory", "extra_repr"),
)


def not_supported(rank):
    if rank == 0:
        for handle in (RemoteModule("worker1", Mode), rpc.rpc_sync("worker1", RemoteModule, ("worker1", Mode))):
            for name in NOT_SUPPORTED:
                with pytest.raises(ValueError, match=f"^Method ``{name}`` not supported for RemoteModule$"):
                    getattr(handle, name)()
            with pytest.raises(ValueError, match=r"``parameters`` .* Please use ``remote_parameters`` instead\.$"):
                handle.parameters()
            with pytest.raises(AttributeError, match="no attribute 'linear'"):
                handle.linear  # noqa: B018
            for pickling in (pickle.dumps, copy.deepcopy, lambda it: torch.save(it, io.BytesIO()), rpc.internal.serialize):
                with pytest.raises(RuntimeError, match="RemoteModule can only be pickled when using RPC"):
                    pickling(handle)
    rpc.shutdown()


def test_what_is_about_parameters_is_refused():
    results(run_group(not_supported))


def is_own(rref, parameter) -> bool:
    return any(parameter.local_value() is own for own in rref.local_value().parameters())


def parameters(rank):
    if rank == 0:
        module = RemoteModule("worker1", seeded, (4, 2))
        found = module.remote_parameters()
        here = list(seeded(4, 2).parameters())
        assert [rref.owner_name() for rref in found] == ["worker1"] * 3
        assert all(torch.equal(rref.to_here(), own) for rref, own in zip(found, here))
        assert all(rpc.rpc_sync("worker1", is_own, (module.module_rref, rref)) for rref in found)
        assert len(module.remote_parameters(recurse=False)) == 1
    rpc.shutdown()


def test_parameters_are_those_of_the_module_itself():
    results(run_group(parameters))


def modes(rank):
    if rank == 0:
        module = RemoteModule("worker1", Mode)
        assert module.eval() is module
        assert (module(), module.training) == (False, False)
        assert module.train() is module
        assert (module(), module.training) == (True, True)
        assert module.train(False)() is False
        # A model that has it for a part passes its mode on.
        parent = Parent(module)
        parent.train()
        assert module() is True
        parent.eval()
        assert module() is False
    rpc.shutdown()


def test_the_mode_is_that_of_the_module():
    results(run_group(modes))


def elsewhere(rank):
    if rank == 0:
        module = RemoteModule("worker1/meta", WhereAmI)
        x, y = torch.ones(2), torch.ones(2)
        for _ in range(2):
            where, nested, made = module(x, {"y": [y]})
            assert (where, nested) == ("meta", "meta")
            assert made[0].tolist() == [1.0, 1.0]
        assert module.forward_async(x, nested={"y": (y,)}).wait()[:2] == ("meta", "meta")
    rpc.shutdown()


def test_tensors_are_moved_to_the_device_of_the_module():
    results(run_group(elsewhere))


# -- handles that travel


def use(handle, x):
    return handle(x), handle.forward(x), handle.forward_async(x).wait()


def attributes(handle):
    return handle.__dict__


def build_parent(handle, x):
    parent = Parent(handle)
    parent.eval()
    return parent(x).shape, handle.training


def travelling(rank):
    if rank == 0:
        module = RemoteModule("worker1", seeded, (16, 8))
        module.note = "not sent"
        x = torch.randn(4, 16)
        expected = module(x)[0]
        for name in ("worker0", "worker1", "worker2"):
            assert all(torch.equal(got[0], expected) for got in rpc.rpc_sync(name, use, (module, x)))
        found = rpc.rpc_sync("worker2", attributes, (module,))
        assert list(found) == [
            *("on", "device", "is_device_map_set", "is_scriptable", "module_rref"),
            *("forward_async", "forward"),
        ]
        assert (found["on"], found["device"]) == ("worker1", "cpu")
        assert torch.equal(found["forward"](x)[0], expected)
        assert rpc.rpc_sync("worker2", build_parent, (module, x)) == ((4, 2), False)
        other = rpc.rpc_sync("worker2", RemoteModule.init_from_module_rref, ("worker1/cpu", module.get_module_rref()))
        assert other.module_rref is not module.module_rref
        assert torch.equal(other(x)[0], expected)
        assert len(other.remote_parameters()) == 3
    rpc.shutdown()


def test_handles_travel():
    results(run_group(travelling, 3))


def until(expected: int) -> None:
    eventually(lambda: rpc.rpc_sync("worker1", values), expected)


def lifetime(rank):
    if rank == 0:
        gc.disable()  # nothing may depend on it
        module = RemoteModule("worker1", Gated)
        rpc.rpc_sync("worker1", pass_gate)
        assert module(torch.ones(1)).item() == 2
        until(1)
        held = module.forward
        del module
        assert held(torch.ones(1)).item() == 2
        del held
        until(0)
    rpc.shutdown()


def test_a_module_lives_while_a_handle_does():
    results(run_group(lifetime))


def dropped(rank):
    if rank == 0:
        module = RemoteModule("worker1", Slow)
        futures = [module.forward_async(torch.ones(1)) for _ in range(5)]
        del module
        until(0)  # that the handle died is told with the first call of these, long before the last forward runs
        assert all(future.wait().item() == 2 for future in futures)
    rpc.shutdown()


def test_calls_find_their_module_when_its_last_handle_has_died():
    results(run_group(dropped, num_worker_threads=1))


def owner_dies(rank):
    if rank == 0:
        module = RemoteModule("worker1", Mode)
        assert module() is True
        with pytest.raises(rpc.PeerLost):
            rpc.rpc_sync("worker1", die)
        with pytest.raises(rpc.PeerLost, match="worker1"):
            module()
        with pytest.raises(rpc.PeerLost, match="worker1"):
            module.forward_async().wait()
        rpc.shutdown(graceful=False)
        with pytest.raises(RuntimeError, match="Cannot call the module after deletion"):
            module()
    else:
        time.sleep(30)


def test_a_lost_owner():
    outcomes = run_group(owner_dies)
    assert not outcomes[0].error, outcomes[0].text


# -- landing places


class Traffic:
    """What both workers count while a block runs."""

    def __enter__(self) -> Traffic:
        self._before = self._read()
        return self

    def __exit__(self, *_) -> None:
        after = self._read()
        self.of = [{key: there[key] - here[key] for key in there} for here, there in zip(self._before, after)]

    def _read(self) -> list[dict[str, int]]:
        return [counters(), rpc.rpc_sync("worker1", counters)]

    def assert_direct(self, there: int, back: int) -> None:
        """``there`` and ``back``: bytes of payload, all written straight to their places. What is more is small: frames."""
        for counts, payload in zip(self.of, (there, back)):
            assert counts["bytes_staged"] == counts["rpc_reads"] == 0, self.of
            assert payload <= counts["bytes_direct"] <= payload + 100_000, self.of


def repeated(rank):
    if rank == 0:
        x = torch.randn(ROWS, WIDTH)
        rows = torch.randint(0, 50, (ROWS,))
        same = RemoteModule("worker1", seeded, (WIDTH, WIDTH))
        wide = RemoteModule("worker1", nn.Linear, (WIDTH, 3 * WIDTH))
        table = RemoteModule("worker1", nn.Embedding, (50, WIDTH))
        keyword = RemoteModule("worker1", nn.Identity)
        cases = (
            (lambda: same(x)[0], x.nbytes, x.nbytes),
            (lambda: wide(x), x.nbytes, 3 * x.nbytes),  # the same arguments, another result
            (lambda: table(rows), 0, x.nbytes),  # what is small rides in the frame
            (lambda: keyword(input=x).requires_grad_(), x.nbytes, 0),
            (lambda: same.forward_async(x).wait()[0], x.nbytes, x.nbytes),
        )
        first = [call().clone() for call, _, _ in cases]
        handed = rpc.rpc_sync("worker1", counters)["bytes_handed"]
        with Traffic() as traffic:
            for _ in range(5):
                for (call, _, _), expected in zip(cases, first):
                    assert torch.equal(call(), expected)
        handed = rpc.rpc_sync("worker1", counters)["bytes_handed"] - handed
        # On shm what the identity returns stays where it lies; elsewhere it is written back.
        assert handed in (0, 5 * x.nbytes)
        traffic.assert_direct(5 * sum(case[1] for case in cases), 5 * (sum(case[2] for case in cases) + x.nbytes) - handed)
    rpc.shutdown()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_from_the_second_call_on_inputs_and_outputs_are_direct_writes(transport):
    results(run_group(repeated, transport=transport))


def in_flight(rank):
    if rank == 0:
        module = RemoteModule("worker1", seeded, (WIDTH, WIDTH))
        x = torch.randn(ROWS, WIDTH)
        pieces = [x * number for number in range(4)]
        expected = [module(piece)[0] for piece in pieces]
        for _ in range(3):  # as many places as calls that are ever under way at once
            torch.futures.wait_all([module.forward_async(piece) for piece in pieces])
        with Traffic() as traffic:
            for _ in range(5):
                got = torch.futures.wait_all([module.forward_async(piece) for piece in pieces])
                assert all(torch.equal(one[0], other) for one, other in zip(got, expected))
        traffic.assert_direct(20 * x.nbytes, 20 * x.nbytes)
    rpc.shutdown()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_micro_batches_under_way_at_once_have_places_each(transport):
    results(run_group(in_flight, transport=transport))


def sums() -> list[float]:
    return [value.double().sum().item() for value in kept]


def spoil() -> None:
    for value in kept:
        value.fill_(-1)


def keeping(rank):
    if rank == 0:
        module = RemoteModule("worker1", Keeps)
        mine = [torch.full((ROWS, WIDTH), float(number)) for number in range(8)]
        got = [module(value) for value in mine]
        assert all((value == number).all() for number, value in enumerate(mine))
        assert rpc.rpc_sync("worker1", sums) == [(number + 1) * ROWS * WIDTH for number in range(8)]
        rpc.rpc_sync("worker1", spoil)
        assert all((value == number + 1).all() for number, value in enumerate(got))
        got[0].zero_()
        assert (got[1] == 2).all()
    rpc.shutdown()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_both_sides_may_keep_and_change_what_they_have(transport):
    results(run_group(keeping, transport=transport))
