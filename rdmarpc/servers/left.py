"""What a step leaves of the gradients. Torch's own optimizers leave them as they are; others drop, replace or write into them.
Servers do that to copies, so here it is done once more, to the gradients that were sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..transport import NotSupported

_Sent = tuple[int, nn.Parameter, "weakref.ref[torch.Tensor]", int]
"""The position of a parameter at its server, itself, its gradient, and the version of that when it was sent."""


class Left:
    """The gradients of the last step of one model, by server. ``alone``: no other worker has sent any."""

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self._sent: dict[str, list[_Sent]] = {}
        self._stale: dict[int, weakref.ref[torch.Tensor]] = {}
        """By ``id`` of a parameter: a gradient that is not what one process would have."""

    def send(self, server: str, at: Iterable[int], parameters: Iterable[nn.Parameter]) -> None:
        """Gradients of these parameters, which lie at these positions there, are about to be sent."""
        found = [(where, parameter, parameter.grad) for where, parameter in zip(at, parameters)]
        self._sent[server] = [(at, p, weakref.ref(grad), grad._version) for at, p, grad in found if grad is not None]

    def landed(self, changed: Iterable[str], ask: Callable[[str], dict[int, Any]]) -> None:
        """The weights of that step are here. ``changed``: the servers whose step has changed gradients; ``ask`` gives what has
        become of these there: ``None``, or (whether it is the same tensor still, its value)."""
        for server in changed:
            here = [(at, p, grad, seen) for at, p, sent, seen in self._sent.get(server, ()) if (grad := sent()) is p.grad]
            found = ask(server) if here else {}
            for at, parameter, grad, seen in here:
                if at in found and grad is not None:
                    self._change(parameter, grad, seen, found[at])
        self._sent.clear()

    def _change(self, parameter: nn.Parameter, grad: torch.Tensor, seen: int, found: Any) -> None:
        if grad._version != seen or not (found is None or self._alone):
            self._stale[id(parameter)] = weakref.ref(grad)
        elif found is None:
            parameter.grad = None
        elif found[0]:
            with torch.no_grad():
                grad.copy_(found[1])
        else:
            parameter.grad = found[1]

    def zeroed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Their gradients are ``None`` or zero."""
        for parameter in parameters if self._stale else ():
            self._stale.pop(id(parameter), None)

    def check(self, parameters: Iterable[nn.Parameter], kind: str) -> None:
        """``NotSupported`` where a gradient goes on that is not what one process would have."""
        for parameter in parameters if self._stale else ():
            stale = self._stale.pop(id(parameter), None)
            if stale is not None and parameter.grad is not None and stale() is parameter.grad:
                why = f"a step of {kind} has changed gradients, which are sums over all workers, and this step adds to them"
                raise NotSupported(why, hint="call zero_grad() in every step")
