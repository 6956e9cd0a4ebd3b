"""A member of the group whose frames are tampered with on their way: it has the secret, and its connections are real."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import Any

import torch

import rdmarpc as rpc
from rdmarpc.links.ring import RING
from rdmarpc.transport.shm.channel import ShmChannel
from rdmarpc.transport.tcp.channel import TcpChannel

from . import workloads
from .workloads import Scene, add, double, make, name_of

LIAR = 2
"""Its rank. Workers 0 and 1 call each other all the time, and it now and then."""
_SHARE = 0.2
_CALL_S = 2.0


class _Tampered:
    """In place of the window to a peer's ring: some of the frames leave with other bytes than the link composed."""

    def __init__(self, window: Any, local: torch.Tensor, liar: Liar) -> None:
        self._window, self._liar = window, liar
        self._ring = memoryview(local.numpy()).cast("B")

    def __getattr__(self, name: str) -> Any:
        """``put`` and the like take an offset and a length first."""
        found = getattr(self._window, name)
        if not name.startswith("put"):
            return found

        def put(offset: int, nbytes: int, *rest: Any, **named: Any) -> Any:
            self._change(offset, nbytes)
            return found(offset, nbytes, *rest, **named)

        return put

    def _change(self, offset: int, nbytes: int) -> None:
        chance = self._liar.chance
        if chance.random() < _SHARE:
            self._liar.frames += 1
            frame = self._ring[offset : offset + nbytes]
            for _ in range(chance.choice((1, 1, 2, 8))):
                at = chance.randrange(min(nbytes, 400))
                frame[at] = chance.choice((frame[at] ^ 1 << chance.randrange(8), chance.randrange(256), 0, 0xFF))


class Liar:
    """Joins, calls the others with frames that were tampered with, and joins again when they have had enough of it."""

    def __init__(self, scene: Scene) -> None:
        self._scene, self._lives, self.frames = scene, 0, 0
        self.chance = random.Random(scene.trial.number)
        for kind in (ShmChannel, TcpChannel):
            kind.window = self._tampering(kind.window)  # type: ignore[method-assign]

    def _tampering(self, opened: Any) -> Any:
        def window(channel: Any, remote: Any, local: torch.Tensor, *, notify: int) -> Any:
            found = opened(channel, remote, local, notify=notify)
            return _Tampered(found, local, self) if notify == RING else found

        return window

    def live(self) -> None:
        """One membership."""
        self._lives += 1
        options = rpc.RpcBackendOptions(**{**self._scene.options, "rpc_timeout": _CALL_S})
        with suppress(Exception):
            rpc.init_rpc(f"{name_of(LIAR)}-{self._lives}", rank=LIAR, rpc_backend_options=options)
        if not rpc._is_current_rpc_agent_set():
            time.sleep(0.05)
            return
        lost = 0
        while self._scene.going and lost < 3:
            lost += self._call()
        with suppress(Exception):
            rpc.shutdown(graceful=False)

    def _call(self) -> bool:
        """Some calls at once. Whether one of the others has cut us off."""
        futures, lost = [], False
        for _ in range(20):
            to = name_of(self.chance.randrange(2))
            try:
                kind = self.chance.randrange(4)
                if kind == 0:
                    futures.append(rpc.rpc_async(to, add, (1, 2)))
                elif kind == 1:
                    futures.append(rpc.rpc_async(to, double, (make(3, self.chance.choice((10, 5000, 20_000))),)))
                elif kind == 2:
                    rpc.remote(to, make, (4, 50))
                else:
                    futures.append(rpc.rpc_async(to, make, (5, 20_000)))
            except Exception:
                lost = True
        for future in futures:
            try:
                future.wait()
            except rpc.PeerLost:
                lost = True
            except Exception:
                pass  # a call that was tampered with, or its answer
        return lost


def honest(scene: Scene, chance: random.Random) -> None:
    """Calls between those who are honest, each checked; and some to the other one, of which nothing is expected but an end."""
    if chance.randrange(10) == 0:
        names = [name for name in rpc._get_current_rpc_agent().worker_names() if name.startswith(name_of(LIAR))]
        with scene.diary.doing("liar", scene.rank), suppress(Exception):
            rpc.rpc_sync(chance.choice(names), double, (make(1, 20_000),), timeout=_CALL_S)
        return
    step = chance.choice((workloads.calls, workloads.references, workloads.autograd))
    step(scene, chance)
