"""Which port is taken, on hosts that are described rather than owned: the decisions are functions of plain data."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmarpc.transport import NotSupported
from rdmarpc.transport.nic import ports as verbs_ports
from rdmarpc.transport.nic import sysfs
from rdmarpc.transport.nic.ports import as_address
from rdmarpc.transport.nic.sysfs import Found, Gid


def gid(index: int, address: str, kind: str = "RoCEv2", netdev: str = "eth0") -> Gid:
    ip = ipaddress.ip_address(address)
    raw = ip.packed if ip.version == 6 else b"\0" * 10 + b"\xff\xff" + ip.packed
    return Gid(index, raw, kind, netdev)


def roce(device: str, *gids: Gid, number: int = 1, rate: float = 100, near: int | None = None, state: str = "ACTIVE") -> Found:
    interfaces = {entry.netdev: "" for entry in gids}
    return Found(device, number, "CA", state, "ETHERNET", 0, rate, gids, near, interfaces)


def ib(
    device: str, *, number: int = 1, lid: int = 7, rate: float = 400, near: int | None = None, state: str = "ACTIVE"
) -> Found:
    entry = Gid(0, bytes.fromhex("fe80000000000000506b4b0300a1b2c3"), "IB", "")
    return Found(device, number, "CA", state, "INFINIBAND", lid, rate, (entry,), near, {"ib0": "10.3.0.5"})


FOUR_OF_A_PORT = (
    gid(0, "fe80::1", "RoCEv1"),
    gid(1, "fe80::1"),
    gid(2, "10.0.0.1", "RoCEv1"),
    gid(3, "10.0.0.1"),
)
"""What an adapter shows for an interface with one IPv4 address."""


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        (FOUR_OF_A_PORT, 3),
        ((gid(0, "fe80::1"), gid(1, "10.77.0.1")), 1),
        ((gid(0, "fe80::1"), gid(1, "2001:db8::1"), gid(2, "10.0.0.1")), 2),
        ((gid(0, "fe80::1"), gid(1, "2001:db8::1")), 1),
        ((gid(0, "fe80::1", "RoCEv1"), gid(1, "fe80::1")), 1),
        ((gid(0, "10.0.0.1", "RoCEv1"), gid(1, "fe80::1", "RoCEv1")), 0),
        ((gid(0, "fe80::1", "RoCEv1"),), 0),
        ((gid(0, "169.254.3.4"), gid(5, "fd00::5")), 5),
        ((gid(0, "127.0.0.1"), gid(1, "192.168.0.1")), 1),
        ((gid(4, "10.0.0.2"), gid(3, "10.0.0.1")), 3),
    ],
)
def test_which_address(gids: tuple[Gid, ...], index: int) -> None:
    chosen, why = verbs_ports.pick_gid(roce("mlx5_0", *gids))
    assert chosen is not None and chosen.index == index
    assert why.startswith(f"GID {index} {as_address(chosen.raw)}, eth0: ")


def test_the_address_of_the_interface_that_was_named() -> None:
    port = roce("mlx5_0", gid(3, "10.0.0.1", netdev="eth0"), gid(5, "10.9.0.1", netdev="eth0.9"))
    assert verbs_ports.pick_gid(port, "eth0.9")[0] == port.gids[1]
    assert verbs_ports.pick_gid(port, "eth0.8") == (None, "no address: give eth0.8 an IP address (ip addr add ...)")
    assert verbs_ports.rank([port], "eth0.9")[0] == [port] and verbs_ports.interface_of(port, "eth0.9") == "eth0.9"
    assert verbs_ports.interface_of(port, "mlx5_0") == ""


LEFT_OUT = [
    (roce("mlx5_0", *FOUR_OF_A_PORT, state="DOWN"), "its port is DOWN: is the cable plugged"),
    (ib("mlx5_0", state="INIT", lid=0), "its port is INIT: it waits for a subnet manager"),
    (ib("mlx5_0", lid=0), "it has no LID"),
    (roce("mlx5_0"), "no address: give its interface an IP address"),
    (replace(roce("siw0", *FOUR_OF_A_PORT), node_type="RNIC"), "an iWARP adapter cannot announce a write"),
    (replace(roce("efa_0", *FOUR_OF_A_PORT), node_type="unspecified"), "an adapter of kind unspecified has no reliable"),
    (replace(roce("mlx5_0", *FOUR_OF_A_PORT), state=""), "its port is in an unknown state"),
    (roce("mlx5_0", gid(0, "10.0.0.1", kind="")), "no address"),
]


@pytest.mark.parametrize(("bad", "reason"), LEFT_OUT)
def test_a_bad_port_is_left_out_with_its_reason(bad: Found, reason: str) -> None:
    good = roce("mlx5_9", *FOUR_OF_A_PORT)
    order, lines = verbs_ports.rank([bad, good])
    assert order == [good]
    assert len(lines) == 1 and lines[0].startswith(f"{bad.name} left out: {reason}")
    assert verbs_ports.rank([bad])[0] == []


def test_eight_adapters_of_two_ports() -> None:
    """On two sockets, some ports down, one without an address: the near ones first, each other one with its reason."""
    ports = [
        roce(f"mlx5_{n}", gid(3, f"10.{n}.{number}.1"), number=number, near=10 if n >= 4 else 21)
        for n in range(8)
        for number in (1, 2)
    ]
    ports[8] = replace(ports[8], state="DOWN")  # mlx5_4:1
    ports[9] = replace(ports[9], gids=(gid(1, "fe80::9"),))  # mlx5_4:2, nearest by name, but on its wire only
    ports[15] = replace(ports[15], gbit_per_s=200)  # mlx5_7:2
    order, lines = verbs_ports.rank(ports)
    names = [port.name for port in order]
    assert names[0] == "mlx5_7:2"
    assert names[1:6] == ["mlx5_5:1", "mlx5_5:2", "mlx5_6:1", "mlx5_6:2", "mlx5_7:1"]
    assert names[6:14] == [f"mlx5_{n}:{number}" for n in range(4) for number in (1, 2)] and names[14:] == ["mlx5_4:2"]
    said = "\n".join(lines)
    assert "mlx5_4:1 left out: its port is DOWN" in said
    assert "mlx5_5:1 not needed: Ethernet, 100 Gb/s, NUMA distance 10; mlx5_7:2 is faster" in said
    assert "mlx5_0:1 not needed: Ethernet, 100 Gb/s, NUMA distance 21; mlx5_7:2 is nearer" in said
    assert "mlx5_4:2 not needed: Ethernet, 100 Gb/s, NUMA distance 10; mlx5_7:2 has an address that reaches farther" in said
    assert len(lines) == 15


def test_names_with_numbers_are_in_their_order() -> None:
    ports = [roce(name, *FOUR_OF_A_PORT) for name in ("mlx5_10", "mlx5_2", "bnxt_re0", "irdma1", "irdma0", "10g", "2g")]
    assert [port.device for port in verbs_ports.rank(ports)[0]] == [
        "2g",
        "10g",
        "bnxt_re0",
        "irdma0",
        "irdma1",
        "mlx5_2",
        "mlx5_10",
    ]
    assert verbs_ports.rank(ports)[1][-1].endswith("as good as 2g:1")


def test_an_adapter_that_the_firmware_places_comes_before_one_it_does_not() -> None:
    soft, far = roce("rxe0", *FOUR_OF_A_PORT, rate=1000), roce("mlx5_0", *FOUR_OF_A_PORT, near=32)
    assert verbs_ports.rank([soft, far])[0] == [far, soft]


def test_a_place_is_a_device_a_port_or_an_interface() -> None:
    one, two = roce("mlx5_0", *FOUR_OF_A_PORT), roce("mlx5_0", gid(1, "10.1.0.1", netdev="eth1"), number=2)
    bond = roce("mlx5_bond_0", gid(1, "10.2.0.1", netdev="bond0"))
    infini = ib("mlx5_1")
    host = [one, two, bond, infini]
    cases = {
        "": host,
        "mlx5_0": [one, two],
        "mlx5_0:2": [two],
        "eth1": [two],
        "bond0": [bond],
        "ib0": [infini],
        "mlx5_bond_0:1": [bond],
    }
    for place, expected in cases.items():
        assert verbs_ports.at_place(host, place) == expected, place
    for place in ("mlx5_0:3", "mlx5_2", "eth7", "eth1:1", "mlx5_0:", ":1", "mlx5_0:x"):
        with pytest.raises(NotSupported, match=r"no RDMA device, port or interface") as raised:
            verbs_ports.at_place(host, place)
        assert "mlx5_bond_0:1" in raised.value.hint and "bond0" in raised.value.hint
    with pytest.raises(NotSupported) as raised:
        verbs_ports.at_place([], "mlx5_0")
    assert "no RDMA device at all" in raised.value.hint
    assert verbs_ports.rank([]) == ([], [])


def test_where_the_control_stream_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs_ports, "where_to_listen", lambda: ("192.0.2.9", ""))
    four = roce("mlx5_0", *FOUR_OF_A_PORT)
    assert verbs_ports.listening_address(four, four.gids[3]) == "10.0.0.1"
    six = roce("mlx5_0", gid(2, "2001:db8::7"))
    assert verbs_ports.listening_address(six, six.gids[0]) == "2001:db8::7"
    infini = ib("mlx5_1")
    assert verbs_ports.listening_address(infini, infini.gids[0]) == "10.3.0.5"
    assert verbs_ports.listening_address(replace(infini, interfaces={}), infini.gids[0]) == "192.0.2.9"
    local = replace(roce("mlx5_0", gid(1, "fe80::1")), interfaces={"eth0": "10.0.0.3", "eth1": ""})
    assert verbs_ports.listening_address(local, local.gids[0]) == "10.0.0.3"


gids = st.builds(
    gid,
    st.integers(0, 255),
    st.sampled_from(["10.0.0.1", "10.9.9.9", "169.254.1.1", "127.0.0.1", "2001:db8::1", "fd00::1", "fe80::1", "::1"]),
    st.sampled_from(["RoCEv1", "RoCEv2", ""]),
    st.sampled_from(["e0", "e1"]),
)
any_port = st.builds(
    lambda name, number, entries, near, state, rate: replace(
        roce(name, *entries, number=number, near=near, rate=rate), state=state
    ),
    st.sampled_from(["mlx5_0", "mlx5_1", "rxe0"]),
    st.integers(1, 2),
    st.lists(gids, max_size=6, unique_by=lambda entry: entry.index),
    st.sampled_from([None, 10, 21]),
    st.sampled_from(["ACTIVE", "DOWN", "INIT", "ARMED", ""]),
    st.sampled_from([10.0, 100.0]),
)


def far(entry: Gid) -> bool:
    address = as_address(entry.raw)
    return not address.is_link_local and not address.is_loopback


@settings(max_examples=60, deadline=None)
@given(st.lists(any_port, max_size=8, unique_by=lambda port: port.name), st.randoms(use_true_random=False))
def test_every_port_is_used_or_explained_whatever_the_host(ports: list[Found], random: Random) -> None:
    order, lines = verbs_ports.rank(ports)
    assert {port.name for port in order} <= {port.name for port in ports if port.state == "ACTIVE" and port.gids}
    assert len(lines) == len(ports) - bool(order)
    for port in order:
        chosen, _ = verbs_ports.pick_gid(port)
        assert chosen in port.gids and chosen is not None and chosen.kind
        for better in (  # the first of these wishes that some entry fulfils is fulfilled
            lambda entry: entry.kind == "RoCEv2" and far(entry) and as_address(entry.raw).version == 4,
            lambda entry: entry.kind == "RoCEv2" and far(entry),
            lambda entry: entry.kind == "RoCEv2",
            lambda entry: entry.kind == "RoCEv1" and far(entry),
        ):
            if any(better(entry) for entry in port.gids):
                assert better(chosen)
                break
        assert verbs_ports.listening_address(port, chosen)
    shuffled = list(ports)
    random.shuffle(shuffled)
    assert verbs_ports.rank(shuffled)[0] == order, "the choice depends on the order in which the kernel lists them"


# -- reading the kernel's tables


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_reading_the_kernel_s_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files as drivers write them: an InfiniBand adapter on node 1, a RoCE adapter with holes in its table, soft RoCE."""
    infini = {
        "mlx5_0/node_type": "1: CA",
        "mlx5_0/device/numa_node": "1",
        "mlx5_0/device/net/ib0/address": "00:00",
        "mlx5_0/ports/1/state": "4: ACTIVE",
        "mlx5_0/ports/1/link_layer": "InfiniBand",
        "mlx5_0/ports/1/lid": "0x1f",
        "mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
        "mlx5_0/ports/1/gids/0": "fe80:0000:0000:0000:506b:4b03:00a1:b2c3",
        "mlx5_0/ports/1/gids/1": "0000:0000:0000:0000:0000:0000:0000:0000",
        "mlx5_0/ports/1/gid_attrs/types/0": "IB/RoCE v1",
    }
    converged = {
        "mlx5_1/node_type": "1: CA",
        "mlx5_1/device/numa_node": "-1",
        "mlx5_1/ports/1/state": "1: DOWN",
        "mlx5_1/ports/1/link_layer": "Ethernet",
        "mlx5_1/ports/1/lid": "0x0",
        "mlx5_1/ports/1/rate": "40 Gb/sec (4X QDR)",
        "mlx5_1/ports/2/state": "4: ACTIVE",
        "mlx5_1/ports/2/link_layer": "Ethernet",
        "mlx5_1/ports/2/rate": "2.5 Gb/sec (1X SDR)",
        "mlx5_1/ports/2/gids/0": "fe80:0000:0000:0000:0000:00ff:fe00:0001",
        "mlx5_1/ports/2/gids/10": "0000:0000:0000:0000:0000:ffff:0a00:0002",
        "mlx5_1/ports/2/gids/2": "0000:0000:0000:0000:0000:ffff:0a00:0002",
        "mlx5_1/ports/2/gid_attrs/types/0": "IB/RoCE v1",
        "mlx5_1/ports/2/gid_attrs/types/2": "IB/RoCE v1",
        "mlx5_1/ports/2/gid_attrs/types/10": "RoCE v2",
        "mlx5_1/ports/2/gid_attrs/ndevs/10": "eth5",
    }
    soft = {
        "rxe0/node_type": "1: CA",
        "rxe0/parent": "lo",
        "rxe0/ports/1/state": "4: ACTIVE",
        "rxe0/ports/1/link_layer": "Ethernet",
    }
    write(tmp_path / "infiniband", infini | converged | soft)
    write(tmp_path / "net", {"ib0/dev_port": "0"})
    everyone = ",".join(f"{cpu}-{cpu}" for cpu in sorted(os.sched_getaffinity(0)))
    write(
        tmp_path / "node",
        {
            "node0/cpulist": everyone,
            "node0/distance": "10 21",
            "node1/cpulist": "",
            "node1/distance": "21 10",
            "possible": "0-1",
        },
    )
    monkeypatch.setattr(sysfs, "ROOT", str(tmp_path / "infiniband"))
    monkeypatch.setattr(sysfs, "NETWORK", str(tmp_path / "net"))
    monkeypatch.setattr(sysfs, "NODES", str(tmp_path / "node"))
    first, down, second, rxe = sysfs.survey()
    assert (first.name, first.link_layer, first.lid, first.gbit_per_s) == ("mlx5_0:1", "INFINIBAND", 31, 200.0)
    assert first.distance == 21 and first.interfaces == {"ib0": ""}
    assert [(entry.index, entry.kind) for entry in first.gids] == [(0, "IB")]
    assert (down.name, down.state, down.gids, down.distance) == ("mlx5_1:1", "DOWN", (), None)
    assert [(entry.index, entry.kind, entry.netdev) for entry in second.gids] == [
        (0, "RoCEv1", ""),
        (2, "RoCEv1", ""),
        (10, "RoCEv2", "eth5"),
    ]
    assert second.gids[2].raw == gid(0, "10.0.0.2").raw and second.gbit_per_s == 2.5
    assert rxe.interfaces == {"lo": "127.0.0.1"} and rxe.gbit_per_s == 0
    assert [port.name for port in verbs_ports.rank([first, down, second, rxe])[0]] == ["mlx5_0:1", "mlx5_1:2"]
    monkeypatch.setattr(sysfs, "ROOT", str(tmp_path / "nothing"))
    assert sysfs.survey() == []
