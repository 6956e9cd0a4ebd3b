"""The workers of the training job: worker0 trains over rdmarpc, and alone for comparison; the others serve.

Both start from the same weights and see the same batches, and take turns epoch by epoch in the same process. The workers
of torch RPC (`torch_rpc.py`) are processes of their own, stopped while these have their turn.
"""

from collections import Counter
from typing import Any

import rdmarpc as rpc

from ..harness.processes import Launcher
from . import digits_models as models
from .digits_data import load_digits
from .digits_training import PlainLoop, Record, blocks


def main(rank: int, job: dict[str, Any], launcher: Launcher) -> None:
    """A worker from its first line to its last; worker0 tells ("progress", ...) after each block and ("trained", ...)."""
    options = rpc.RpcBackendOptions(
        init_method=job["init_method"],
        transport=job["device"],
        require=job["require"],
        rpc_timeout=job["rpc_timeout_s"],
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=job["workers"], rpc_backend_options=options)
    if rank == 0:
        train(job, launcher)
    rpc.shutdown()  # the other workers serve in here until worker0 is done


def train(job: dict[str, Any], launcher: Launcher) -> None:
    """The job as worker0 drives it."""
    digits = load_digits(job["seed"])
    rates = {"lr": job["lr"], "momentum": job["momentum"]}
    alone = PlainLoop(models.build(job["model"], job["seed"]), **rates)
    model = rpc.wrap(models.build(job["model"], job["seed"]), placement=job["placement"])
    spread = PlainLoop(model, **rates)

    alone_record, spread_record = Record(), Record()
    counters: Counter[str] = Counter()
    for done, batches in blocks(digits, job):
        launcher.wait_for_turn()
        alone_record.train(alone, batches)
        before = model.counters()
        spread_record.train(spread, batches)
        if len(spread_record.losses) > 1:  # the counters of the steady state, without the first step
            counters.update({key: value - before[key] for key, value in model.counters().items()})
        alone_record.evaluate(alone, digits)
        spread_record.evaluate(spread, digits)
        launcher.tell(("progress", done, spread_record.losses[-1], spread_record.accuracy))

    records = {"single_process": alone_record.as_dict(), "rdmarpc": spread_record.as_dict()}
    launcher.tell(("trained", records, dict(counters), model.transfers()))
