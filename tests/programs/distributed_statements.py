"""What users do with models at other workers that train by distributed autograd, one function each: the statements of
``distributed_programs``. All names of ``rdmarpc`` are those of ``mixed_calls.rpc``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mixed_calls
import served_nets
import torch
import torch.nn.functional as F
from mixed_calls import Doing, forwarded, gradients_of, parameters_of, state_of
from torch import nn
from torch.utils.checkpoint import checkpoint

WORKERS = ["worker1", "worker2"]
"""Set by programs."""

_building = threading.Lock()

Statement = Callable[["Session"], Any]
STATEMENTS: dict[str, Statement] = {}


def statement(function: Statement) -> Statement:
    STATEMENTS[function.__name__] = function
    return function


class Session(Doing):
    """Models at workers and one here, which share an optimizer."""

    def __init__(self, keep: Any, nets: list[tuple[str, str, int]], kind: Any, options: dict[str, Any]) -> None:
        super().__init__(keep)
        self.rpc = mixed_calls.rpc
        self.here = built(nets[0][1], 99)
        self.nets, self.references = [], [[self.rpc.RRef(p) for p in self.here.parameters()]]
        for owner, name, seed in nets:
            self.nets.append(self.rpc.remote(owner, built, (name, seed, *self.nets[-1:])))
            self.references.append(self.rpc.rpc_sync(owner, parameters_of, (self.nets[-1],)))
        self.called = self.nets if nets[-1][1] != "Relay" else [*self.nets[:-2], self.nets[-1]]
        """By the loss: each model once, as gradients of several messages are added in any order."""
        every = [rref for each in self.references for rref in each]
        self.optimizer = self.rpc.optim.DistributedOptimizer(kind, every, **options)
        self.dtype = next(self.here.parameters()).dtype

    def ends(self) -> None:
        self.keep("optimizer", self.optimizer.state_dict()["state"])
        self.keep("here", self.here)
        for net in self.nets:
            self.keep("there", self.rpc.rpc_sync(net.owner_name(), state_of, (net,)))
            self.keep("gradients there", self.rpc.rpc_sync(net.owner_name(), mixed_calls.local_gradients_of, (net,)))

    @property
    def net(self) -> Any:
        """One that the statement draws."""
        return self.nets[int(self.share * len(self.nets))]

    @property
    def parameter(self) -> Any:
        """A reference to one of those at workers."""
        there = [rref for each in self.references[1:] for rref in each]
        return there[int(self.share * len(there))]

    @property
    def other(self) -> str:
        return WORKERS[self.seed % len(WORKERS)]

    def batch(self, number: int = 0) -> torch.Tensor:
        return torch.randn(4, 5, generator=torch.Generator().manual_seed(self.seed + number)).to(self.dtype)

    def classes(self) -> torch.Tensor:
        return torch.randint(0, 10, (4,), generator=torch.Generator().manual_seed(self.seed + 1))

    def forward(self, net: Any, x: torch.Tensor) -> torch.Tensor:
        """In one of many ways."""
        ways: list[Callable[[], Any]] = [
            lambda: net.rpc_sync().forward(x),
            lambda: net.rpc_async().forward(x).wait(),
            lambda: net.remote().forward(x).to_here(),
            lambda: self.rpc.rpc_sync(self.other, forwarded, (net, x)),
            lambda: self.rpc.rpc_sync(self.other, mixed_calls.on_kept_forward, (net, x)),
            lambda: self.rpc.rpc_async(net.owner_name(), forward_there, (net, x)).wait(),
            lambda: self.rpc.rpc_sync(self.other, later_forward, (net, x)),
        ]
        return ways[self.seed % len(ways)]()

    def loss(self, x: torch.Tensor | None = None) -> torch.Tensor:
        x = self.batch() if x is None else x
        out = self.here(x)
        for net in self.called:
            out = out + self.forward(net, x)
        return F.cross_entropy(out, self.classes())

    def gradients(self, context: int) -> None:
        found = self.rpc.autograd.get_gradients(context)
        self.keep("gradients", [None if (g := found.get(p)) is None else g.clone() for p in self.here.parameters()])
        for net in self.nets:
            self.keep("gradients of a net", self.rpc.rpc_sync(net.owner_name(), gradients_of, (context, net)))

    def step(self, context: int, *roots: torch.Tensor, **options: Any) -> None:
        self.rpc.autograd.backward(context, list(roots), **options)
        self.gradients(context)
        self.optimizer.step(context)


# At workers.


def built(name: str, seed: int, before: Any = None) -> nn.Module:
    with _building, torch.random.fork_rng(devices=[]):  # of several callers
        torch.manual_seed(seed)
        return Relay(before) if name == "Relay" else getattr(served_nets, name)()


class Relay(nn.Module):
    """Its forward calls the model before it."""

    def __init__(self, before: Any) -> None:
        super().__init__()
        self.before, self.first, self.last = before, nn.Linear(5, 5), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        late = self.before.rpc_async().forward(torch.tanh(self.first(x)))
        return self.last(late.wait()) * 0.5


def forward_there(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.local_value()(x)


@mixed_calls.async_execution
def later_forward(net: Any, x: torch.Tensor) -> Any:
    return mixed_calls.rpc.rpc_async(net.owner_name(), forward_there, (net, x)).then(lambda done: done.wait() * 1)


def loss_there(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(forwarded(net, x), y)


def loss_of(out: Any, y: torch.Tensor) -> torch.Tensor:
    """``out`` is a reference."""
    return F.cross_entropy(out.to_here(), y)


def trained_there(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A context, a backward and a step at a worker, over a model of another one, or its own."""
    rpc = mixed_calls.rpc
    with rpc.autograd.context() as context:
        loss = F.cross_entropy(forwarded(net, x), y)
        references = rpc.rpc_sync(net.owner_name(), parameters_of, (net,))
        rpc.autograd.backward(context, [loss])
        rpc.optim.DistributedOptimizer(torch.optim.SGD, references, lr=0.05).step(context)
    return loss.detach()


