"""Facts about a host that its kernel shows in files: one *finding* a fact. Every function takes the folder below which it
looks, ``/`` but in tests; none needs rights or changes anything, and none but ``gpu`` opens a device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..calls import environment
from ..graph import size
from ..transport import PINNED_SEGMENT_BYTES, RdmaError, gpudirect
from ..transport import cuda_driver as driver

OK, LIMITS, MISSING = "ok", "limits", "missing"
_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19
_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number for none


@dataclass(frozen=True, slots=True)
class Finding:
    """``state``: ``OK``; ``LIMITS``: works, but something is slower or smaller than it could be; ``MISSING``: it is not there.
    ``hint``: what would change that, a command if there is one."""

    topic: str
    state: str
    text: str
    hint: str = ""


def memlock(root: Path, needed: int) -> Finding:
    """How much memory this process may pin for an RDMA device. ``needed``: bytes, the arena's limit."""
    line = re.search(r"^Max locked memory\s+(\S+)", _read(root / "proc/self/limits"), re.MULTILINE)
    limit = line[1] if line else "unknown"
    hint = "ulimit -l unlimited (LimitMEMLOCK=infinity for slurmd or a service, --ulimit memlock=-1 for a container)"
    if limit == "unlimited":
        return Finding("memlock", OK, "unlimited: all of the arena can be registered with an RDMA device")
    if not limit.isdigit():
        return Finding("memlock", LIMITS, "cannot be found out (/proc/self/limits)", "ulimit -l")
    # The kernel asks for this one in its first user namespace, so a rootless container has it in vain.
    if _capable(root, _CAP_IPC_LOCK) and _read(root / "proc/self/uid_map").split() == ["0", "0", "4294967295"]:
        return Finding("memlock", OK, f"{size(int(limit))}, which does not bind this process (CAP_IPC_LOCK)")
    if int(limit) < PINNED_SEGMENT_BYTES:
        text = f"{size(int(limit))}: too little for one segment ({size(PINNED_SEGMENT_BYTES)})"
        return Finding("memlock", MISSING, text, hint)
    if int(limit) < needed:
        return Finding("memlock", LIMITS, f"{size(int(limit))}, the arena may grow to {size(needed)}", hint)
    return Finding("memlock", OK, f"{size(int(limit))}, enough for the arena ({size(needed)})")


def memory(root: Path, needed: int) -> Finding:
    """The memory that the cgroup lets this process use. ``needed``: the arena's limit in bytes."""
    limits = [int(text) for text in _cgroup_values(root, "memory", "memory.max", "memory.limit_in_bytes") if text.isdigit()]
    limit = min(limits, default=_NO_LIMIT)
    if limit >= _NO_LIMIT:
        return Finding("memory", OK, f"no cgroup limit; the arena may grow to {size(needed)}")
    if limit < needed:
        hint = f"RDMARPC_ARENA_LIMIT={limit // 2 >> 20}MiB, or a larger limit for the container or the job (--mem)"
        text = f"the cgroup allows {size(limit)}, and kills beyond; the arena may grow to {size(needed)}"
        return Finding("memory", LIMITS, text, hint)
    return Finding("memory", OK, f"the cgroup allows {size(limit)}, the arena {size(needed)}")


def rdma_cgroup(root: Path) -> Finding | None:
    """The limits of the cgroup's rdma controller; ``None`` if there are none."""
    lines = {line for text in _cgroup_values(root, "rdma", "rdma.max", "rdma.max") for line in text.splitlines()}
    bound = sorted(line for line in lines if re.search(r"=\d", line))
    if not bound:
        return None
    return Finding("rdma cgroup", LIMITS, "; ".join(bound), "rdma.max of this cgroup; a worker takes 1 handle, 1 object a peer")


def gpu(root: Path, status_of: Callable[[str], str] = gpudirect.ask) -> list[Finding]:
    """The way by which each RDMA adapter reaches the memory of each GPU, why not by a better one, and what would change that.
    Asks the GPUs' driver, and opens each adapter for a moment (``status_of``: as for ``gpudirect.survey``)."""
    topic, other = "gpu memory", "tensors on them travel between hosts through host memory"
    if not driver.kind():
        if not (root / "proc/driver/nvidia").exists():
            return [Finding(topic, OK, "no NVIDIA driver here: nothing is needed")]
        return [Finding(topic, LIMITS, "GPUs are here, and torch is built without CUDA", "install a CUDA build of torch")]
    try:
        found = gpudirect.survey(root, status_of)
    except RdmaError as error:
        return [Finding(topic, MISSING, f"the GPUs' driver does not answer: {error.message}", error.hint)]
    if not found:
        return [Finding(topic, OK, f"GPUs, and no RDMA adapter: {other}")]
    groups: dict[tuple[int, gpudirect.Decision], list[tuple[int, str]]] = {}
    for one, adapter, decision in found:
        far = gpudirect.distance(one, adapter)
        groups.setdefault((one.index, decision), []).append((gpudirect.DISTANCES.index(far), f"{adapter.name} ({far})"))
    return [_gpu(topic, index, decision, [name for _, name in sorted(near)]) for (index, decision), near in groups.items()]


