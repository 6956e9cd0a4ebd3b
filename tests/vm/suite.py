"""``make vm-test``: the tests that need RDMA, run for real in a guest with a Soft-RoCE device.

    python tests/vm/suite.py                       all of them; fails if fewer than EXPECTED were executed
    python tests/vm/suite.py tests/transport -k poller    these

Exit status 0 only if every test selected was executed and passed, and the device's counters show the packets. The last line is
pytest's own closing line, as read in the guest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from guest import BOX_INSIDE, GENERIC, Guest, GuestFailed
from image import Unavailable, image
from packets import needed

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
FOLDERS = ["tests/vm", "tests/transport", "tests/rpc/collectives/test_collectives_over_verbs.py"]
SELECTED = "rdma and not slow"  # slow: gigabytes, and stress over many seconds
EXPECTED = 229
"""How many tests are executed at the least. Raise it with the tests: nothing else fails when one is not selected any more."""
TESTS_LIMIT_S = 1200.0

phases: list[tuple[str, float, float]] = []
"""Name, seconds, seconds of processor time that QEMU took: on a machine that is busy otherwise the latter tell more."""


@contextlib.contextmanager
def phase(name: str, guest: Guest | None = None) -> Iterator[None]:
    began, used = time.monotonic(), guest.processor_time() if guest else 0.0
    print(f"-- {name}", flush=True)
    try:
        yield
    finally:
        phases.append((name, time.monotonic() - began, (guest.processor_time() if guest else 0.0) - used))


def prewarm() -> None:
    """On the host, where it takes seconds: byte code of modules and tests, and kernels compiled for a processor of no kind."""
    code = f"import sys, warm, pytest; sys.exit(pytest.main(['--collect-only', '-qq', '-m', '{SELECTED}', *{FOLDERS}]))"
    path = os.pathsep.join([str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **GENERIC, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise GuestFailed(f"the tests cannot be collected:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")


def counted(guest: Guest) -> Counter[str]:
    """The counters of the guest's devices now, added up."""
    lines: list[bytes] = []
    guest.run(["sh", "-c", "grep -H '' /sys/class/infiniband/*/ports/1/hw_counters/*"], lines.append, timeout=30)
    total: Counter[str] = Counter()
    for line in b"".join(lines).decode().splitlines():
        name, value = line.rsplit("/", 1)[1].split(":")
        if name != "lifespan":
            total[name] += int(value)
    return total


class Output:
    """Passes on what pytest writes, and keeps its closing line."""

    def __init__(self) -> None:
        self.closing = ""
        self._rest = b""

    def __call__(self, written: bytes) -> None:
        sys.stdout.buffer.write(written)
        sys.stdout.buffer.flush()
        *lines, self._rest = (self._rest + written).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if text.startswith("==") and any(word in text for word in (" passed", " failed", " error", "no tests ran")):
                self.closing = text


def told(report: Path) -> tuple[int, list[str], int]:
    """How many tests ran, which of those selected were skipped, and how many bytes they say they moved (``bytes_direct``)."""
    ran, skipped, nbytes = 0, [], 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        reason = case.find("skipped")
        if reason is None:
            ran += 1
        else:
            skipped.append(f"{case.get('classname')}::{case.get('name')}: {reason.get('message')}")
        nbytes += sum(int(found.get("value", 0)) for found in case.iter("property") if found.get("name") == "bytes_direct")
    return ran, skipped, nbytes


def main(arguments: list[str]) -> int:
    output, complaints = Output(), []
    with contextlib.ExitStack() as stack:
        with phase("packages, kernel, initramfs"):
            version = image().version
        with phase("byte code and kernels, on the host"):
            prewarm()
        guest = Guest()
        with phase("boot", guest):
            stack.enter_context(guest)
        print(f"guest: Linux {version} under {guest.accel}", flush=True)
        with phase("imports, once", guest):
            guest.preload(("warm",), path=[HELPERS])
            guest.wait_preloaded(600.0)
        before = counted(guest)
        with phase("tests", guest):
            report = ["--junitxml", f"{BOX_INSIDE}/report.xml", "-o", "junit_family=xunit1"]
            report += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--durations=10"]
            command = ["-m", "pytest", "-m", SELECTED, *report, *(arguments or FOLDERS)]
            status = guest.run(command, output, python=True, cwd=ROOT, timeout=TESTS_LIMIT_S)
        sent = counted(guest) - before
        ran, skipped, nbytes = told(guest.box / "report.xml") if (guest.box / "report.xml").exists() else (0, [], 0)

    if status:
        complaints.append(f"pytest ended with exit status {status}")
    if skipped:
        complaints.append("skipped although the guest has a device:\n  " + "\n  ".join(skipped))
    if not arguments and ran < EXPECTED:
        complaints.append(f"{ran} tests were executed, {EXPECTED} are expected (EXPECTED in tests/vm/suite.py)")
    if ran and not nbytes:
        complaints.append("no test told how many bytes it moved")
    if sent["sent_pkts"] < needed(nbytes):
        complaints.append(f"the device has sent {sent['sent_pkts']} packets, and {nbytes} bytes need {needed(nbytes)}")

    print(f"\nbytes that tests say they moved: {nbytes}, which need {needed(nbytes)} packets; sent: {sent['sent_pkts']}")
    print("the device's counters over the tests: " + ", ".join(f"{name} {count}" for name, count in sorted(sent.items())))
    print("seconds, and seconds of processor time in QEMU:")
    for name, seconds, used in [*phases, ("all", *(sum(column) for column in list(zip(*phases))[1:]))]:
        print(f"{seconds:8.1f} {used:8.1f}  {name}")
    for complaint in complaints:
        print(f"vm-test FAILED: {complaint}")
    print(f"vm-test: {ran} RDMA tests executed, {len(skipped)} skipped")
    print(output.closing or "pytest did not reach its closing line")
    return 1 if complaints else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the guest is closed, its box removed
    try:
        sys.exit(main(sys.argv[1:]))
    except (GuestFailed, Unavailable) as error:
        print(f"vm-test FAILED: {error}")
        sys.exit(1)