def frozen(parameter: Any, trains: bool) -> None:
    parameter.local_value().requires_grad_(trains)


def written(parameter: Any, how: int) -> None:
    value = parameter.local_value()
    with torch.no_grad():
        if how == 0:
            value.mul_(0.9)
        elif how == 1:
            value.data = value.data * 1.1
        elif how == 2:
            value.detach().numpy().reshape(-1)[:1] = 0.3
        else:
            value.data.copy_(torch.full_like(value, 0.1))


def hooked(parameter: Any, fails: bool) -> None:
    """Nothing but the gradient tells whether it ran: of a backward that fails, others may have done their part, or not."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if fails:
            raise KeyError("a hook")
        return gradient * 2

    handle = parameter.local_value().register_hook(hook)
    if fails:
        _failing.append(handle)


_failing: list[Any] = []


def unhooked() -> None:
    _failing.pop().remove()


def both(net: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Structures, the same tensor twice, views, and what needs no gradient."""
    one, two = given["x"], given["more"][0]
    out = forwarded(net, one + two)
    return {"out": out, "parts": (out[:, :5], out[:, 5:]), "same": [out, one], "plain": two.detach(), "n": 3}


def summed(context: int, net: Any) -> Any:
    return [None if g is None else g.sum() for g in gradients_of(context, net)]


def raises(x: torch.Tensor) -> None:
    raise ValueError("a call")


# Steps.


@statement
def trains(session: Session) -> Any:
    with session.rpc.autograd.context() as context:
        loss = session.loss()
        session.step(context, loss)
    return loss.detach()


@statement
def trains_on_two_losses(session: Session) -> Any:
    with session.rpc.autograd.context() as context:
        loss = session.loss()
        session.step(context, loss, (session.here(session.batch(3)) ** 2).mean())
    return loss.detach()


@statement
def trains_a_leaf(session: Session) -> Any:
    x = session.batch().requires_grad_()
    with session.rpc.autograd.context() as context:
        session.step(context, (session.here(x * 2) + session.forward(session.net, x)).square().mean())
        found = session.rpc.autograd.get_gradients(context).get(x)
        return found if found is None else found.clone(), x.grad  # which is none


@statement
def goes_back_twice(session: Session) -> None:
    with session.rpc.autograd.context() as context:
        loss = session.loss()
        session.rpc.autograd.backward(context, [loss], retain_graph=True)
        session.step(context, loss)


@statement
def goes_back_once_too_often(session: Session) -> None:
    with session.rpc.autograd.context() as context:
        loss = session.loss()
        session.rpc.autograd.backward(context, [loss])
        session.rpc.autograd.backward(context, [loss])


@statement
def two_batches_in_a_context(session: Session) -> None:
    with session.rpc.autograd.context() as context:
        session.rpc.autograd.backward(context, [session.loss()])
        session.seed += 7
        session.step(context, session.loss())


@statement
def trains_from_the_owner_of_the_loss(session: Session) -> None:
    """``RRef.backward``"""
    net = session.net
    with session.rpc.autograd.context() as context:
        loss = session.rpc.remote(session.other, loss_there, (net, session.batch(), session.classes()))
        if session.share < 0.5:
            loss.backward(context, retain_graph=True)
        loss.backward(context)
        session.gradients(context)
        session.optimizer.step(context)
        session.keep("loss", loss.to_here().detach())


