"""The process group that torch uses: its names, its life, and what is told of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..base import forked, here
from ..transport import PeerLost, RdmaError, cuda_driver, timeouts
from .meeting import named
from .operations import OF_GROUP, Collectives, groups
from .queue import Work, failure

_log = logging.getLogger("rdmarpc")
_FORKED = "a process group cannot be used in a process that was forked from one of its ranks"


class ProcessGroup(Collectives):
    """See ``Collectives`` for what it is made of."""

    group_name = group_desc = ""

    def getBackendName(self) -> str:
        return "rdmarpc"

    def name(self) -> str:
        return "rdmarpc"

    def _get_backend_name(self) -> str:
        """torch asks whether it is gloo to know whether tensors without another device belong on the CPU."""
        return self.name() if cuda_driver.count() else "gloo"

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """A group of these ranks of ours, which meet; ``None`` at the others."""
        if self.me not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'_'.join(map(str, ranks))}"
        limit = timeout or timedelta(seconds=self.engine.timeout)
        store = dist.PrefixStore(f"{name}/", self.store)
        made = ProcessGroup(store, ranks.index(self.me), [self.members.ranks[each] for each in ranks], limit, opts)
        made._set_group_name(name)
        made._set_group_desc(group_desc or f"{self.group_desc}:split")
        return made

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, text: str) -> None:
        self.group_desc = text

    # What C++ calls.
    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        return self.group_name

    def getGroupDesc(self) -> str:
        return self.group_desc

    def get_group_store(self) -> dist.Store:
        return self.store

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        """torch asks for what a backend can do: split, coalesce, allocate."""
        if device.type not in ("cpu", cuda_driver.kind()):
            raise RuntimeError(f"the backend rdmarpc takes tensors on the CPU and on CUDA devices, not on {device}")
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device(cuda_driver.kind())] if cuda_driver.count() else [])]

    def _start_coalescing(self, device: torch.device) -> None:
        self.collected.works = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self.collected.works = self.collected.works, None

        def run() -> None:
            for work in works or ():
                work.wait()

        def finish() -> None:
            made.finish(failure(made))

        made = Work(run, [], "coalesced")
        threading.Thread(target=finish, name="rdmarpc-coalesced", daemon=True).start()
        return made

    def _set_sequence_number_for_group(self) -> None:
        """The sequence begins with the group."""

    def _get_sequence_number_for_group(self) -> int:
        return self.engine.sequence

    def set_timeout(self, timeout: timedelta) -> None:
        self.engine.timeout = self.pairs.timeout = timeouts.above_zero(timeout.total_seconds(), OF_GROUP)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End the group here, and every call under way at any rank. Idempotent."""
        self.engine.fail(PeerLost(f"rank {self._called} aborted the process group", status="ABORTED"))
        self._close()

    def shutdown(self) -> None:
        """Leave the group. What was submitted is done before. Idempotent."""
        if not self.queue.ended:
            for work in self.queue.pending():
                try:
                    work.wait()
                except Exception:
                    break
            for text in (*self.engine.unseen(), *self.pairs.unseen()):
                _log.warning("rank %s leaves process group %s: %s", self._called, self.group_name, text)
        self._close()

    def forked(self) -> None:
        """In a forked child: what is under way is the parent's, and so is a group of several ranks. Takes no lock."""
        error = RdmaError(_FORKED, hint="let the parent make the call, or call destroy_process_group and make a group here")
        self.queue.forked(error)
        self.pairs.forked(error)
        self.engine.forked(error)

    def _close(self) -> None:
        self.queue.stop()
        self.pairs.close()
        self.engine.close()
        self.staging.close()
        groups.discard(self)

    def explain(self) -> list[str]:
        """Lines for people: what is under way, and who is missing."""
        engine = self.engine
        name = self.group_name or "without a name"
        who = f"of the ranks {named(self.members.ranks)}, this is rank {self._called}"
        lines = [f"process group {name} {who}: {engine.sequence} calls"]
        if engine.error is not None:
            lines.append(f"  failed: {engine.error}")
        if engine.since:
            lines.append(f"  {engine.told(engine.signature)}, call {engine.sequence}: {engine.missing()}")
        lines += [f"  {text}" for text in self.pairs.waiting()]
        return lines


def _explain() -> list[str]:
    return [line for group in list(groups) for line in group.explain()]


def _in_child() -> None:
    for group in list(groups):
        group.forked()


here.explained.append(_explain)
forked.in_child(_in_child)
