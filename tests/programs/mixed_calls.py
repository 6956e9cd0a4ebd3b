"""What mixed programs (``mixed_programs``) call at workers, and ``Alone``: the names of ``rdmarpc`` in one process.

There a place is nothing, a call is a call of a copy of its arguments, and distributed autograd is torch's own.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rdmarpc.functions import async_execution

rpc: Any = None
"""``rdmarpc``, or ``Alone()`` while one process says what is right: what functions use that call on."""


class Net(nn.Module):
    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):  # it is made at a worker
            self.one, self.two = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=drawn, dtype=torch.float32) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.norm(self.one(x))))

    def scaled(self, x: torch.Tensor, by: float) -> torch.Tensor:
        """Writes the module, too."""
        with torch.no_grad():
            self.one.weight.mul_(by)
        return self.two(x) * by

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.parameters()]

    def fails(self, x: torch.Tensor) -> None:
        raise KeyError("a method")


def at(x: torch.Tensor, place: str) -> torch.Tensor:
    """A copy there."""
    return rpc.moved(x, place) if isinstance(rpc, Alone) else x.to(rpc.device(place), copy=True)


def home(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().clone()


def double(x):
    return x * 2


def same(x):
    return x


def added(x, y):
    return x + y


def product(x, y):
    return torch.tanh(x @ y)


def in_place(x):
    x = x.mul_(0.5)
    x[0].add_(1)
    return x


def turned(x):
    return x.t()


def pieces(x):
    half = x.shape[0] // 2
    return {"first": x[:half], "rest": (x[half:] * 2, [x.sum()])}


def made():
    return torch.full((3,), 0.5) + torch.arange(3.0)


def unwatched(x):
    with torch.no_grad():
        return x * 3


def needing(x):
    return x.detach().requires_grad_() * 2


def fails(x):
    x.add_(1)
    raise ValueError("a function")


def there(x, place):
    """Lies at ``place`` when it is returned."""
    return at(x, place) * 2 + 1


def by_way_of(x, place):
    return home(at(x, place) @ at(x, place)) * 0.1


def on(x, to):
    return rpc.rpc_sync(to, double, (x,)) + x


def on_late(x, to):
    one, two = rpc.rpc_async(to, double, (x,)), rpc.rpc_async(to, product, (x, x))
    return two.wait() + one.wait()


def on_kept(x, to):
    kept = rpc.remote(to, double, (x,))
    return kept.to_here() + kept.rpc_sync().sum()


def on_fails(x, to):
    try:
        return rpc.rpc_sync(to, fails, (x,))
    except ValueError:
        return x - 1


@async_execution
def later(x, to):
    return rpc.rpc_async(to, product, (x, x)).then(lambda done: done.wait() + x)


def backward_there(x, to):
    y = at(x, to).detach().requires_grad_()
    (y @ y).tanh().sum().backward()
    return y.grad + home(y.grad)


def trained_there(x, to):
    """A model of the worker's, over another one."""
    net = Net(x.shape[0], 4)
    net = net if isinstance(rpc, Alone) else rpc.wrap(net, {"one": to})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        net(x.detach()).pow(2).sum().backward()
        optimizer.step()
    found = net.one.weight.detach().cpu().clone()
    closed(net)
    return found


def fetched(rref):
    return rref.to_here() * 2


def written(rref, x):
    """At the owner."""
    with torch.no_grad():
        return rref.local_value().mul_(0.5).add_(x.detach()).clone()


def forwarded(rref, x):
    return rref.rpc_sync().forward(x)


def forwarded_late(rref, x):
    found = rref.rpc_async().forward(x).wait()
    return found + rref.remote().forward(x).to_here()


def on_kept_forward(rref, x):
    return rref.remote().forward(x).to_here() * 1


def applied(net, x):
    return net(x)


def state_of(rref):
    return rref.local_value().state_dict()


def parameters_of(rref):
    return [rpc.RRef(parameter) for parameter in rref.local_value().parameters()]


def gradients_of(context_id, rref):
    found = rpc.autograd.get_gradients(context_id)
    value = rref.local_value()
    tensors = list(value.parameters()) if isinstance(value, nn.Module) else [value]
    return [found[tensor].detach().cpu().clone() if tensor in found else None for tensor in tensors]


