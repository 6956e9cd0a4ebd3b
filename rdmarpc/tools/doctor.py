"""``rdmarpc doctor``: what this host can do, which device reaches a peer, and what would make the faster ones work."""

from __future__ import annotations

import argparse
import importlib
import ipaddress
import json
import os
import pkgutil
import platform
import re
import secrets
import shutil
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from .. import transport
from ..calls import environment
from ..graph import size
from ..links.group.members import chosen_secret
from ..options import RpcBackendOptions
from ..transport import PINNED_SEGMENT_BYTES, AuthenticationError, AutoDevice, RdmaError, gpudirect, host_id, sysfs
from ..transport import cuda_driver as driver

# -- facts about a host, most of which its kernel shows in files: one *finding* a fact

# ``root`` is the folder below which a function looks: ``/`` but in tests. None needs rights or changes anything, and none but
# ``gpu`` opens a device.

OK, LIMITS, MISSING = "ok", "limits", "missing"
_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19
_NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number for none


class Finding(NamedTuple):
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


# -- what there is in all, and what reaches a peer

_CONNECT_TIMEOUT_S = 3.0
_CHOSEN = 3  # lines of a port that say what was chosen; the others, why not another
_ADDRESSES = ("auto:", "shm:", "verbs:", "tcp:")
_SOFTWARE = "without hardware, to try it: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0"
_NO_HOST = "give a host's name (getent hosts NAME), or Device.address of a worker; names of workers are not known here"
_WITHIN = {"shm": "processes of this host", "verbs": "hosts with a usable RDMA port, too", "tcp": "all other hosts"}


class Way(NamedTuple):
    """How one device stands towards a peer, or towards peers at large: ``why_not`` is empty where it works."""

    device: str
    why_not: str
    hint: str = ""


def ports(found: list[sysfs.Found]) -> list[Finding]:
    """Each RDMA port, the one to use first."""
    if not found:
        return [Finding("rdma", MISSING, "this host has no RDMA device (/sys/class/infiniband is empty)", _SOFTWARE)]
    try:
        port = transport.ports.choose(transport.packages.choose())
    except RdmaError as error:
        return [Finding("rdma", MISSING, error.message, error.hint)]
    port.context.close()
    chosen, others = port.lines[:_CHOSEN], port.lines[_CHOSEN:]
    rest = [Finding("rdma", LIMITS if " left out: " in line else OK, line) for line in others]
    return [Finding("rdma", OK, "; ".join(chosen)), *rest]


def host(root: Path = Path("/")) -> list[Finding]:
    """The facts about this host."""
    arena = transport.default_limit()
    tcp = _listening()
    return [
        *ports(sysfs.survey()),
        memlock(root, arena),
        *filter(None, [rdma_cgroup(root)]),
        *gpu(root),
        memory(root, arena),
        huge_pages(root),
        attach(root),
        tcp,
        sockets(root),
        threads(len(transport.processors())),
        heap(),
        encryption(),
        job_secret(),
    ]


def job_secret() -> Finding:
    """What the workers that are started from here would share."""
    try:
        found = chosen_secret(RpcBackendOptions())
    except (ValueError, AuthenticationError) as error:
        return Finding("secret", MISSING, str(error), "export RDMARPC_SECRET=$(openssl rand -hex 32)")
    return Finding("secret", OK, f"{len(found)} bytes" if found else "none is set: enough for workers of one user on one host")


def encryption() -> Finding:
    """Whether ``tls`` can be on."""
    try:
        library = transport.openssl.library()
    except RdmaError as error:
        return Finding("tls", MISSING, error.message, error.hint)
    return Finding("tls", OK, f"{transport.openssl.version(library)}: tls=True encrypts tcp")


def ways(auto: AutoDevice) -> list[Way]:
    """The devices that open here."""
    refused = {kind: Way(kind, refusal.why, refusal.hint) for kind, refusal in auto.refused.items()}
    return [refused.get(kind, Way(kind, "")) for kind in _WITHIN]


def ways_to(auto: AutoDevice, address: str) -> list[Way]:
    """The devices, the fastest first, towards the device at that address; tcp by trying whether somebody answers."""
    found = []
    for kind, refusal in auto.weigh(address.encode()).items():
        if refusal is not None:
            found.append(Way(kind, refusal.why, refusal.hint))
        elif kind == "tcp":
            part = next(part for part in address.removeprefix("auto:").split(",") if part.startswith("tcp:"))
            name, _, port = part.removeprefix("tcp:").rpartition(":")[0].rpartition(":")
            found.append(Way(kind, *_answers(name.strip("[]"), int(port))))
        else:
            found.append(Way(kind, ""))
    return found


