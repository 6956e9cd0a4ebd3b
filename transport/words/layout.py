"""The layout of the native structures of libibverbs: byte offsets, sizes and numbers of ``<infiniband/verbs.h>``.

These structures are libibverbs' stable interface to compiled programs (symbol version ``IBVERBS_1.1``; inline functions of
the header read them, so they cannot move), on 64-bit little-endian Linux. Fields that a later version appends lie behind what
is named here. All integers of a work request and a completion are in the host's byte order, except ``imm_data`` (network
order).
"""

from __future__ import annotations

# struct ibv_device
DEVICE_NAME = 24
"""``char name[64]``."""

# struct ibv_context; OPS_*: pointers to functions, byte offsets inside ibv_context
CONTEXT_DEVICE, CONTEXT_CMD_FD, CONTEXT_ASYNC_FD = 0, 264, 268
OPS_POLL_CQ = 96
"""``int poll_cq(ibv_cq *cq, int num_entries, ibv_wc *wc)``: how many were filled, or negative."""
OPS_REQ_NOTIFY_CQ = 104
"""``int req_notify_cq(ibv_cq *cq, int solicited_only)``: 0 or an errno."""
OPS_POST_SRQ_RECV = 168
"""``int post_srq_recv(ibv_srq *srq, ibv_recv_wr *wr, ibv_recv_wr **bad)``: 0 or an errno."""
OPS_POST_SEND = 208
"""``int post_send(ibv_qp *qp, ibv_send_wr *wr, ibv_send_wr **bad)``: 0 or an errno; what lies before ``*bad`` was posted."""

# struct ibv_qp
QP_CONTEXT, QP_PD, QP_SEND_CQ, QP_RECV_CQ, QP_SRQ, QP_NUM, QP_STATE, QP_TYPE = 0, 16, 24, 32, 40, 52, 56, 60

# struct ibv_cq
CQ_CONTEXT, CQ_CHANNEL, CQ_CQE = 0, 8, 28

# struct ibv_srq
SRQ_CONTEXT, SRQ_PD = 0, 16

# struct ibv_pd
PD_CONTEXT = 0

# struct ibv_mr
MR_LKEY, MR_RKEY = 36, 40

# struct ibv_comp_channel
CHANNEL_CONTEXT, CHANNEL_FD = 0, 8

# struct ibv_send_wr
SEND_WR_BYTES = 128
SEND_WR_WR_ID, SEND_WR_SG_LIST, SEND_WR_SEND_FLAGS, SEND_WR_REMOTE_ADDR, SEND_WR_RKEY = 0, 16, 32, 40, 48

# struct ibv_sge
SGE_BYTES = 16
SGE_ADDR, SGE_LENGTH, SGE_LKEY = 0, 8, 12

# struct ibv_recv_wr
RECV_WR_BYTES = 32
RECV_WR_NEXT = 8

# struct ibv_wc
WC_BYTES = 48
WC_WR_ID, WC_STATUS, WC_OPCODE, WC_VENDOR_ERR, WC_IMM_DATA, WC_QP_NUM = 0, 8, 12, 16, 24, 28

# enum ibv_wr_opcode: what a work request asks for
WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_RDMA_READ = 0, 1, 4

# enum ibv_send_flags
SEND_FENCE, SEND_SIGNALED, SEND_INLINE = 1, 2, 8

# enum ibv_wc_opcode: what completed; meaningless unless the status is WC_SUCCESS
WC_RDMA_WRITE, WC_RDMA_READ, WC_RECV, WC_RECV_RDMA_WITH_IMM = 1, 2, 128, 129

# enum ibv_wc_status; names and causes of all of them are in ``nic/libibverbs``
WC_SUCCESS = 0

# enum ibv_qp_state, ibv_qp_type, ibv_access_flags
QPS_INIT, QPS_RTR, QPS_RTS, QPS_ERR = 1, 2, 3, 6
QPT_RC = 2
ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, ACCESS_REMOTE_READ = 1, 2, 4

# struct ibv_async_event
ASYNC_EVENT_BYTES = 16
ASYNC_EVENT_TYPE = 8

# enum ibv_qp_attr_mask: the bit that says that a field of struct ibv_qp_attr is set
_FIELDS = (
    "qp_state", "cur_qp_state", "en_sqd_async_notify", "qp_access_flags", "pkey_index", "port_num", "qkey", "ah_attr",
    "path_mtu", "timeout", "retry_cnt", "rnr_retry", "rq_psn", "max_rd_atomic", "alt_path", "min_rnr_timer", "sq_psn",
    "max_dest_rd_atomic", "path_mig_state", "cap", "dest_qp_num",
)  # fmt: skip
QP_ATTR_MASK = {field: 1 << bit for bit, field in enumerate(_FIELDS)}
