"""``make vm-test``: the tests that need RDMA, run for real in a guest with a Soft-RoCE device.

    python tests/vm/suite.py                       all of them, in two guests; fails if fewer than EXPECTED were executed
    python tests/vm/suite.py tests/transport -k poller    these
    python tests/vm/suite.py --when FILE           boots and imports at once, and begins when there is such a file

Exit status 0 only if every test selected was executed and passed, and the devices' counters show the packets. The last
lines are pytest's own closing lines, as read in the guests.
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

import psutil
from guest import BOX_INSIDE, GENERIC, Command, Guest, GuestFailed, show
from image import Unavailable, image
from packets import needed

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
FOLDERS = ["tests/vm", "tests/transport", "tests/rpc/collectives/test_collectives_over_verbs.py"]
TRAINING = ["tests/vm", "tests/rpc/collectives/test_collectives_over_verbs.py"]
SHARES = (["tests/transport"], TRAINING)
"""What each guest runs: a guest keeps one core busy, so two of them take half of the time. The first one begins while the other
still imports what optimizers need."""
OPTIMIZERS = "torch._dynamo"
MEMORY_GIB = 5
"""Of each guest."""
SELECTED = "rdma and not slow"  # slow: gigabytes, and stress over many seconds
EXPECTED = 191
"""How many tests are executed at the least. Raise it with the tests: nothing else fails when one is not selected any more."""
IMPORTS_LIMIT_S, TESTS_LIMIT_S = 600.0, 1200.0

phases: list[tuple[str, float, float]] = []
"""Name, seconds, seconds of processor time that QEMU took: on a machine that is busy otherwise the latter tell more."""


@contextlib.contextmanager
def phase(name: str, *guests: Guest) -> Iterator[None]:
    def used() -> float:
        return sum(guest.processor_time() for guest in guests)

    began, before = time.monotonic(), used()
    print(f"-- {name}", flush=True)
    try:
        yield
    finally:
        phases.append((name, time.monotonic() - began, used() - before))


def prewarm(arguments: list[str]) -> None:
    """On the host, where it takes seconds: byte code of modules and tests, and kernels compiled for a processor of no kind."""
    code = f"""
import sys, warm, pytest
from rdmarpc.transport.words.compiled import kernels
status = pytest.main(['--collect-only', '-qq', '-m', '{SELECTED}', *{arguments}])
for kernel in kernels:
    kernel.load()
