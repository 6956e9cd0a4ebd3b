"""The description of a port that crosses the wire, and whether two fit."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmarpc.transport import RdmaError
from rdmarpc.transport.nic.ports import ENDPOINT_BYTES, Endpoint, route, why_not

endpoints = st.builds(
    Endpoint,
    link_layer=st.sampled_from(["INFINIBAND", "ETHERNET"]),
    kind=st.sampled_from(["IB", "RoCEv1", "RoCEv2"]),
    mtu=st.sampled_from([256, 512, 1024, 2048, 4096]),
    reads=st.integers(1, 255),
    global_only=st.booleans(),
    lid=st.integers(0, 0xFFFF),
    gid=st.binary(min_size=16, max_size=16),
)


@settings(deadline=None)
@given(endpoints)
def test_dump_and_load(endpoint: Endpoint) -> None:
    assert len(endpoint.dump()) == ENDPOINT_BYTES
    assert Endpoint.load(endpoint.dump()) == endpoint == Endpoint.parse(str(endpoint))
    assert str(endpoint).isalnum()


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=40), st.binary(min_size=ENDPOINT_BYTES, max_size=ENDPOINT_BYTES)))
def test_any_other_bytes_are_refused(blob: bytes) -> None:
    try:
        endpoint = Endpoint.load(blob)
    except RdmaError as error:
        assert "not the description of a port" in error.message
        return
    assert Endpoint.load(endpoint.dump()) == endpoint and endpoint.gid == blob[-16:]


@settings(deadline=None)
@given(st.text("0123456789abcdefx ", max_size=60))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(RdmaError, match="not the description of a port"):
        Endpoint.parse(text + "x")


@settings(deadline=None)
@given(endpoints, endpoints)
def test_whether_two_fit_is_the_same_from_both_ends(a: Endpoint, b: Endpoint) -> None:
    assert (why_not(a, b) is None) == (why_not(b, a) is None)
    if a.link_layer == "INFINIBAND" or a.kind == b.kind:
        assert why_not(a, a) is None


def roce(address: str, kind: str = "RoCEv2", mtu: int = 4096, reads: int = 16) -> Endpoint:
    ip = ipaddress.ip_address(address)
    raw = ip.packed if ip.version == 6 else b"\0" * 10 + b"\xff\xff" + ip.packed
    return Endpoint("ETHERNET", kind, mtu, reads, False, 0, raw)


def ib(prefix: str = "fe80000000000000", lid: int = 3, global_only: bool = False) -> Endpoint:
    return Endpoint("INFINIBAND", "IB", 4096, 16, global_only, lid, bytes.fromhex(prefix + "506b4b0300a1b2c3"))


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        (roce("10.0.0.1"), roce("10.0.0.2"), None),
        (roce("10.0.0.1"), roce("10.9.0.2"), None),
        (roce("2001:db8::1"), roce("fd00::2"), None),
        (roce("fe80::1"), roce("fe80::2"), None),
        (roce("10.0.0.1", "RoCEv1"), roce("10.0.0.2", "RoCEv1"), None),
        (ib(), ib(lid=9), None),
        (ib(), roce("10.0.0.1"), "one end is INFINIBAND, the other ETHERNET"),
        (ib(), ib("fec0000000000001"), "the InfiniBand subnets differ (fe80000000000000 and fec0000000000001)"),
        (roce("10.0.0.1"), roce("10.0.0.2", "RoCEv1"), "one end has RoCEv2, the other RoCEv1"),
        (roce("10.0.0.1"), roce("2001:db8::2"), "one end is at 10.0.0.1, the other at 2001:db8::2"),
        (roce("fe80::1"), roce("2001:db8::2"), "one end has only a link-local address"),
        (roce("127.0.0.1"), roce("10.0.0.2"), "one end is at 127.0.0.1, the other at 10.0.0.2: a loopback"),
    ],
)
def test_which_two_fit(mine: Endpoint, theirs: Endpoint, reason: str | None) -> None:
    said = why_not(mine, theirs)
    assert said is None if reason is None else said is not None and said.startswith(reason)


def test_the_way_between_two() -> None:
    numbers = {"port": 2, "sgid_index": 3, "dest_qp_num": 17, "rq_psn": 5, "sq_psn": 6, "timeout": 14, "retry_cnt": 7}
    way = route(roce("10.0.0.1", mtu=1024, reads=16), roce("10.0.0.2", mtu=4096, reads=4), **numbers)
    assert (way.mtu, way.reads, way.global_route) == (1024, 4, True)
    assert way.dgid == roce("10.0.0.2").gid
    assert {name: getattr(way, name) for name in numbers} == numbers
    assert not route(ib(), ib(lid=9), **numbers).global_route and route(ib(), ib(lid=9), **numbers).dlid == 9
    assert (
        route(ib(), ib(global_only=True), **numbers).global_route and route(ib(global_only=True), ib(), **numbers).global_route
    )
