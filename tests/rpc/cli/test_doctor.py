"""``rdmarpc doctor`` over made-up hosts, and on this one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rdmarpc.calls import environment
from rdmarpc.tools import doctor
from rdmarpc.tools.doctor import LIMITS, MISSING, OK
from rdmarpc.transport import NotSupported, open_device
from rdmarpc.transport.nic import sysfs
from rdmarpc.transport.tls import openssl
from rdmarpc.transport.words.compiled import kernels

GIB = 1 << 30
INIT_USER = "         0          0 4294967295\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def limits(text: str, capabilities: int = 0, users: str = INIT_USER) -> dict[str, str]:
    return {
        "proc/self/limits": f"Limit   Soft Limit   Hard Limit   Units\nMax locked memory   {text}   {text}   bytes\n",
        "proc/self/status": f"Name:\tpython\nCapEff:\t{capabilities:016x}\n",
        "proc/self/uid_map": users,
    }


MEMLOCK = [
    (limits("unlimited"), OK, "unlimited"),
    (limits(str(64 << 10)), MISSING, "64 KiB: too little for one segment"),
    (limits(str(GIB)), LIMITS, "1 GiB, the arena may grow to 4 GiB"),
    (limits(str(8 * GIB)), OK, "enough"),
    (limits(str(64 << 10), 1 << 14), OK, "CAP_IPC_LOCK"),
    (limits(str(64 << 10), 1 << 14, "         0       1000          1\n"), MISSING, "too little"),  # a rootless container
    ({}, LIMITS, "cannot be found out"),
]


@pytest.mark.parametrize("files, state, text", MEMLOCK)
def test_a_low_limit_of_locked_memory_is_named(tmp_path: Path, files: dict[str, str], state: str, text: str) -> None:
    found = doctor.memlock(tree(tmp_path, files), 4 * GIB)
    assert found.state == state and text in found.text
    assert ("ulimit -l" in found.hint) == (state != OK)


CGROUPS = [
    ({"proc/self/cgroup": "0::/\n"}, OK, "no cgroup limit"),
    ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/memory.max": "max\n"}, OK, "no cgroup limit"),
    (  # the limit of a cgroup around ours counts
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.max": str(2 * GIB),
        },
        LIMITS,
        "the cgroup allows 2 GiB",
    ),
    (
        {"proc/self/cgroup": "5:cpu,memory:/a\n0::/\n", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(3 * GIB)},
        LIMITS,
        "the cgroup allows 3 GiB",
    ),
    ({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)}, OK, "no cgroup"),
    ({"proc/self/cgroup": "0::/../..\n", "sys/fs/cgroup/memory.max": str(64 * GIB)}, OK, "no cgroup limit"),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": str(64 * GIB)}, OK, "the cgroup allows 64 GiB"),
    ({}, OK, "no cgroup limit"),
]


@pytest.mark.parametrize("files, state, text", CGROUPS)
def test_memory_of_the_cgroup(tmp_path: Path, files: dict[str, str], state: str, text: str) -> None:
    found = doctor.memory(tree(tmp_path, files), 4 * GIB)
    assert found.state == state and text in found.text
    if state == LIMITS:
        assert "RDMARPC_ARENA_LIMIT=" in found.hint


def test_a_limit_of_the_rdma_cgroup_is_named(tmp_path: Path) -> None:
    assert doctor.rdma_cgroup(tmp_path) is None
    tree(tmp_path, {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/rdma.max": "mlx5_0 hca_handle=max hca_object=max\n"})
    assert doctor.rdma_cgroup(tmp_path) is None
    tree(tmp_path, {"sys/fs/cgroup/job/rdma.max": "mlx5_0 hca_handle=2 hca_object=max\nmlx5_1 hca_handle=max hca_object=max\n"})
    found = doctor.rdma_cgroup(tmp_path)
    assert found is not None and found.state == LIMITS and found.text == "mlx5_0 hca_handle=2 hca_object=max"


def test_a_host_with_gpus_and_a_torch_without_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of hosts with GPUs and adapters: ``tests/transport/verbs/test_gpudirect``."""
    monkeypatch.setattr(doctor.driver, "kind", lambda: "")
    assert [found.state for found in doctor.gpu(tmp_path)] == [OK]
    (found,) = doctor.gpu(tree(tmp_path, {"proc/driver/nvidia/version": ""}))
    assert found.state == LIMITS and "torch is built without CUDA" in found.text and found.hint


@pytest.mark.parametrize(
    "scope, capabilities, state", [("", 0, OK), ("0", 0, OK), ("1", 0, LIMITS), ("1", 1 << 19, OK), ("3", 0, LIMITS)]
)
def test_what_forbids_to_read_from_other_processes_is_named(tmp_path: Path, scope: str, capabilities: int, state: str) -> None:
    tree(tmp_path, {"proc/sys/kernel/yama/ptrace_scope": scope + "\n", **limits("unlimited", capabilities)})
    found = doctor.attach(tmp_path)
    assert found.state == state and bool(found.hint) == (state == LIMITS)


