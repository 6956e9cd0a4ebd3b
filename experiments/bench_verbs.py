"""The verbs device beside perftest and torch RPC on the same RDMA port, in turns in one run.

    python -m experiments.bench_verbs            # needs an RDMA device, Soft-RoCE is one, and perftest
    python -m experiments.bench_verbs --json     # JSON on standard output instead of the table
    make vm-bench                                # the same in a guest with Soft-RoCE

Bandwidth: prepared WRITEs with a notification each, 16 in flight, beside ``ib_write_bw``. One way: half a ping-pong of prepared
and notified 8 bytes, beside ``ib_write_lat`` and the Python of the same calls where there is no network (shared memory, what is
waited for is there). Identity: ``rpc_sync`` of a tensor and back, from registered memory (arena) and any other (ordinary),
beside torch RPC over TensorPipe's ``ibv`` and ``uv`` transports, its channel ``basic`` (the others are ways within one host).
Then what a warm training step of two workers adds to the counters. Medians over the rounds.
"""

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from .harness.processes import Group, WorkerFailed, run_job
from .latency.rdma_workers import SMALL, perftest_main, rdmarpc_main, torch_main

Medians = dict[tuple[str, int, str], float]


def port_facts() -> dict[str, Any]:
    """The port that the device chooses, and how it is reached. Ends the program where there is none."""
    from rdmarpc.transport import RdmaError, packages, ports, sysfs

    try:
        provider = packages.choose().name
    except RdmaError as error:
        raise SystemExit(f"error: {error}") from None
    for found in ports.rank(sysfs.survey())[0]:
        if (gid := ports.pick_gid(found)[0]) is not None:
            return {"port": found.name, "gid_index": gid.index, "interface": gid.netdev, "provider": provider}
    raise SystemExit("error: no RDMA port can be used here; `rdmarpc doctor` says why")


def machine() -> dict[str, str]:
    """The machine on which the figures were measured."""
    processor = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    model, flags = processor.partition(":")[2].strip(), Path("/proc/cpuinfo").read_text()
    accelerator = "TCG" if "TCG" in model else "KVM or another hypervisor" if " hypervisor" in flags else "none needed"
    return {"kernel": platform.release(), "accelerator": accelerator, "processor": model, "cores": str(os.cpu_count())}


def rows(medians: Medians, counters: dict[str, Any], job: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each target: what was measured, beside what, what is asked, whether it is met."""
    found = []
    for size in job["sizes"]:
        ours, theirs = (medians["bandwidth", size, what] / 1e6 for what in ("rdmarpc", "perftest"))
        found.append(row(f"WRITE {size >> 10} KiB, MB/s", ours, {"ib_write_bw": theirs}, ours / theirs, ">= 0.9"))
    one_way, python, limit = (medians["one_way", SMALL, what] for what in ("rdmarpc", "python", "perftest"))
    beside = {"ib_write_lat": limit, "Python": python}
    found.append(row("one way 8 B, us", one_way, beside, (one_way - python) / limit, "<= 3"))
    size = job["call"]
    for name in ("arena", "ordinary"):
        ours = medians["identity", size, f"rdmarpc_{name}"] / 1e3
        for transport, asked in (("ibv", ">= 3"), ("uv", "> 1")):
            theirs = medians["identity", size, f"torch_{transport}"] / 1e3
            what = f"identity {size >> 10} KiB {name}, ms"
            found.append(row(what, ours, {f"torch RPC {transport}": theirs}, theirs / ours, asked))
    found.append(row("registrations after warm-up", counters["registrations"], {}, counters["registrations"], "== 0"))
    return found


def row(what: str, measured: float, beside: dict[str, float], ratio: float, asked: str) -> dict[str, Any]:
    relation, number = asked.split()
    met = {">=": ratio >= float(number), "<=": ratio <= float(number), ">": ratio > float(number), "==": ratio == float(number)}
    return {"what": what, "rdmarpc": measured, "beside": beside, "ratio": ratio, "asked": asked, "met": met[relation]}


def show(result: dict[str, Any]) -> None:
    print(
        "Linux {kernel}, accelerator {accelerator}, {cores} cores; {port}, GID index {gid_index}, provider {provider}; "
        "medians of {rounds} rounds\n".format(**result["machine"], **result["config"])
    )
    print(f"{'':38}{'rdmarpc':>10}  {'beside':44}{'ratio':>7}  asked")
    for each in result["rows"]:
        beside = ", ".join(f"{name} {value:.1f}" for name, value in each["beside"].items())
        verdict = f"{each['asked']} {'met' if each['met'] else 'MISSED'}"
        print(f"{each['what']:38}{each['rdmarpc']:10.1f}  {beside:44}{each['ratio']:7.2f}  {verdict}")
    print("\nratio of one way: (rdmarpc - Python) / ib_write_lat")
    print("bytes staged by an identity call, both workers: " + ", ".join(f"{k} {v:.0f}" for k, v in result["staged"].items()))
    print("a traced step of two stages: " + ", ".join(f"{key} {value:g}" for key, value in sorted(result["step"].items())))


def note(records: list[dict[str, Any]], counters: dict[str, Any], group: str, event: tuple[Any, ...]) -> None:
    if event[0] == "samples":
        records += event[1]
    elif event[0] == "counters":
        counters.update(event[1])
    else:
        print(f"{group}: {event[1]}", file=sys.stderr, flush=True)


def groups() -> list[Group]:
    """The groups of workers. Those of torch RPC are stopped outside their turn, because their idle threads poll."""
    return [
        Group("rdmarpc", rdmarpc_main, 2),
        Group("perftest", perftest_main, 1),
        *(Group(f"torch RPC over {name}", partial(torch_main, name), 2, freeze=True) for name in ("ibv", "uv")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64 << 10, 1 << 20, 4 << 20], help="bytes of a WRITE")
    parser.add_argument("--bytes", type=int, default=64 << 20, help="of one sample of bandwidth")
    parser.add_argument("--pings", type=int, default=20, help="groups of 50 pings of one sample")
    parser.add_argument("--call", type=int, default=4 << 20, help="bytes of the tensor of a call")
    parser.add_argument("--calls", type=int, default=5, help="calls of one sample")
    parser.add_argument("--steps", type=int, default=20, help="training steps whose counters are taken")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for everything")
    parser.add_argument("--json", action="store_true")
    job = vars(parser.parse_args())
    job |= port_facts()

    records: list[dict[str, Any]] = []
    counters: dict[str, Any] = {}
    links = multiprocessing.get_context("spawn").Pipe()
    try:
        with tempfile.TemporaryDirectory() as folder:
            here = job | {"meeting_place": folder, "links": links}
            run_job(groups(), here, partial(note, records, counters), job["timeout"])
    except WorkerFailed as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        for link in links:
            link.close()

    medians = {(each["case"], each["size"], each["what"]): each["median"] for each in records}
    result = {
        "machine": machine(),
        "config": job,
        "rows": rows(medians, counters, job),
        "step": counters["step"],
        "staged": {name: medians["staged", job["call"], name] for name in ("arena", "ordinary")},
        "records": records,
    }
    if job["json"]:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        show(result)


if __name__ == "__main__":
    main()
