"""Where a ``tcp`` device listens: hosts with IPv6 alone, several interfaces, no default route, and what programs say of it."""

from __future__ import annotations

import tempfile
import textwrap

import hosts
import pytest
from programs import run

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not())
PROGRAM = """
    import ctypes, logging, subprocess, sys
    assert ctypes.CDLL(None, use_errno=True).unshare(0x40000000) == 0
    for command in {commands!r}:
        subprocess.run(["ip", *command.split()], check=True)
    logging.basicConfig(stream=sys.stdout, format="LOG %(message)s")
    from rdmarpc import transport
    secret = {secret!r}
    try:
        a = transport.open_device({place!r}, **({{"secret": secret}} if secret else {{}}))
    except transport.RdmaError as error:
        print("ERROR", error)
        sys.exit()
    text = a.address.decode()
    print("ADDRESS", text)
    print(a.explain())
    if a.name != "auto":
        import torch
        b = transport.open_device({place!r}.removesuffix(":5123"), **({{"secret": secret}} if secret else {{}}))
        channel = b.connect(a.address)
        other = a.accept(timeout=30)
        tensor = a.empty((4,), dtype=torch.float32).fill_(3)
        found = torch.zeros(4)
        channel.memcpy(found, transport.RemoteRegion.load(a.export(tensor))).wait(30)
        assert found.sum() == 12
        print("REACHED")
        b.close()
    a.close()
"""


CHOOSING = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR")
"""Variables that say which interface is taken; empty ones are none."""


def listening(commands: list[str], place: str = "tcp", secret: bytes = b"open sesame, open", **variables: str) -> str:
    """What a program prints on a host with these interfaces: in a network namespace of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(textwrap.dedent(PROGRAM.format(commands=commands, place=place, secret=secret)))
        file.flush()
        done = run(file.name, timeout=120, environment=dict.fromkeys(CHOOSING, "") | variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


def link(name: str, *addresses: str) -> list[str]:
    """Commands that make an interface."""
    return [
        f"link add {name} type veth peer name {name}-end",
        f"link set {name}-end up",
        *(f"addr add {address} dev {name}{' nodad' if ':' in address else ''}" for address in addresses),
        f"link set {name} up",
    ]


LO = ["link set lo up"]
SIX = [*LO, "addr del 127.0.0.1/8 dev lo", *link("one", "2001:db8:1::1/64"), "-6 route add default dev one"]
TWO = [*LO, *link("one", "10.1.0.1/24"), *link("two", "10.2.0.1/24", "2001:db8:2::1/64")]


@pytest.mark.parametrize(
    "place", ["tcp", "tcp://one", "tcp://2001:db8:1::1", "tcp://[2001:db8:1::1]", "tcp://[::]", "tcp://one:5123"]
)
def test_a_host_with_ipv6_alone(place: str) -> None:
    found = listening(SIX, place)
    assert "ADDRESS tcp:[2001:db8:1::1]:" in found and "REACHED" in found
    assert (":5123:" in found) == place.endswith("5123")


def test_auto_on_a_host_with_ipv6_alone() -> None:
    assert "tcp:[2001:db8:1::1]:" in listening(SIX, "auto")


def test_without_a_secret_the_loopback_address_is_one_that_there_is() -> None:
    found = listening(SIX, secret=b"")
    assert "ADDRESS tcp:[::1]:" in found and "REACHED" in found


def test_one_interface_without_a_default_route() -> None:
    for address, shown in (("10.1.0.1/24", "10.1.0.1"), ("2001:db8:1::1/64", "[2001:db8:1::1]")):
        found = listening([*LO, *link("one", address)])
        assert f"ADDRESS tcp:{shown}:" in found and "the only interface" in found and "LOG" not in found


def test_two_interfaces_and_no_default_route() -> None:
    found = listening(TWO)
    assert "ADDRESS tcp:10.1.0.1:" in found
    assert (
        "LOG other hosts reach this one at 10.1.0.1, one of one (10.1.0.1), two (10.2.0.1): there is no default route" in found
    )
    assert "TP_SOCKET_IFNAME" in found
    for first, shown in (("10.2.0.77", "10.2.0.1"), ("2001:db8:2::77", "[2001:db8:2::1]"), ("10.2.0.1", "10.2.0.1")):
        found = listening(TWO, MASTER_ADDR=first)
        assert f"ADDRESS tcp:{shown}:" in found and "LOG" not in found


def test_a_link_local_address_that_is_asked_for_is_refused() -> None:
    found = listening([*LO, *link("one", "fe80::1/64")], "tcp://fe80::1%one")
    assert "ERROR tcp on fe80::1: to other hosts a link-local IPv6 address has a meaning on one of" in found


def test_nothing_leads_to_other_hosts() -> None:
    assert "no interface leads to other hosts" in listening(LO)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("TP_SOCKET_IFNAME", "two"),
        ("GLOO_SOCKET_IFNAME", "two"),
        ("GLOO_SOCKET_IFNAME", "two,one"),
        ("NCCL_SOCKET_IFNAME", "tw"),
        ("NCCL_SOCKET_IFNAME", "=two"),
        ("NCCL_SOCKET_IFNAME", "^one"),
    ],
)
def test_variables_of_torchs_backends_choose_an_interface(variable: str, text: str) -> None:
    found = listening(TWO, **{variable: text})
    assert "LOG" not in found and f"({variable})" in found
    assert "ADDRESS tcp:10.2.0.1:" in found or ("," in text and "ADDRESS tcp:10.1.0.1:" in found)


def test_names_that_there_are_not_are_errors() -> None:
    for variable, text in (("TP_SOCKET_IFNAME", "eth9"), ("NCCL_SOCKET_IFNAME", "=tw"), ("NCCL_SOCKET_IFNAME", "^one,two")):
        found = listening(TWO, **{variable: text})
        assert f"ERROR {variable}={text} names no interface" in found and "one (10.1.0.1), two (10.2.0.1)" in found
    found = listening([*TWO, "link add three type veth peer name three-end"], "tcp://three")
    assert "ERROR no address, or interface with one, 'three' here" in found and "two (10.2.0.1)" in found
    assert "ADDRESS tcp:10.2.0.1:" in listening(TWO, "tcp://two", TP_SOCKET_IFNAME="eth9")  # what is asked for counts