@statement
def trains_in_a_chain_of_references(session: Session) -> Any:
    with session.rpc.autograd.context() as context:
        out = session.net.remote().forward(session.batch())
        loss = session.rpc.remote(session.other, loss_of, (out, session.classes()))
        if session.share < 0.5:
            loss.backward(context)
            session.gradients(context)
            session.optimizer.step(context)
        else:
            session.step(context, loss.to_here())
        return loss.to_here().detach()


@statement
def trains_at_a_worker(session: Session) -> Any:
    return session.rpc.rpc_sync(session.other, trained_there, (session.net, session.batch(), session.classes()))


@statement
def trains_in_threads(session: Session) -> Any:
    """Each has a context of its own; steps are taken one after the other."""
    losses: list[Any] = [None, None]
    net, ready = session.net, threading.Semaphore(0)
    x, y = session.batch(), session.classes()

    def run(number: int) -> None:
        try:
            with session.rpc.autograd.context() as context:
                loss = F.cross_entropy(session.forward(net, x * (number + 1)), y)
                session.rpc.autograd.backward(context, [loss])
                ready.release()
                losses[number] = loss.detach(), context
                steps[number].acquire()
                session.optimizer.step(context)
        except Exception as error:
            raised.append(error)
            ready.release()
        done.release()

    raised: list[Exception] = []
    steps, done = [threading.Semaphore(0), threading.Semaphore(0)], threading.Semaphore(0)
    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    try:
        for thread in threads:
            thread.start()
            ready.acquire(timeout=20)
        for step in steps:
            step.release()
            done.acquire(timeout=20)
        for thread in threads:
            thread.join()
    finally:
        for step in steps:
            step.release()
    if raised:
        raise raised[0]
    return [loss for loss, _ in losses]


@statement
def trains_parameters_that_were_fetched(session: Session) -> Any:
    """What a call brings of a parameter is connected with it."""
    parameter = session.parameter
    with session.rpc.autograd.context() as context:
        value = parameter.to_here()
        loss = value.square().sum() * 0.01 + session.here(session.batch()).square().mean()
        session.step(context, loss)
    return loss.detach()


@statement
def trains_on_structures(session: Session) -> Any:
    x = session.batch().requires_grad_()
    with session.rpc.autograd.context() as context:
        given = {"x": x, "more": [x, x[:2].detach()], "same": x.t()}
        found = session.rpc.rpc_sync(session.other, both, (session.net, given))
        loss = found["out"].sum() + (found["parts"][0] * found["parts"][1]).sum() + found["same"][1].sum()
        session.rpc.autograd.backward(context, [loss * 0.01])
        gradient = session.rpc.autograd.get_gradients(context)[x].clone()
        session.optimizer.step(context)
    return loss.detach(), gradient, found["plain"], found["plain"].requires_grad, found["n"]


@statement
def trains_a_part_of_what_came(session: Session) -> Any:
    """Calls whose results no loss has, and one that fails."""
    with session.rpc.autograd.context() as context:
        session.forward(session.net, session.batch(5))
        try:
            session.rpc.rpc_sync(session.other, raises, (session.batch().requires_grad_(),))
        except ValueError:
            pass
        loss = session.forward(session.net, session.batch())[:2, 3:].square().sum()
        session.step(context, loss)
    return loss.detach()


@statement
def recomputes_a_call(session: Session) -> Any:
    with session.rpc.autograd.context() as context:
        x = session.batch().requires_grad_()
        hidden = checkpoint(session.here, x, use_reentrant=False)
        loss = (hidden + session.forward(session.net, x)).square().mean()
        session.step(context, loss)
        return session.rpc.autograd.get_gradients(context)[x].clone()


@statement
def trains_in_bfloat16(session: Session) -> Any:
    with session.rpc.autograd.context() as context:
        with torch.autocast("cpu", torch.bfloat16):
            loss = session.loss()
        session.step(context, loss.float())
    return loss.detach()


@statement
def gives_gradients_by_hand(session: Session) -> None:
    """Sums of gradients of two contexts, for an optimizer of torch's."""
    sums: dict[Any, torch.Tensor] = {}
    for n in range(2):
        with session.rpc.autograd.context() as context:
            session.rpc.autograd.backward(context, [F.cross_entropy(session.here(session.batch(n)), session.classes())])
            found = session.rpc.autograd.get_gradients(context)
            for parameter in session.here.parameters():
                if parameter in found:
                    sums[parameter] = (
                        sums[parameter] + found[parameter] if n and parameter in sums else found[parameter].clone()
                    )
    with torch.no_grad():
        for parameter, gradient in sums.items():
            parameter.sub_(gradient, alpha=0.05)


@statement
def steps_twice_in_a_context(session: Session) -> None:
    with session.rpc.autograd.context() as context:
        session.step(context, session.loss())
        session.optimizer.step(context)


@statement
def steps_without_gradients(session: Session) -> None:
    with session.rpc.autograd.context() as context:
        session.optimizer.step(context)