def _gpu(topic: str, index: int, decision: gpudirect.Decision, adapters: list[str]) -> Finding:
    """One GPU, and adapters that reach it alike, the nearest first."""
    staged = decision.way == gpudirect.STAGED
    way = "staged in host memory" if staged else f"reached by {decision.way} (untried on hardware)"
    text = "; ".join([f"GPU {index} is {way}, from {', '.join(adapters)}", *map(str, decision.why)])
    hint = next((refused.hint for refused in decision.why if refused.hint), "")
    return Finding(topic, LIMITS if staged else OK, text, hint)


def attach(root: Path) -> Finding:
    """Whether a process may read tensors of another that are not in the arena."""
    text = _read(root / "proc/sys/kernel/yama/ptrace_scope")
    staged = "what is not in the arena is copied once more on its way"
    if not text or text == "0" or _capable(root, _CAP_SYS_PTRACE):
        why = "CAP_SYS_PTRACE" if text not in ("", "0") else "no yama" if not text else "ptrace_scope 0"
        return Finding("attach", OK, f"cross-memory attach between processes of one user is allowed ({why})")
    if text == "3":
        return Finding("attach", LIMITS, f"ptrace_scope is 3: {staged}", "kernel.yama.ptrace_scope=0 at boot (sysctl.conf)")
    return Finding("attach", LIMITS, f"ptrace_scope is {text}: {staged}", "sysctl kernel.yama.ptrace_scope=0")


def huge_pages(root: Path) -> Finding:
    """Whether the arena's pages may be large, of memory that peers of this host map; of other memory the system decides."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    modes = {name: (re.findall(r"\[(\w+)\]", _read(folder / name)) or ["unknown"])[0] for name in ("shmem_enabled", "enabled")}
    text = f"shared memory {modes['shmem_enabled']}, private memory {modes['enabled']}"
    if modes["shmem_enabled"] in ("advise", "always", "within_size", "force"):
        return Finding("huge pages", OK, text)
    return Finding("huge pages", LIMITS, text, f"echo advise > {Path('/', folder.relative_to(root))}/shmem_enabled")


def sockets(root: Path) -> Finding:
    """How much the kernel buffers for a TCP connection."""
    names = ("tcp_wmem", "tcp_rmem")
    texts = [_read(root / "proc/sys/net/ipv4" / name).split() for name in names]
    if not all(len(text) == 3 for text in texts):
        return Finding("tcp buffers", LIMITS, "cannot be found out (/proc/sys/net/ipv4)")
    most = [int(text[2]) for text in texts]
    text = ", ".join(f"{name} up to {size(value)}" for name, value in zip(names, most, strict=True))
    if min(most) >= 4 << 20:
        return Finding("tcp buffers", OK, text)
    return Finding("tcp buffers", LIMITS, text, "sysctl net.ipv4.tcp_wmem='4096 65536 16777216' (and tcp_rmem)")


def threads(cores: int, environ: Mapping[str, str] = os.environ) -> Finding:
    """What OpenMP's threads do between parallel regions."""
    each = f"{environ.get('OMP_NUM_THREADS') or cores} threads a process on {cores} cores"
    if environment.spins(environ):
        text = f"{each}; they spin when they wait, which slows other workers of this host"
        return Finding("threads", LIMITS, text, f"{environment.PASSIVE} before Python starts, or a smaller OMP_NUM_THREADS")
    return Finding("threads", OK, f"{each}; they sleep when they wait")


def heap(environ: Mapping[str, str] = os.environ) -> Finding:
    """What becomes of large tensors that functions free."""
    if environment.gives_back(environ):
        text = "glibc gives freed blocks of 32 MiB and more back to the system: large temporaries of functions cost page faults"
        return Finding("heap", LIMITS, text, f"{environment.KEEPING} before Python starts (keeps up to 1 GiB)")
    return Finding("heap", OK, "freed blocks stay with the process")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _capable(root: Path, capability: int) -> bool:
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", _read(root / "proc/self/status"), re.MULTILINE)
    return bool(found) and bool(int(found[1], 16) >> capability & 1)  # type: ignore[index]


def _cgroup_values(root: Path, controller: str, v2_name: str, v1_name: str) -> Iterator[str]:
    """The contents of one file of this process's cgroup and of all cgroups around it."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top, name = (mount / controller, v1_name) if controllers else (mount, v2_name)
        place = Path(os.path.normpath(top / path.lstrip("/")))
        while place.is_relative_to(top):
            if text := _read(place / name):
                yield text
            place = place.parent
