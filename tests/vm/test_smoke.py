"""The RDMA device itself, without any of our code: what the tests over ``verbs`` stand on."""

from __future__ import annotations

import time
from collections.abc import Callable

import packets
import pytest
import torch
from forks import forks

pytestmark = pytest.mark.rdma

NBYTES = 4 << 20


def first_device() -> str:
    return sorted(place.name for place in packets.DEVICES.iterdir())[0]


def test_a_tensor_written_with_an_immediate(record_property: Callable[[str, object], None]) -> None:
    # In a process of its own: libibverbs is set up for forks, as ours do it, before the first registration or never.
    process = forks().Process(target=write_with_an_immediate, daemon=True)
    process.start()
    process.join(110.0)
    code = process.exitcode
    process.kill()
    process.join()
    assert code == 0
    record_property("bytes_direct", NBYTES)


def write_with_an_immediate() -> None:
    """Two connected queue pairs: one WRITE_WITH_IMM lands in the other's tensor, and the number arrives after the bytes."""
    from pyverbs import enums as e
    from pyverbs.addr import AHAttr, GlobalRoute
    from pyverbs.cq import CQ
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, RecvWR, SendWR

    context = Context(name=first_device())
    pd, cq = PD(context), CQ(context, 16)
    cap = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)
    init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap, sq_sig_all=1)
    access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
    ends = [QP(pd, init) for _ in range(2)]
    index = next(i for i in range(context.query_port(1).gid_tbl_len) if "ffff:" in str(context.query_gid(1, i)))
    for mine, other in (ends, ends[::-1]):
        route = GlobalRoute(dgid=context.query_gid(1, index), sgid_index=index)
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = access
        attr.path_mtu, attr.dest_qp_num, attr.rq_psn, attr.sq_psn = e.IBV_MTU_4096, other.qp_num, 0, 0
        attr.max_rd_atomic, attr.max_dest_rd_atomic, attr.min_rnr_timer = 1, 1, 12
        attr.timeout, attr.retry_cnt, attr.rnr_retry = 14, 7, 7
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        mine.to_rts(attr)

    source = torch.arange(NBYTES // 4, dtype=torch.int32)
    target = torch.zeros_like(source)
    source_mr = MR(pd, NBYTES, access, address=source.data_ptr())
    target_mr = MR(pd, NBYTES, access, address=target.data_ptr())
    before = packets.counters()
    ends[1].post_recv(RecvWR(wr_id=7, num_sge=1, sg=[SGE(target.data_ptr(), 0, target_mr.lkey)]))
    write = SendWR(opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM, num_sge=1, sg=[SGE(source.data_ptr(), NBYTES, source_mr.lkey)])
    write.set_wr_rdma(target_mr.rkey, target.data_ptr())
    write.imm_data = 0x01020304
    ends[0].post_send(write)

    done = []
    deadline = time.monotonic() + 20
    while len(done) < 2:
        assert time.monotonic() < deadline, [completion.opcode for completion in done]
        done += cq.poll(2 - len(done))[1]
    assert [completion.status for completion in done] == [e.IBV_WC_SUCCESS] * 2
    arrived = next(completion for completion in done if completion.opcode == e.IBV_WC_RECV_RDMA_WITH_IMM)
    assert (arrived.wr_id, arrived.imm_data, arrived.byte_len) == (7, 0x01020304, NBYTES)
    assert torch.equal(target, source)
    assert packets.counters()["sent_pkts"] - before["sent_pkts"] >= packets.needed(NBYTES)
    for thing in (*ends, source_mr, target_mr, cq, pd, context):
        thing.close()
