"""The numbers of ``words/layout`` and ``nic/libibverbs`` against the compiler's reading of ``<infiniband/verbs.h>``."""

import ctypes
import os
import re
import shutil
import subprocess

import pytest

from rdmarpc.transport.nic import libibverbs, status
from rdmarpc.transport.words import layout

STRUCTS = {
    "CONTEXT": "ibv_context",
    "QP": "ibv_qp",
    "CQ": "ibv_cq",
    "MR": "ibv_mr",
    "CHANNEL": "ibv_comp_channel",
    "SEND_WR": "ibv_send_wr",
    "SGE": "ibv_sge",
    "RECV_WR": "ibv_recv_wr",
    "WC": "ibv_wc",
    "ASYNC_EVENT": "ibv_async_event",
}
FIELDS = {
    "SEND_WR_REMOTE_ADDR": "wr.rdma.remote_addr",
    "SEND_WR_RKEY": "wr.rdma.rkey",
    "QP_NUM": "qp_num",
    "ASYNC_EVENT_TYPE": "event_type",
}
WC_FIELDS = ("wr_id", "status", "opcode", "vendor_err", "byte_len", "imm_data", "qp_num", "src_qp", "wc_flags")
MASKS = {
    "qp_state": "STATE",
    "qp_access_flags": "ACCESS_FLAGS",
    "port_num": "PORT",
    "ah_attr": "AV",
    "max_rd_atomic": "MAX_QP_RD_ATOMIC",
    "dest_qp_num": "DEST_QPN",
}
NUMBERS = re.compile("(WR|SEND|WC|QPS|QPT|ACCESS)_[A-Z_]+")


MEMBERS = {
    "AhAttr": {"dgid": "grh.dgid", "flow_label": "grh.flow_label", "sgid_index": "grh.sgid_index"}
    | {"hop_limit": "grh.hop_limit", "traffic_class": "grh.traffic_class", "grh_end": "", "end": ""},
    "SrqInitAttr": {name: f"attr.{name}" for name in ("max_wr", "max_sge", "srq_limit")},
    "PortAttr": {"later": ""},
}
"""Where a field stands elsewhere in the header; empty: it is padding."""


def constants() -> dict[str, tuple[str, int]]:
    """Each claim by name: in C, and here."""
    numbers = {name: (in_c(name), value) for name, value in vars(layout).items() if isinstance(value, int)}
    for kind, names in (("WC", status.STATUSES), ("EVENT", status.EVENTS)):
        numbers |= {f"{kind}.{name}": (f"IBV_{kind}_{name}", number) for number, name in enumerate(names)}
    for field, value in libibverbs.QpAttr.MASK.items():
        numbers[f"MASK.{field}"] = f"IBV_QP_{MASKS.get(field, field.upper())}", value
    for kind in (each for each in vars(libibverbs).values() if isinstance(each, type(ctypes.Structure))):
        struct = "ibv" + re.sub("([A-Z])", r"_\1", kind.__name__).lower()
        for field, _ in kind._fields_:
            if member := MEMBERS.get(kind.__name__, {}).get(field, field):
                numbers[f"{kind.__name__}.{field}"] = f"offsetof(struct {struct}, {member})", getattr(kind, field).offset
        if kind is not libibverbs.PortAttr:  # which has room for what a later version appends
            numbers[kind.__name__] = f"sizeof(struct {struct})", ctypes.sizeof(kind)
    return numbers


def in_c(name: str) -> str:
    """The C expression whose value the constant claims to be."""
    if name.startswith("OPS_"):
        return f"offsetof(struct ibv_context, ops.{name[4:].lower()})"
    for prefix in sorted(STRUCTS, key=len, reverse=True):
        field = name.removeprefix(prefix + "_")
        if field == name:
            continue
        if field == "BYTES":
            return f"sizeof(struct {STRUCTS[prefix]})"
        field = FIELDS.get(name, field.lower())
        if prefix == "WC" and field not in WC_FIELDS:
            break  # WC_ is also the prefix of the enumerations
        return f"offsetof(struct {STRUCTS[prefix]}, {field})"
    assert NUMBERS.fullmatch(name), f"{name} is no name of a structure or an enumeration"
    return f"IBV_{name}"


def test_the_header_agrees(tmp_path):
    """Set CPATH where the header is not installed."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    claims = constants()
    lines = [f'  printf("{name} %lld\\n", (long long)({text}));' for name, (text, _) in claims.items()]
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\nint main(void) {\n"
        + "\n".join(lines)
        + "\n}\n"
    )
    probe = subprocess.run(
        [compiler, "-E", "-"], input="#include <infiniband/verbs.h>\n", text=True, capture_output=True, timeout=60
    )
    if probe.returncode:
        pytest.skip("no <infiniband/verbs.h> (Debian: libibverbs-dev)")
    program = tmp_path / "layout"
    subprocess.run([compiler, str(source), "-o", str(program)], check=True, timeout=60)
    said = subprocess.run([str(program)], check=True, text=True, capture_output=True, timeout=60).stdout
    found = {name: int(value) for name, value in map(str.split, said.splitlines())}
    assert found == {name: value for name, (_, value) in claims.items()}
