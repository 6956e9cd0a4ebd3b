"""A QEMU guest with a Soft-RoCE device ``rxe0`` that runs commands on the host's own file system.

    python tests/vm/guest.py [--cpus 2] [--memory 6G] -- COMMAND...   one command in a guest of its own
    python tests/vm/guest.py --serve DIR                              a guest that stays up, until SIGTERM or Ctrl-C
    python tests/vm/guest.py --in DIR -- COMMAND...                   one command in that guest
    python tests/vm/guest.py --in DIR --python -- -m pytest ...       a Python program there, without waiting for imports

A command runs in the caller's working directory with the caller's Python; its output comes as it is written, its exit
status is ours (125: the guest itself failed, 124: out of time). What it writes is lost, but for the folder
``$RDMARPC_VM_BOX``, which is the box ``DIR`` of the host: through it commands go in and results come out.
``RDMARPC_VM_ACCEL``: ``kvm`` or ``tcg``, else KVM is tried first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from image import Image, Unavailable, image

AGENT = Path(__file__).with_name("agent.sh")
ZYGOTE = Path(__file__).with_name("zygote.py")
BOX_INSIDE = "/run/box"
BELLS = ("agent.bell", "python.bell")
"""Pipes in the box, which are the guest's serial ports 1 and 2: a line there tells of a command in the box."""
KVM_PATIENCE = 8.0
"""Seconds in which a guest must have reached its first process under KVM: some machines offer a KVM in which a guest hangs."""
BOOT_PATIENCE = 900.0
"""Seconds for a boot, which takes some 20 alone: in CI it is at the lowest priority beside tests that want both cores."""
FAILED, OUT_OF_TIME = 125, 124

GENERIC = {"RDMARPC_CPU_NAME": "generic", "RDMARPC_CPU_FEATURES": ""}
"""With these a kernel compiled on the host is loaded from disk in the guest, whose processor is another one."""

THIRD_PARTY = ("numpy", "torch", "torch._dynamo", "llvmlite.binding", "psutil", "matplotlib.pyplot", "rich")
"""What programs in a guest that stays find imported: nothing of ours, which may change from one program to the next."""

PASSED_ON = ("PATH", "HOME", "LANG", "USER", "VIRTUAL_ENV")
PASSED_ON_PREFIXES = ("PYTHON", "PYTEST_", "RDMARPC_", "TORCH_", "OMP_", "MKL_", "HYDRA_")


class GuestFailed(RuntimeError):
    """The guest did not come up, or went down; with the end of its console."""