sys.exit(status)
"""
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
    if guest.run(["sh", "-c", "grep -H '' /sys/class/infiniband/*/ports/1/hw_counters/*"], lines.append, timeout=120):
        raise GuestFailed(f"{guest.hostname} has not told its devices' counters:\n{b''.join(lines).decode()}")
    total: Counter[str] = Counter()
    for line in b"".join(lines).decode().splitlines():
        name, value = line.rsplit("/", 1)[1].split(":")
        if name != "lifespan":
            total[name] += int(value)
    return total


class Share:
    """A guest, the tests that it runs as soon as there is a file ``when``, and what came of them. ``live``: what pytest writes
    is shown at once, not at the end."""

    def __init__(self, guest: Guest, arguments: list[str], when: Path, *, live: bool) -> None:
        self.guest, self._arguments, self._when = guest, arguments, when
        self._running: Command | None = None
        guest.preload(("warm",) if arguments == SHARES[0] else (OPTIMIZERS, "warm"), path=[HELPERS])
        self._imported_by = 0.0
        """The limit, from when there is the file: until then other work may come first on this machine."""
        self._held: list[bytes] = []
        self._output = show if live else self._held.append
        self.closing, self.ran, self.skipped, self.nbytes = "pytest did not reach its closing line", 0, [], 0
        self.sent: Counter[str] = Counter()

    def _start(self) -> None:
        self._before = counted(self.guest)
        report = ["--junitxml", f"{BOX_INSIDE}/report.xml", "-o", "junit_family=xunit1"]
        report += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "--durations=25"]
        command = ["-m", "pytest", "-m", SELECTED, *report, *self._arguments]
        self._running = self.guest.command(command, python=True, cwd=ROOT, timeout=TESTS_LIMIT_S)

    def poll(self) -> bool:
        """Starts pytest when all is imported. Whether it has yet to end."""
        if self._running is not None:
            return self._running.running(self._output)
        imported = self.guest.preloaded()
        if not self._when.exists():
            return True
        self._imported_by = self._imported_by or time.monotonic() + IMPORTS_LIMIT_S
        if imported:
            print(f"-- {self.guest.hostname} has imported for {(self.guest.box / 'python.ready').read_text()} s", flush=True)
            self._start()
        elif time.monotonic() > self._imported_by:
            raise GuestFailed(f"{self.guest.hostname} has not imported everything within {IMPORTS_LIMIT_S:g} s")
        return True

    def show(self) -> None:
        """Show what was not shown yet."""
        while self._held:
            show(self._held.pop(0))

    def finish(self) -> list[str]:
        """Look at what came of it. What is wrong with that, a line each."""
        assert self._running is not None
        status = self._running.wait(show)
        for line in self._running.output().decode(errors="replace").splitlines():
            if line.startswith("==") and any(word in line for word in (" passed", " failed", " error", "no tests ran")):
                self.closing = line
        self.sent = counted(self.guest) - self._before
        if (report := self.guest.box / "report.xml").exists():
            self.ran, self.skipped, self.nbytes = told(report)

        complaints = []
        if status:
            complaints.append(f"pytest ended with exit status {status}")
        if self.skipped:
            complaints.append("skipped although the guest has a device:\n  " + "\n  ".join(self.skipped))
        if self.ran and not self.nbytes:
            complaints.append("no test told how many bytes it moved")
        if self.sent["sent_pkts"] < needed(self.nbytes):
            packets = self.sent["sent_pkts"]
            complaints.append(f"the device has sent {packets} packets, and {self.nbytes} bytes need {needed(self.nbytes)}")
        return complaints


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


def shares(arguments: list[str]) -> list[list[str]]:
    """What each guest runs: what was asked for in one, and all in one where the memory does not do for more."""
    if arguments:
        return [arguments]
    roomy = psutil.virtual_memory().available >= len(SHARES) * (MEMORY_GIB + 1) << 30
    return [*SHARES] if roomy else [FOLDERS]


def main(arguments: list[str]) -> int:
    complaints = []
    when = ROOT
    if arguments[:1] == ["--when"]:
        when, arguments = Path(arguments[1]), arguments[2:]
    given = shares(arguments)
    with contextlib.ExitStack() as stack:
        with phase("packages, kernel, initramfs"):
            version = image().version
        with phase("byte code and kernels, on the host"):
            prewarm(arguments or FOLDERS)
        guests = [Guest(hostname=f"guest{number}", memory=f"{MEMORY_GIB}G") for number in range(len(given))]
        with phase("boot", *guests):
            for guest in guests:
                stack.enter_context(guest)
        print(f"{len(guests)} guests: Linux {version} under {guests[0].accel}", flush=True)
        with phase("imports, once, and tests", *guests):
            halves = [Share(guest, asked, when, live=number == 0) for number, (guest, asked) in enumerate(zip(guests, given))]
            try:
                running = halves
                while running := [share for share in running if share.poll()]:
                    time.sleep(0.1)
            finally:
                for share in halves:
                    share.show()
        for share in halves:
            complaints += share.finish()

    ran, nbytes = sum(share.ran for share in halves), sum(share.nbytes for share in halves)
    sent = sum((share.sent for share in halves), Counter[str]())
    if not arguments and ran < EXPECTED:
        complaints.append(f"{ran} tests were executed, {EXPECTED} are expected (EXPECTED in tests/vm/suite.py)")

    print(f"\nbytes that tests say they moved: {nbytes}, which need {needed(nbytes)} packets; sent: {sent['sent_pkts']}")
    print("the devices' counters over the tests: " + ", ".join(f"{name} {count}" for name, count in sorted(sent.items())))
    print("seconds, and seconds of processor time in QEMU:")
    for name, seconds, used in [*phases, ("all", *(sum(column) for column in list(zip(*phases))[1:]))]:
        print(f"{seconds:8.1f} {used:8.1f}  {name}")
    for complaint in complaints:
        print(f"vm-test FAILED: {complaint}")
    print(f"vm-test: {ran} RDMA tests executed, {sum(len(share.skipped) for share in halves)} skipped")
    for share in halves:
        print(share.closing)
    return 1 if complaints else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the guest is closed, its box removed
    try:
        sys.exit(main(sys.argv[1:]))
    except (GuestFailed, Unavailable) as error:
        print(f"vm-test FAILED: {error}")
        sys.exit(1)