def test_pages_and_sockets(tmp_path: Path) -> None:
    assert doctor.huge_pages(tmp_path).state == LIMITS
    pages = "sys/kernel/mm/transparent_hugepage/"
    tree(
        tmp_path,
        {pages + "enabled": "always [madvise] never", pages + "shmem_enabled": "always within_size advise [never] deny"},
    )
    found = doctor.huge_pages(tmp_path)
    assert found.text == "shared memory never, private memory madvise" and found.hint.endswith("hugepage/shmem_enabled")
    tree(tmp_path, {pages + "shmem_enabled": "always within_size [advise] never deny force"})
    assert doctor.huge_pages(tmp_path).state == OK
    assert doctor.sockets(tmp_path).state == LIMITS
    tree(tmp_path, {f"proc/sys/net/ipv4/tcp_{side}mem": "4096\t65536\t4194304\n" for side in "rw"})
    assert doctor.sockets(tmp_path).state == OK


def test_sizes_are_told_in_short() -> None:
    assert [doctor.size(n) for n in (5, 8 << 20, 3 * GIB // 2, 2 << 40)] == ["5 B", "8 MiB", "1.5 GiB", "2 TiB"]


# -- on this host


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        doctor.main(list(arguments))
    return int(ended.value.code or 0), capsys.readouterr().out


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, text = ask(capsys, "--json", *arguments)
    return code, json.loads(text)


def without_rdma(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(sysfs, "ROOT", str(folder / "none"))


def test_its_help_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing that is for readers of the code."""
    with pytest.raises(SystemExit):
        doctor.main(["--help"])
    description = capsys.readouterr().out.split("\n\n")[1]
    assert description.startswith("``rdmarpc doctor``") and "." not in description[:-1]


def test_the_page_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_rdma(monkeypatch, tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    with open_device("auto") as device:
        code, text = ask(capsys, device.address.decode())
    lines = text.splitlines()
    assert code == 0 and len(lines) <= 40 and max(map(len, lines)) <= 100
    assert any(line.split() == ["ok", "shm", "is", "used"] for line in lines)
    assert "this host has no RDMA device" in text and "modprobe rdma_rxe" in text
    for topic in ("rdma", "memlock", "memory", "gpu memory", "huge pages", "attach", "tcp", "tcp buffers"):
        assert any(line.split(None, 1)[1:] and line.split(None, 1)[1].startswith(topic) for line in lines), topic


def test_each_way_to_a_peer_has_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_rdma(monkeypatch, tmp_path)
    with open_device("tcp") as device:
        address = device.address.decode()
        code, found = report(capsys, address)
        assert code == 0
        assert [bool(way["why_not"]) for way in found["peers"][address]] == [True, True, False]
        assert report(capsys, address, "--require", "rdma")[0] == 1
    code, found = report(capsys, address)  # has ended
    assert code == 1 and "nobody listens" in found["peers"][address][2]["why_not"]
    elsewhere = f"auto:shm:0123456789abcdef:1,{address}"
    code, found = report(capsys, elsewhere)
    assert code == 1 and "another host" in found["peers"][elsewhere][0]["why_not"]
    assert "loopback only" in found["peers"][elsewhere][2]["why_not"] and "secret" in found["peers"][elsewhere][2]["hint"]
    told = "auto:shm:0123456789abcdef:1,tcp:127.0.0.1:9:1,no-verbs:memlock%20is%208%20MiB"
    assert ask(capsys, told)[0] == 1


def test_a_host_name_is_told_by_which_devices_it_could_be_reached(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_rdma(monkeypatch, tmp_path)
    for here in ("localhost", "127.0.1.1"):  # Debian has a host's own name at the second one
        code, found = report(capsys, here)
        assert code == 0 and found["peers"][here][0] == {"device": "shm", "why_not": "", "hint": ""}
    found = report(capsys, "192.0.2.77")[1]["peers"]["192.0.2.77"]  # nobody is asked
    assert [way["device"] for way in found] == ["shm", "verbs", "tcp"]
    assert found[0]["why_not"] == "it is another host" and "no RDMA device" in found[1]["why_not"]

    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    code, found = report(capsys, "nosuch")
    assert code == 1 and all("no host is called nosuch" in way["why_not"] for way in found["peers"]["nosuch"])
    assert "names of workers are not known" in found["peers"]["nosuch"][-1]["hint"]
    assert report(capsys, "--require", "rdma")[0] == 1


def test_rdma_hardware_that_does_not_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree(
        tmp_path,
        {"mlx5_0/node_type": "1: CA\n", "mlx5_0/ports/1/state": "1: DOWN\n", "mlx5_0/ports/1/link_layer": "Ethernet\n"},
    )
    monkeypatch.setattr(sysfs, "ROOT", str(tmp_path))
    code, found = report(capsys)
    assert code == 0
    broken = [entry for entry in found["findings"] if entry["topic"] == "rdma"]
    assert [entry["state"] for entry in broken] == [MISSING] and broken[0]["hint"]
    verbs = next(way for way in found["devices"] if way["device"] == "verbs")
    assert verbs["why_not"] == broken[0]["text"]


@pytest.mark.parametrize(("secret", "state", "text"), [("x", MISSING, "has 1 bytes"), ("x" * 16, OK, "16"), ("", OK, "none")])
def test_a_secret_that_init_rpc_would_refuse_is_named(
    monkeypatch: pytest.MonkeyPatch, secret: str, state: str, text: str
) -> None:
    monkeypatch.setenv("RDMARPC_SECRET", secret)
    monkeypatch.delenv("RDMARPC_SECRET_FILE", raising=False)
    found = doctor.job_secret()
    assert found.state == state and text in found.text


def test_whether_tls_can_be_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.encryption().state == OK

    def refuse() -> None:
        raise NotSupported("no libssl here", hint="install one")

    monkeypatch.setattr(openssl, "library", refuse)
    found = doctor.encryption()
    assert (found.state, found.text, found.hint) == (MISSING, "no libssl here", "install one")


SPINNING = [
    ({}, LIMITS),
    ({"OMP_WAIT_POLICY": "active"}, LIMITS),
    ({"OMP_WAIT_POLICY": "passive"}, OK),
    ({"GOMP_SPINCOUNT": "0"}, OK),
    ({"KMP_BLOCKTIME": "0"}, OK),
]


@pytest.mark.parametrize("environ, state", SPINNING)
def test_threads_that_would_spin_on_cores_of_others_are_named(environ: dict[str, str], state: str) -> None:
    found = doctor.threads(8, {"OMP_NUM_THREADS": "3", **environ})
    assert found.state == state and "3 threads a process on 8 cores" in found.text
    assert ("OMP_WAIT_POLICY=PASSIVE" in found.hint) == (state != OK)
    crowded = [environment.crowded(workers, threads, 4, environ) for workers, threads in ((3, 2), (2, 2), (1, 8), (8, 1))]
    assert ["OMP_NUM_THREADS=1" in crowded[0], *map(bool, crowded[1:])] == [state != OK, False, False, False]


TUNABLES = ":".join(f"glibc.malloc.{text}" for text in ("arena_max=1", "mmap_threshold=0x10000000", "trim_threshold=268435456"))
HEAPS = [
    ({}, LIMITS),
    ({"MALLOC_ARENA_MAX": "1"}, LIMITS),
    ({"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"}, LIMITS),
    (dict(setting.split("=") for setting in environment.KEEPING.split()), OK),
    ({"GLIBC_TUNABLES": TUNABLES}, OK),
]


@pytest.mark.parametrize("environ, state", HEAPS)
def test_settings_of_glibc_that_keep_large_blocks_are_told(environ: dict[str, str], state: str) -> None:
    found = doctor.heap(environ)
    assert found.state == state and (environment.KEEPING in found.hint) == (state != OK)


FAULTS = """
import resource, threading, torch

def add():
    x = torch.ones(16 << 20)
    for _ in range(20):
        x = x + 1
        before.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

before = []
thread = threading.Thread(target=add)
thread.start()
thread.join()
print(min(now - then for then, now in zip(before, before[1:])))
"""


def test_what_the_hint_promises() -> None:
    """Large temporaries of a thread cost no page faults with it once the heap has grown, and thousands each without."""
    keeping = dict(setting.split("=") for setting in environment.KEEPING.split())
    without, kept = (
        int(subprocess.check_output([sys.executable, "-c", FAULTS], env={**os.environ, **environ}, timeout=60))
        for environ in ({}, keeping)
    )
    assert without > 5_000 and kept < 500


def test_all_kernels_are_compiled(capsys):
    doctor.compile_kernels()
    assert f"{len(kernels)} of {len(kernels)} kernels" in capsys.readouterr().err
    root = Path(doctor.__file__).parents[2]
    files = [path for folder in ("transport", "rdmarpc") for path in (root / folder).rglob("*.py")]
    with_kernels = {str(path) for path in files if "\n@compiled" in path.read_text()}
    assert with_kernels <= {kernel.function.__code__.co_filename for kernel in kernels}


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_who_reads_the_page_may_stop(unbuffered: str) -> None:
    command = [sys.executable, "-m", "rdmarpc", "doctor"]
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        process.stdout.close()  # before anything is printed
        process.stdout = None
        assert process.communicate(timeout=60)[1] == ""


def test_nobody_need_read_the_page() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdout = None; from rdmarpc.__main__ import main; main()", "doctor"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