def local_gradients_of(rref):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in rref.local_value().parameters()]


def attempts(keep: Callable[[str, Any], None]) -> Callable[[int], Any]:
    """``with attempt(7):`` notes what statement 7 raises, and the program goes on."""

    @contextlib.contextmanager
    def attempt(number: int) -> Iterator[None]:
        error = None
        try:
            yield
        except Exception as raised:
            error = _plain(raised)
        keep(f"write {number}", error)

    return attempt


class Doing:
    """What statements are done with, and what their user keeps from one to another."""

    def __init__(self, keep: Callable[[str, Any], None]) -> None:
        self.keep = keep
        self.kept: dict[str, Any] = {}
        self.seed, self.share = 0, 0.0
        self._attempt, self._number = attempts(keep), 0

    def does(self, statement: Callable[[Any], Any], seed: int, share: float) -> None:
        """What it raises is kept, too."""
        self.seed, self.share = seed, share
        self._number += 1
        with self._attempt(self._number):
            self.keep(statement.__name__, statement(self))


def _plain(error: Exception) -> Exception:
    """Without its text, of its first class that is Python's own. What is refused by name stays what it is."""
    kinds = [kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
    if type(error).__name__ == "NotSupported":
        return error
    special = [kind for kind in kinds if kind is not RuntimeError]
    kind = special[0] if special[0] not in (Exception, NotImplementedError) else RuntimeError
    raised = kind("")
    raised.__cause__ = error.__cause__
    raised.__notes__ = [repr(error)]
    return raised


def seen(*values: torch.Tensor) -> list[Any]:
    """What is compared: values, and whether they need gradients. Which node made them is not."""
    return [(None if v is None else (v.detach(), v.requires_grad and not v.is_inference(), home_grad(v))) for v in values]


def settled(*values: torch.Tensor) -> list[torch.Tensor]:
    """Without what only the context or the mode that they come from can use."""
    return [v.detach().clone() if v.is_inference() else v.detach() if v.grad_fn is not None else v for v in values]


def in_threads(keep: Callable[[str, Any], None], functions: list[Any], values: list[torch.Tensor]) -> None:
    """Each has tensors of its own; what it keeps is kept in the order of the functions."""
    kept: list[list[tuple[str, Any]]] = [[] for _ in functions]

    def run(number: int, own: list[torch.Tensor]) -> None:
        functions[number](lambda name, value: kept[number].append((name, value)), *own)

    own = [[v.detach().clone() for v in values] for _ in functions]
    threads = [threading.Thread(target=run, args=(n, own[n])) for n in range(len(functions))]
    for thread in threads:
        thread.start()
        if isinstance(rpc, Alone):  # a default dtype is one for all threads
            thread.join()
    for thread in threads:
        thread.join()
    for number, each in enumerate(kept):
        for name, value in each:
            keep(f"{name} of thread {number}", value)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    if isinstance(rpc, Alone):
        rpc.dtype = dtype
    try:
        yield
    finally:
        torch.set_default_dtype(kept)
        if isinstance(rpc, Alone):
            rpc.dtype = kept


def made_on(place: str) -> Any:
    """Tensors are made there."""
    return contextlib.nullcontext() if isinstance(rpc, Alone) else rpc.device(place)


def in_batches(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if hasattr(net, "forward_backward"):
        return net.forward_backward(nn.functional.mse_loss, x, target=y, chunks=2)
    with torch.enable_grad():  # whatever the mode is
        losses = [nn.functional.mse_loss(net(a), b) * (len(a) / len(x)) for a, b in zip(x.chunk(2), y.chunk(2))]
        for loss in losses:
            loss.backward()
    return sum(losses).detach()


def closed(net: nn.Module) -> None:
    if not isinstance(rpc, Alone):
        net.close()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def home_grad(value: torch.Tensor) -> torch.Tensor | None:
    return value.grad.detach() if value.is_leaf and value.grad is not None else None


class _Future:
    def __init__(self, made: Callable[[], Any]) -> None:
        self._value, self._error = None, None
        try:
            self._value = made()
        except Exception as error:
            self._error = error

    def wait(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def then(self, callback: Callable[[_Future], Any]) -> _Future:
        return _Future(lambda: callback(self))


class _Reference(_Future):
    def __init__(self, alone: Alone, owner: str, made: Callable[[], Any]) -> None:
        super().__init__(made)
        self._alone, self._owner = alone, owner

    def owner_name(self) -> str:
        return self._owner

    def local_value(self) -> Any:
        return self.wait()

    def backward(self, context_id: int, retain_graph: bool = False) -> None:
        self._alone.autograd.backward(context_id, [self.wait()], retain_graph)

    def to_here(self) -> Any:
        if self._alone.here.worker == self._owner:
            return self.wait()
        value, found = self.wait(), self._alone.sent(self.wait())
        if isinstance(value, torch.Tensor) and found.requires_grad and found.is_leaf and torch.is_grad_enabled():
            found.register_hook(lambda gradient: self._on(value, gradient))
        return found

    def _on(self, value: torch.Tensor, gradient: torch.Tensor) -> None:
        """A backward pass without a context goes on at the owner when it is over here."""
        if self._alone.here.context is None:
            retain = torch._C._autograd._get_current_graph_task_keep_graph()
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: value.backward(gradient, retain_graph=retain))

    def _proxy(self, call: Callable[..., Any]) -> Any:
        reference = self

        class Proxy:
            def __getattr__(self, name: str) -> Any:
                def method(*args: Any, **kwargs: Any) -> Any:
                    return call(reference._owner, _call_method, (name, reference, *args), kwargs)

                return method

        return Proxy()

    def rpc_sync(self) -> Any:
        return self._proxy(self._alone.rpc_sync)

    def rpc_async(self) -> Any:
        return self._proxy(self._alone.rpc_async)

    def remote(self) -> Any:
        return self._proxy(self._alone.remote)


def _call_method(name: str, reference: _Reference, *args: Any, **kwargs: Any) -> Any:
    return getattr(reference.wait(), name)(*args, **kwargs)


class _Here(threading.local):
    worker = "worker0"
    context: int | None = None


class Alone:
    """``rdmarpc`` without a group."""

    def __init__(self, me: str = "worker0") -> None:
        self.me, self.here = me, _Here()
        self.dtype = torch.float32
        self._contexts: dict[int, dict[torch.Tensor, torch.Tensor]] = {}
        self.autograd = types.SimpleNamespace(context=self._context, backward=self._backward, get_gradients=self._contexts.get)
        self.optim = types.SimpleNamespace(DistributedOptimizer=self._optimizer)
        self.nn = types.SimpleNamespace(RemoteModule=self._module)

    def moved(self, x: torch.Tensor, place: str) -> torch.Tensor:
        return x.to(x.dtype, copy=True)

    def wrap(self, net: nn.Module, placement: Any) -> nn.Module:
        return net

    def serve(self, net: nn.Module, servers: Any, optimizer: Any, name: str, **options: Any) -> nn.Module:
        net.optimizer = optimizer(net.parameters(), **options)
        return net

    def save_checkpoint(self, state: dict[str, Any], folder: str) -> None:
        torch.save({name: each.state_dict() for name, each in state.items()}, f"{folder}/state")

    def load_checkpoint(self, state: dict[str, Any], folder: str) -> None:
        for name, each in torch.load(f"{folder}/state").items():
            state[name].load_state_dict(each)

    def graphed(self, step: Any) -> Any:
        return step

    def RRef(self, value: Any) -> _Reference:
        return _Reference(self, self.here.worker, lambda: value)

    def rpc_sync(self, to: str, func: Any, args: Any = (), kwargs: Any = None) -> Any:
        sent = self.sent((args, kwargs or {}))
        with self._at(to):
            found = func(*sent[0], **sent[1])
            found = found.wait() if type(found) is _Future else found
        return self.sent(found)

    def rpc_async(self, to: str, func: Any, args: Any = (), kwargs: Any = None) -> _Future:
        return _Future(lambda: self.rpc_sync(to, func, args, kwargs))

    def remote(self, to: str, func: Any, args: Any = (), kwargs: Any = None) -> _Reference:
        def made() -> Any:
            sent = self.sent((args, kwargs or {}))
            with self._at(to):
                found = func(*sent[0], **sent[1])
                return found.wait() if type(found) is _Future else found

        return _Reference(self, to, made)

    def sent(self, value: Any) -> Any:
        """As it arrives: connected in an autograd context, under grad mode; else on its own."""
        connected = self.here.context is not None and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        memo: dict[int, Any] = {}

        def tensor(t: torch.Tensor) -> torch.Tensor:
            if connected and t.requires_grad:
                return t.clone()
            with torch.inference_mode(False), torch.no_grad():
                return t.detach().clone().requires_grad_(t.requires_grad)

        def item(v: Any) -> Any:
            if isinstance(v, torch.Tensor):
                if id(v) not in memo:
                    memo[id(v)] = tensor(v)
                return memo[id(v)]
            if isinstance(v, (tuple, list)):
                return type(v)(item(each) for each in v)
            if isinstance(v, dict):
                return {key: item(each) for key, each in v.items()}
            if isinstance(v, nn.Module):
                with torch.inference_mode(False):
                    return copy.deepcopy(v)
            return v

        return item(value)

    @contextlib.contextmanager
    def _at(self, worker: str) -> Iterator[None]:
        """With the modes of a worker."""
        kept = torch.get_default_dtype(), self.here.worker
        torch.set_default_dtype(self.dtype if worker == self.me else torch.float32)
        self.here.worker = worker
        try:
            with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
                yield
        finally:
            torch.set_default_dtype(kept[0])
            self.here.worker = kept[1]

    @contextlib.contextmanager
    def _context(self) -> Iterator[int]:
        number = len(self._contexts)
        self._contexts[number] = {}
        self.here.context = number
        try:
            yield number
        finally:
            self.here.context = None

    def _backward(self, context_id: int, roots: list[torch.Tensor], retain_graph: bool = False) -> None:
        leaves = _leaves(roots)
        if not leaves:
            raise RuntimeError("nothing requires grad")
        gradients = torch.autograd.grad(roots, leaves, retain_graph=retain_graph, allow_unused=True)
        kept = self._contexts[context_id]
        for leaf, gradient in zip(leaves, gradients):
            if gradient is not None:
                kept[leaf] = kept[leaf] + gradient if leaf in kept else torch.empty_like(leaf).copy_(gradient)

    def _optimizer(self, kind: Any, rrefs: list[Any], **options: Any) -> Any:
        owners: Any = collections.defaultdict(list)
        for rref in rrefs:
            owners[rref.owner_name()].append(rref.wait())
        order = [rref.wait() for rref in rrefs]
        return _Optimizer(self._contexts, order, [(tensors, kind(tensors, **options)) for tensors in owners.values()])

    def _module(self, worker: str, kind: Any, args: Any) -> Any:
        rref = self.remote(worker, kind, args)
        return types.SimpleNamespace(
            forward=lambda x: rref.rpc_sync().forward(x),
            forward_async=lambda x: rref.rpc_async().forward(x),
            get_module_rref=lambda: rref,
            remote_parameters=lambda: [_Reference(self, worker, lambda p=p: p) for p in rref.wait().parameters()],
        )


class _Optimizer:
    def __init__(self, contexts: Any, order: Any, parts: Any) -> None:
        self._contexts, self._order, self._parts = contexts, order, parts
        self.param_groups = [{"lr": parts[0][1].param_groups[0]["lr"]}]

    def state_dict(self) -> dict[str, Any]:
        states = {id(tensor): state for _, optimizer in self._parts for tensor, state in optimizer.state.items()}
        return {"state": {n: states[id(tensor)] for n, tensor in enumerate(self._order) if id(tensor) in states}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """That of this moment."""

    def step(self, context_id: int) -> None:
        found = self._contexts[context_id]
        for tensors, optimizer in self._parts:
            optimizer.param_groups[0].update(self.param_groups[0])
            kept = [tensor.grad for tensor in tensors]
            for tensor in tensors:
                tensor.grad = found.get(tensor)
            try:
                with torch.enable_grad():
                    optimizer.step()
            finally:
                for tensor, gradient in zip(tensors, kept):
                    tensor.grad = gradient


def _leaves(roots: list[torch.Tensor]) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    todo, known = [root.grad_fn for root in roots if root.grad_fn is not None], set()
    for root in roots:
        if root.grad_fn is None and root.requires_grad:
            found[id(root)] = root
    while todo:
        node = todo.pop()
        if node is None or node in known:
            continue
        known.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        todo += [after for after, _ in node.next_functions]
    return list(found.values())
