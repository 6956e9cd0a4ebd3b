"""PyTorch's own tests of collectives and DistributedDataParallel over the backend ``rdmarpc``: see ``torch_collectives``.

Three ranks run those of ``QUICK``. All that the installed torch has take minutes, with three ranks and with four (which more of
them want): ``RDMARPC_CONFORMANCE=whole RDMARPC_CONFORMANCE_SIZE=4 make test ARGS=tests/conformance/test_torch_collectives.py``.
Whatever passes with gloo has to pass; torch itself skips the others, for the reasons in ``docs/collectives.md``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from suite_client import Server
from torch_collectives import listed

WHOLE = os.environ.get("RDMARPC_CONFORMANCE") == "whole"
QUICK = {
    "gloo": """get_backend barrier_timeout_global batch_isend_irecv_gloo_tags send_recv_any_source send_recv_with_tag irecv
        reduce_sum_twice all_reduce_sum_async all_reduce_sum_complex sparse_all_reduce_sum scatter_complex all_gather_complex
        all_reduce_coalesced_full_group_sum all_gather_coalesced_with_empty static_graph_api_cpu get_future scatter_object_list
        accumulate_gradients_no_sync_allreduce_with_then_hook ddp_logging_data_cpu monitored_barrier_gloo_rank_0_timeout""",
    "mpi": "all_to_all_complex all_to_all_single_unequal_split_full_group",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("torch_collectives")
    yield server
    server.close()


def _parameters() -> list:
    quick = {suite: {f"test_{name}" for name in names.split()} for suite, names in QUICK.items()}
    chosen = {suite: [test for test in tests if WHOLE or test in quick[suite]] for suite, tests in listed().items()}
    return [pytest.param(suite, test, id=f"{suite}.{test}") for suite, tests in chosen.items() for test in tests]


@pytest.mark.parametrize(("suite", "test"), _parameters())
def test_torch(server: Server, suite: str, test: str) -> None:
    server.check(suite, test)