# Contexts that end early, errors.


@statement
def leaves_a_context(session: Session) -> None:
    try:
        with session.rpc.autograd.context():
            session.loss()
            raise KeyError("left")
    except KeyError:
        pass


@statement
def goes_back_from_no_scalar(session: Session) -> None:
    with session.rpc.autograd.context() as context:
        session.rpc.autograd.backward(context, [session.forward(session.net, session.batch())])


@statement
def goes_back_from_nothing(session: Session) -> None:
    with session.rpc.autograd.context() as context:
        session.rpc.autograd.backward(context, [session.batch().sum()])


@statement
def goes_back_when_the_context_is_over(session: Session) -> None:
    with session.rpc.autograd.context() as context:
        loss = session.loss()
    if not isinstance(session.rpc, mixed_calls.Alone):
        session.rpc.autograd.backward(context, [loss])
    raise RuntimeError("no context")


@statement
def begins_two_contexts(session: Session) -> None:
    with session.rpc.autograd.context():
        if not isinstance(session.rpc, mixed_calls.Alone):
            with session.rpc.autograd.context():
                pass
        raise RuntimeError("a context already")


@statement
def fails_in_a_hook_there(session: Session) -> None:
    parameter = session.parameter
    session.rpc.rpc_sync(parameter.owner_name(), hooked, (parameter, True))
    try:
        with session.rpc.autograd.context() as context:
            session.rpc.autograd.backward(context, [session.loss()])
            session.optimizer.step(context)
    finally:
        session.rpc.rpc_sync(parameter.owner_name(), unhooked)


@statement
def hooks_a_gradient_there(session: Session) -> None:
    parameter = session.parameter
    session.rpc.rpc_sync(parameter.owner_name(), hooked, (parameter, False))


@statement
def hooks_an_output(session: Session) -> Any:
    seen = []
    with session.rpc.autograd.context() as context:
        out = session.forward(session.net, session.batch())
        out.register_hook(lambda g: seen.append(g.clone()))
        out.register_hook(lambda g: g * 0.5)
        session.step(context, out.square().mean())
    return seen


# Without gradients.


@statement
def evaluates(session: Session) -> Any:
    with torch.no_grad():
        return session.loss()


@statement
def evaluates_in_a_context(session: Session) -> Any:
    with session.rpc.autograd.context() as context, torch.no_grad():
        loss = session.loss()
        session.keep("no gradients", len(session.rpc.autograd.get_gradients(context)))
    return loss


@statement
def infers(session: Session) -> Any:
    with torch.inference_mode():
        return session.loss().clone()


@statement
def calls_without_a_context(session: Session) -> Any:
    return session.forward(session.net, session.batch()).detach()


# Parameters and states.


@statement
def freezes_a_parameter(session: Session) -> None:
    session.rpc.rpc_sync(session.parameter.owner_name(), frozen, (session.parameter, False))


@statement
def trains_all_again(session: Session) -> None:
    for each in session.references[1:]:
        for parameter in each:
            session.rpc.rpc_sync(parameter.owner_name(), frozen, (parameter, True))


@statement
def freezes_here(session: Session) -> None:
    session.here.requires_grad_(session.share < 0.5)


@statement
def writes_a_parameter(session: Session) -> None:
    session.rpc.rpc_sync(session.parameter.owner_name(), written, (session.parameter, session.seed % 4))


@statement
def reads_a_parameter(session: Session) -> Any:
    return session.parameter.to_here().detach()


@statement
def reads_gradients_there(session: Session) -> Any:
    with session.rpc.autograd.context() as context:
        session.rpc.autograd.backward(context, [session.loss()])
        return session.rpc.rpc_sync(session.net.owner_name(), summed, (context, session.net))


@statement
def reads_the_optimizer(session: Session) -> Any:
    return session.optimizer.state_dict()["state"]


@statement
def sets_the_rate(session: Session) -> None:
    for group in session.optimizer.param_groups:
        group["lr"] = 0.01 + 0.1 * session.share


@statement
def makes_another_optimizer(session: Session) -> None:
    kinds = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop]
    every = [rref for each in session.references[:: 1 + session.seed % 2] for rref in each]
    session.optimizer = session.rpc.optim.DistributedOptimizer(kinds[session.seed % 5], every, lr=0.02)


@statement
def steps_by_torch_without_a_context(session: Session) -> None:
    """Of the model here: ``.grad``, which contexts leave alone."""
    optimizer = torch.optim.SGD(session.here.parameters(), lr=0.05)
    F.cross_entropy(session.here(session.batch()), session.classes()).backward()
    if session.share < 0.5:
        optimizer.step()
        optimizer.zero_grad()


COMMON = ["trains", "trains", "trains_from_the_owner_of_the_loss", "trains_in_a_chain_of_references", "evaluates"]