def _answers(name: str, port: int) -> tuple[str, str]:
    """Why there is nobody, and what to look at; twice empty where somebody listens."""
    try:
        socket.create_connection((name, port), _CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return f"nobody listens at {name}:{port} any more", "is the peer still running?"
    except TimeoutError:
        return f"no answer from {name}:{port}", f"a firewall? nc -vz {name} {port}"
    except OSError as error:
        return f"{name}:{port}: {error.strerror or error}", f"ip route get {name}"
    return "", ""


def _listening() -> Finding:
    """Where other hosts reach this one."""
    try:
        address, how = transport.where_to_listen()
    except RdmaError as error:
        return Finding("tcp", MISSING, error.message, error.hint)
    if ipaddress.ip_address(address).is_loopback:
        return Finding("tcp", LIMITS, f"other hosts do not reach this one: {how}", "ip route; or tcp://ADDRESS")
    guess = how.startswith("?")
    return Finding("tcp", LIMITS if guess else OK, f"other hosts reach this one at {address} ({how.removeprefix('?')})")


def ways_to_host(auto: AutoDevice, name: str) -> list[Way]:
    """As far as can be told without an address of a running worker: what that host would need."""
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError as error:
        why = f"no host is called {name} here ({error.strerror or error})"
        return [Way(kind, why, _NO_HOST if kind == "tcp" else "") for kind in _WITHIN]
    own = _source(address)
    here = {way.device: way for way in ways(auto)}
    if own == address or ipaddress.ip_address(address).is_loopback:  # as Debian's 127.0.1.1, for the host's own name
        return [here["shm"], *(Way(kind, "it is this host", "") for kind in ("verbs", "tcp"))]
    perhaps = Way("verbs", "", f"if `rdmarpc doctor` on {name} shows a port of the same kind")
    found = [Way("shm", "it is another host"), here["verbs"] if here["verbs"].why_not else perhaps]
    if not own:
        found.append(Way("tcp", f"there is no route to {address}", f"ip route get {address}"))
    else:
        found.append(here["tcp"] if here["tcp"].why_not else Way("tcp", "", f"from {own} to {address}, with one job secret"))
    return found


def _source(address: str) -> str:
    """Our address when we send there; empty if there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def taken(found: list[Way]) -> str:
    """The device that is used; empty: none is."""
    return next((way.device for way in found if not way.why_not), "")


_BAR = 40


def compile_kernels() -> None:
    """Have the code of all kernels on disk; shows on standard error how far it is."""
    for module in pkgutil.walk_packages(transport.__path__, f"{transport.__name__}."):
        importlib.import_module(module.name)
    importlib.import_module("rdmarpc.links.polling.steps")
    for done, kernel in enumerate(transport.known_kernels, 1):
        kernel.load()
        filled = _BAR * done // len(transport.known_kernels)
        text = f"\r[{'#' * filled}{'.' * (_BAR - filled)}] {done} of {len(transport.known_kernels)} kernels"
        print(text, end="\n" if done == len(transport.known_kernels) else "", file=sys.stderr, flush=True)


# -- the page

_WIDTH = 100


def page(findings: list[Finding], devices: list[Way], towards: Mapping[str, list[Way]], width: int) -> str:
    """Text of at most ``width`` columns."""
    lines = [f"{platform.node()}: Linux {platform.release()}, Python {platform.python_version()}, host {host_id()}", ""]
    for finding in findings:
        lines += _entry(finding.state, finding.topic, finding.text, "" if finding.state == OK else finding.hint, width)
    lines += ["", "transport=auto reaches, by the first that works:"]
    lines += _rows(devices, {way.device: _WITHIN[way.device] for way in devices}, width)
    for peer, found in towards.items():
        used = taken(found)
        lines += ["", *textwrap.wrap(f"to {peer}: " + (used or "no device reaches it"), width, subsequent_indent="  ")]
        lines += _rows(found, {way.device: "is used" if way.device == used else "would work" for way in found}, width)
    return "\n".join(lines)


def _rows(found: list[Way], good: dict[str, str], width: int) -> list[str]:
    lines = []
    for way in found:
        text = f"not: {way.why_not}" if way.why_not else good[way.device]
        lines += _entry(MISSING if way.why_not else OK, way.device, text, way.hint, width)
    return lines


def _entry(state: str, topic: str, text: str, hint: str, width: int) -> list[str]:
    mark = {OK: "ok", LIMITS: "limits", MISSING: "-"}[state]
    head = f"  {mark:<7} {topic:<12} "
    margin = " " * len(head)
    lines = textwrap.wrap(text, width, initial_indent=head, subsequent_indent=margin)
    if hint and "rdmarpc doctor" not in hint:  # which this is
        lines += textwrap.wrap(f"> {hint}", width, initial_indent=margin, subsequent_indent=margin + "  ")
    return lines


def main(arguments: list[str]) -> None:
    """``rdmarpc doctor [PEER] [--require rdma] [--json] [--compile]``: exit code 1 if nothing reaches the peer, or not what is
    required."""
    parser = argparse.ArgumentParser(prog="rdmarpc doctor", description=__doc__)
    parser.add_argument("peer", nargs="?", help="Device.address of a running worker, or the name of a host")
    parser.add_argument("--require", choices=["rdma"], default="", help="exit with 1 unless RDMA (to the peer) is possible")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument("--compile", action="store_true", help="first compile all kernels, so that no later process has to")
    given = parser.parse_args(arguments)
    if given.compile:
        compile_kernels()
    findings = host()
    try:
        # The secret is our own: nobody gets in while we look.
        auto = transport.open_device("auto", secret=secrets.token_bytes(32))
    except RdmaError as error:
        sys.exit(f"rdmarpc doctor: {error}")
    assert isinstance(auto, AutoDevice)
    towards: dict[str, list[Way]] = {}
    with auto:
        devices = ways(auto)
        if given.peer:
            known = given.peer.startswith(_ADDRESSES)
            towards[given.peer] = ways_to(auto, given.peer) if known else ways_to_host(auto, given.peer)
    if given.json:
        found = {
            "host": host_id(),
            "findings": [finding._asdict() for finding in findings],
            "devices": [way._asdict() for way in devices],
            "peers": {peer: [way._asdict() for way in to] for peer, to in towards.items()},
        }
        print(json.dumps(found, indent=2))
    else:
        print(page(findings, devices, towards, min(shutil.get_terminal_size((_WIDTH, 24)).columns, 120)))
    used = taken(towards[given.peer] if given.peer else devices)
    lacks = given.require and (used == "tcp" if given.peer else any(way.device == "verbs" and way.why_not for way in devices))
    sys.exit(1 if not used or lacks else 0)
