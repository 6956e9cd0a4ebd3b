"""What happens in one trial: drawn from one number, so that the number is enough to do it again."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass

PEER_TIMEOUT_S = 2.0
"""Of every worker in a trial."""
GRACE_S = 3.0
"""Nobody may wait for longer than ``PEER_TIMEOUT_S`` and this after a fault."""

LETHAL = ("kill", "stop", "sleeper", "exit", "socket", "cut", "raise")
"""Afterwards the victim is lost to others: for good, or (``socket``) to one of them."""
GENTLE = ("pause", "gil", "delay", "callbacks", "descriptors", "arena", "interrupt")
"""Afterwards everything goes on with right results."""
PROGRAMS = ("statements", "served", "wrapped", "distributed")
"""Drawn programs, of each kind."""
WORKLOADS = ("calls", "flood", "references", "autograd", "wrap", "serve", "groups", "channels", *PROGRAMS, "collective")
DEVICES = ("shm", "tcp", "auto")


@dataclass(frozen=True)
class Fault:
    """``victim``: its rank. ``phase``: ``init``, ``work`` or ``shutdown``; ``after``: seconds into it. ``seconds``: how long it
    lasts, where it does. ``by``: the rank that brings it about, where that is a worker."""

    kind: str
    victim: int
    phase: str
    after: float
    seconds: float
    by: int

    @property
    def lethal(self) -> bool:
        return self.kind in LETHAL


@dataclass(frozen=True)
class Trial:
    number: int
    workload: str
    device: str
    size: int
    faults: tuple[Fault, ...]

    @property
    def dead(self) -> set[int]:
        """Who is lost to all others in the end, whenever that is."""
        return {fault.victim for fault in self.faults if fault.lethal and fault.kind != "socket"}

    def __str__(self) -> str:
        faults = " and ".join(
            f"{fault.kind} of worker{fault.victim} {fault.after:.2f} s into {fault.phase}"
            + (f" for {fault.seconds:.1f} s" if fault.kind in ("pause", "sleeper", "gil", "delay", "descriptors") else "")
            for fault in self.faults
        )
        return f"{self.number}: {self.workload} of {self.size} over {self.device}, {faults or 'no fault'}"


def why_no_cut() -> str:
    """Why no host can be cut off here, or empty."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    return f"no {', '.join(missing)} here" if missing else ""


def draw(number: int, devices: tuple[str, ...] = DEVICES, workloads: tuple[str, ...] = WORKLOADS) -> Trial:
    """The trial of that number. Which devices and workloads there are to choose from belongs to the number."""
    chance = random.Random(number)
    workload, device = chance.choice(workloads), chance.choice(devices)
    drawn, grouped = workload in PROGRAMS, workload == "collective"
    size = 4 if drawn else {"serve": 4, "wrap": 3}.get(workload) or chance.choice((2, 3) if grouped else (3, 3, 4))
    kinds = [kind for kind in LETHAL + GENTLE if drawn or grouped or kind not in ("raise", "interrupt")]
    if workload == "channels":
        kinds = [kind for kind in kinds if kind not in ("exit", "callbacks", "delay", "arena")]
    if workload == "groups":  # who could bring it about may be elsewhere
        kinds = [kind for kind in kinds if kind not in ("exit", "callbacks", "socket")]
    if grouped:  # without RPC, beside gloo, over a file store, which aborts where it can open no file
        kinds = [kind for kind in kinds if kind not in ("exit", "callbacks", "delay", "arena", "cut", "descriptors")]
    elif why_no_cut() or workload in ("channels", "serve"):
        kinds.remove("cut")
    if drawn or workload in ("serve", "wrap"):
        kinds.remove("arena")
    count = 1 if grouped else chance.choice((1, 1, 1, 1, 2))
    victims = chance.sample(range(size), count)
    faults = tuple(_fault(chance, kinds, size, victim) for victim in victims)
    if any(fault.kind == "cut" for fault in faults):
        faults, device = faults[:1] if faults[0].kind == "cut" else faults[1:], "tcp"
    return Trial(number, workload, device, size, faults)


def _fault(chance: random.Random, kinds: list[str], size: int, victim: int) -> Fault:
    kind = chance.choice(kinds)
    if kind in ("raise", "interrupt"):  # who runs a program goes on with it
        kind = "interrupt" if victim in (0, size - 1) else "raise"
    phase = chance.choices(("init", "work", "shutdown"), (1, 12, 2))[0]
    if kind not in ("kill", "stop", "pause") or ("exit" not in kinds and phase == "init"):
        phase = "work"
    after = {
        "init": chance.uniform(0.0, 0.15),
        "work": chance.uniform(0.02, 2.0 if "raise" in kinds else 0.8),
        "shutdown": chance.uniform(0.0, 0.03),
    }[phase]
    seconds = {
        "pause": chance.uniform(0.1, 0.5 * PEER_TIMEOUT_S),
        "sleeper": PEER_TIMEOUT_S + chance.uniform(1.0, 2.0),
        "gil": chance.uniform(0.3, 4.0),
        "delay": 1.0,
        "descriptors": 0.7,
    }.get(kind, 0.0)
    by = chance.choice([rank for rank in range(size) if rank != victim])
    return Fault(kind, victim, phase, after, seconds, by)
