"""The numbers of ``words/layout`` against the compiler's reading of ``<infiniband/verbs.h>``."""

import os
import re
import shutil
import subprocess

import pytest

from rdmarpc.transport.words import layout

STRUCTS = {
    "DEVICE": "ibv_device",
    "CONTEXT": "ibv_context",
    "QP": "ibv_qp",
    "CQ": "ibv_cq",
    "SRQ": "ibv_srq",
    "PD": "ibv_pd",
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
    "QP_TYPE": "qp_type",
    "ASYNC_EVENT_TYPE": "event_type",
}
WC_FIELDS = ("wr_id", "status", "opcode", "vendor_err", "byte_len", "imm_data", "qp_num", "src_qp", "wc_flags")
MASKS = {
    "qp_state": "STATE",
    "cur_qp_state": "CUR_STATE",
    "qp_access_flags": "ACCESS_FLAGS",
    "port_num": "PORT",
    "ah_attr": "AV",
    "max_rd_atomic": "MAX_QP_RD_ATOMIC",
    "dest_qp_num": "DEST_QPN",
}
NUMBERS = re.compile("(WR|SEND|WC|QPS|QPT|ACCESS)_[A-Z_]+")


def constants() -> dict[str, int]:
    numbers = {name: value for name, value in vars(layout).items() if isinstance(value, int)}
    return numbers | {f"QP_ATTR_MASK[{field}]": value for field, value in layout.QP_ATTR_MASK.items()}


def in_c(name: str) -> str:
    """The C expression whose value the constant claims to be."""
    if name.startswith("QP_ATTR_MASK["):
        field = name[len("QP_ATTR_MASK[") : -1]
        return f"IBV_QP_{MASKS.get(field, field.upper())}"
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
    names = constants()
    lines = [f'  printf("{name} %lld\\n", (long long)({in_c(name)}));' for name in names]
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
    assert {name: int(value) for name, value in map(str.split, said.splitlines())} == names