class Guest:
    """A running guest. It ends with this object, and with the thread that started it, however that ends.

    ``box``: a folder of the host that the guest may write to (a new one by default); its console is ``box/console.log``.
    ``link``: ``veth`` for a device on a pair of its own, else the network interface that ``rxe0`` is made on, which ``qemu``,
    more arguments for QEMU, has to bring (``("-netdev", "socket,...", "-device", "virtio-net-pci,host_mtu=4200,...")``).
    ``address``: of that interface.
    """

    def __init__(
        self,
        box: Path | None = None,
        *,
        cpus: int = 2,
        memory: str = "6G",
        hostname: str = "guest",
        link: str = "veth",
        address: str = "10.77.0.1/24",
        qemu: Sequence[str] = (),
    ) -> None:
        self.hostname = hostname
        self._own_box = box is None
        self.box = Path(tempfile.mkdtemp(prefix="rdmarpc-vm-")) if box is None else box
        self.box.mkdir(parents=True, exist_ok=True)
        self.console = self.box / "console.log"
        self.accel = ""
        self._cpus, self._memory, self._extra = cpus, memory, tuple(qemu)
        self._options = f"rdmarpc.hostname={hostname} rdmarpc.link={link} rdmarpc.address={address}"
        self._qemu: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Guest:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Boots; returns when commands are accepted. Raises ``GuestFailed``, ``Unavailable``."""
        booted = image()
        for old in self.box.iterdir():
            if old.suffix in (".sh", ".json", ".out", ".rc", ".pid") or old.name.endswith("ready") or old.is_fifo():
                old.unlink()
        for bell in BELLS:
            os.mkfifo(self.box / bell)
        shutil.copy(AGENT, self.box / "agent.sh")
        wanted = os.environ.get("RDMARPC_VM_ACCEL", "")
        if wanted not in ("", "kvm", "tcg"):
            raise GuestFailed(f"RDMARPC_VM_ACCEL={wanted}: kvm or tcg")
        if wanted != "tcg" and os.access("/dev/kvm", os.R_OK | os.W_OK):
            self._boot(booted, "kvm")
            if self._wait(lambda: "rdmarpc: init" in self._log(), KVM_PATIENCE):
                self._wait_ready()
                return
            self.close_qemu()
        if wanted == "kvm":
            raise GuestFailed(f"no guest under KVM on this machine within {KVM_PATIENCE:g} s")
        self._boot(booted, "tcg")
        self._wait_ready()

    def command(self, command: Sequence[str], **options: Any) -> Command:
        """Starts a command in the guest; ``options`` are those of ``Command``."""
        return Command(self.box, command, alive=self.alive, **options)

    def run(self, command: Sequence[str], output: Callable[[bytes], object] | None = None, **options: Any) -> int:
        """Runs a command to its end and gives its exit status; ``output`` gets what it writes."""
        return self.command(command, **options).wait(output)

    def preload(self, modules: Sequence[str] = THIRD_PARTY, path: Sequence[Path] = ()) -> Command:
        """Starts the process that commands with ``python=True`` are forked from, when it has imported ``modules``."""
        search = os.pathsep.join(str(place) for place in path)
        arguments = [sys.executable, str(ZYGOTE), BOX_INSIDE, *modules]
        return self.command(arguments, name="python", timeout=float("inf"), env={"PYTHONPATH": search})

    def preloaded(self) -> bool:
        """Whether it has. Raises ``GuestFailed`` when it never will."""
        if (self.box / "python.rc").exists() or not self.alive():
            out = self.box / "python.out"
            raise GuestFailed(f"nothing was imported:\n{out.read_text()[-2000:] if out.exists() else ''}")
        return (self.box / "python.ready").exists()

    def wait_preloaded(self, timeout: float) -> None:
        if not self._wait(self.preloaded, timeout):
            raise GuestFailed(f"not everything was imported within {timeout:g} s")

    @property
    def pid(self) -> int:
        """The process whose death by SIGKILL is this host's loss of power, and SIGSTOP its pause."""
        assert self._qemu is not None
        return self._qemu.pid

    def alive(self) -> bool:
        return self._qemu is not None and self._qemu.poll() is None

    def processor_time(self) -> float:
        """Seconds of processor time that the guest has taken; 0 when it does not run."""
        if not self.alive():
            return 0.0
        words = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ends the guest as a loss of power would."""
        self.close_qemu()
        if self._own_box:
            shutil.rmtree(self.box, ignore_errors=True)

    def close_qemu(self) -> None:
        if self._qemu is not None:
            self._qemu.kill()
            self._qemu.wait()

    def _boot(self, booted: Image, accel: str) -> None:
        self.accel = accel
        self.console.write_bytes(b"")
        share = "security_model=none,multidevs=remap"
        arguments = [
            # The kernel ends QEMU when we are gone, however we ended.
            *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64"),
            *("-machine", "q35", "-smp", str(self._cpus), "-m", self._memory),
            *(("-accel", "kvm", "-cpu", "host") if accel == "kvm" else ("-accel", "tcg,thread=multi", "-cpu", "max")),
            *("-nodefaults", "-display", "none", "-no-reboot", "-serial", f"file:{self.console}"),
            *("-kernel", str(booted.kernel), "-initrd", str(booted.initramfs)),
            # An emulated processor's time stamps are the host's, but it does not say so; the other clocks are slow to read.
            *("-append", f"console=ttyS0 panic=-1 quiet mitigations=off no_timer_check tsc=reliable {self._options}"),
            *("-virtfs", f"local,path=/,mount_tag=root,readonly=on,{share}"),
            *("-virtfs", f"local,path={self.box.resolve()},mount_tag=box,{share}"),
            *("-device", "virtio-serial-pci,id=bells"),
            *(word for n, bell in enumerate(BELLS) for word in self._bell(n + 1, self.box.resolve() / bell)),
            *self._extra,
        ]
        with (self.box / "qemu.log").open("wb") as log:
            self._qemu = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @staticmethod
    def _bell(number: int, pipe: Path) -> list[str]:
        port = f"virtserialport,bus=bells.0,nr={number},chardev=bell{number}"
        return ["-chardev", f"pipe,id=bell{number},path={pipe}", "-device", port]

    def _wait_ready(self) -> None:
        if not self._wait((self.box / "ready").exists, BOOT_PATIENCE):
            tail = self._log()[-1500:] + (self.box / "qemu.log").read_text(errors="replace")[-1500:]
            raise GuestFailed(
                f"the guest did not come up within {BOOT_PATIENCE:g} s ({self.accel}); its console ends with:\n{tail}"
            )

    def _wait(self, condition: Callable[[], bool], patience: float) -> bool:
        deadline = time.monotonic() + patience
        while not condition():
            if time.monotonic() > deadline or not self.alive():
                return False
            time.sleep(0.05)
        return True

    def _log(self) -> str:
        return self.console.read_text(errors="replace")


class Command:
    """A command in the guest whose box is ``box``; ``kill`` ends it and all that it started.

    ``python``: it is what would follow ``python``, and is forked from a process that has imported the modules of ``preload``.
    ``env``: besides what is passed on (``PASSED_ON``). ``timeout``: seconds, after which ``wait`` kills it.
    """

    def __init__(
        self,
        box: Path,
        command: Sequence[str],
        *,
        python: bool = False,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        alive: Callable[[], bool] = lambda: True,
        name: str = "",
    ) -> None:
        self._box, self._alive, self._python = box, alive, python
        self._name = name or f"{time.time_ns()}-{os.getpid()}"
        self._deadline = time.monotonic() + timeout
        self._read = 0
        passed = {k: v for k, v in os.environ.items() if k in PASSED_ON or k.startswith(PASSED_ON_PREFIXES)}
        passed |= {**GENERIC, "RDMARPC_VM_BOX": BOX_INSIDE, **(env or {})}
        # The distribution's pyverbs lies there.
        passed["PYTHONPATH"] = os.pathsep.join(place for place in (passed.get("PYTHONPATH"), "/run/python") if place)
        folder = str(cwd or Path.cwd())
        if python:
            self._file("json").write_text(json.dumps({"argv": list(command), "cwd": folder, "env": passed}))
        else:
            lines = [f"export {key}={shlex.quote(value)}" for key, value in passed.items()]
            lines += [f"cd {shlex.quote(folder)} || exit {FAILED}", f"exec {shlex.join(command)}"]
            self._file("sh").write_text("\n".join(lines) + "\n")
        self._ring("run")

    def wait(self, output: Callable[[bytes], object] | None = None) -> int:
        """The exit status, when it has ended. ``OUT_OF_TIME`` after its time, ``FAILED`` when the guest died."""
        while self.running(output):
            time.sleep(0.05)
        if (status := self.poll(output)) is not None:
            return status
        if self._alive() and time.monotonic() > self._deadline:
            self.kill()
            return OUT_OF_TIME
        return FAILED

    def running(self, output: Callable[[bytes], object] | None = None) -> bool:
        """Whether ``wait`` would wait. As ``poll`` for the output."""
        if self.poll(output) is not None or time.monotonic() > self._deadline:
            return False
        return self._alive() and not (self._python and (self._box / "python.rc").exists())

    def poll(self, output: Callable[[bytes], object] | None = None) -> int | None:
        """The exit status, or None while it runs; ``output`` gets what it wrote since the last call."""
        ended = self._file("rc").exists()
        written = self.output()[self._read :]
        self._read += len(written)
        if written and output is not None:
            output(written)
        return int(self._file("rc").read_text()) if ended else None

    def output(self) -> bytes:
        """All that it has written so far."""
        return self._file("out").read_bytes() if self._file("out").exists() else b""

    def kill(self) -> None:
        self._ring("kill")

    def _ring(self, order: str) -> None:
        bell = self._box / BELLS[self._python]
        try:
            pipe = os.open(bell, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            raise GuestFailed(f"no guest listens at {bell}: {error}") from error
        os.write(pipe, f"{order} {self._name}\n".encode())
        os.close(pipe)

    def _file(self, kind: str) -> Path:
        return self._box / f"{self._name}.{kind}"


def show(output: bytes) -> None:
    sys.stdout.buffer.write(output)
    sys.stdout.buffer.flush()


def _serve(guest: Guest) -> int:
    guest.preload()
    (guest.box / "qemu.pid").write_text(str(guest.pid))
    print(f"ready ({guest.accel}); commands: python {__file__} --in {guest.box} -- COMMAND", flush=True)
    while guest.alive():
        time.sleep(0.5)
    return FAILED


def _served(box: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((box / "qemu.pid").read_text()), 0)
        return (box / "ready").exists()
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--memory", default="6G")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that the command may take")
    parser.add_argument("--serve", type=Path, metavar="DIR")
    parser.add_argument("--in", type=Path, metavar="DIR", dest="inside")
    parser.add_argument("--python", action="store_true", help="COMMAND is what would follow python: forked, not started")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    asked = parser.parse_args()
    command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
    if bool(command) == bool(asked.serve):
        parser.error("either --serve DIR, or a command after --")
    if asked.python and asked.inside is None:
        parser.error("--python needs --in DIR")
    # An ordinary end, so that the guest is closed and a command in it is killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if asked.inside is not None:
            if not _served(asked.inside):
                raise GuestFailed(f"no guest serves {asked.inside}: python {__file__} --serve {asked.inside}")
            running = Command(
                asked.inside, command, python=asked.python, timeout=asked.timeout, alive=lambda: _served(asked.inside)
            )
            try:
                return running.wait(show)
            except BaseException:
                running.kill()
                raise
        with Guest(asked.serve, cpus=asked.cpus, memory=asked.memory) as guest:
            return _serve(guest) if asked.serve else guest.run(command, timeout=asked.timeout, output=show)
    except (GuestFailed, Unavailable) as error:
        print(error, file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
