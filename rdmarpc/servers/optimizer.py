"""Optimizers whose steps are made by parameter servers.

``make`` gives an object of a class below both ``ServedOptimizer`` and the real one: its groups, defaults and what schedulers do
with them are the real one's; a step sends gradients and the numbers of the groups; the state lives at the servers.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..transport import NotSupported
from .bundle import ABSENT, NUMBERS, PRESENT
from .servers import Half, Servers
from .updates import PER_PARAMETER, Elsewhere, counting_dtype, hyperparameters, leaves_gradients, numbers_of, refuse_scaling


class _Share:
    """The part of an optimizer that one server makes. ``groups`` lists (group, positions there of its parameters);
    ``parameters`` are all of them by ascending position ``at``."""

    def __init__(self, half: Half, groups: list[tuple[int, list[int]]], found: dict[int, nn.Parameter]) -> None:
        self.half, self.groups = half, groups
        self.sum = float(zlib.crc32(repr(groups).encode()))
        """Goes behind the numbers of the groups: all workers have the same members in them."""
        self.at = tuple(sorted(found))
        self.parameters = [found[at] for at in self.at]
        room = 0 if half.gradients is None else len(half.gradients)
        self.learns = [at < room for at in self.at]
        self.dtypes = [parameter.dtype for parameter in self.parameters]
        self._room = room
        self.full = self.marks(self.at) if all(self.learns) else b""
        """The marks when every parameter has a gradient; empty if they cannot all have one."""

    def marks(self, present: Iterable[int]) -> bytes:
        marks = bytearray([ABSENT]) * self._room
        for at in present:
            marks[at] = PRESENT
        return bytes(marks)


class ServedOptimizer(torch.optim.Optimizer):
    """See the module; made by ``make`` only."""

    _kind: type[torch.optim.Optimizer]
    _served: Servers = None  # type: ignore[assignment]
    """``None`` while the real class makes its own."""

    def __init__(self, served: Servers, params: Any, given: dict[str, Any]) -> None:
        super().__init__(params, **given)
        self.state.clear()  # some optimizers make theirs at once
        known = ("_served", "state", "param_groups", "defaults")
        self._made = {name: value for name, value in vars(self).items() if name not in known}
        self._served, self._number, self._given = served, next(served.optimizers), given
        weakref.finalize(self, served.unused.append, self._number).atexit = False
        self._told: dict[str, Any] = {}
        self._grouped: list[list[int]] = []
        self._share_out()
        for share in self._shares:
            self._numbers(share)

    def _share_out(self) -> None:
        served = self._served
        groups: dict[str, dict[int, list[int]]] = {}
        found: dict[str, dict[int, nn.Parameter]] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter not in served.position:
                    raise ValueError("an optimizer of a served model can only have parameters of that model")
                server, at = served.position[parameter]
                groups.setdefault(server, {}).setdefault(number, []).append(at)
                found.setdefault(server, {})[at] = parameter
        halves = served.trainer.halves
        self._shares = [_Share(halves[server], list(parts.items()), found[server]) for server, parts in groups.items()]
        self._told.clear()
        before = {number for group in self._grouped for number in group}
        self._grouped = [list(map(id, group["params"])) for group in self.param_groups]
        self._mark([parameter for parameter in self._everything() if id(parameter) not in before])

    def _look(self) -> None:
        """Find what the program has changed otherwise than by methods: the members of groups. Attributes are refused."""
        if [list(map(id, group["params"])) for group in self.param_groups] != self._grouped:
            self._share_out()
        for name, value in self._made.items():
            now = vars(self).get(name)
            if now is not value and not (isinstance(now, (int, float, str)) and now == value):
                why = f"{name!r} of a served {self._kind.__name__} was set after it was made, which its servers do not see"
                raise NotSupported(why, hint="keep what changes in param_groups")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._served is not None:
            self._share_out()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send the gradients; returns when they may be changed again. The new weights come by themselves: the next forward
        waits for them. Raises ``PeerLost``, ``TransferTimeout``, what a server raised, ``NotSupported`` (nothing was sent)."""
        served = self._served
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_scaling(self)
        self._renew()
        served.ready()
        served.left.check(self._everything(), self._kind.__name__)
        staging, writes, leaves = served.staging, [], leaves_gradients(self._kind, self.param_groups)
        for share in self._shares:
            numbers = self._numbers(share)
            write = _gradients(share)
            if share.half.gradients is not None:
                writes.append((share, *write, numbers))
        for share, *_ in writes if not leaves else ():
            served.left.send(share.half.server, share.at, share.parameters)
        served.sending(leaves)
        try:
            for share, marks, present, grads, numbers in writes:
                share.half.send(self._number, marks, present, grads, numbers, staging)
                # New values will stand there without torch's doing: graphs that saved the old ones must not go backward.
                torch.autograd.graph.increment_version(share.parameters)
        finally:
            served.watch.seen()
        served.sent()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._served is not None:
            if not set_to_none:
                self._served.pull()  # a step may leave None
            self._served.left.zeroed(self._everything())
        with torch._C.DisableTorchFunctionSubclass():  # gradients are here, also while weights are on their way
            super().zero_grad(set_to_none)

    def _numbers(self, share: _Share) -> list[float]:
        """The numbers of its groups. The server is told what else there is about these, if that has changed."""
        numbers, rest = numbers_of([self.param_groups[group] for group, _ in share.groups])
        if len(numbers) >= NUMBERS:
            why = f"the groups have {len(numbers)} numbers, there is room for {NUMBERS - 1}"
            raise NotSupported(why, hint="use fewer groups")
        server, counting = share.half.server, counting_dtype(self._kind)
        if self._told.get(server) != (rest, counting):
            described = [{**hyperparameters(self.param_groups[group]), "params": at} for group, at in share.groups]
            self._served.ask(server, "optimizer", self._number, self._kind, self._given, described, counting)
            self._told[server] = rest, counting
        return [*numbers, share.sum]

    # -- state

    def _mark(self, parameters: Iterable[nn.Parameter]) -> None:
        """Other classes may have methods that keep a state of their own here."""
        if self._kind in PER_PARAMETER:
            self.state.update({parameter: Elsewhere() for parameter in parameters})

    def _renew(self) -> None:
        """Send what the program has put into ``state``, or has dropped there."""
        self._look()
        parameters = self._everything()
        if self._kind in PER_PARAMETER and any(kind is not Elsewhere for kind in map(type, map(self.state.get, parameters))):
            self._load({p: self.state.get(p, {}) for p in parameters if type(self.state.get(p)) is not Elsewhere})

    def _load(self, states: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Where there are no entries, a parameter loses its own."""
        served = self._served
        served.pull()
        there: dict[str, dict[int, Any]] = {share.half.server: {} for share in self._shares}
        for parameter, entries in states.items():
            server, at = served.position[parameter]
            there[server][at] = entries
        for share in self._shares:
            self._numbers(share)  # the groups there have these parameters
        for server, found in there.items():
            served.ask(server, "load_optimizer_state", self._number, found)
        self._mark(self._everything())

    def state_dict(self) -> dict[str, Any]:
        """As the real one's, with the state that the servers have."""
        served = self._served
        self._renew()
        served.pull()
        found: dict[nn.Parameter, Any] = {}
        for share in self._shares:
            here = dict(zip(share.at, share.parameters))
            entries = served.ask(share.half.server, "optimizer_state", self._number)
            found.update({here[at]: entry for at, entry in entries.items() if at in here})
        before = self.state
        kept = {key: entries for key, entries in before.items() if type(entries) is not Elsewhere}
        try:  # hooks see the whole state
            self.state = defaultdict(dict)
            self.state.update({parameter: found[parameter] for parameter in self._everything() if parameter in found})
            self.state.update(kept)
            return super().state_dict()
        finally:
            self.state = before

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """With several workers each of them loads the same before its next step."""
        super().load_state_dict(state_dict)
        self._look()
        self._load({parameter: self.state.pop(parameter, {}) for parameter in self._everything()})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies (``copy.deepcopy``, pickle) are ordinary optimizers over copies of the parameters."""
        everything = self._everything()
        state = {everything[at]: entries for at, entries in self.state_dict()["state"].items()}
        return _ordinary, (self._kind, {"defaults": self.defaults, "state": state, "param_groups": self.param_groups})

    def _everything(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


def _gradients(share: _Share) -> tuple[bytes, tuple[int, ...], list[torch.Tensor]]:
    """The marks of a share, the positions that have a gradient, and these."""
    given = [parameter.grad for parameter in share.parameters]
    grads = [grad for grad in given if grad is not None]
    for grad, dtype in zip(given, share.dtypes):
        if grad is None:
            continue
        if grad.layout is not torch.strided:
            text = f"a gradient is {grad.layout}"
            raise NotSupported(text, hint="sparse gradients (Embedding(sparse=True)) cannot be served")
        if grad.dtype is not dtype:
            raise NotSupported(f"a gradient is {grad.dtype}, and its parameter {dtype}", hint="leave grad_dtype as it is")
    if share.full and len(grads) == len(given):
        return share.full, share.at, grads
    present = tuple(at for at, grad in zip(share.at, given) if grad is not None)
    if any(grad is not None and not learns for grad, learns in zip(given, share.learns)):
        why = "a parameter has a gradient that had requires_grad=False when serve() was called"
        raise NotSupported(why, hint="freeze parameters after serve(), not before")
    return share.marks(present), present, grads


def _ordinary(kind: type[torch.optim.Optimizer], content: dict[str, Any]) -> torch.optim.Optimizer:
    made = kind.__new__(kind)
    made.__setstate__({**content, "state": defaultdict(dict, content["state"])})
    return made


@functools.cache
def _class(kind: Any) -> type[ServedOptimizer]:
    return type(f"Served{kind.__name__}", (ServedOptimizer, kind), {"_kind": kind})


def make(served: Servers, kind: type[torch.optim.Optimizer], params: Any, defaults: dict[str, Any]) -> ServedOptimizer:
    """An optimizer of this class over parameters of that model."""
    if issubclass(kind, torch.optim.LBFGS):
        why = "LBFGS looks at all gradients of several evaluations in one step: it cannot be served"
        raise NotSupported(why, hint="rdmarpc.wrap(net, placement) runs it: its step reads and writes remote parameters")
    servers = {server for server, _ in served.position.values()}
    if kind not in PER_PARAMETER and len(servers) > 1:
        why = f"{kind.__name__} may combine parameters in one step, and they are at {len(servers)} servers"
        raise NotSupported(why, hint="use one server, or a class of torch.optim")
    served.forget()
    found: Any = kind
    return _class(found)(served, params, defaults)
