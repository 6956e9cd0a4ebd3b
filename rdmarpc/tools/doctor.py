"""``rdmarpc doctor``: what this host can do, which device reaches a peer, and what would make the faster ones work."""

from __future__ import annotations

import argparse
import importlib
import ipaddress
import json
import pkgutil
import platform
import secrets
import shutil
import socket
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import transport
from ..transport import AutoDevice, RdmaError, host_id, sysfs
from . import host_facts
from .host_facts import LIMITS, MISSING, OK, Finding

_CONNECT_TIMEOUT_S = 3.0
_WIDTH = 100
_BAR = 40
_CHOSEN = 3  # lines of a port that say what was chosen; the others, why not another
_ADDRESSES = ("auto:", "shm:", "verbs:", "tcp:")
_SOFTWARE = "without hardware, to try it: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev {}"
_NO_HOST = "give a host's name (getent hosts NAME), or Device.address of a worker; names of workers are not known here"
_WITHIN = {"shm": "processes of this host", "verbs": "hosts with a usable RDMA port, too", "tcp": "all other hosts"}


@dataclass(frozen=True, slots=True)
class Way:
    """How one device stands towards a peer, or towards peers at large: ``why_not`` is empty where it works."""

    device: str
    why_not: str
    hint: str = ""


def ports(found: list[sysfs.Found]) -> list[Finding]:
    """Each RDMA port, the one to use first."""
    if not found:
        hint = _SOFTWARE.format("eth0")
        return [Finding("rdma", MISSING, "this host has no RDMA device (/sys/class/infiniband is empty)", hint)]
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
        host_facts.memlock(root, arena),
        *filter(None, [host_facts.rdma_cgroup(root)]),
        *host_facts.gpu(root),
        host_facts.memory(root, arena),
        host_facts.huge_pages(root),
        host_facts.attach(root),
        tcp,
        host_facts.sockets(root),
        host_facts.threads(len(transport.processors())),
        host_facts.heap(),
        encryption(),
    ]


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
        address = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)[0][4][0]
    except OSError as error:
        why = f"no host is called {name} here ({error.strerror or error})"
        return [Way(kind, why, _NO_HOST if kind == "tcp" else "") for kind in _WITHIN]
    own = _source(str(address))
    here = {way.device: way for way in ways(auto)}
    if own == address:
        return [here["shm"], *(Way(kind, "it is this host", "") for kind in ("verbs", "tcp"))]
    found = [Way("shm", "it is another host")]
    if here["verbs"].why_not:
        found.append(here["verbs"])
    else:
        found.append(Way("verbs", "", f"if `rdmarpc doctor` on {name} shows a port of the same kind"))
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
            "findings": [asdict(finding) for finding in findings],
            "devices": [asdict(way) for way in devices],
            "peers": {peer: [asdict(way) for way in to] for peer, to in towards.items()},
        }
        print(json.dumps(found, indent=2))
    else:
        print(page(findings, devices, towards, min(shutil.get_terminal_size((_WIDTH, 24)).columns, 120)))
    used = taken(towards[given.peer] if given.peer else devices)
    lacks = given.require and (used == "tcp" if given.peer else any(way.device == "verbs" and way.why_not for way in devices))
    sys.exit(1 if not used or lacks else 0)
